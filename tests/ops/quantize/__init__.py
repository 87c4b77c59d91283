"""Tests of ops.quantize."""
