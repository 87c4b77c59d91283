"""Microscaling formats."""
