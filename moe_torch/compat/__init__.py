"""Interfaces of other libraries on our ops: their callers change only the import."""
