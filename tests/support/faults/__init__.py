"""Faults planted in copies of kernels, and the processes that run something on each copy."""
