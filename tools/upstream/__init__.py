"""Code that others published, run unmodified on our public surface: see `python -m tools.upstream --help`."""
