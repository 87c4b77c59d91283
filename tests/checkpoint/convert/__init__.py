"""Tests of checkpoint."""
