"""Tests of jax."""
