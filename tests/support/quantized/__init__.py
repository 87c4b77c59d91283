"""Quantised operands, files and formulas."""
