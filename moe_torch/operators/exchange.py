"""The operators that store and load at peers' addresses."""

from __future__ import annotations

from typing import Any

import torch

from moe_core.base.arrays import ArraySpec
from moe_core.errors import InvalidInput
from moe_core.formats import Format
from moe_core.ops.exchange.direct import plan_push_tokens_once, plan_sum_results
from moe_core.ops.exchange.operands import Checks, HomeTokens, Places, TokenSizes, TokenTables, in_records
from moe_core.ops.exchange.pull import plan_combine_pull_weights, plan_take_rows
from moe_core.ops.exchange.push import (
    plan_combine_push,
    plan_dispatch_push,
    plan_push_counts,
    plan_push_slots,
    plan_result_addresses,
)
from moe_core.ops.exchange.tables import plan_peer_places
from moe_core.plan.steps import LaunchPlan
from moe_torch.bridge.operator import Operator, Outputs
from moe_torch.bridge.signature import MaybeTensor, Memory, Tensor, Written
from moe_torch.operators.kinds import IntoOperator
from moe_torch.operators.shapes import out_dtype_of


def _places_shapes(call: Any) -> Outputs:
    slots, counts = tuple(call.ids.shape), call.counts.shape
    shapes = (slots, slots, (1, counts[1] // counts[0]), (1,))
    return [(shape, torch.int32) for shape in shapes]


def _peer_places(
    *, ids: Tensor, group_start: Tensor, row_of_slot: Tensor, counts: Tensor, rank: int, receive: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]: ...
def _peer_take_rows(
    *, x: Tensor, scales: MaybeTensor, rows: Tensor, group_start: Tensor, dtype: str | None, programs: int | None
) -> Tensor: ...
def _push_counts(*, counts: Tensor, counts_at: Tensor, memory: Memory, rank: int) -> None: ...
def _dispatch_push(
    *, x: Tensor, owners: Tensor, rows: Tensor, rows_at: Tensor, scales_at: MaybeTensor, memory: Memory,
    num_rows: int, format: Format | None, programs: int | None,
) -> None: ...  # fmt: skip
def _push_slots(
    *, weights: Tensor, owners: Tensor, rows: Tensor, weights_at: MaybeTensor, sources_at: MaybeTensor, memory: Memory,
    rank: int, num_rows: int,
) -> None: ...  # fmt: skip
def _combine_pull_weights(
    *, owners: Tensor, rows: Tensor, weights_at: Tensor, memory: Memory, num_rows: int
) -> Tensor: ...
def _combine_push(
    *, y: Tensor, sources: Tensor, group_start: Tensor, slots_at: Tensor, memory: Memory, num_slots: int,
    programs: int | None,
) -> None: ...  # fmt: skip
def _push_tokens_once(
    *, x: MaybeTensor, ids: Tensor, weights: Tensor, header: Tensor, places_of_experts: MaybeTensor,
    given: MaybeTensor, token_mask: MaybeTensor, rows_at: MaybeTensor, ids_at: Tensor, weights_at: Tensor,
    headers_at: Tensor, memory: Memory, rank: int, per_rank: int, num_experts: int, most: int, programs: int | None,
    visits: bool,
) -> list[Tensor]: ...  # fmt: skip
def _sum_results(
    *, y: Tensor, row_of_slot: Tensor, headers: MaybeTensor, agree: MaybeTensor, wanted: MaybeTensor,
    shared: MaybeTensor, shared_gate: MaybeTensor, memory: Memory, out_dtype: str | None,
) -> Tensor: ...  # fmt: skip
def _sum_results_into(
    *, y: Tensor, row_of_slot: Tensor, headers: MaybeTensor, agree: MaybeTensor, wanted: MaybeTensor,
    shared: MaybeTensor, shared_gate: MaybeTensor, out: Written, memory: Memory,
) -> None: ...  # fmt: skip
def _result_addresses(
    *, sources: Tensor, group_start: Tensor, slots_at: Tensor, num_slots: int, width: int, dtype: str | None
) -> Tensor: ...


def _nothing(call: Any) -> Outputs:
    return []


def _once_shapes(call: Any) -> Outputs:
    (tokens, top_k), ranks = call.ids.shape, call.ids_at.shape[0]
    sizes = (tokens, top_k), (call.num_experts,), (1,), (1,)
    if call.visits:
        sizes += ((tokens, ranks), (tokens, ranks))
    return [(size, torch.int32) for size in sizes]


_plan_sum_results = in_records(plan_sum_results, checks=Checks)


def _plan_sum_into(*, out: ArraySpec, **arrays: Any) -> LaunchPlan:
    plan = _plan_sum_results(**arrays, out_dtype=out.dtype)
    if out != plan.spec("out"):
        raise InvalidInput(f"out must be {plan.spec('out')} like y and its tokens, got {out}; pass such rows")
    return plan


#: Returns owners, rows, received, overflow.
PEER_PLACES = Operator(_peer_places, plan_peer_places, _places_shapes)
TAKE_ROWS = Operator(
    _peer_take_rows,
    plan_take_rows,
    lambda call: [((call.rows.shape[0], call.x.shape[1]), out_dtype_of(call.x, call.dtype))],
)
PUSH_COUNTS = Operator(_push_counts, plan_push_counts, _nothing)
DISPATCH_PUSH = Operator(_dispatch_push, in_records(plan_dispatch_push, places=Places), _nothing)
PUSH_SLOTS = Operator(_push_slots, in_records(plan_push_slots, places=Places), _nothing)
COMBINE_PULL_WEIGHTS = Operator(
    _combine_pull_weights,
    in_records(plan_combine_pull_weights, places=Places),
    lambda call: [(tuple(call.rows.shape), torch.float32)],
)
COMBINE_PUSH = Operator(_combine_push, plan_combine_push, _nothing)
#: Returns places, tokens_per_expert, invalid_ids, overflow, with visits also owners and rows.
PUSH_TOKENS_ONCE = Operator(
    _push_tokens_once,
    in_records(plan_push_tokens_once, operands=HomeTokens, tables=TokenTables, sizes=TokenSizes),
    _once_shapes,
)
SUM_RESULTS = Operator(
    _sum_results,
    _plan_sum_results,
    lambda call: [((call.row_of_slot.shape[0], call.y.shape[1]), out_dtype_of(call.y, call.out_dtype))],
)
SUM_RESULTS_INTO = IntoOperator(_sum_results_into, _plan_sum_into, _nothing)
RESULT_ADDRESSES = Operator(
    _result_addresses, plan_result_addresses, lambda call: [((call.sources.shape[0],), torch.int64)]
)
