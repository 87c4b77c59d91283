"""The fp32 product of plain matrices: float32 BLAS."""

from __future__ import annotations

import numpy as np

from moe_core.ops.common.rounding import to_float32

#: BLAS reads a large matrix as it lies faster than its transpose, which counts where few rows are multiplied with it.
_FEW_ROWS = 64


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
    elif weight_layout == "out_in" and 1 < len(rows) <= _FEW_ROWS:
        result = (weight @ rows.T).T
    else:
        return np.matmul(rows, matrix, out=out)
    if out is None:
        return result
    out[...] = result
    return out
