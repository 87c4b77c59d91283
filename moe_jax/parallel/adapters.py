"""Adapters of experts on several ranks. See `moe_torch.parallel.adapters`."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from moe_core.parallel import Placement
from moe_core.parallel.operands import held_columns, require_adapters
from moe_core.specs.operands import LoRAFactors, named_fields
from moe_jax.bridge.calls import require_type
from moe_jax.parallel.collectives import AxisName
from moe_jax.parallel.routes import Routes, Sizes, push


class RankAdapters(NamedTuple):
    """lora: of this rank's experts. ids int32 `[T]` and invalid int32 `[1]`: of its tokens."""

    lora: LoRAFactors
    ids: jax.Array
    invalid: jax.Array


def adapters_here(
    adapters: tuple[LoRAFactors, Any], mask: Any, tokens: int, where: tuple[Placement, AxisName, int]
) -> RankAdapters:
    """adapters: factors of this rank's experts or of all, scale and ranks of all, and ids. where: the placement, its
    axis, and the ranks that split each expert."""
    (lora, ids), (placement, axis, size) = adapters, where
    require_type("lora", lora, LoRAFactors)
    require_adapters(lora, ids, tokens, placement, size)
    count = placement.per_rank
    every = jnp.asarray([held_columns(placement, rank, count) for rank in range(placement.num_ranks)])
    columns, whole = every[jax.lax.axis_index(axis)], placement.num_experts
    ranks, slots = jnp.asarray(lora.ranks), lora.scale.shape[0]
    named = (ids >= 0) & (ids < slots)
    known = named & (ranks.max(axis=1) > 0)[jnp.where(named, ids, 0)]
    invalid = (ids != -1) & ~known
    invalid = invalid if mask is None else invalid & mask
    factors = {name: one for name, one in named_fields(lora) if name[0] in "ab" and one.shape[1] == whole != count}
    own = {name: one[:, columns] for name, one in {**factors, "scale": lora.scale, "ranks": ranks}.items()}
    return RankAdapters(
        dataclasses.replace(lora, **own), jnp.where(known, ids, -1), invalid.sum(dtype=jnp.int32).reshape(1)
    )


def push_ids(sizes: Sizes, routes: Routes, ids: jax.Array) -> jax.Array:
    """Send ids of tokens int32 `[T]` to their owners. Returns the ids of rows there, `[R]`."""
    return push(sizes, routes, ids[:, None].astype(jnp.float32))[:, 0].astype(jnp.int32)  # fp32, as rows are
