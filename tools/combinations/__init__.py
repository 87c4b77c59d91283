"""Features times features: a covering array of all pairs, run against the oracle of tools/fuzz, or refused by name."""
