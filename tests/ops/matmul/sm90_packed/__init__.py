"""Tests of ops.matmul.sm90_packed."""
