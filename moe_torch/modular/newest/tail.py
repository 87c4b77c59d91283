"""Work around the experts: zero experts before them, and the sum with a norm after them."""

from __future__ import annotations

from typing import Any

import torch

from moe_core.base.checks import require_at_least, require_choice
from moe_core.errors import InvalidInput
from moe_core.modular.types import ZERO_EXPERT_TYPES, FinalizedNorm, ZeroExperts
from moe_core.specs.norm import NormSpec
from moe_core.specs.routing import LayoutSpec
from moe_torch import ops
from moe_torch.modular.generations.unfinalized import parts_of
from moe_torch.modular.stages import as_ids, as_weights, weighted_rows

_DEFAULT_NORM = NormSpec()


def zero_experts(
    hidden_states: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    num_experts: int,
    zero_expert_type: str = "identity",
) -> ZeroExperts:
    """Split ids from num_experts on off a routing: experts without weights, which pass tokens through or add zero.

    zero_expert_type: `identity`: output is hidden_states `[M, K]` times the sum of the weights of such slots, in fp32
    with one cast, and exact zeros for tokens without one. `zero`: output is zero. topk_weights, topk_ids: `[M, topk]`,
    not changed. Raises InvalidInput.
    """
    require_at_least("num_experts", num_experts, 1)
    require_choice("zero_expert_type", zero_expert_type, ZERO_EXPERT_TYPES)
    ids = as_ids(topk_ids)
    weights = as_weights(topk_weights, ids)
    if hidden_states.dim() != 2 or hidden_states.shape[0] != ids.shape[0]:
        raise InvalidInput(
            f"hidden_states must be [{ids.shape[0]}, K], a row for each of topk_ids, got {list(hidden_states.shape)}; "
            "route the same tokens"
        )
    chosen = ids >= num_experts
    left = torch.where(chosen, 0.0, weights), torch.where(chosen, -1, ids)
    if zero_expert_type == "zero":
        return ZeroExperts(torch.zeros_like(hidden_states), *left)
    total = torch.where(chosen, weights, 0.0).sum(1, keepdim=True)
    passed = weighted_rows(hidden_states, total)
    return ZeroExperts(torch.where(chosen.any(1, keepdim=True), passed, 0), *left)


def finalize_and_norm(
    unfinalized: Any,
    residual: torch.Tensor,
    norm_weight: torch.Tensor,
    norm: NormSpec = _DEFAULT_NORM,
    *,
    shared_output: torch.Tensor | None = None,
    routed_scaling_factor: float = 1.0,
) -> FinalizedNorm:
    """Do what a layer's consumer does with an `UnfinalizedMoEOutput`: weigh, sum, add and normalise.

    unfinalized: gemm2_permuted `[rows, K]`, expert_weights `[M, topk]` and expanded_idx_to_permuted_idx int32 `[M,
    topk]` (-1: no row). Each row times its weight (and routed_scaling_factor) is rounded. The sum over topk and
    shared_output `[M, K]` is in fp32 with one cast, then residual `[M, K]` is added, and RMS norm with norm_weight
    `[K]` follows. The bits are those of these steps one by one, which run as separate kernels. Raises InvalidInput.
    """
    rows, weights, places = parts_of(unfinalized, "unfinalized must be")
    places = as_ids(places)
    weights = as_weights(weights, places)
    tokens, topk = places.shape
    if residual.shape != (tokens, rows.shape[-1]):
        raise InvalidInput(
            f"residual must be {[tokens, rows.shape[-1]]}, a row for each token of unfinalized, got "
            f"{list(residual.shape)}; pass that of the same layer"
        )
    flat = places.reshape(-1)
    rows = rows if rows.shape[0] else rows.new_zeros(1, rows.shape[1])
    by_slot = weighted_rows(rows[flat.clamp(min=0).long()], (weights * routed_scaling_factor).reshape(-1, 1))
    slots = torch.where(flat >= 0, torch.arange(tokens * topk, dtype=torch.int32, device=flat.device), -1)
    nothing = torch.zeros(1, dtype=torch.int32, device=flat.device)
    layout = ops.RaggedLayout(LayoutSpec(tokens, topk, 1), nothing, nothing, slots, slots, nothing)
    hidden = residual + ops.reduce(by_slot, layout, shared=shared_output)
    return FinalizedNorm(hidden, ops.rms_norm(hidden, norm_weight, norm))
