"""Tests of ops.matmul.sm90."""
