"""Tests of ops.routing."""
