"""Layouts, one by one."""
