"""Routes of rows between ranks: tokens go out, results of slots come home. An owner's op has one row per slot."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp

from moe_core.parallel import ExchangeSpec, Placement
from moe_core.parallel.bounds import bounds_of
from moe_core.specs.routing import LayoutSpec
from moe_jax import ops
from moe_jax.autodiff.function import varying_alike
from moe_jax.ops import RaggedLayout
from moe_jax.parallel import exchange
from moe_jax.parallel.collectives import AxisName, all_to_all, exchanged, ragged_all_to_all
from moe_jax.parallel.exchange import Splits, take

#: The value of rows without a source. Tests put NaN here.
UNUSED = 0.0


@dataclass(frozen=True)
class Sizes:
    """Static sizes of an exchange. axis_name: of hosts and their ranks, if spec has hosts. tokens: T, of each rank."""

    axis_name: AxisName
    placement: Placement
    spec: ExchangeSpec
    tokens: int
    top_k: int

    @property
    def num_ranks(self) -> int:
        return self.placement.num_ranks

    @property
    def is_exact(self) -> bool:
        """True if ranks exchange counts. Otherwise blocks have one size."""
        return self.spec.mode == "all_to_all"

    @functools.cached_property
    def levels(self) -> tuple[Sizes, Sizes]:
        """Between hosts, and inside each, where a gateway has the tokens of a rank on every host."""
        between, inside = exchange.levels_of(self.placement, self.spec.hosts)
        outer = Sizes(self.axis_name[0], between, ExchangeSpec(), self.tokens, self.top_k)
        return outer, Sizes(self.axis_name[1], inside, ExchangeSpec(), outer.out, self.top_k)

    @property
    def nearest(self) -> int:
        """The most experts of one owner among a token's ids."""
        return min(self.top_k, self.placement.per_rank)

    @functools.cached_property
    def most_out(self) -> int:
        """Rows of a block, else of an owner from all homes."""
        bounds = bounds_of(self.spec, self.tokens, self.top_k, self.placement)
        if bounds.block is not None:
            return bounds.block
        worst = self.num_ranks * self.tokens * (self.nearest if self.spec.rows == "slots" else 1)
        return worst if bounds.receive is None else min(worst, bounds.receive)

    @functools.cached_property
    def most_back(self) -> int:
        """As `most_out`, slots on the way back."""
        back = bounds_of(self.spec, self.tokens, self.top_k, self.placement).back
        return self.most_out * (self.nearest if self.spec.rows == "tokens" else 1) if back is None else back

    # Arrays have at least one row, which may be unused.
    @property
    def out(self) -> int:
        return max(1, self.most_out)

    @property
    def back(self) -> int:
        return max(1, self.most_back)

    @property
    def at_home(self) -> LayoutSpec:
        """The layout of returning rows: one for each slot, or blocks of the owners."""
        return LayoutSpec(self.tokens, self.top_k, self.num_ranks, max_rows=None if self.is_exact else self.back)


class Routes(NamedTuple):
    """The routes of one rank. send int32 `[S]`: the slot of each outgoing row (a slot's or its token's), -1: none.
    None: every token. slots int32 `[R]`: the received row * K + k of every owner's row, -1: none. None: received rows
    are slots. out, home: splits of both ways. ids int32 and weights fp32 `[R, 1]`: of the owner's op. row_of_slot int32
    `[T * K]`: the row of a slot's result at home, -1: none. lost bool `[T]`: a slot of the token did not fit. overflow
    int32 `[1]`: rows of all ranks that did not fit."""

    send: jax.Array | None
    slots: jax.Array | None
    out: Splits | None
    home: Splits | None
    ids: jax.Array
    weights: jax.Array
    row_of_slot: jax.Array
    lost: jax.Array
    overflow: jax.Array
    inside: Inside | None = None


class Inside(NamedTuple):
    """Routes from a gateway to owners. passed int32 `[S]`: the row at this gateway of each result that it sends home,
    -1: none. as_sent int32 `[R]`: an owner's rows in the order in which they arrived."""

    routes: Routes
    passed: jax.Array
    as_sent: jax.Array


