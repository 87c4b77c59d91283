"""Prepare and finalize across ranks."""
