"""Ops on JAX arrays that arrange, copy or scale rows."""

from __future__ import annotations

import jax

from moe_core.base.checks import as_integer
from moe_core.ops.reduction.gather import plan_gather_rows
from moe_core.ops.reduction.reduce import plan_scale_rows
from moe_core.ops.routing.runs import plan_layout_of_runs, runs_spec
from moe_core.specs.operands import RaggedLayout
from moe_jax.autodiff.stages import run_stage
from moe_jax.bridge.calls import Array, OpCall, require_type


def layout_of_runs(counts: Array, num_rows: int, *, stride: int | None = None) -> tuple[jax.Array, RaggedLayout]:
    """Group rows by expert that arrived as runs: source 0 for expert 0, 1, ..., then source 1, as all-to-all brings
    them.

    Needs no sort and no wait. An expert's rows keep the order of arrival, which is slot order if sources are in rank
    order.

    Args:
        counts: int32 `[W, L]`, the rows that source w sent for local expert e.
        num_rows: R, the allocated rows.
        stride: rows per source, `R / W`, unused after its runs. None: runs are adjacent.

    Returns:
        ids int32 `[R, 1]`, the local expert of each row (-1: unused), and the layout, with one slot per row. Its
            `overflow` int32 `[1]` counts rows of runs that were cut at their memory.
    """
    call = OpCall("layout_of_runs")
    num_rows = as_integer("num_rows", num_rows, 0)
    stride = None if stride is None else as_integer("stride", stride, 0)
    table = call.array("counts", counts)
    ids, *tables, overflow = call.run(plan_layout_of_runs, table, num_rows, stride=stride)
    spec = runs_spec(num_rows, table.shape[1])
    return ids, RaggedLayout(spec, tables[0], tables[1], tables[2], tables[3], None, overflow)


def gather_rows(x: Array, layout: RaggedLayout, *, wide: Array | None = None) -> jax.Array:
    """Copy each token's row to the rows of its slots, grouped by expert. Rows without a slot are zeros.

    Its gradient is `reduce(d_y, layout, order="row")`: fp32 sums in the order k = 0..K-1, one cast, no atomic addition.

    Args:
        x: bf16, fp16 or fp32 `[T, D]`.
        layout: the rows.
        wide: `x.astype(float32)`, which gets the unrounded gradient instead of x. With the same `wide` in `router` both
            gradients are added before the one cast, as in `moe`.

    Returns:
        y `[capacity, D]` in the dtype of x.
    """
    call = OpCall("gather_rows")
    require_type("layout", layout, RaggedLayout)
    rows = call.array("x", x if wide is None else jax.lax.stop_gradient(x))
    names = ("slot_of_row", "row_of_slot")
    slots = [call.array(name, getattr(layout, name), f"layout.{name}") for name in names]
    wide_spec = call.optional("wide", wide)
    return run_stage(call, plan_gather_rows, rows, *slots, layout.spec, wide=wide_spec)[0]


def scale_rows(x: Array, weights: Array) -> jax.Array:
    """Multiply each row of x `[T, D]` with its weight fp32 `[T, 1]` in fp32, with one cast to the dtype of x."""
    call = OpCall("scale_rows")
    (y,) = call.run(plan_scale_rows, call.array("x", x), call.array("weights", weights))
    return y
