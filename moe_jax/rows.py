"""Ops on JAX arrays that copy or scale rows."""

from __future__ import annotations

import jax

from moe_core.ops.reduction.gather import plan_gather_rows
from moe_core.ops.reduction.reduce import plan_scale_rows
from moe_core.specs.operands import RaggedLayout
from moe_jax.autodiff.stages import run_stage
from moe_jax.bridge.calls import Array, OpCall, require_type


def gather_rows(x: Array, layout: RaggedLayout, *, wide: Array | None = None) -> jax.Array:
    """Copy the row of each token to the rows of its slots: rows grouped by expert, zeros where a row has no slot.

    Its gradient is `reduce(d_y, layout, order="row")`: fp32 sums in the order k = 0..K-1, one cast, never an atomic
    addition.

    Args:
        x: bf16, fp16 or fp32 `[T, D]`.
        layout: the rows.
        wide: `x.astype(float32)`, which gets the gradient of x in fp32, unrounded. x itself then gets none.
            Where `router` gets the same `wide`, both gradients are added before the one cast, as `moe` adds them.

    Returns:
        y `[capacity, D]` in the dtype of x.
    """
    call = OpCall("gather_rows")
    require_type("layout", layout, RaggedLayout)
    rows = call.array("x", x if wide is None else jax.lax.stop_gradient(x))
    names = ("slot_of_row", "row_of_slot")
    slots = [call.array(name, getattr(layout, name), f"layout.{name}") for name in names]
    given = call.optional("wide", wide)
    return run_stage(call, plan_gather_rows, rows, *slots, layout.spec, wide=given)[0]


def scale_rows(x: Array, weights: Array) -> jax.Array:
    """Multiply each row with its weight in fp32, with one cast at the end.

    Args:
        x: `[T, D]`.
        weights: fp32 `[T, 1]`.

    Returns:
        y `[T, D]` in the dtype of x.
    """
    call = OpCall("scale_rows")
    (y,) = call.run(plan_scale_rows, call.array("x", x), call.array("weights", weights))
    return y
