"""Tests of ops.moe."""
