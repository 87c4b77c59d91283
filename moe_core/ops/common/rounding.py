"""Widening to fp32 and the one rounding back: half to even, overflow to infinity.

Of float64 arrays the working precision is float64, and "float32" names it (`moe_core.plan.float64`).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from moe_core.base import dtypes


def working_dtype(array: Any) -> np.dtype:
    """What sums of the array's elements are kept in: float64 for float64, else (quantised tensors too) float32."""
    return np.dtype(np.float64 if getattr(array, "dtype", None) == np.float64 else np.float32)


def to_float32(array: np.ndarray) -> np.ndarray:
    """`array` as fp32, exactly; no copy where it is fp32 already. float64 stays."""
    return np.asarray(array).astype(working_dtype(array), copy=False)


def result_dtype(dtype: str, array: Any) -> np.dtype:
    """The NumPy dtype of results named `dtype` that are computed from `array`."""
    return working_dtype(array) if dtype == "float32" else dtypes.numpy_dtype(dtype)


def plain_name(array: np.ndarray) -> str:
    """The canonical name of the array's dtype, `float32` for float64."""
    name = dtypes.canonical(array.dtype)
    return "float32" if name == "float64" else name


def round_to(values: np.ndarray, dtype: str | np.dtype) -> np.ndarray:
    """`values` rounded half to even to a dtype (a canonical name, see `result_dtype`, or a NumPy dtype)."""
    wanted = result_dtype(dtype, values) if isinstance(dtype, str) else dtype
    if isinstance(values, np.ndarray) and values.dtype == wanted:
        return values
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        return np.asarray(values).astype(wanted, copy=False)
