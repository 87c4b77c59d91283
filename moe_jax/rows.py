"""Ops on JAX arrays that arrange, copy or scale rows."""

from __future__ import annotations

import jax

from moe_core.base.checks import as_integer
from moe_core.ops.reduction.reduce import plan_scale_rows
from moe_core.ops.reduction.rowwise import plan_gather_rows
from moe_core.ops.routing.layout import plan_layout_of_runs, runs_spec
from moe_core.specs.operands import RaggedLayout
from moe_jax.autodiff.stages import run_stage
from moe_jax.bridge.calls import Array, OpCall, require_type
from moe_jax.bridge.layouts import on_every_device
from moe_jax.bridge.mesh import over_rows


@on_every_device("reshard it", "counts")
def layout_of_runs(counts: Array, num_rows: int, *, stride: int | None = None) -> tuple[jax.Array, RaggedLayout]:
    """Group rows that arrived as runs of counts int32 `[W, L]` by expert, as `moe_torch.layout_of_runs`."""
    call = OpCall("layout_of_runs")
    num_rows = as_integer("num_rows", num_rows, 0)
    stride = None if stride is None else as_integer("stride", stride, 0)
    table = call.array("counts", counts)
    ids, *tables, overflow = call.run(plan_layout_of_runs, table, num_rows, stride=stride)
    spec = runs_spec(num_rows, table.shape[1])
    return ids, RaggedLayout(spec, tables[0], tables[1], tables[2], tables[3], None, overflow)


@on_every_device("use matmul_ogs with gather='token' and scatter='slot', which moves none, or reshard it")
def gather_rows(x: Array, layout: RaggedLayout, *, wide: Array | None = None) -> jax.Array:
    """Copy each row of x `[T, D]` to the rows of its slots, `[capacity, D]`, as `moe_torch.gather_rows`.

    wide: `x.astype(float32)`, which gets the unrounded gradient instead of x. With the same `wide` in `router` both
    gradients are added before the one cast, as in `moe`.
    """
    call = OpCall("gather_rows")
    require_type("layout", layout, RaggedLayout)
    rows = call.array("x", x if wide is None else jax.lax.stop_gradient(x))
    names = ("slot_of_row", "row_of_slot")
    slots = [call.array(name, getattr(layout, name), f"layout.{name}") for name in names]
    wide_spec = call.optional("wide", wide)
    return run_stage(call, plan_gather_rows, rows, *slots, layout.spec, wide=wide_spec)[0]


@over_rows("x", "weights")
def scale_rows(x: Array, weights: Array) -> jax.Array:
    """Multiply each row of x `[T, D]` with its weight fp32 `[T, 1]` in fp32, with one cast to the dtype of x."""
    call = OpCall("scale_rows")
    (y,) = call.run(plan_scale_rows, call.array("x", x), call.array("weights", weights))
    return y
