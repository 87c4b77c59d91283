"""Tests of ops.matmul.quantized."""