def push(sizes: Sizes, routes: Routes, values: jax.Array) -> jax.Array:
    """Rows of tokens at home `[T, N]` to rows of slots at their owners `[R, N]`."""
    if routes.inside is not None:
        outer, inner = sizes.levels
        return push(inner, routes.inside.routes, push(outer, routes._replace(inside=None), values))
    send, slots = routes.send, routes.slots
    came = _go_out(sizes, routes.out, values if send is None else take(values, _tokens(sizes, send), UNUSED))
    return came if slots is None else take(came, _tokens(sizes, slots), UNUSED)


def pull(sizes: Sizes, routes: Routes, rows: jax.Array) -> jax.Array:
    """Rows of slots at their owners `[R, N]` to rows of slots at home, in the layout `sizes.at_home`."""
    if routes.inside is not None:
        (outer, inner), (inside, passed, as_sent) = sizes.levels, routes.inside
        came = take(pull(inner, inside, take(rows, as_sent, UNUSED)), passed, UNUSED)
        return pull(outer, routes._replace(inside=None), came)
    if routes.home is None:
        return all_to_all(rows, sizes.axis_name)
    return ragged_all_to_all(rows, routes.home, sizes.at_home.num_slots, UNUSED, sizes.axis_name)


def at_home(sizes: Sizes, routes: Routes) -> RaggedLayout:
    nothing = jnp.zeros(0, jnp.int32)
    return RaggedLayout(sizes.at_home, nothing, nothing, nothing, routes.row_of_slot, None)


def make_routes(sizes: Sizes, places: jax.Array, weights: jax.Array) -> Routes:
    """The routes of this rank's slots, places int32 and weights fp32 `[T, K]`. Bounds assume distinct ids."""
    owners = exchange.owners_of(places, sizes.placement.per_rank)
    if sizes.is_exact:
        owners = jnp.where(exchange.nearest_slots(owners, sizes.nearest), owners, -1)
    kept = jnp.where(owners < 0, -1, places)
    of_rows = _of_slots if sizes.spec.rows == "slots" else _of_tokens if sizes.spec.hosts == 1 else _over_hosts
    routes = of_rows(sizes, kept, owners, weights)
    row_of_slot = routes.row_of_slot
    lost = (places >= 0) & (row_of_slot < 0)
    # Lost slots count as lost rows, except those of a lost token.
    rows = lost.sum(dtype=jnp.int32) + routes.overflow
    overflow = jax.lax.psum(rows, sizes.axis_name).reshape(1)
    return routes._replace(row_of_slot=row_of_slot.reshape(-1), lost=lost.any(axis=1), overflow=overflow)


def _of_slots(sizes: Sizes, places: jax.Array, owners: jax.Array, weights: jax.Array) -> Routes:
    """Rows are slots, sent by place."""
    ranks, each = sizes.num_ranks, sizes.placement.per_rank
    sent = ops.make_layout(places, ranks * each)
    number = exchange.rows_in_runs(sent, places, ranks)
    out = home = None
    if sizes.is_exact:
        groups, send = sent.group_sizes.reshape(ranks, each), sent.slot_of_row
        first = exchange.starts(groups.sum(axis=1, dtype=jnp.int32))
        told = all_to_all(jnp.concatenate([first[:, None], groups], axis=1), sizes.axis_name)
        counts = told[:, 1:].sum(axis=1, dtype=jnp.int32)
        begins, fits = exchange.starts(counts), exchange.fitting(counts, sizes.most_out)
        at_owners, fit_there = exchanged(sizes.axis_name, begins, fits)
        out, home = Splits(fit_there, fits, first, at_owners), Splits(fits, fit_there, begins, told[:, 0])
        fits, begins = out.sent[jnp.maximum(owners, 0)], out.sent_start[jnp.maximum(owners, 0)]
        # The expert of each row follows from the counts.
        runs = exchange.first_rows(told[:, 1:], sizes.most_out)
        ids, _ = ops.layout_of_runs(runs, sizes.out)
        came = _go_out(sizes, out, take(weights.reshape(-1, 1), send, 0))
    else:
        send = exchange.rows_of_blocks(sent, ranks, sizes.out, sizes.most_out)
        fits, begins = sizes.most_out, owners * sizes.back
        local = jnp.where(places < 0, -1, places % each)
        table = take(_table(local.reshape(-1, 1), weights.reshape(-1, 1)), send, -1)
        ids, came = _ids_and_weights(_go_out(sizes, None, table))
    row_of_slot = jnp.where((number >= 0) & (number < fits), begins + number, -1)
    return Routes(send, None, out, home, ids, came, row_of_slot, row_of_slot, jnp.zeros((), jnp.int32))


