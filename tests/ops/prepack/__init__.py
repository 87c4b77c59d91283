"""Tests of ops.prepack."""
