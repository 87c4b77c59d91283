"""Benchmarks; each runs as `python -m benchmarks.<name>` on a machine with a GPU."""
