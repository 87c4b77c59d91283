"""The twin: all ranks of an expert-parallel MoE in one process, in NumPy. Receive buffers begin as NaN."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from moe_core.errors import InvalidInput, Unsupported
from moe_core.ops.common.rounding import plain_name, round_to, to_float32, working_dtype
from moe_core.ops.moe.reference.backward import EVERYTHING, MoEBackward, Request, moe_backward_stages
from moe_core.ops.moe.reference.forward import moe_stages, routing_stages, shared_output
from moe_core.ops.reduction.reference import reduce, scale_rows
from moe_core.parallel.exchange import physical_ids
from moe_core.parallel.placement import Placement
from moe_core.parallel.spec import ExchangeSpec
from moe_core.specs import MoESpec
from moe_core.specs.operands import MoEOperands, MoEOutput, OutputGradients, TopK
from tests.support.parallel.twin.routes import HostRoutes, Routes, host_tables, make_host_routes, make_routes

#: An owner's op: stages of a forward, with matmul2 and tokens_per_expert; and d_slots, `d_routing.weights` and
#: `d_experts.*` of a backward from these.
Forward = Callable[[MoEOperands, MoESpec], dict[str, np.ndarray]]
Backward = Callable[[OutputGradients, MoEOperands, MoESpec, dict[str, np.ndarray]], dict[str, np.ndarray]]


def numpy_forward(operands: MoEOperands, spec: MoESpec) -> dict[str, np.ndarray]:
    return moe_stages(operands.x, operands.experts, operands.routing, spec)


def numpy_backward(
    gradients: OutputGradients, operands: MoEOperands, spec: MoESpec, stages: dict[str, np.ndarray]
) -> dict[str, np.ndarray]:
    return moe_backward_stages(gradients, operands, spec, stages)


class Owner(NamedTuple):
    operands: MoEOperands
    stages: dict[str, np.ndarray]


class GroupForward(NamedTuple):
    """Results of all ranks. received_per_expert int32 `[L]`, overflow int32 `[1]`: as in `ParallelOutput`."""

    outputs: tuple[MoEOutput, ...]
    received_per_expert: tuple[np.ndarray, ...]
    overflow: np.ndarray
    routes: Routes | HostRoutes
    owners: tuple[Owner, ...]
    stages: tuple[dict[str, np.ndarray], ...]


def moe(
    ranks: Sequence[MoEOperands],
    spec: MoESpec,
    placement: Placement,
    exchange: ExchangeSpec | None = None,
    *,
    run: Forward = numpy_forward,
) -> GroupForward:
    """Run one MoE forward of all ranks.

    The output is bitwise that of `moe_stages` on all tokens and experts, unless `plan_exchange` says why not. A token
    with a slot that did not fit is NaN unless exchange.on_overflow is `drop`.

    ranks: tokens routed over all E experts, and experts of `shard_experts`; no expert_map. run: computes an owner's op.
    Raises InvalidInput, and Unsupported for a format and chunks.
    """
    exchange = ExchangeSpec() if exchange is None else exchange
    _check(ranks, placement, exchange)
    stages, places, sources, weights = [], [], [], []
    first_token = 0
    for rank in ranks:
        routing = routing_stages(rank.x, rank.routing, spec, rank.token_mask)
        tables = host_tables(placement, exchange, len(places))
        options: Any = {"first_token": first_token, "token_mask": rank.token_mask, "tables": tables}
        physical = physical_ids(routing["ids"], placement, **options)
        first_token += len(rank.x)
        # The weight is applied before rows travel, so the owner's is 1.
        on_input = spec.apply_router_weight_on_input
        sources.append(scale_rows(rank.x, routing["weights"]) if on_input else rank.x)
        weights.append(np.ones_like(routing["weights"]) if on_input else routing["weights"])
        places.append(physical.places)
        stages.append(routing | {"invalid_ids": physical.invalid_ids})
    routes = (make_routes if exchange.hosts == 1 else make_host_routes)(places, placement, exchange)
    owners = []
    for number, rank in enumerate(ranks):
        routing = TopK(routes.ids[number], routes.push_weights(number, weights))
        operands = MoEOperands(routes.push(number, sources), rank.experts, routing)
        owners.append(Owner(operands, run(operands, _at_owner(spec))))
    slots = [owner.stages["matmul2"] for owner in owners]
    outputs = []
    for number, (rank, stage) in enumerate(zip(ranks, stages, strict=True)):
        layer_index = rank.experts.layer_index
        shared = (None, None) if rank.shared is None else shared_output(rank.x, rank.shared, spec, layer_index)
        rows, order = routes.pull(number, slots), routes.homes[number].back
        dtype = spec.out_dtype or plain_name(rank.x)
        output = reduce(rows, order, *shared, top_k=order.shape[1], order="row", out_dtype=dtype)
        if exchange.on_overflow != "drop":
            output[routes.lost[number].any(axis=1)] = np.nan
        outputs.append(output_of(output, stage, places[number], placement))
    received = tuple(owner.stages["tokens_per_expert"] for owner in owners)
    return GroupForward(tuple(outputs), received, routes.overflow, routes, tuple(owners), tuple(stages))


def output_of(output: np.ndarray, stages: dict[str, np.ndarray], places: np.ndarray, placement: Placement) -> MoEOutput:
    counts = np.bincount(stages["ids"][places >= 0], minlength=placement.num_experts).astype(np.int32)
    return MoEOutput(output, stages["ids"], stages["weights"], stages.get("logits"), counts, stages["invalid_ids"])


def _at_owner(spec: MoESpec) -> MoESpec:
    plain = {"router": None, "apply_router_weight_on_input": False, "out_dtype": None, "shared_activation": None}
    return dataclasses.replace(spec, **plain)


def _check(ranks: Sequence[MoEOperands], placement: Placement, exchange: ExchangeSpec) -> None:
    if len(ranks) != placement.num_ranks:
        raise InvalidInput(f"ranks must be the placement's {placement.num_ranks}, got {len(ranks)}; pass one for each")
    for name, default in (("format", None), ("chunks", 1)):
        if getattr(exchange, name) != default:
            raise Unsupported(
                f"the twin moves rows as they are and at once, got {name}={getattr(exchange, name)}; leave it out"
            )
    for number, rank in enumerate(ranks):
        held = rank.experts.down.shape[0 if rank.experts.layer_index is None else 1]
        if held != placement.per_rank or rank.expert_map is not None:
            raise InvalidInput(
                f"rank {number} must hold its {placement.per_rank} places of experts and no expert_map, got {held} "
                "experts; use shard_experts"
            )


class _Home(MoEBackward):
    def __init__(self, number: int, routes: Any, returned: tuple[list[np.ndarray], list[np.ndarray]], *rest) -> None:
        self.number, self.routes, self.returned = number, routes, returned
        super().__init__(*rest)

    def through_experts(self) -> np.ndarray:
        """d_x, and the gradient of weights, fp32 `[T, K]`."""
        d_slots, d_weights = self.returned
        rows, order = self.routes.pull(self.number, d_slots), self.routes.homes[self.number].back
        by_slot = self.routes.pull_weights(self.number, d_weights)
        if not self.spec.apply_router_weight_on_input:
            self.d_x += reduce(rows, order, top_k=order.shape[1], order="row", out_dtype="float32")
            return by_slot
        # K = 1: at most one row comes back, the gradient of x times the weight.
        row = order.max(axis=1)
        tokens = np.flatnonzero(row >= 0)
        d_source, weights = to_float32(rows[row[tokens]]), self.stages["weights"]
        by_slot = np.zeros(weights.shape, working_dtype(self.x))
        with np.errstate(all="ignore"):
            by_slot[tokens, 0] = (d_source * to_float32(self.x[tokens])).sum(axis=-1)
            self.d_x[tokens] += d_source * weights[tokens]
        return by_slot


def moe_backward(
    gradients: Sequence[OutputGradients],
    ranks: Sequence[MoEOperands],
    spec: MoESpec,
    forward: GroupForward,
    *,
    run: Backward = numpy_backward,
    request: Request = EVERYTHING,
) -> tuple[dict[str, np.ndarray], ...]:
    """Return the gradients of every rank, by the names of `moe_backward_stages`; `d_experts.*` from all ranks' tokens.

    d_x, the gradients of given weights, and those of experts with one place are bitwise one device's. Gradients of a
    router and a shared expert are this rank's addends, and losses those of its tokens. request: what home computes.
    """
    routes = forward.routes
    d_out = [round_to(gradient.output, rank.x.dtype) for gradient, rank in zip(gradients, ranks, strict=True)]
    expert_gradients, d_slots, d_weights = [], [], []
    for number, owner in enumerate(forward.owners):
        operands = owner.operands
        flowing = OutputGradients(routes.push(number, d_out))
        outcome = run(flowing, operands, _at_owner(spec), owner.stages)
        d_slots.append(outcome["d_slots"])
        d_weights.append(outcome["d_routing.weights"])
        expert_gradients.append({name: value for name, value in outcome.items() if name.startswith("d_experts.")})
    results = []
    for number, (gradient, rank, stages) in enumerate(zip(gradients, ranks, forward.stages, strict=True)):
        home = _Home(number, routes, (d_slots, d_weights), gradient, rank, spec, stages, request)
        results.append(home.run() | expert_gradients[number])
    return tuple(results)
