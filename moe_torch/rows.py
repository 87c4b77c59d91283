"""Ops on torch tensors that copy or scale rows."""

from __future__ import annotations

import torch

from moe_core.specs.operands import RaggedLayout
from moe_torch.bridge.operator import call
from moe_torch.bridge.options import encode
from moe_torch.operators import table as operators
from moe_torch.operators.requests import layout_sizes


def gather_rows(x: torch.Tensor, layout: RaggedLayout, *, wide: torch.Tensor | None = None) -> torch.Tensor:
    """Copy the row of each token to the rows of its slots: rows grouped by expert, zeros where a row has no slot.

    Its gradient is `reduce(d_y, layout, order="row")`: fp32 sums in the order k = 0..K-1, one cast, never an atomic
    addition.

    Args:
        x: bf16, fp16 or fp32 `[T, D]`. Rows may be strided.
        layout: the rows.
        wide: `x.float()`, which gets the gradient of x in fp32, unrounded. x itself then gets none.
            Where `router` gets the same `wide`, both gradients are added before the one cast, as `moe` adds them.

    Returns:
        y `[capacity, D]` in the dtype of x.
    """
    text, x = encode(layout_sizes(layout)), x if wide is None else x.detach()
    return call(operators.GATHER_ROWS, x, layout.slot_of_row, layout.row_of_slot, wide, text)


def scale_rows(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Multiply each row with its weight in fp32, with one cast at the end.

    Args:
        x: `[T, D]`.
        weights: fp32 `[T, 1]`.

    Returns:
        y `[T, D]` in the dtype of x.
    """
    return call(operators.SCALE_ROWS, x, weights, encode())
