"""The steps before and after the experts."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from moe_core.base.checks import require_at_least
from moe_core.errors import InvalidInput
from moe_core.specs.operands import RaggedLayout
from moe_core.specs.routing import LayoutSpec
from moe_jax import ops
from moe_jax.bridge.calls import int32_ids, require_array, require_type


@dataclass(frozen=True)
class PreparedTokens:
    """A pytree. a1q: tokens `[M, K]`, or batched `[E, max_num_tokens, K]` with expert_num_tokens int32 `[E]`."""

    a1q: jax.Array
    expert_num_tokens: jax.Array | None = None
    layout: RaggedLayout | None = None


jax.tree_util.register_dataclass(PreparedTokens, data_fields=["a1q", "expert_num_tokens", "layout"], meta_fields=[])


def as_routing(topk_weights: Any, topk_ids: Any) -> tuple[jax.Array, jax.Array]:
    """weights fp32 and ids int32 `[M, topk]`. Raises InvalidInput."""
    require_array("topk_weights", topk_weights)
    require_array("topk_ids", topk_ids)
    ids = int32_ids(topk_ids)
    if ids.ndim != 2 or ids.dtype != jnp.int32:
        raise InvalidInput(
            f"topk_ids must be integers [num_tokens, topk], got {topk_ids.dtype} {topk_ids.shape}; pass the ids of a "
            "top-k"
        )
    if topk_weights.shape != ids.shape or not jnp.issubdtype(topk_weights.dtype, jnp.floating):
        raise InvalidInput(
            f"topk_weights must be floats {ids.shape} like topk_ids, got {topk_weights.dtype} "
            f"{topk_weights.shape}; pass the weights of the same top-k"
        )
    return jnp.asarray(topk_weights, jnp.float32), jnp.asarray(ids)


def _require_rank(name: str, array: Any, wanted: str) -> None:
    require_array(name, array)
    if len(array.shape) != wanted.count(",") + 1:
        raise InvalidInput(f"{name} must be {wanted}, got {array.shape}; reshape it")


def left_routing(topk_weights: Any, topk_ids: Any, is_applied: bool) -> tuple[jax.Array, jax.Array]:
    """`as_routing`, with ones for weights if the input is weighted."""
    weights, ids = as_routing(topk_weights, topk_ids)
    return jnp.ones_like(weights) if is_applied else weights, ids


def weighted_rows(rows: jax.Array, weights: jax.Array) -> jax.Array:
    """rows `[R, D]` times weights fp32 `[R, 1]`, in fp32, cast once."""
    return (rows.astype(jnp.float32) * weights).astype(rows.dtype)


def prepare(
    a1: jax.Array, topk_weights: jax.Array, topk_ids: jax.Array, apply_router_weight_on_input: bool = False
) -> PreparedTokens:
    """Prepare tokens in the Standard format: a1 `[M, K]`, weighted if requested (topk 1 only)."""
    weights, ids = as_routing(topk_weights, topk_ids)
    _require_rank("a1", a1, "[num_tokens, hidden]")
    if ids.shape[0] != a1.shape[0]:
        raise InvalidInput(
            f"topk_ids must have a row for each of the {a1.shape[0]} tokens of a1, got {ids.shape}; route the same "
            "tokens"
        )
    if not apply_router_weight_on_input:
        return PreparedTokens(a1)
    if ids.shape[1] != 1:
        raise InvalidInput(
            f"topk must be 1 with apply_router_weight_on_input, got {ids.shape[1]}; weight the output instead"
        )
    return PreparedTokens(weighted_rows(a1, weights))


def prepare_batched(
    a1: jax.Array,
    topk_weights: jax.Array,
    topk_ids: jax.Array,
    num_local_experts: int,
    max_num_tokens: int,
    rank: int = 0,
    expert_map: jax.Array | None = None,
    apply_router_weight_on_input: bool = False,
) -> PreparedTokens:
    """Prepare tokens in the batched format: blocks `[num_local_experts, max_num_tokens, K]`, unused rows zero.

    The local experts are num_local_experts ids from rank * num_local_experts on, unless expert_map int32 `[E_global]`
    is given. M is at most max_num_tokens, and a token has at most one row per expert.
    """
    require_at_least("rank", rank, 0)
    require_at_least("max_num_tokens", max_num_tokens, 1)
    _require_rank("a1", a1, "[num_tokens, hidden]")
    if a1.shape[0] > max_num_tokens:
        raise InvalidInput(
            f"a1 must have at most max_num_tokens = {max_num_tokens} rows, got {a1.shape[0]}; raise max_num_tokens or "
            "split the batch"
        )
    a1 = prepare(a1, topk_weights, topk_ids, apply_router_weight_on_input).a1q
    _, ids = as_routing(topk_weights, topk_ids)
    if expert_map is None:
        local_ids = ids - rank * num_local_experts
        ids = jnp.where((local_ids >= 0) & (local_ids < num_local_experts), local_ids, -1)
    else:
        require_array("expert_map", expert_map)
        if expert_map.dtype.name != "int32" or expert_map.ndim != 1 or not expert_map.shape[0]:
            raise InvalidInput(
                f"expert_map must be int32 [num_global_experts], at least one, got {expert_map.dtype} "
                f"{expert_map.shape}; cast it, or pass None for no map"
            )
        known = (ids >= 0) & (ids < expert_map.shape[0])
        ids = jnp.where(known, expert_map[jnp.clip(ids, 0, expert_map.shape[0] - 1)], -1).astype(jnp.int32)
    # A token's slots of the same expert point to one row.
    first = (ids[:, :, None] == ids[:, None, :]).argmax(-1)
    is_first = first == jnp.arange(ids.shape[1])
    layout = ops.make_layout(jnp.where(is_first, ids, -1), num_local_experts, max_rows=max_num_tokens)
    rows = jnp.take_along_axis(layout.row_of_slot.reshape(ids.shape), first, axis=1)
    layout = dataclasses.replace(layout, row_of_slot=rows.reshape(-1))
    slots = layout.slot_of_row
    # Padding reads a row of zeros behind the last token.
    tokens = jnp.where(slots >= 0, slots // topk_ids.shape[1], a1.shape[0])
    source = jnp.concatenate([a1, jnp.zeros((1, a1.shape[1]), a1.dtype)])
    rows = source[tokens]
    blocks = rows.reshape(num_local_experts, max_num_tokens, a1.shape[1])
    return PreparedTokens(blocks, layout.group_sizes, layout)


def rows_by_slot(row_of_slot: jax.Array, top_k: int) -> RaggedLayout:
    """For `ops.reduce` of rows by slot int32 `[M * topk]`, -1 = adds nothing."""
    spec = LayoutSpec(row_of_slot.shape[0] // top_k, top_k, 1)
    nothing = jnp.zeros(1, jnp.int32)
    return RaggedLayout(spec, nothing, nothing, row_of_slot, row_of_slot, nothing)


def blocks_layout(groups: int, rows: int, sizes: jax.Array) -> RaggedLayout:
    """The layout of `[groups, rows, D]` with sizes int32 `[groups]` used rows."""
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
    """Weight and reduce slots `[M, topk, K]` to output `[M, K]`. Experts that return `[M, K]` do not need it.

    Each row times its weight, unless the input was weighted, is rounded to its dtype. The sum is in fp32 in the order k
    = 0..topk-1, with one cast. Rows with a negative id add nothing.
    """
    weights, ids = as_routing(topk_weights, topk_ids)
    _require_rank("fused_expert_output", fused_expert_output, "[M, topk, K]")
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
    """Weight and reduce blocks of `prepare_batched` to output `[M, K]`, rounded as in `finalize`."""
    require_type("prepared", prepared, PreparedTokens)
    require_array("topk_weights", topk_weights)
    layout = prepared.layout
    if layout is None:
        raise InvalidInput("prepared must come from prepare_batched, got one without a layout; pass what it returned")
    tokens = (layout.spec.num_tokens, layout.spec.top_k)
    if topk_weights.shape != tokens:
        raise InvalidInput(
            f"topk_weights must be {tokens}, those of the tokens that were prepared, got {topk_weights.shape}; pass "
            "those"
        )
    blocks = (layout.spec.num_experts, layout.spec.max_rows)
    _require_rank("fused_expert_output", fused_expert_output, "[E, max_num_tokens, K]")
    if fused_expert_output.shape[:2] != blocks:
        raise InvalidInput(
            f"fused_expert_output must be [E, max_num_tokens, K] with {blocks} of prepare_batched, got "
            f"{fused_expert_output.shape}; pass the rows of its blocks"
        )
    rows, places = fused_expert_output.reshape(-1, fused_expert_output.shape[-1]), layout.row_of_slot
    dtype = "float16" if (rows.dtype, prepared.a1q.dtype) == (jnp.float32, jnp.float16) else None
    if apply_router_weight_on_input or not topk_weights.size:
        return ops.reduce(rows, layout, order="row", out_dtype=dtype)
    by_slot = weighted_rows(rows[jnp.maximum(places, 0)], topk_weights.astype(jnp.float32).reshape(-1, 1))
    slots = jnp.where(places >= 0, jnp.arange(places.shape[0], dtype=jnp.int32), -1)
    return ops.reduce(by_slot, rows_by_slot(slots, layout.spec.top_k), out_dtype=dtype)
