"""Tests of flax."""
