"""Widening to fp32 and the single rounding back: half to even, overflow to infinity. float64 stays float64, which
"float32" then names (`moe_core.plan.float64`)."""

from __future__ import annotations

from typing import Any

import numpy as np

from moe_core.base import dtypes


def working_dtype(array: Any) -> np.dtype:
    """The dtype of sums of the array's elements: float64 for float64, else float32."""
    return np.dtype(np.float64 if getattr(array, "dtype", None) == np.float64 else np.float32)


def to_float32(array: np.ndarray) -> np.ndarray:
    """`array` as fp32, exactly, without a copy if possible. float64 stays."""
    return np.asarray(array).astype(working_dtype(array), copy=False)


def result_dtype(dtype: str, array: Any) -> np.dtype:
    """The NumPy dtype of results named `dtype`, computed from `array`."""
    return working_dtype(array) if dtype == "float32" else dtypes.numpy_dtype(dtype)


def plain_name(array: np.ndarray) -> str:
    name = dtypes.canonical(array.dtype)
    return "float32" if name == "float64" else name


def round_to(values: np.ndarray, dtype: str | np.dtype) -> np.ndarray:
    """`values` rounded half to even to a NumPy dtype or a canonical name (`result_dtype`)."""
    wanted = result_dtype(dtype, values) if isinstance(dtype, str) else dtype
    if isinstance(values, np.ndarray) and values.dtype == wanted:
        return values
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        return np.asarray(values).astype(wanted, copy=False)
