"""Ops on torch tensors that arrange, copy or scale rows."""

from __future__ import annotations

import torch

from moe_core.base.checks import as_integer
from moe_core.specs.operands import RaggedLayout
from moe_torch.bridge.options import layout_spec
from moe_torch.operators import stages
from moe_torch.operators.requests import layout_sizes


def layout_of_runs(
    counts: torch.Tensor, num_rows: int, *, stride: int | None = None
) -> tuple[torch.Tensor, RaggedLayout]:
    """Group rows by expert that arrived as runs: source 0 for expert 0, 1, ..., then source 1, as all-to-all brings
    them.

    Needs no sort and no wait for the device. An expert's rows keep the order of arrival, which is slot order if sources
    are in rank order.

    Args:
        counts: int32 `[W, L]`, the rows that source w sent for local expert e.
        num_rows: R, the allocated rows.
        stride: rows per source, `R / W`, unused after its runs. None: runs are adjacent.

    Returns:
        ids int32 `[R, 1]`, the local expert of each row (-1: unused), and the layout, with one slot per row. Its
            `overflow` int32 `[1]` counts rows of runs that were cut at their memory.
    """
    num_rows = as_integer("num_rows", num_rows, 0)
    stride = None if stride is None else as_integer("stride", stride, 0)
    ids, *arrays, overflow = stages.LAYOUT_OF_RUNS.call(counts=counts, num_rows=num_rows, stride=stride)
    spec = layout_spec(num_rows, 1, counts.shape[1], 1, None, num_rows)
    return ids, RaggedLayout(spec, arrays[0], arrays[1], arrays[2], arrays[3], None, overflow)


def gather_rows(x: torch.Tensor, layout: RaggedLayout, *, wide: torch.Tensor | None = None) -> torch.Tensor:
    """Copy each token's row to the rows of its slots, grouped by expert. Rows without a slot are zeros.

    Its gradient is `reduce(d_y, layout, order="row")`: fp32 sums in the order k = 0..K-1, one cast, no atomic addition.

    Args:
        x: bf16, fp16 or fp32 `[T, D]`. Rows may be strided.
        layout: the rows.
        wide: `x.float()`, which gets the unrounded gradient instead of x. Pass the same `wide` to `router` to add both
            gradients before the one cast, as `moe` does.

    Returns:
        y `[capacity, D]` in the dtype of x.
    """
    return stages.GATHER_ROWS.call(
        x=x if wide is None else x.detach(), slot_of_row=layout.slot_of_row, row_of_slot=layout.row_of_slot, wide=wide,
        sizes=layout_sizes(layout),
    )  # fmt: skip


def scale_rows(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Multiply each row of x `[T, D]` with its weight fp32 `[T, 1]` in fp32, with one cast to the dtype of x."""
    return stages.SCALE_ROWS.call(x=x, weights=weights)
