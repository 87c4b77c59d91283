"""The fp32 product of plain matrices: float32 BLAS."""

from __future__ import annotations

from typing import Any

import numpy as np

from moe_core.base.threads import blas_kernels
from moe_core.ops.common.rounding import to_float32

#: Where OpenBLAS has AVX-512 it multiplies small float32 matrices without packing them first: rows times a transposed
#: matrix up to so many results and so many multiplications, from this depth on.
_SMALL_KERNELS = ("SkylakeX", "Cooperlake", "SapphireRapids")
_MOST_RESULTS, _MOST_PRODUCTS, _LEAST_DEPTH = 1200, 1_000_000, 32
#: Columns that one of them computes.
_NARROW = 4


def product(
    x: np.ndarray, weight: np.ndarray, weight_layout: str, batch_invariant: bool, out: np.ndarray | None = None
) -> np.ndarray:
    """fp32 `[R, N]` = x `[R, D]` . weight. batch_invariant: row by row, because the order of BLAS depends on R. out:
    what is written to and returned, None = a new array."""
    return multiply(to_float32(x), to_float32(weight), weight_layout, batch_invariant, out)


def multiply(
    rows: np.ndarray, weight: np.ndarray, weight_layout: str, batch_invariant: bool, out: np.ndarray | None = None
) -> np.ndarray:
    """`product` in the dtype both operands have."""
    matrix = weight if weight_layout == "in_out" else weight.T
    if batch_invariant:
        result = np.matmul(rows[:, None, :], matrix)[:, 0, :]
        if out is None:
            return result
        out[...] = result
        return out
    if weight_layout == "out_in" and (step := _rows_of_small(rows, weight.shape[0])):
        out = np.empty((len(rows), len(weight)), rows.dtype) if out is None else out
        columns = weight.reshape(-1, _NARROW, weight.shape[1]).swapaxes(1, 2)
        for first in range(0, len(rows), step):
            part = out[first : first + step]
            # A stack of products in one call: it holds Python's lock once.
            np.matmul(rows[first : first + step], columns, out=part.reshape(len(part), -1, _NARROW).swapaxes(0, 1))
        return out
    return np.matmul(rows, matrix, out=out)


def narrow_columns(rows: Any, weight: Any, weight_layout: str) -> bool:
    """Whether every few columns of the product are a product of their own, so that any pieces of them give the same
    bits. weight: a matrix or a stack of them."""
    plain = isinstance(rows, np.ndarray) and isinstance(weight, np.ndarray) and weight.dtype == rows.dtype
    return plain and weight_layout == "out_in" and _rows_of_small(rows, weight.shape[-2]) > 0


def _rows_of_small(rows: np.ndarray, width: int) -> int:
    """Rows that a small product takes at a time where these are faster, else 0: for more than two parts they are not,
    because each reads the whole matrix."""
    count, depth = rows.shape
    if rows.dtype != np.float32 or count < 2 or depth < _LEAST_DEPTH or width % _NARROW:
        return 0
    if blas_kernels() not in _SMALL_KERNELS:
        return 0
    most = min(_MOST_RESULTS // _NARROW, _MOST_PRODUCTS // (_NARROW * depth))
    if count <= most:
        return count
    return -(-count // 2) if count <= 2 * most else 0
