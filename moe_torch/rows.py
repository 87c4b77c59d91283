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
    """Group rows by expert that arrived as runs: of source 0 for expert 0, for expert 1, ..., then of source 1.

    This is the layout of rows after an all-to-all of slots, without a sort and without waiting for the device. Rows of
    an expert keep the order of sources and of arrival. If sources are ranks in order, this is the order of all slots.

    Args:
        counts: int32 `[W, L]`. Number of rows from source w for local expert e.
        num_rows: R, the rows that there is memory for.
        stride: every source has `stride = R / W` rows, unused behind its runs. None: there are no gaps between runs.

    Returns:
        ids int32 `[R, 1]`, the local expert of each row or -1 if it is unused, and the layout, with one slot for each
        row. Runs beyond their memory are cut, and the layout's `overflow` int32 `[1]` counts the missing rows.
    """
    num_rows = as_integer("num_rows", num_rows, 0)
    stride = None if stride is None else as_integer("stride", stride, 0)
    ids, *own, overflow = stages.LAYOUT_OF_RUNS.call(counts=counts, num_rows=num_rows, stride=stride)
    spec = layout_spec(num_rows, 1, counts.shape[1], 1, None, num_rows)
    return ids, RaggedLayout(spec, own[0], own[1], own[2], own[3], None, overflow)


def gather_rows(x: torch.Tensor, layout: RaggedLayout, *, wide: torch.Tensor | None = None) -> torch.Tensor:
    """Copy the row of each token to the rows of its slots: rows grouped by expert, zeros for rows without a slot.

    The gradient is `reduce(d_y, layout, order="row")`: fp32 sums in the order k = 0..K-1, one cast, no atomic
    additions.

    Args:
        x: bf16, fp16 or fp32 `[T, D]`. Rows may be strided.
        layout: the rows.
        wide: `x.float()`, which gets the gradient of x in fp32, unrounded. x itself then gets none. If `router` gets
            the same `wide`, both gradients are added before the one cast, as in `moe`.

    Returns:
        y `[capacity, D]` in the dtype of x.
    """
    return stages.GATHER_ROWS.call(
        x=x if wide is None else x.detach(), slot_of_row=layout.slot_of_row, row_of_slot=layout.row_of_slot, wide=wide,
        sizes=layout_sizes(layout),
    )  # fmt: skip


def scale_rows(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Multiply each row with its weight in fp32, with one cast at the end.

    Args:
        x: `[T, D]`.
        weights: fp32 `[T, 1]`.

    Returns:
        y `[T, D]` in the dtype of x.
    """
    return stages.SCALE_ROWS.call(x=x, weights=weights)
