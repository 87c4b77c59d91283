"""NumPy twins of the exchange without counts. Addresses are host memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from moe_core.base.arrays import ArraySpec, host_array
from moe_core.ops.exchange.operands import HomeTokens, TokenTables, record_of
from moe_core.ops.reduction.reference import reduce


def push_tokens_once(
    arrays: Mapping[str, np.ndarray],
    *,
    rank: int,
    per_rank: int,
    num_experts: int,
    most: int,
    visits: bool,
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
    out = reduce(y[: order.size], order, shared, shared_gate, top_k=top_k, order="slot", out_dtype=out_dtype)
    if headers is not None:
        told = last_told(headers)[:, :-4]
        if (told != told[0]).any():
            out[...] = np.nan
    if agree is not None and not agree[0]:
        out[...] = np.nan
    if wanted is not None:
        out[((wanted >= 0) & (row_of_slot < 0)).any(axis=1)] = np.nan
    return out
