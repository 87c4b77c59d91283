"""NumPy twins of stores and loads between ranks, on host memory, named like their planners."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from moe_core.base.arrays import ArraySpec, host_array
from moe_core.formats import Format
from moe_core.formats.fp8 import BLOCK
from moe_core.ops.common.rounding import round_to, to_float32
from moe_core.ops.exchange.operands import HomeTokens, TokenTables, record_of
from moe_core.ops.quantize.reference import quantize_rows
from moe_core.ops.reduction.reference import reduce

_INT32_MOST = 2**31 - 1


def peer_places(
    ids: np.ndarray, group_start: np.ndarray, row_of_slot: np.ndarray, counts: np.ndarray, *, rank: int, receive: int
) -> tuple[np.ndarray, ...]:
    num_ranks = len(counts)
    sent = np.maximum(counts.astype(np.int64), 0).reshape(num_ranks, num_ranks, -1)  # [home, owner, expert]
    per_rank = sent.shape[2]
    total = sent.sum(axis=0)
    starts = (np.cumsum(total, axis=1) - total + sent[:rank].sum(axis=0)).reshape(-1)
    expert, row_at_home = ids.reshape(-1), row_of_slot.astype(np.int64)
    slots = np.flatnonzero((expert >= 0) & (expert < len(starts)) & (row_at_home >= 0))
    row = starts[expert[slots]] + row_at_home[slots] - group_start[expert[slots]]
    fits = (row >= 0) & (row < receive)
    slots, row = slots[fits], row[fits]
    owners, rows = np.full(expert.shape, -1, np.int32), np.full(expert.shape, -1, np.int32)
    owners[slots], rows[slots] = expert[slots] // per_rank, row
    received = np.minimum(total[rank : rank + 1], _INT32_MOST).astype(np.int32)
    missing = min(int(np.maximum(total.sum(axis=1) - receive, 0).sum()), _INT32_MOST)
    return owners.reshape(ids.shape), rows.reshape(ids.shape), received, np.array([missing], np.int32)


def _peers(table: np.ndarray, shape: tuple[int, ...], dtype: str) -> list[np.ndarray]:
    return [host_array(int(address), ArraySpec(shape, dtype)) for address in table]


def _slots_by_owner(owners: np.ndarray, rows: np.ndarray, num_ranks: int, num_rows: int):
    flat = rows.reshape(-1)
    for owner in range(num_ranks):
        slots = np.flatnonzero((owners.reshape(-1) == owner) & (flat >= 0) & (flat < num_rows))
        yield owner, slots, flat[slots]


def push_rows(
    x: np.ndarray,
    owners: np.ndarray,
    rows: np.ndarray,
    rows_at: np.ndarray,
    scales_at: np.ndarray | None = None,
    *,
    num_rows: int,
    format: Format | None = None,
) -> tuple[()]:
    arrays = [(rows_at, x)]
    if format is not None:
        assert scales_at is not None
        arrays = list(zip((rows_at, scales_at), quantize_rows(x, format=format), strict=True))
    for table, values in arrays:
        peers = _peers(table, (num_rows, values.shape[1]), values.dtype.name)
        for owner, slots, row in _slots_by_owner(owners, rows, len(table), num_rows):
            peers[owner][row] = values[slots // rows.shape[1]]
    return ()


def push_slots(
    weights: np.ndarray,
    owners: np.ndarray,
    rows: np.ndarray,
    weights_at: np.ndarray | None = None,
    sources_at: np.ndarray | None = None,
    *,
    rank: int,
    num_rows: int,
) -> tuple[()]:
    slots = np.arange(rows.size, dtype=np.int32)
    sources = np.stack([np.full_like(slots, rank), slots], axis=1)
    for table, values in ((weights_at, weights.reshape(-1, 1)), (sources_at, sources)):
        if table is not None:
            peers = _peers(table, (num_rows, values.shape[1]), values.dtype.name)
            for owner, pushed, row in _slots_by_owner(owners, rows, len(table), num_rows):
                peers[owner][row] = values[pushed]
    return ()


def push_counts(counts: np.ndarray, counts_at: np.ndarray, *, rank: int) -> tuple[()]:
    for peer in _peers(counts_at, (len(counts_at), len(counts)), "int32"):
        peer[rank] = counts
    return ()


def push_results(
    y: np.ndarray, sources: np.ndarray, group_start: np.ndarray, slots_at: np.ndarray, *, num_slots: int
) -> tuple[()]:
    homes, slots = sources[: max(0, group_start[-1])].T
    peers = _peers(slots_at, (num_slots, y.shape[1]), y.dtype.name)
    for home, row, slot in _slots_by_owner(homes, slots, len(peers), num_slots):
        peers[home][slot] = y[row]
    return ()


def result_addresses(
    sources: np.ndarray, group_start: np.ndarray, slots_at: np.ndarray, *, num_slots: int, row_bytes: int
) -> np.ndarray:
    addresses = np.zeros(len(sources), np.int64)
    homes, slots = sources[: max(0, group_start[-1])].T
    for home, row, slot in _slots_by_owner(homes, slots, len(slots_at), num_slots):
        addresses[row] = slots_at[home] + slot.astype(np.int64) * row_bytes
    return addresses


def push_to_addresses(y: np.ndarray, row_of_slot: np.ndarray, results_at: np.ndarray) -> tuple[()]:
    """Store row y[s] of every slot s with a row to its address (0: nowhere)."""
    spec = ArraySpec(y.shape[1:], y.dtype.name)
    for slot in np.flatnonzero((row_of_slot >= 0) & (results_at != 0)):
        host_array(int(results_at[slot]), spec)[...] = y[slot]
    return ()


def take_rows(
    x: np.ndarray,
    rows: np.ndarray,
    group_start: np.ndarray,
    scales: np.ndarray | None = None,
    *,
    places: tuple[np.ndarray, ...],
) -> np.ndarray:
    """`plan_take_rows`, in places[0]. Other rows there are unchanged."""
    (y,) = places
    source = rows[: max(0, group_start[-1]), 0]
    present = (source >= 0) & (source < len(x))
    source, destination = source[present], np.flatnonzero(present)
    y[: len(present)] = 0
    if scales is None:
        y[destination] = x[source]
    else:
        factors = np.repeat(scales[source], BLOCK, axis=1)
        with np.errstate(all="ignore"):
            y[destination] = round_to(to_float32(x[source]) * factors[:, : x.shape[1]], y.dtype)
    return y


def _pulled(owners: np.ndarray, rows: np.ndarray, peers: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    values = np.full((rows.size, peers[0].shape[1]), 0, peers[0].dtype)
    order = np.full(rows.size, -1, np.int32)
    for owner, slots, row in _slots_by_owner(owners, rows, len(peers), len(peers[0])):
        values[slots], order[slots] = peers[owner][row], slots
    return values, order


def pull_weights(owners: np.ndarray, rows: np.ndarray, weights_at: np.ndarray, *, num_rows: int) -> np.ndarray:
    return _pulled(owners, rows, _peers(weights_at, (num_rows, 1), "float32"))[0].reshape(rows.shape)


def push_tokens_once(
    arrays: Mapping[str, np.ndarray], *, rank: int, per_rank: int, num_experts: int, most: int, visits: bool
) -> tuple[np.ndarray, ...]:
    x, ids, weights, token_mask, places_of_experts, given_places = record_of(HomeTokens, {"x": None, **arrays})
    ids_at, weights_at, headers_at, rows_at = record_of(TokenTables, arrays)
    header, num_ranks, (tokens, top_k) = arrays["header"], len(ids_at), ids.shape
    known = ids if token_mask is None else np.where(token_mask[:, None], ids, -1)
    valid = (known >= 0) & (known < num_experts)
    places = known if places_of_experts is None else places_of_experts[np.where(valid, known, 0)]
    places = np.where(valid, places, -1) if given_places is None else given_places
    places = np.where((places >= 0) & (places < num_ranks * per_rank), places, -1).astype(np.int32)
    home_rows, whole = slice(rank * most, rank * most + tokens), slice(rank * most, (rank + 1) * most)
    of_ids, of_headers = (num_ranks * most, top_k), ArraySpec((2 * num_ranks + 1, len(header) + 4), "int32")
    turns = host_array(int(headers_at[rank]), of_headers)[-1]
    own_row = (turns[0] & 1) * num_ranks + rank
    rows = np.full((tokens, num_ranks), -1, np.int32)
    for peer in range(num_ranks):
        local = host_array(int(ids_at[peer]), ArraySpec(of_ids, "int32"))
        received_weights = host_array(int(weights_at[peer]), ArraySpec(of_ids, "float32"))
        here = (places >= 0) & (places // per_rank == peer)
        visiting = here.any(axis=1)
        rows[visiting, peer] = np.arange(home_rows.start, home_rows.stop)[visiting]
        if x is not None and rows_at is not None:
            host_array(int(rows_at[peer]), ArraySpec((of_ids[0], x.shape[1]), x.dtype.name))[home_rows][visiting] = x[
                visiting
            ]
        local[whole] = -1
        local[home_rows], received_weights[home_rows] = np.where(here, places % per_rank, -1), weights
        host_array(int(headers_at[peer]), of_headers)[own_row] = [*header, tokens, 0, 0, 0]
    turns[0] += 1
    counts = np.bincount(known[valid], minlength=num_experts).astype(np.int32)
    invalid = np.array([((known < -1) | (known >= num_experts)).sum()], np.int32)
    results = places, counts, invalid, np.zeros(1, np.int32)
    if not visits:
        return results
    return *results, np.where(rows < 0, -1, np.arange(num_ranks, dtype=np.int32)).astype(np.int32), rows


def last_told(headers: Any) -> Any:
    """The headers `[W, 12]` of the last turn, of all `[2 * W + 1, 12]` (NumPy or torch)."""
    first = (int(headers[-1, 0]) - 1 & 1) * (len(headers) // 2)
    return headers[first : first + len(headers) // 2]


def sum_results(
    y: np.ndarray,
    row_of_slot: np.ndarray,
    headers: np.ndarray | None = None,
    agree: np.ndarray | None = None,
    wanted: np.ndarray | None = None,
    shared: np.ndarray | None = None,
    shared_gate: np.ndarray | None = None,
    *,
    out_dtype: str,
) -> np.ndarray:
    top_k, order = row_of_slot.shape[1], row_of_slot.reshape(-1)
    out = reduce(y[: order.size], order, shared, shared_gate, top_k=top_k, out_dtype=out_dtype)
    if headers is not None:
        told = last_told(headers)[:, :-4]
        if (told != told[0]).any():
            out[...] = np.nan
    if agree is not None and not agree[0]:
        out[...] = np.nan
    if wanted is not None:
        out[((wanted >= 0) & (row_of_slot < 0)).any(axis=1)] = np.nan
    return out
