"""Widening to fp32 and the one rounding back: half to even, overflow to infinity."""

from __future__ import annotations

import numpy as np

from moe_core.base import dtypes


def to_float32(array: np.ndarray) -> np.ndarray:
    """`array` as fp32, exactly; no copy where it is fp32 already."""
    return np.asarray(array).astype(np.float32, copy=False)


def round_to(values: np.ndarray, dtype: str | np.dtype) -> np.ndarray:
    """`values` rounded half to even to a dtype (a canonical name or a NumPy dtype)."""
    wanted = dtypes.numpy_dtype(dtype) if isinstance(dtype, str) else dtype
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        return np.asarray(values).astype(wanted, copy=False)
