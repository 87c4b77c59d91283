"""The fp32 product of plain matrices: float32 BLAS."""

from __future__ import annotations

import contextlib
import functools
import pathlib
from typing import Any

import numpy as np

from moe_core.base.threads import blas_kernels
from moe_core.ops.common.rounding import to_float32

#: Most multiplications that OpenBLAS does without packing (float32, AVX-512). With few rows, parts are then faster.
_SMALL_KERNELS = ("SkylakeX", "Cooperlake", "SapphireRapids")
_MOST_PRODUCTS, _FEW_ROWS = 1_000_000, 48
#: For transposed matrices, up to 1200 results: least depth and columns of a part. On Intel 128 rows would be slower.
_LEAST_DEPTH, _NARROW, _FEW_ROWS_OF_AMD = 32, 4, 300
#: Columns, or rows of a gradient, of other parts.
_PARTS = (256, 128, 64, 32, 16)


@functools.cache
def _transposed_rows() -> int:
    with contextlib.suppress(OSError):
        return _FEW_ROWS_OF_AMD if "AuthenticAMD" in pathlib.Path("/proc/cpuinfo").read_text() else _FEW_ROWS
    return _FEW_ROWS


def product(
    x: np.ndarray, weight: np.ndarray, weight_layout: str, batch_invariant: bool, out: np.ndarray | None = None
) -> np.ndarray:
    """fp32 `[R, N]` = x `[R, D]` . weight. batch_invariant: row by row, as BLAS's order of additions depends on R."""
    return multiply(to_float32(x), to_float32(weight), weight_layout, batch_invariant, out)


def multiply(
    rows: np.ndarray, weight: np.ndarray, weight_layout: str, batch_invariant: bool, out: np.ndarray | None = None
) -> np.ndarray:
    """`product` in the common dtype of both operands."""
    matrix = weight if weight_layout == "in_out" else weight.T
    if batch_invariant:
        result = np.matmul(rows[:, None, :], matrix)[:, 0, :]
        if out is None:
            return result
        out[...] = result
        return out
    out = np.empty((len(rows), matrix.shape[1]), rows.dtype) if out is None else out
    np.matmul(*operands(rows, matrix, out, weight_layout == "out_in"))
    return out


def operands(
    rows: np.ndarray, matrix: np.ndarray, out: np.ndarray, transposed: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """np.matmul's arguments for out = rows `[R, D]` . matrix `[D, N]` of one dtype, or faster stacks of parts in one
    call, which takes the GIL once. transposed: as the matrix is stored."""
    part = _part(rows, matrix.shape[1], transposed)
    return (rows, _columns(matrix, part), _columns(out, part)) if part else (rows, matrix, out)


def inner_operands(left: np.ndarray, right: np.ndarray, out: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """`operands` of out `[M, N]` = left `[R, M]`^T . right `[R, N]`."""
    part = _part(right, left.shape[1], False)
    if not part:
        return left.T, right, out
    return _columns(left, part).swapaxes(1, 2), right, out.reshape(-1, part, out.shape[1])


def narrow_columns(rows: Any, weight: Any, weight_layout: str) -> bool:
    """True if any split into columns gives the same bits. weight: a matrix or a stack."""
    plain = isinstance(rows, np.ndarray) and isinstance(weight, np.ndarray) and weight.dtype == rows.dtype
    return plain and weight_layout == "out_in" and _part(rows, weight.shape[-2], True) > 0


def _columns(array: np.ndarray, width: int) -> np.ndarray:
    return array.reshape(len(array), -1, width).swapaxes(0, 1)


def _part(rows: np.ndarray, width: int, transposed: bool) -> int:
    """Columns multiplied at a time, 0 for all."""
    count, depth = rows.shape
    few = _transposed_rows() if transposed else _FEW_ROWS
    if rows.dtype != np.float32 or not 2 <= count <= few or blas_kernels() not in _SMALL_KERNELS:
        return 0
    if transposed:
        fits = depth >= _LEAST_DEPTH and width % _NARROW == 0 and count * depth * _NARROW <= _MOST_PRODUCTS
        return _NARROW if fits else 0
    return next((part for part in _PARTS if width % part == 0 and count * depth * part <= _MOST_PRODUCTS), 0)
