"""Prepare and finalize across ranks: by collectives of torch, or on a DeepEP buffer."""
