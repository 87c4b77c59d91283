"""The tensor axis around the exchange: each rank has a slice of every expert. See `moe_torch.parallel.tensor`."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from moe_core.errors import InvalidInput
from moe_core.specs.operands import ExpertWeights, RaggedLayout
from moe_core.specs.routing import LayoutSpec
from moe_jax import ops
from moe_jax.autodiff.paired import paired


class Brought(NamedTuple):
    """x `[T, D]` without a gradient, wide fp32 `[T, D]` with it, ids int32, weights fp32 `[T, K]`, mask, adapters."""

    x: jax.Array
    wide: jax.Array
    ids: jax.Array
    weights: jax.Array
    token_mask: jax.Array | None
    adapter_ids: jax.Array | None = None


def size_of(axis: str | None) -> int:
    """The ranks of the axis, 1 without one. Raises InvalidInput unless it is manual."""
    if axis is None:
        return 1
    try:
        return jax.lax.axis_size(axis)
    except NameError as error:
        raise InvalidInput(
            f"tensor_axis must be a mesh axis that is manual here, got {axis!r}; call this inside jax.shard_map over "
            "both axes, with slices of the local experts"
        ) from error


def gathered(axis: str, brought: Brought) -> Brought:
    """All ranks' tokens, in rank order. A masked token has no expert."""
    ids = brought.ids if brought.token_mask is None else jnp.where(brought.token_mask[:, None], brought.ids, -1)
    x, ids = _gather_all(axis, brought.x, ids)
    around = _around((axis,), (brought.wide, brought.weights), (x,))
    adapters = brought.adapter_ids
    (adapters,) = (None,) if adapters is None else _gather_all(axis, adapters)
    return Brought(x, around[0], ids, around[1], None, adapters)


def _around_back(axis: str, arguments: Any, d_wide: jax.Array, d_weights: jax.Array) -> Any:
    came = _pulled(axis, d_weights)
    return _added(axis, d_wide), functools.reduce(jnp.add, jnp.split(came, jax.lax.axis_size(axis)))


def _gather_all(axis: str, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    return tuple(jax.lax.all_gather(one, axis, tiled=True) for one in arrays)


#: wide fp32 `[S, D]` and weights `[S, K]` of all ranks' tokens. Parts of their gradients are added.
_around = paired(
    lambda axis, wide, weights, x: (x.astype(wide.dtype), *_gather_all(axis, weights)),
    _around_back,
    lambda axis, wide, weights, x: _gather_all(axis, wide, weights),
)


def _pulled(axis: str, parts: jax.Array) -> jax.Array:
    """Parts of this rank's tokens from all ranks, `[size * T, N]`."""
    return jax.lax.all_to_all(parts, axis, 0, 0, tiled=True)


def _added(axis: str, parts: jax.Array, **options: Any) -> jax.Array:
    """The sum `[T, D]` of parts fp32 in rank order. options: of `reduce`."""
    size, nothing = jax.lax.axis_size(axis), jnp.zeros(0, jnp.int32)
    tokens = len(parts) // size
    row_of_slot = jnp.arange(size * tokens, dtype=jnp.int32).reshape(size, tokens).T.reshape(-1)
    layout = RaggedLayout(LayoutSpec(tokens, size, 1), nothing, nothing, nothing, row_of_slot, None)
    every: Any = {"order": "row", "out_dtype": "float32"} | options
    return ops.reduce(_pulled(axis, parts), layout, **every)


def total(
    axis: str, dtype: str, out_dtype: str, parts: jax.Array, shared: jax.Array | None, gate: jax.Array | None
) -> jax.Array:
    """The sum `[T, D]` of all ranks' parts fp32 `[S, D]`, plus shared `[T, D]`, gated. Derivatives: `combine`."""
    return _total((axis, dtype, out_dtype), (parts,) if shared is None else (parts, shared), (gate,))


def _totalled(axis: str, dtype: str, out_dtype: str, *arguments: Any) -> jax.Array:
    parts, *shared, gate = arguments
    return _added(axis, parts, shared=shared[0] if shared else None, shared_gate=gate, out_dtype=out_dtype)


def _total_back(axis: str, dtype: str, out_dtype: str, arguments: Any, d_y: jax.Array) -> Any:
    parts = jax.lax.all_gather(d_y.astype(dtype), axis, tiled=True).astype(jnp.float32)
    return (parts, *(d_y.astype(shared.dtype) for shared in arguments[1:-1]))


_total = paired(_totalled, _total_back, lambda *arguments: _totalled(*arguments[:-1], None))


def bias_once(axis: str, experts: ExpertWeights) -> ExpertWeights:
    """Only the first rank of the axis adds down_bias, and gets its gradient."""
    if experts.down_bias is None:
        return experts
    first = jax.lax.axis_index(axis) == 0
    return dataclasses.replace(experts, down_bias=jnp.where(first, experts.down_bias, 0))
