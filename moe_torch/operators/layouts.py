"""Planners of operators with a layout among their options, and the shapes of their outputs."""

from __future__ import annotations

from typing import Any

import torch

from moe_core.base.arrays import ArraySpec, require_spec
from moe_core.base.dtypes import ID_DTYPES
from moe_core.base.target import Target
from moe_core.ops.reduction.reduce import plan_reduce
from moe_core.ops.reduction.rowwise import plan_gather_rows
from moe_core.ops.routing.layout import plan_layout
from moe_core.plan.steps import LaunchPlan
from moe_core.specs import LayoutSpec
from moe_core.specs import operands as bundles
from moe_torch.bridge.operator import Outputs

#: `layout_sizes` of a layout. Programs leave out the number of tokens: None.
Sizes = tuple[int | None, ...]


def layout_of(sizes: tuple[Any, ...], arrays: bundles.LayoutArrays) -> LayoutSpec:
    num_tokens, top_k, *others = sizes
    if num_tokens is None:
        slots = require_spec("layout.row_of_slot", arrays.row_of_slot, ("num_tokens * top_k",), "int32")
        num_tokens = slots.shape[0] // top_k
    layout = LayoutSpec(num_tokens, top_k, *others)
    bundles.require_layout(layout, arrays)
    return layout


def make_layout_plan(
    ids: ArraySpec, num_experts: int, alignment: int, max_rows: int | None, target: Target, **optional: Any
) -> LaunchPlan:
    """optional: rows of `LayoutSpec`, and the arrays that `plan_layout` takes by name."""
    require_spec("ids", ids, ("num_tokens", "top_k"), ID_DTYPES)
    layout = LayoutSpec(ids.shape[0], ids.shape[1], num_experts, alignment, max_rows, optional.pop("rows", None))
    return plan_layout(ids, layout, target, **optional)


def layout_shapes(call: Any) -> Outputs:
    slots, num_experts = call.ids.shape[0] * call.ids.shape[1], call.num_experts
    capacity = slots
    if call.max_rows is not None:
        capacity = num_experts * call.max_rows
    elif call.alignment > 1 and _or_true(slots > 0):
        capacity = slots + num_experts * (call.alignment - 1)
    return [((size,), torch.int32) for size in (num_experts, num_experts + 1, capacity, slots, 1)]


def _or_true(condition: bool | torch.SymBool) -> bool:
    """Return a condition, True where only a compiler's later call can tell."""
    if isinstance(condition, bool):
        return condition
    # A second of sympy, which only a compiler needs.
    from torch.fx.experimental.symbolic_shapes import guard_or_true

    return guard_or_true(condition)


def bounded_layout_shapes(call: Any) -> Outputs:
    sizes, groups, _, slots, one = layout_shapes(call)
    return [sizes, groups, ((torch.sym_min(slots[0][0], call.rows),), torch.int32), slots, one, one]


def taken_shapes(call: Any) -> Outputs:
    return [((call.slot_of_row.shape[0], call.x.shape[1]), call.x.dtype)]


def runs_shapes(call: Any) -> Outputs:
    rows, num_experts = call.num_rows, call.counts.shape[1]
    shapes = ((rows, 1), (num_experts,), (num_experts + 1,), (rows,), (rows,), (1,))
    return [(shape, torch.int32) for shape in shapes]


def reduce_plan(y: ArraySpec, row_of_slot: ArraySpec, sizes: Sizes, target: Target, **options: Any) -> LaunchPlan:
    """options: of `plan_reduce`."""
    if sizes[2] is None:
        # The rows of modular kernels are in no layout of experts.
        rows = y.shape[0] if options["order"] == "row" else None
        sizes = (*sizes[:2], 1, 1, rows or None)
    layout = layout_of(sizes, bundles.LayoutArrays(row_of_slot=row_of_slot))
    return plan_reduce(y, row_of_slot, layout, target, **options)


def gather_rows_plan(
    x: ArraySpec, slot_of_row: ArraySpec, row_of_slot: ArraySpec, sizes: Sizes, target: Target, wide: ArraySpec | None
) -> LaunchPlan:
    layout = layout_of(sizes, bundles.LayoutArrays(row_of_slot=row_of_slot, slot_of_row=slot_of_row))
    return plan_gather_rows(x, slot_of_row, row_of_slot, layout, target, wide=wide)
