"""Work around the experts: zero experts before them, and the sum with a norm after them."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from moe_core.base.checks import require_at_least, require_choice
from moe_core.errors import InvalidInput
from moe_core.modular.types import ZERO_EXPERT_TYPES, FinalizedNorm, ZeroExperts
from moe_core.specs.norm import NormSpec
from moe_jax import ops
from moe_jax.modular.prepare_finalize import as_routing, rows_by_slot, weighted_rows

_DEFAULT_NORM = NormSpec()


def zero_experts(
    hidden_states: jax.Array,
    topk_weights: jax.Array,
    topk_ids: jax.Array,
    num_experts: int,
    zero_expert_type: str = "identity",
) -> ZeroExperts:
    """Split ids from num_experts on off a routing, as `moe_torch.modular.zero_experts`."""
    require_at_least("num_experts", num_experts, 1)
    require_choice("zero_expert_type", zero_expert_type, ZERO_EXPERT_TYPES)
    weights, ids = as_routing(topk_weights, topk_ids)
    if hidden_states.ndim != 2 or hidden_states.shape[0] != ids.shape[0]:
        raise InvalidInput(
            f"hidden_states must be [{ids.shape[0]}, K], a row for each of topk_ids, got {hidden_states.shape}; route "
            "the same tokens"
        )
    chosen = ids >= num_experts
    left = jnp.where(chosen, 0.0, weights), jnp.where(chosen, -1, ids)
    if zero_expert_type == "zero":
        return ZeroExperts(jnp.zeros_like(hidden_states), *left)
    passed = weighted_rows(hidden_states, jnp.where(chosen, weights, 0.0).sum(1, keepdims=True))
    return ZeroExperts(jnp.where(chosen.any(1, keepdims=True), passed, jnp.zeros_like(passed)), *left)


def finalize_and_norm(
    fused_expert_output: jax.Array,
    topk_weights: jax.Array,
    topk_ids: jax.Array,
    residual: jax.Array,
    norm_weight: jax.Array,
    norm: NormSpec = _DEFAULT_NORM,
    *,
    shared_output: jax.Array | None = None,
    routed_scaling_factor: float = 1.0,
) -> FinalizedNorm:
    """`finalize` slots `[M, topk, K]`, add shared_output and residual `[M, K]`, and RMS norm with norm_weight `[K]`."""
    weights, ids = as_routing(topk_weights, topk_ids)
    rows = fused_expert_output.reshape(-1, fused_expert_output.shape[-1])
    if rows.shape[0] != ids.size or residual.shape != (ids.shape[0], rows.shape[1]):
        raise InvalidInput(
            f"fused_expert_output must be [M, topk, K] and residual [M, K] with [M, topk] = {ids.shape}, got "
            f"{fused_expert_output.shape} and {residual.shape}; pass those of the same layer"
        )
    by_slot = weighted_rows(rows, (weights * routed_scaling_factor).reshape(-1, 1))
    slots = jnp.where(ids.reshape(-1) >= 0, jnp.arange(ids.size, dtype=jnp.int32), -1)
    hidden = residual + ops.reduce(by_slot, rows_by_slot(slots, ids.shape[1]), shared=shared_output)
    return FinalizedNorm(hidden, ops.rms_norm(hidden, norm_weight, norm))
