"""Tests of ops.matmul."""
