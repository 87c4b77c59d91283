"""Zeroing of a result's rows that no expert writes."""

from __future__ import annotations

from moe_core.ops.common.kernels import zero_rows as kernels
from moe_core.plan import PlanBuilder, declare_kernel, passed

ZERO_ROWS = declare_kernel(kernels.zero_rows)


def launch_zero_rows(builder: PlanBuilder, markers: str, y: str, tile: tuple[int, int]) -> None:
    """Zero rows of y `[rows, columns]` where markers int32 `[rows]` is -1. tile: rows and columns per program."""
    rows, width = builder.spec(y).shape
    arguments = passed(markers=markers, y=y, num_rows=rows, WIDTH=width, BLOCK_M=tile[0], BLOCK_N=tile[1])
    builder.launch(ZERO_ROWS, (-(-rows // tile[0]),), arguments)
