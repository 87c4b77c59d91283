"""Tests of ops.activation."""
