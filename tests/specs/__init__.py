"""Tests of specs."""
