"""Tests of expert parallelism in JAX."""
