"""Tests of ops.router."""
