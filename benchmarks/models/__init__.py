"""Benchmarks of parts of whole models, as transformers builds them."""
