"""Canonical dtype names, plain strings that hash and print alike in every framework, and each system's names."""

from __future__ import annotations

import contextlib
from typing import Any

import ml_dtypes
import numpy as np

from moe_core.errors import InvalidInput

_NAMES: dict[str, tuple[Any, str]] = {
    "float32": (np.float32, "fp32"),
    "float16": (np.float16, "fp16"),
    "bfloat16": (ml_dtypes.bfloat16, "bf16"),
    "float64": (np.float64, "fp64"),
    "float8_e4m3fn": (ml_dtypes.float8_e4m3fn, "u8"),
    "int64": (np.int64, "i64"),
    "int32": (np.int32, "i32"),
    "int16": (np.int16, "i16"),
    "int8": (np.int8, "i8"),
    "uint64": (np.uint64, "u64"),
    "uint32": (np.uint32, "u32"),
    "uint16": (np.uint16, "u16"),
    "uint8": (np.uint8, "u8"),
    "bool": (np.bool_, "u8"),
}
MATMUL_DTYPES = ("bfloat16", "float16", "float32")
ROUTER_WEIGHT_DTYPES = ("float32", "bfloat16", "float16")
ID_DTYPES = ("int32", "int64", "int16", "int8", "uint64", "uint32", "uint16", "uint8")


def canonical(dtype: Any) -> str:
    """The canonical name of a NumPy, ml_dtypes, torch or JAX dtype, or of a name: `torch.bfloat16` -> `"bfloat16"`."""
    if hasattr(dtype, "dtype") and hasattr(dtype, "shape") and not isinstance(dtype, type):
        kind = type(dtype).__name__  # whose numbers may be many, and nowhere to be read
        raise InvalidInput(f"dtype must be one of {', '.join(_NAMES)}, got an array ({kind}); pass its dtype")
    name = dtype if isinstance(dtype, str) else str(getattr(dtype, "name", dtype))
    name = name.removeprefix("torch.")
    if name not in _NAMES:
        with contextlib.suppress(TypeError):
            name = np.dtype(dtype).name
    if name not in _NAMES:
        raise InvalidInput(f"dtype must be one of {', '.join(_NAMES)}, got {dtype!r}; convert the array first")
    return name


def itemsize(dtype: str) -> int:
    return np.dtype(_NAMES[dtype][0]).itemsize


def numpy_dtype(dtype: str) -> np.dtype:
    return np.dtype(_NAMES[dtype][0])


def triton_name(dtype: str) -> str:
    """Triton's name of a canonical dtype (`bfloat16` -> `bf16`). Booleans and fp8, which old GPUs lack, are `u8`."""
    return _NAMES[dtype][1]
