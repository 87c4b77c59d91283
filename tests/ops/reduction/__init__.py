"""Tests of ops.reduction."""
