"""Expert-parallel layers with hard routings, and the same layers on one device."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np

from moe_core.ops.moe.reference.backward import moe_backward_stages
from moe_core.ops.moe.reference.forward import moe_stages
from moe_core.parallel import Placement
from moe_core.parallel.placement import shard_experts
from moe_core.specs import Activation, MoESpec
from moe_core.specs.operands import (
    ExpertWeights,
    MoEOperands,
    OutputGradients,
    RouterLogits,
    RouterWeights,
    SharedExpert,
    TopK,
)
from tests.support.strategies import draw_array

#: Loads of `draw_ids_of`; `masked` also has a token mask.
LOADS = ("random", "hot_expert", "hot_rank", "empty_rank", "absent", "invalid", "repeated", "masked", "nothing")


def draw_ids_of(load: str, random: np.random.Generator, tokens: int, top_k: int, placement: Placement) -> np.ndarray:
    """ids int32 `[T, K]` by the name of a hard load; distinct within a token unless it is `repeated`."""
    experts = placement.num_experts
    scores = random.random((tokens, experts))
    if load == "hot_expert":
        scores[:, random.integers(experts)] += 2
    if load in ("hot_rank", "empty_rank"):
        own = [expert for expert in placement.owners[random.integers(placement.num_ranks)] if expert >= 0]
        scores[:, own] += 2 if load == "hot_rank" else -2
    ids = np.argsort(-scores, axis=1)[:, :top_k].astype(np.int32)
    if load == "repeated":
        ids[:] = ids[:, :1]
    if load == "absent":
        ids[random.random(ids.shape) < 0.5] = -1
    if load == "invalid":
        ids[random.random(ids.shape) < 0.3] = random.choice([-2, experts, experts + 7])
    return np.full_like(ids, -1) if load == "nothing" else ids


@dataclass(frozen=True)
class Problem:
    """A layer of all ranks. tokens: of each rank. ids `[T, K]` of all their tokens; x, weights, d_output likewise."""

    placement: Placement
    tokens: tuple[int, ...]
    x: np.ndarray
    routing: Any
    d_output: np.ndarray
    experts: ExpertWeights
    spec: MoESpec
    token_mask: np.ndarray | None = None
    shared: SharedExpert | None = None

    def of_rank(self, rank: int, array: np.ndarray) -> np.ndarray:
        """The part of an array by token that is a rank's."""
        first = sum(self.tokens[:rank])
        return array[first : first + self.tokens[rank]]

    def ranks(self) -> list[MoEOperands]:
        """The operands of each rank."""
        found = []
        for rank, experts in enumerate(shard_experts(self.experts, self.placement)):
            mask = None if self.token_mask is None else self.of_rank(rank, self.token_mask)
            routing = self.routing
            if isinstance(routing, TopK):
                routing = TopK(self.of_rank(rank, routing.ids), self.of_rank(rank, routing.weights))
            elif isinstance(routing, RouterLogits):
                routing = dataclasses.replace(routing, logits=self.of_rank(rank, routing.logits))
            found.append(MoEOperands(self.of_rank(rank, self.x), experts, routing, mask, None, self.shared))
        return found

    def gradients(self) -> list[OutputGradients]:
        return [OutputGradients(self.of_rank(rank, self.d_output)) for rank in range(len(self.tokens))]

    def alone(self) -> dict[str, np.ndarray]:
        """Every stage of the forward on one device."""
        extras = {"token_mask": self.token_mask, "shared": self.shared}
        return moe_stages(self.x, self.experts, self.routing, self.spec, **extras)

    def alone_backward(self, stages: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Every gradient on one device."""
        operands = MoEOperands(self.x, self.experts, self.routing, self.token_mask, shared=self.shared)
        return moe_backward_stages(OutputGradients(self.d_output), operands, self.spec, stages)


def draw_problem(
    seed: int,
    placement: Placement,
    tokens: tuple[int, ...],
    top_k: int,
    load: str,
    dtype: str,
    spec: MoESpec,
    *,
    extras: bool = False,
    sizes: tuple[int, int] = (12, 8),
) -> Problem:
    """sizes: D, F. extras: a router, a gated shared expert and biases; the ids are then the router's."""
    random = np.random.default_rng(seed)
    total, experts, (d, f) = sum(tokens), placement.num_experts, sizes
    top_k = min(top_k, experts)
    gated = spec.activation.gated
    width = 2 * f if gated and spec.activation.gate_layout != "separate" else f

    def draw(*shape: int) -> np.ndarray:
        return draw_array(random, shape, dtype)

    in_out = spec.weight_layout == "in_out"

    def matrix(*shape: int) -> np.ndarray:
        return draw(*shape) if in_out else np.ascontiguousarray(np.swapaxes(draw(*shape), -1, -2))

    up = matrix(experts, d, f) if spec.activation.gate_layout == "separate" else None
    weights = ExpertWeights(matrix(experts, d, width), matrix(experts, f, d), up)
    if extras:
        up_bias = None if up is None else draw(experts, f)
        weights = dataclasses.replace(
            weights, gate_up_bias=draw(experts, width), up_bias=up_bias, down_bias=draw(experts, d)
        )
    ids = draw_ids_of(load, random, total, top_k, placement)
    routing: Any = TopK(ids, random.random((total, top_k), np.float32))
    shared = None
    if extras and spec.router is not None:
        matrix_of_router = draw(d, experts) if spec.router_weight_layout == "in_out" else draw(experts, d)
        routing = RouterWeights(matrix_of_router, draw(experts))
        up = matrix(d, f) if spec.activation.gate_layout == "separate" else None
        shared = SharedExpert(matrix(d, width), matrix(f, d), up, matrix(d, 1))
    mask = random.random(total) < 0.6 if load == "masked" else None
    return Problem(placement, tokens, draw(total, d), routing, draw(total, d), weights, spec, mask, shared)


PLAIN = MoESpec(Activation("silu"))
