"""Tests of what holds for the three packages together."""
