"""Messages between the ranks of a mesh axis, inside `jax.shard_map`."""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from moe_jax.autodiff.function import varying_alike
from moe_jax.parallel.exchange import Splits, take

#: A mesh axis, or the axes of hosts and of the ranks of each.
AxisName = str | tuple[str, str]


def all_to_all(values: jax.Array, axis_name: AxisName) -> jax.Array:
    """Equally many rows from each rank, of `[W * B, ...]` for each."""
    return jax.lax.all_to_all(values, axis_name, 0, 0, tiled=True)


def exchanged(axis_name: AxisName, *numbers: jax.Array) -> tuple[jax.Array, ...]:
    """Numbers int32 `[W]` from each rank, of those for each."""
    return tuple(all_to_all(jnp.stack(numbers, axis=1), axis_name).T)


class _Rows(NamedTuple):
    count: int
    unused: float
    axis_name: AxisName


def ragged_all_to_all(rows: jax.Array, splits: Splits, count: int, unused: float, axis_name: AxisName) -> jax.Array:
    """Rows `[count, N]` from the peers by splits, sent from rows `[S, N]`. On CPUs every rank gathers all rows."""
    static = _Rows(count, unused, axis_name)
    gathered, exchanged = (functools.partial(one, static=static) for one in (_gathered, _exchanged))
    return jax.lax.platform_dependent(rows, splits, cpu=gathered, default=exchanged)


def _exchanged(rows: jax.Array, splits: Splits, static: _Rows) -> jax.Array:
    into = jnp.full((static.count, rows.shape[1]), static.unused, rows.dtype)
    rows, into, *varying = varying_alike((rows, into, *splits))
    sent, received, sent_start, peer_start = varying
    offsets = sent_start, sent, peer_start, received
    return jax.lax.ragged_all_to_all(rows, into, *offsets, axis_name=static.axis_name)


def _gathered(rows: jax.Array, splits: Splits, static: _Rows) -> jax.Array:
    rank = jax.lax.axis_index(static.axis_name)
    table = jnp.stack([splits.sent_start, splits.sent, splits.peer_start])
    first, sent, begins = jax.lax.all_gather(table, static.axis_name)[:, :, rank].T[:, :, None]
    number = jnp.arange(static.count, dtype=jnp.int32) - begins
    source = jnp.arange(len(begins), dtype=jnp.int32)[:, None] * rows.shape[0] + first + number
    rows_read = jnp.where((number >= 0) & (number < sent), source, -1).max(axis=0)
    return take(jax.lax.all_gather(rows, static.axis_name, tiled=True), rows_read, static.unused)


def varying_over(array: jax.Array, axis_name: AxisName) -> jax.Array:
    names = (axis_name,) if isinstance(axis_name, str) else axis_name
    missing = tuple(name for name in names if name not in jax.typeof(array).manual_axis_type.varying)
    return jax.lax.pcast(array, missing, to="varying") if missing else array
