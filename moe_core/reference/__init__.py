"""NumPy twins of every op: the semantics, written to be read. NumPy and ml_dtypes only."""
