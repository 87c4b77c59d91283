"""Tests of modular."""
