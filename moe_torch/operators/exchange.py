"""The operators that store and load at peers' addresses.

`memory` is this rank's own symmetric tensor: declared as written to, so that traced programs keep the order of stores,
barriers and loads. No plan reads it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from moe_core.base.arrays import ArraySpec
from moe_core.errors import InvalidInput
from moe_core.ops.exchange.direct import plan_push_tokens_once, plan_sum_results
from moe_core.ops.exchange.operands import Checks, HomeTokens, Places, RowsAt, TokenSizes, TokenTables, in_records
from moe_core.ops.exchange.places import plan_peer_places
from moe_core.ops.exchange.pull import plan_combine_pull, plan_combine_pull_weights
from moe_core.ops.exchange.push import (
    plan_combine_push,
    plan_dispatch_push,
    plan_push_counts,
    plan_push_slots,
)
from moe_core.ops.exchange.results import plan_result_addresses
from moe_core.ops.exchange.take import plan_take_rows
from moe_core.plan.steps import LaunchPlan
from moe_torch.bridge.operator import Operator, Outputs
from moe_torch.bridge.options import TORCH_DTYPES
from moe_torch.bridge.signature import Signature


def _operator(
    name: str,
    tensors: tuple[str, ...],
    options: tuple[str, ...],
    planner: Callable[..., LaunchPlan],
    shapes: Callable[[Any], Outputs] = lambda _: [],
    returns: int | None = 0,
) -> Operator:
    signature = Signature((*tensors, "memory!"), options)
    return Operator(name, signature, lambda *, memory, **given: planner(**given), shapes, returns)


def _places_shapes(given: Any) -> Outputs:
    slots, counts = tuple(given.ids.shape), given.counts.shape
    shapes = (slots, slots, (1, counts[1] // counts[0]), (1,))
    return [(shape, torch.int32) for shape in shapes]


#: Returns owners, rows, received, overflow.
PEER_PLACES = Operator(
    "peer_places",
    Signature(("ids", "group_start", "row_of_slot", "counts"), ("rank", "receive")),
    plan_peer_places,
    _places_shapes,
    4,
)
TAKE_ROWS = Operator(
    "peer_take_rows",
    Signature(("x", "scales?", "rows", "group_start"), ("dtype", "programs")),
    plan_take_rows,
    lambda given: [
        ((given.rows.shape[0], given.x.shape[1]), TORCH_DTYPES[given.dtype] if given.dtype else given.x.dtype)
    ],
)
PUSH_COUNTS = _operator("push_counts", ("counts", "counts_at"), ("rank",), plan_push_counts)
DISPATCH_PUSH = _operator(
    "dispatch_push",
    ("x", "owners", "rows", "rows_at", "scales_at?"),
    ("num_rows", "format", "programs"),
    in_records(plan_dispatch_push, places=Places),
)
PUSH_SLOTS = _operator(
    "push_slots",
    ("weights", "owners", "rows", "weights_at?", "sources_at?"),
    ("rank", "num_rows"),
    in_records(plan_push_slots, places=Places),
)


def _plan_combine_pull(*, results_at: ArraySpec, **flat: Any) -> LaunchPlan:
    rows_at = RowsAt(results_at, *(flat.pop(name) for name in ("num_rows", "width", "dtype")))
    return in_records(plan_combine_pull, places=Places)(results_at=rows_at, **flat)


COMBINE_PULL = _operator(
    "combine_pull",
    ("owners", "rows", "results_at", "shared?", "shared_gate?"),
    ("width", "dtype", "num_rows", "out_dtype", "programs"),
    _plan_combine_pull,
    lambda given: [((given.owners.shape[0], given.width), TORCH_DTYPES[given.out_dtype or given.dtype])],
    1,
)
COMBINE_PULL_WEIGHTS = _operator(
    "combine_pull_weights",
    ("owners", "rows", "weights_at"),
    ("num_rows",),
    in_records(plan_combine_pull_weights, places=Places),
    lambda given: [(tuple(given.rows.shape), torch.float32)],
    1,
)
COMBINE_PUSH = _operator(
    "combine_push", ("y", "sources", "group_start", "slots_at"), ("num_slots", "programs"), plan_combine_push
)


def _once_shapes(given: Any) -> Outputs:
    (tokens, top_k), ranks = given.ids.shape, given.ids_at.shape[0]
    sizes = (tokens, top_k), (given.num_experts,), (1,), (1,)
    if given.visits:
        sizes += ((tokens, ranks), (tokens, ranks))
    return [(size, torch.int32) for size in sizes]


#: Returns places, tokens_per_expert, invalid_ids, overflow, with visits also owners and rows.
PUSH_TOKENS_ONCE = _operator(
    "push_tokens_once",
    (
        "x?", "ids", "weights", "header", "places_of_experts?", "given?", "token_mask?", "rows_at?", "ids_at",
        "weights_at", "headers_at",
    ),
    ("rank", "per_rank", "num_experts", "most", "programs", "visits"),
    in_records(plan_push_tokens_once, operands=HomeTokens, tables=TokenTables, sizes=TokenSizes),
    _once_shapes,
    None,
)  # fmt: skip


def _sum_shapes(given: Any) -> Outputs:
    dtype = TORCH_DTYPES[given.out_dtype] if given.out_dtype else given.y.dtype
    return [((given.row_of_slot.shape[0], given.y.shape[1]), dtype)]


_plan_sum_results = in_records(plan_sum_results, checks=Checks)
_SUMMED = ("y", "row_of_slot", "headers?", "agree?", "wanted?", "shared?", "shared_gate?")
SUM_RESULTS = _operator(
    "sum_results",
    _SUMMED,
    ("out_dtype",),
    _plan_sum_results,
    _sum_shapes,
    1,
)


def _plan_sum_into(*, memory: object, out: ArraySpec, **given: Any) -> LaunchPlan:
    plan = _plan_sum_results(**given, out_dtype=out.dtype)
    if out != plan.spec("out"):
        raise InvalidInput(f"out must be {plan.spec('out')} like y and its tokens, got {out}; pass such rows")
    return plan


class _IntoOperator(Operator):
    """The plan's output is written to `out`, which exists."""

    _runs_plan_alone = False

    def _run(self, key: tuple[Any, ...], arguments: tuple[Any, ...]) -> list[torch.Tensor]:
        ready, out = self._cache.get(key) or self._remember(key, arguments), arguments[self.names.index("out")]
        self.require_alignment(arguments, ("out",))
        self.run_ready(ready, arguments, (out,))
        torch.autograd.graph.increment_version([out])
        return []


SUM_RESULTS_INTO = _IntoOperator(
    "sum_results_into",
    Signature((*_SUMMED, "out!", "memory!"), ()),
    _plan_sum_into,
    lambda _: [],
    0,
)
#: Returns results_at.
RESULT_ADDRESSES = Operator(
    "result_addresses",
    Signature(("sources", "group_start", "slots_at"), ("num_slots", "width", "dtype")),
    plan_result_addresses,
    lambda given: [((given.sources.shape[0],), torch.int64)],
)
