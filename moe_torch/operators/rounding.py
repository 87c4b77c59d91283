"""The operator of token rounding and its backward."""

from __future__ import annotations

from typing import Any

import torch

from moe_core.ops.routing.rounding import plan_route_rounded, plan_route_rounded_backward
from moe_core.specs.routing import RouterSpec, TokenRounding
from moe_torch.bridge.operator import Operator, Outputs
from moe_torch.bridge.signature import Declaration, MaybeTensor, Tensor
from moe_torch.operators.kinds import BackwardOperator


def _rounded(call: Any) -> Outputs:
    tokens, num_experts = call.logits.shape[0], call.logits.shape[1]
    table = (tokens, call.rounding.width(call.spec.require_top_k(), num_experts))
    return [
        (table, torch.int32),
        (table, torch.float32),
        ((num_experts,), torch.int32),
        (table, torch.int32),
    ]


class _RouteRounded(Declaration[tuple[Tensor, Tensor, Tensor, Tensor]]):
    logits: Tensor
    correction_bias: MaybeTensor
    token_mask: MaybeTensor
    spec: RouterSpec
    rounding: TokenRounding


class _RouteRoundedBackward(Declaration[Tensor]):
    d_weights: Tensor
    logits: Tensor
    ids: Tensor
    candidates: Tensor
    spec: RouterSpec
    rounding: TokenRounding


#: Returns ids, weights, tokens_per_expert, candidates.
ROUTE_ROUNDED = Operator("route_rounded", _RouteRounded, plan_route_rounded, _rounded)
ROUTE_ROUNDED_BACKWARD = BackwardOperator(
    "route_rounded_backward",
    _RouteRoundedBackward,
    plan_route_rounded_backward,
    lambda call: [(tuple(call.logits.shape), torch.float32)],
)
