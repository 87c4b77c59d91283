"""Interfaces of other libraries on our ops."""