def _of_tokens(sizes: Sizes, places: jax.Array, owners: jax.Array, weights: jax.Array) -> Routes:
    """Rows are tokens. The owner expands them to slots, in the order (home, slot)."""
    ranks, rank = sizes.num_ranks, jax.lax.axis_index(sizes.axis_name)
    first, arrived, overflow = exchange.first_owners(owners), owners, jnp.zeros((), jnp.int32)
    send = out = home = arrives = fits = None
    at_homes: list[jax.Array] = []
    table = _table(places, weights)
    # Of exact counts nothing is lost without a bound. Then one message fewer tells where results come home.
    at_once = sizes.is_exact and sizes.spec.receive is None
    back = ops.make_layout(owners, ranks) if at_once else None
    if sizes.spec.mode != "all_gather":
        sent = ops.make_layout(first, ranks)
        if sizes.is_exact:
            (counts,) = exchanged(sizes.axis_name, sent.group_sizes)
            begins, here = exchange.starts(counts), exchange.fitting(counts, sizes.most_out)
            at_owners, there, *at_homes = exchanged(sizes.axis_name, begins, here, *_counts(back))
            out = Splits(there, here, exchange.starts(sent.group_sizes), at_owners)
            send, arrives = sent.slot_of_row[: sizes.tokens * min(sizes.top_k, ranks)], here.sum()
            fits = None if at_once else there[jnp.maximum(first, 0)]
        else:
            send, fits = exchange.rows_of_blocks(sent, ranks, sizes.out, sizes.most_out), sizes.most_out
        if fits is not None:
            lost = exchange.rows_in_runs(sent, first, ranks) >= fits
            arrived = jnp.where(exchange.same_owner(owners, jnp.where(lost, first, -2)).any(axis=2), -1, owners)
            overflow = lost.sum(dtype=jnp.int32) - ((owners >= 0) & (arrived < 0)).sum(dtype=jnp.int32)
        table = take(table, _tokens(sizes, send), -1)
    came, came_weights = _ids_and_weights(_go_out(sizes, out, table))
    local = came - rank * sizes.placement.per_rank
    valid = (came >= 0) & (local >= 0) & (local < sizes.placement.per_rank)
    if arrives is not None:
        valid &= (jnp.arange(len(came)) < arrives)[:, None]
    slots = _rows_of_slots(sizes, valid)
    ids, own_weights = (take(array.reshape(-1, 1), slots, fill) for array, fill in ((local, -1), (came_weights, 0)))
    back = ops.make_layout(arrived, ranks) if back is None else back
    number = exchange.rows_in_runs(back, arrived, ranks)
    if sizes.is_exact:
        counts, begins = at_homes or exchanged(sizes.axis_name, *_counts(back))
        home = Splits(counts, back.group_sizes, exchange.starts(counts), begins)
        row_of_slot = jnp.where(number >= 0, back.row_of_slot.reshape(number.shape), -1)
    else:
        fits = (number >= 0) & (number < sizes.most_back)
        row_of_slot = jnp.where(fits, owners * sizes.back + number, -1)
    return Routes(send, slots, out, home, ids, own_weights, row_of_slot, row_of_slot, overflow)


def _counts(layout: RaggedLayout | None) -> tuple[jax.Array, ...]:
    """Rows of each group, and where they begin."""
    return () if layout is None else (layout.group_sizes, exchange.starts(layout.group_sizes))


