"""Tests of torch."""
