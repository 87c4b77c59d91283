"""NumPy twins of stores and loads between ranks, on host memory, named like their planners."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from moe_core.base.arrays import ArraySpec, host_array
from moe_core.formats import Format
from moe_core.formats.fp8 import BLOCK
from moe_core.ops.common.rounding import round_to, to_float32
from moe_core.ops.quantize.reference import quantize_rows
from moe_core.ops.reduction.reference import reduce

_INT32_MOST = 2**31 - 1


def peer_places(
    ids: np.ndarray,
    group_start: np.ndarray,
    row_of_slot: np.ndarray,
    counts: np.ndarray,
    *,
    rank: int,
    receive: int,
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


def pull_rows(arrays: Mapping[str, np.ndarray], *, num_rows: int, width: int, dtype: str, out_dtype: str) -> np.ndarray:
    owners, rows, results_at = arrays["owners"], arrays["rows"], arrays["results_at"]
    shared, shared_gate = arrays.get("shared"), arrays.get("shared_gate")
    values, order = _pulled(owners, rows, _peers(results_at, (num_rows, width), dtype))
    return reduce(values, order, shared, shared_gate, top_k=rows.shape[1], order="slot", out_dtype=out_dtype)


def pull_weights(owners: np.ndarray, rows: np.ndarray, weights_at: np.ndarray, *, num_rows: int) -> np.ndarray:
    return _pulled(owners, rows, _peers(weights_at, (num_rows, 1), "float32"))[0].reshape(rows.shape)
