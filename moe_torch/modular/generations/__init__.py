"""Calls of classes of every published generation."""
