"""Dispatch and combine, each the other's backward. Rows of slots are added in the order k = 0..K-1."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from moe_core.errors import Unsupported
from moe_jax import ops
from moe_jax.autodiff.paired import paired
from moe_jax.parallel.exchange import take
from moe_jax.parallel.routes import Routes, Sizes, at_home, pull, push


def dispatch(sizes: Sizes, routes: Routes, x: jax.Array, wide: jax.Array, weights: jax.Array) -> Any:
    """(rows `[R, D]` of slots, their weights fp32 `[R, 1]`) at their owners. wide: see `gather_rows`."""
    return _dispatch((sizes,), (wide, weights), (x, routes))


def _sent(sizes: Sizes, wide: jax.Array, weights: jax.Array, x: jax.Array, routes: Routes) -> Any:
    return push(sizes, routes, x), routes.weights


def _weights_home(sizes: Sizes, routes: Routes, of_rows: jax.Array) -> jax.Array:
    return take(pull(sizes, routes, of_rows), routes.row_of_slot, 0).reshape(sizes.tokens, sizes.top_k)


def _sent_back(sizes: Sizes, arguments: Any, d_rows: jax.Array, d_weights: jax.Array) -> Any:
    routes = arguments[-1]
    d_wide = ops.reduce(pull(sizes, routes, d_rows), at_home(sizes, routes), order="row", out_dtype="float32")
    return d_wide, _weights_home(sizes, routes, d_weights)


def _sent_again(sizes: Sizes, wide: jax.Array, weights: jax.Array, x: jax.Array, routes: Routes) -> Any:
    home = jax.linear_transpose(functools.partial(_weights_home, sizes, routes), routes.weights)
    return push(sizes, routes, wide.astype(x.dtype)), home(weights)[0]


_dispatch = paired(_sent, _sent_back, _sent_again)


def combine(
    sizes: Sizes, out_dtype: str, routes: Routes, rows: jax.Array, shared: jax.Array | None, gate: jax.Array | None
) -> jax.Array:
    """y `[T, D]`: the sum of each token's slots, from rows `[R, D]` at their owners, then shared fp32 `[T, D]`, if any,
    times the sigmoid of gate fp32 `[T, 1]`. NaN if a slot did not fit. Derivatives of shared are those of the product,
    see `shared_output`."""
    trained = (rows,) if shared is None else (rows, shared)
    return _combine((sizes, out_dtype), trained, (routes, gate))


def _summed(sizes: Sizes, out_dtype: str, rows: jax.Array, *arguments: Any) -> jax.Array:
    *shared, routes, gate = arguments
    options = {"order": "row", "shared": shared[0] if shared else None, "shared_gate": gate, "out_dtype": out_dtype}
    y = ops.reduce(pull(sizes, routes, rows), at_home(sizes, routes), **options)
    return jnp.where(routes.lost[:, None], jnp.nan, y) if sizes.spec.on_overflow != "drop" else y


def _summed_back(sizes: Sizes, out_dtype: str, arguments: Any, d_y: jax.Array) -> Any:
    rows, *shared, routes, _ = arguments
    return (push(sizes, routes, d_y.astype(rows.dtype)), *(d_y.astype(one.dtype) for one in shared))


_combine = paired(_summed, _summed_back, lambda *arguments: _summed(*arguments[:-1], None))


def used(x: jax.Array, count: int, dtype: Any) -> tuple[jax.Array, ...]:
    """x in a dtype, once per use. Gradients are added in that order and dtype, and cast once."""
    return _used((count, jnp.dtype(dtype)), (x,))


_used = paired(
    lambda count, dtype, x: (x.astype(dtype),) * count,
    lambda count, dtype, x, *gradients: (functools.reduce(jnp.add, gradients).astype(x[0].dtype),),
)


def untrained(array: jax.Array) -> jax.Array:
    """An array of experts with replicas. Its derivatives raise Unsupported."""
    return _untrained((), (array,))


def _refuse(*_: Any) -> Any:
    raise Unsupported(
        "experts must lie on one rank each where they are trained, got a placement with replicas, whose gradients "
        "would be parts of one; use Placement.balanced(..., max_replicas=1), or jax.lax.stop_gradient of the experts"
    )


_untrained = paired(lambda array: array, _refuse, _refuse)