def _over_hosts(sizes: Sizes, places: jax.Array, owners: jax.Array, weights: jax.Array) -> Routes:
    """Rows are tokens, which cross to a host once. Its gateway passes them on."""
    outer, inner = sizes.levels
    between = _of_tokens(outer, places, exchange.owners_of(places, outer.placement.per_rank), weights)
    assert between.slots is not None and between.out is not None
    slots, table = between.slots, inner.tokens * sizes.top_k
    arrived = [
        varying_alike((jnp.full(table, fill, one.dtype), jnp.where(slots < 0, table, slots), one.reshape(-1)))
        for one, fill in ((between.ids, -1), (between.weights, 0))
    ]
    ids, of_rows = (fill.at[at].set(one, mode="drop").reshape(-1, sizes.top_k) for fill, at, one in arrived)
    inside = _of_tokens(inner, ids, exchange.owners_of(ids, inner.placement.per_rank), of_rows)
    assert inside.slots is not None
    # An owner's sums need rows by home, and they arrive by gateway.
    row, received = jnp.arange(inner.tokens, dtype=jnp.int32), jnp.cumsum(between.out.received)
    host = (row[:, None] >= received).sum(axis=1, dtype=jnp.int32)
    homes = host * inner.num_ranks + jax.lax.axis_index(inner.axis_name)
    homes = push(inner, inside, homes[:, None].astype(jnp.float32))[:, 0]
    order = jnp.argsort(jnp.where(inside.ids[:, 0] < 0, sizes.num_ranks, homes), stable=True).astype(jnp.int32)
    onward = Inside(
        inside._replace(slots=inside.slots[order]),
        take(inside.row_of_slot.reshape(-1), slots, -1),
        jnp.argsort(order).astype(jnp.int32),
    )
    sent = {"slots": None, "ids": inside.ids[order], "weights": inside.weights[order], "inside": onward}
    return between._replace(**sent)


def _rows_of_slots(sizes: Sizes, valid: jax.Array) -> jax.Array:
    """int32 `[R]`: the received row * K + k of each slot row, from valid bool `[*, K]`."""
    flat, blocks = valid.reshape(-1), 1 if sizes.is_exact else sizes.num_ranks
    by_block = valid.reshape(blocks, -1)
    number = jnp.cumsum(by_block, axis=1, dtype=jnp.int32) - 1
    begins = jnp.arange(blocks, dtype=jnp.int32)[:, None] * sizes.back
    total = blocks * sizes.back
    # Slots without a row write past the end, where writes are dropped.
    row = jnp.where(by_block & (number < sizes.most_back), begins + number, total).reshape(-1)
    nothing = jnp.full(total, -1, jnp.int32)
    nothing, row, slot = varying_alike((nothing, row, jnp.arange(len(flat), dtype=jnp.int32)))
    return nothing.at[row].set(slot, mode="drop")


def _tokens(sizes: Sizes, slots: jax.Array) -> jax.Array:
    return jnp.where(slots < 0, -1, slots // sizes.top_k)


def _table(ids: jax.Array, weights: jax.Array) -> jax.Array:
    """ids and the bits of weights, int32, in one message."""
    return jnp.concatenate([ids, jax.lax.bitcast_convert_type(weights, jnp.int32)], axis=1)


def _ids_and_weights(table: jax.Array) -> tuple[jax.Array, jax.Array]:
    ids, bits = jnp.split(table, 2, axis=1)
    return ids, jnp.where(ids < 0, 0, jax.lax.bitcast_convert_type(bits, jnp.float32))


def _go_out(sizes: Sizes, out: Splits | None, sent: jax.Array) -> jax.Array:
    if sizes.spec.mode == "all_gather":
        return jax.lax.all_gather(sent, sizes.axis_name, tiled=True)
    if out is None:
        return all_to_all(sent, sizes.axis_name)
    unused = UNUSED if jnp.issubdtype(sent.dtype, jnp.floating) else 0
    return ragged_all_to_all(sent, out, sizes.out, unused, sizes.axis_name)
