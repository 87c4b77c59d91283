"""Names that only the newest published generation has."""
