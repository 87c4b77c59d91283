"""Conversions to and from microscaling formats."""
