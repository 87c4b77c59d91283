"""Kernels and a NumPy twin for tests/runtime/test_harness.py."""

from __future__ import annotations

import numpy as np
import triton
import triton.language as tl


@triton.jit
def copy_kernel(
    source_pointer, target_pointer, first, last, STRIDE: tl.constexpr, BLOCK: tl.constexpr,
    SHIFT: tl.constexpr = 0,
):  # fmt: skip
    offsets = first + tl.arange(0, BLOCK)
    inside = offsets < last
    values = tl.load(source_pointer + offsets * STRIDE, mask=inside)
    tl.store(target_pointer + offsets + SHIFT, values, mask=inside)


def negate(x: np.ndarray, *, offset: int) -> np.ndarray:
    return offset - x
