"""Dispatch and combine, each the other's backward, with gradients in a fixed order.

Rows of tokens (backward: the output's gradient) go out, and rows of slots come home, added in the order k = 0..K-1,
gradients in fp32.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from moe_core.errors import Unsupported
from moe_jax import ops
from moe_jax.parallel.exchange import take
from moe_jax.parallel.routes import Routes, Sizes, at_home, pull, push


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def dispatch(sizes: Sizes, routes: Routes, x: jax.Array, wide: jax.Array, weights: jax.Array) -> Any:
    """(rows `[R, D]` of slots at their owners, their weights fp32 `[R, 1]`) of weights fp32 `[T, K]`. wide: see
    `gather_rows`."""
    return push(sizes, routes, x), routes.weights


def _dispatch_backward(sizes: Sizes, routes: Routes, gradients: Any) -> Any:
    d_rows, d_weights = gradients
    d_wide = ops.reduce(pull(sizes, routes, d_rows), at_home(sizes, routes), order="row", out_dtype="float32")
    by_slot = take(pull(sizes, routes, d_weights), routes.row_of_slot, 0)
    return None, None, d_wide, by_slot.reshape(sizes.tokens, sizes.top_k)


dispatch.defvjp(lambda sizes, routes, *arrays: (dispatch(sizes, routes, *arrays), routes), _dispatch_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def combine(
    sizes: Sizes, out_dtype: str, routes: Routes, rows: jax.Array, shared: jax.Array | None, gate: jax.Array | None
) -> jax.Array:
    """y `[T, D]`: the sum of each token's slots, from rows `[R, D]` at their owners, then shared fp32 `[T, D]`, if any,
    times the sigmoid of gate fp32 `[T, 1]`. NaN if a slot did not fit."""
    options = {"order": "row", "shared": shared, "shared_gate": gate, "out_dtype": out_dtype}
    y = ops.reduce(pull(sizes, routes, rows), at_home(sizes, routes), **options)
    return jnp.where(routes.lost[:, None], jnp.nan, y) if sizes.spec.on_overflow != "drop" else y


def _combine_forward(sizes: Sizes, out_dtype: str, routes: Routes, rows: Any, shared: Any, gate: Any) -> Any:
    likes = jax.tree.map(lambda array: jnp.zeros(0, array.dtype), (rows, shared))
    return combine(sizes, out_dtype, routes, rows, shared, gate), (routes, *likes)


def _combine_backward(sizes: Sizes, out_dtype: str, saved: Any, d_y: Any) -> Any:
    routes, rows, shared = saved
    d_shared = None if shared is None else d_y.astype(shared.dtype)
    return None, push(sizes, routes, d_y.astype(rows.dtype)), d_shared, None


combine.defvjp(_combine_forward, _combine_backward)


def used(x: jax.Array, count: int, dtype: Any) -> tuple[jax.Array, ...]:
    """x in a dtype, once per use. Gradients are added in that order and dtype, and cast once."""
    uses: Any = _used(x, count, dtype)
    return uses


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _used(x: jax.Array, count: int, dtype: Any) -> tuple[jax.Array, ...]:
    return (x.astype(dtype),) * count


_used.defvjp(
    lambda x, count, dtype: (_used(x, count, dtype), jnp.zeros(0, x.dtype)),
    lambda count, dtype, like, gradients: (functools.reduce(jnp.add, gradients).astype(like.dtype),),
)


@jax.custom_vjp
def untrained(array: jax.Array) -> jax.Array:
    """An array of experts with replicas. Its gradient raises Unsupported."""
    return array


def _refuse(array: jax.Array) -> Any:
    raise Unsupported(
        "experts must lie on one rank each where they are trained, got a placement with replicas, whose gradients "
        "would be parts of one; use Placement.balanced(..., max_replicas=1), or jax.lax.stop_gradient of the experts"
    )


untrained.defvjp(_refuse, lambda _, gradient: (gradient,))
