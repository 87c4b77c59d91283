"""The fp32 product of plain matrices: float32 BLAS."""

from __future__ import annotations

import numpy as np

from moe_core.ops.common.rounding import to_float32


def product(x: np.ndarray, weight: np.ndarray, weight_layout: str, batch_invariant: bool) -> np.ndarray:
    """fp32 `[R, N]` = x `[R, D]` . weight. batch_invariant: row by row, because the order of BLAS depends on R."""
    return multiply(to_float32(x), to_float32(weight), weight_layout, batch_invariant)


def multiply(rows: np.ndarray, weight: np.ndarray, weight_layout: str, batch_invariant: bool) -> np.ndarray:
    """`product` in the dtype both operands have."""
    matrix = weight if weight_layout == "in_out" else weight.T
    return np.matmul(rows[:, None, :], matrix)[:, 0, :] if batch_invariant else rows @ matrix
