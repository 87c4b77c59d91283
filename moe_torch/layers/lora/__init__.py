"""Adapters of layers."""
