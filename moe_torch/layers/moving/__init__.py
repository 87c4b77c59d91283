"""Experts of layers that train or serve move between ranks: by a new placement, or because ranks died."""
