"""The command `moebius-choose`. `python -m benchmarks.choosing` collects `measured.json` and the docs' tables."""
