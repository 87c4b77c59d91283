"""The index arithmetic of an exchange, in NumPy. Front-ends compute the same on their devices.

Letters: W ranks, L places per rank, T tokens of a rank, K top-k, slot s = t * K + k. A *home* has tokens, an *owner*
has experts. Rows are slots or tokens. A home sends *groups* of rows: one per place for slots (G = W * L), one per owner
for tokens (G = W). Groups make a ragged layout of the places or of `first_owners`, so rows go out by (group, slot).

Example, W = 2, L = 2, K = 2, T = 2 on rank 0, places [[2, 3], [0, 2]]. Slots: group_sizes [1, 0, 2, 1], sends slots 2 |
0, 3, 1. Tokens: first_owners [[1, -1], [0, 1]], group_sizes [1, 2], sends tokens 1 | 0, 1.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from moe_core.base import require_choice
from moe_core.errors import InvalidInput
from moe_core.ops.routing.reference import layout as make_layout
from moe_core.parallel.exchange import owners_of as owners_of
from moe_core.parallel.exchange import physical_ids as physical_ids
from moe_core.specs import LayoutSpec
from moe_core.specs.operands import RaggedLayout

ORDERS = ("expert", "source", "padded")


def first_owners(places: np.ndarray, per_rank: int) -> np.ndarray:
    """Return the rank of every place, int32 `[T, K]`, -1 if an earlier slot of the token has it."""
    owners = owners_of(places, per_rank)
    for k in range(1, owners.shape[1]):
        again = (owners[:, :k] == owners_of(places[:, k], per_rank)[:, None]).any(axis=1)
        owners[again, k] = -1
    return owners


def sends(groups: np.ndarray, num_groups: int) -> RaggedLayout:
    """Return the layout of rows that a home sends. groups int32 `[T, K]`: places or first_owners."""
    tokens, top_k = groups.shape
    spec = LayoutSpec(tokens, top_k, num_groups)
    sizes, start, slot_of_row, row_of_slot, invalid = make_layout(groups, layout=spec)
    return RaggedLayout(spec, sizes, start, slot_of_row, row_of_slot, invalid)


def run_starts(counts: np.ndarray, order: str, block: int = 0) -> np.ndarray:
    """Return where the rows of every (home, group) begin at the owner, int32 `[W, G]`. counts int32 `[W, G]`.

    order: `expert`: by (group, home), as matmuls read. `source`: by (home, group), as an all-to-all delivers. `padded`:
    `block` rows per home, by group.

    Example, W = 2, L = 1, counts [[2, 1], [3, 0]]: expert and source [[0, 0], [2, 1]]; padded, block 4: [[0, 0], [4,
    4]].
    """
    require_choice("order", order, ORDERS)
    num_ranks, num_groups = counts.shape
    each = num_groups // num_ranks
    by_owner = counts.astype(np.int64).reshape(num_ranks, num_ranks, each)
    before = np.cumsum(by_owner, axis=2) - by_owner  # of this home, in earlier groups of the owner
    if order == "padded":
        start = before + block * np.arange(num_ranks)[:, None, None]
    elif order == "source":
        totals = by_owner.sum(axis=2)
        start = before + (np.cumsum(totals, axis=0) - totals)[:, :, None]
    else:
        group = by_owner.sum(axis=0)
        start = (np.cumsum(group, axis=1) - group)[None] + np.cumsum(by_owner, axis=0) - by_owner
    return start.reshape(num_ranks, num_groups).astype(np.int32)


class Destinations(NamedTuple):
    """row int32 `[T, K]`: the row of each slot at its owner, -1: none. overflow int32 `[1]`: rows that did not fit."""

    row: np.ndarray
    overflow: np.ndarray


def destinations(
    sent: RaggedLayout, groups: np.ndarray, start: np.ndarray, end: np.ndarray | int | None = None
) -> Destinations:
    """Return the row at its owner of each row of a home.

    start int32 `[G]`: the home's row of `run_starts`. end: rows from there on do not fit, one bound or block ends
    `[G]`.

    Example above, rank 0, slots, order `source`: start [0, 1, 0, 2], row [[0, 2], [-1, 1]].
    """
    flat = groups.reshape(-1)
    slots = np.flatnonzero(flat >= 0)
    group = flat[slots]
    target = start[group] + sent.row_of_slot[slots] - sent.group_start[group]
    fits = np.ones(len(slots), bool) if end is None else target < np.broadcast_to(end, start.shape)[group]
    row = np.full(flat.shape, -1, np.int32)
    row[slots] = np.where(fits, target, -1)
    return Destinations(row.reshape(groups.shape), np.array([(~fits).sum()], np.int32))


class Splits(NamedTuple):
    """A rank's all-to-all, int32 `[W]` by peer. sent, received: rows. sent_start: its first row for the peer.
    peer_start: where they begin there, in the order `source`."""

    sent: np.ndarray
    received: np.ndarray
    sent_start: np.ndarray
    peer_start: np.ndarray


def rows_by_pair(counts: np.ndarray, receive: int | None = None) -> np.ndarray:
    """Return the rows from each rank to each, int64 `[W, W]`. Arguments as for `splits`."""
    num_ranks, groups = counts.shape
    pairs = counts.astype(np.int64)
    if groups != num_ranks:
        pairs = pairs.reshape(num_ranks, num_ranks, -1).sum(axis=2)
    return pairs if receive is None else np.clip(receive - (np.cumsum(pairs, axis=0) - pairs), 0, pairs)


def splits(counts: np.ndarray, rank: int, receive: int | None = None) -> Splits:
    """Return the splits of a rank, from counts int32 `[W, G]`. An owner takes the first `receive` rows.

    Counts [[2, 1], [3, 0]], rank 1, receive 4: sent [2, 0], received [1, 0], sent_start [0, 3], peer_start [2, 1].
    """
    pairs, kept = rows_by_pair(counts), rows_by_pair(counts, receive)
    start = np.cumsum(pairs, axis=0) - pairs
    first = np.cumsum(pairs[rank]) - pairs[rank]
    return Splits(*(array.astype(np.int32) for array in (kept[rank], kept[:, rank], first, start[rank])))


def received_ids(runs: np.ndarray, order: str) -> np.ndarray:
    """Return the local expert of every received slot, int32 `[R]`. runs int32 `[W, L]`: rows by home and place."""
    require_choice("order", order, ORDERS[:2])
    local = np.broadcast_to(np.arange(runs.shape[1], dtype=np.int32), runs.shape)
    if order == "expert":
        runs, local = runs.T, local.T
    return np.repeat(local.reshape(-1), runs.reshape(-1))


def token_ids(places: np.ndarray, tokens: np.ndarray, owner: int, per_rank: int) -> np.ndarray:
    """Return the K local ids of rows of tokens for one owner, int32 `[R, K]`, -1: another rank has the expert."""
    local = places[tokens] - owner * per_rank
    return np.where((local >= 0) & (local < per_rank), local, -1).astype(np.int32)


def returned_rows(sent: RaggedLayout, groups: np.ndarray, num_ranks: int, block: int | None = None) -> Destinations:
    """Return the row at home of each sent row's result, int32 `[T, K]`, -1: none. block: rows of an owner's."""
    start = sent.group_start[:-1].astype(np.int64)
    if block is None:
        return destinations(sent, groups, start)
    each = len(start) // num_ranks
    owner = np.arange(len(start)) // each
    return destinations(sent, groups, start - start[owner * each] + block * owner, block * (owner + 1))


def token_rows(row: np.ndarray, owners: np.ndarray, num_ranks: int) -> np.ndarray:
    """Return the row of each token at every rank, int32 `[T, W]`, -1: none. row, owners `[T, K]`: of its slots."""
    table = np.full((len(row), num_ranks), -1, np.int32)
    token, k = np.nonzero(row >= 0)
    table[token, owners[token, k]] = row[token, k]
    return table


def slot_rows(table: np.ndarray, owners: np.ndarray) -> np.ndarray:
    """Return the row of a slot's token at its rank, int32 `[T, K]`. table: of `token_rows`."""
    rows = np.take_along_axis(table, np.maximum(owners, 0).astype(np.int64), axis=1)
    return np.where(owners < 0, -1, rows).astype(np.int32)


def require_equal_tokens(tokens: list[int], mode: str) -> int:
    """Return every rank's number of tokens. Raises InvalidInput if they differ."""
    if len(set(tokens)) != 1:
        raise InvalidInput(
            f"tokens must be as many on every rank with mode={mode!r}, got {tokens}; pad them and pass a token_mask"
        )
    return tokens[0]
