"""What comes after the experts: weight and reduce what they have not."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from moe_core.errors import InvalidInput
from moe_core.specs.operands import RaggedLayout
from moe_core.specs.routing import LayoutSpec
from moe_jax import ops
from moe_jax.modular.prepare import PreparedTokens, as_routing, weighted_rows


def rows_by_slot(row_of_slot: jax.Array, top_k: int) -> RaggedLayout:
    """A layout as `ops.reduce` reads it, of rows that lie by slot: int32 `[M * topk]`, -1 = adds nothing."""
    spec = LayoutSpec(row_of_slot.shape[0] // top_k, top_k, 1)
    nothing = jnp.zeros(1, jnp.int32)
    return RaggedLayout(spec, nothing, nothing, row_of_slot, row_of_slot, nothing)


def blocks_layout(groups: int, rows: int, sizes: jax.Array) -> RaggedLayout:
    """The layout of `[groups, rows, D]` whose first sizes int32 `[groups]` rows are used; every row is its own slot."""
    total = groups * rows
    places = jnp.arange(total, dtype=jnp.int32)
    starts = jnp.arange(groups + 1, dtype=jnp.int32) * rows
    used = places.reshape(groups, rows) - starts[:-1, None] < sizes[:, None]
    slots = jnp.where(used.reshape(-1), places, -1)
    spec = LayoutSpec(total, 1, groups, max_rows=rows)
    return RaggedLayout(spec, sizes, starts, slots, slots, jnp.zeros(1, jnp.int32))


def finalize(
    fused_expert_output: jax.Array,
    topk_weights: jax.Array,
    topk_ids: jax.Array,
    apply_router_weight_on_input: bool = False,
) -> jax.Array:
    """output `[M, K]` of slots `[M, topk, K]` that are neither weighted nor reduced.

    Each row times its weight in fp32, unless that was on the input, rounded to its dtype; then the sum in fp32 in the
    order k = 0..topk-1, one cast. Rows whose id is negative add nothing. Experts of this package that return `[M, K]`
    leave nothing to finalize.
    """
    weights, ids = as_routing(topk_weights, topk_ids)
    rows = fused_expert_output.reshape(-1, fused_expert_output.shape[-1])
    if rows.shape[0] != ids.size:
        raise InvalidInput(
            f"fused_expert_output must be [M, topk, K] with [M, topk] = {ids.shape}, got {fused_expert_output.shape}; "
            "pass a row for every slot"
        )
    if not apply_router_weight_on_input:
        rows = weighted_rows(rows, weights.reshape(-1, 1))
    slots = jnp.where(ids.reshape(-1) >= 0, jnp.arange(ids.size, dtype=jnp.int32), -1)
    return ops.reduce(rows, rows_by_slot(slots, ids.shape[1]))


def finalize_batched(
    fused_expert_output: jax.Array,
    topk_weights: jax.Array,
    prepared: PreparedTokens,
    apply_router_weight_on_input: bool = False,
) -> jax.Array:
    """output `[M, K]` of blocks `[E, max_num_tokens, K]` that `prepare_batched` placed; rounded as in `finalize`."""
    layout = prepared.layout
    if layout is None:
        raise InvalidInput("prepared must come from prepare_batched, got one without a layout; pass what it returned")
    tokens = (layout.spec.num_tokens, layout.spec.top_k)
    if topk_weights.shape != tokens:
        raise InvalidInput(
            f"topk_weights must be {tokens}, those of the tokens that were prepared, got {topk_weights.shape}; pass "
            "those"
        )
    rows, places = fused_expert_output.reshape(-1, fused_expert_output.shape[-1]), layout.row_of_slot
    if apply_router_weight_on_input or not topk_weights.size:
        return ops.reduce(rows, layout, order="row")
    by_slot = weighted_rows(rows[jnp.maximum(places, 0)], topk_weights.astype(jnp.float32).reshape(-1, 1))
    slots = jnp.where(places >= 0, jnp.arange(places.shape[0], dtype=jnp.int32), -1)
    return ops.reduce(by_slot, rows_by_slot(slots, layout.spec.top_k))
