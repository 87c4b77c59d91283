"""Interfaces of other libraries on our ops: code that was written for them runs with another import."""
