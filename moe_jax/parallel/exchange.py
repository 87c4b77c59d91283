"""The index arithmetic of an exchange on traced arrays. Letters and terms: docs/developer/parallel.md."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from moe_core.parallel.exchange import levels_of as levels_of
from moe_core.parallel.placement import Placement
from moe_jax.ops import RaggedLayout


class Places(NamedTuple):
    places: jax.Array
    invalid_ids: jax.Array


def physical_ids(
    ids: jax.Array,
    placement: Placement,
    *,
    first_token: jax.Array | int = 0,
    token_mask: jax.Array | None = None,
    host: tuple[jax.Array, int] | None = None,
) -> Places:
    """host: this one, and how many there are. Its replicas are preferred."""
    _, places, start = (jnp.asarray(table) for table in placement.tables)
    if host is not None and placement.has_replicas:
        of_hosts = [placement.tables_of_host(number, host[1])[1:] for number in range(host[1])]
        places, start = (jnp.stack(tables)[host[0]] for tables in zip(*of_hosts, strict=True))
    known = ids if token_mask is None else jnp.where(token_mask[:, None], ids, -1)
    invalid = (known < -1) | (known >= placement.num_experts)
    valid = ~invalid & (known >= 0)
    expert = jnp.where(valid, known, 0)
    first = start[expert]
    if placement.has_replicas:
        token = first_token + jnp.arange(ids.shape[0], dtype=jnp.int32)[:, None]
        first = first + (token + jnp.arange(ids.shape[1], dtype=jnp.int32)) % (start[expert + 1] - first)
    return Places(jnp.where(valid, places[first], -1), invalid.sum(dtype=jnp.int32).reshape(1))


def owners_of(places: jax.Array, per_rank: int) -> jax.Array:
    return jnp.where(places < 0, -1, places // per_rank)


def same_owner(owners: jax.Array, others: jax.Array) -> jax.Array:
    """bool `[T, K, K]`: slots k of a token and j of the others have the same owner."""
    return (owners[:, :, None] == others[:, None, :]) & (owners >= 0)[:, :, None]


def _earlier(owners: jax.Array) -> jax.Array:
    """int32 `[T, K]`: the token's earlier slots with the same owner."""
    return (same_owner(owners, owners) & jnp.tri(owners.shape[1], k=-1, dtype=bool)).sum(axis=2, dtype=jnp.int32)


def first_owners(owners: jax.Array) -> jax.Array:
    """int32 `[T, K]`, -1 if an earlier slot of the token has the owner."""
    return jnp.where(_earlier(owners) > 0, -1, owners)


def nearest_slots(owners: jax.Array, most: int) -> jax.Array:
    """bool `[T, K]`: the slot is among its token's first `most` at its owner: always for distinct ids and min(K, L)."""
    return _earlier(owners) < most


def pair_counts(group_sizes: jax.Array, num_ranks: int) -> jax.Array:
    """int32 `[..., W]`: rows for each owner, from rows of groups `[..., G]`."""
    return group_sizes.reshape(*group_sizes.shape[:-1], num_ranks, -1).sum(axis=-1, dtype=jnp.int32)


def rows_in_runs(sent: RaggedLayout, groups: jax.Array, num_ranks: int) -> jax.Array:
    """int32 `[T, K]`: the number of each row among the home's rows for its owner, -1: no row. Plus their start at the
    owner it is `destinations`, plus the owner's start at home `returned_rows`."""
    each = sent.group_sizes.shape[0] // num_ranks
    begins = sent.group_start[:-1:each]
    numbers = sent.row_of_slot.reshape(groups.shape) - begins[jnp.maximum(groups, 0) // each]
    return jnp.where(groups < 0, -1, numbers)


class Splits(NamedTuple):
    sent: jax.Array
    received: jax.Array
    sent_start: jax.Array
    peer_start: jax.Array


def starts(counts: jax.Array) -> jax.Array:
    """int32 `[W]`: where the rows of each rank begin, one after another."""
    return jnp.cumsum(counts, dtype=jnp.int32) - counts


def fitting(counts: jax.Array, receive: int) -> jax.Array:
    """int32 `[W]`: the rows of each home among the first `receive`, of counts from each."""
    return jnp.clip(receive - starts(counts), 0, counts)


def rows_of_blocks(sent: RaggedLayout, num_ranks: int, block: int, fits: int) -> jax.Array:
    """int32 `[W * block]`: slots of rows in equal blocks, at most `fits` used, -1: unused."""
    each = sent.group_sizes.shape[0] // num_ranks
    number = jnp.arange(block, dtype=jnp.int32)
    row = sent.group_start[:-1:each, None] + number
    used = number < jnp.minimum(pair_counts(sent.group_sizes, num_ranks), fits)[:, None]
    return take(sent.slot_of_row, jnp.where(used, row, -1).reshape(-1), -1)


def first_rows(runs: jax.Array, most: int) -> jax.Array:
    """The part of runs int32 `[W, L]`, one after another, among the first `most` rows."""
    flat = runs.reshape(-1)
    start = jnp.cumsum(flat, dtype=jnp.int32) - flat
    return jnp.clip(most - start, 0, flat).reshape(runs.shape)


def take(values: jax.Array, rows: jax.Array, fill: float) -> jax.Array:
    """values `[R, ...]` at rows int32 `[S]`, and `fill` for rows below 0."""
    if values.shape[0] == 0:
        values = jnp.pad(values, [(0, 1)] + [(0, 0)] * (values.ndim - 1), constant_values=fill)
    inside = jnp.where(rows < 0, values.shape[0], rows)
    return values.at[inside].get(mode="fill", fill_value=fill, wrap_negative_indices=False)
