"""Triton kernels (`@triton.jit` only); imported when a plan first runs, never at import of `moe_core`."""
