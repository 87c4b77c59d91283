"""Changes every file that the package reads at random, and expects our own errors: `python -m tools.parser_fuzz`."""
