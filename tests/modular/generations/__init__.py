"""Tests of published generations of the modular interface."""
