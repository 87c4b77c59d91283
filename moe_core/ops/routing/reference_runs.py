"""NumPy twin of the layout of runs."""

from __future__ import annotations

import numpy as np


def layout_of_runs(counts: np.ndarray, *, num_rows: int, stride: int | None = None) -> tuple[np.ndarray, ...]:
    num_sources, num_experts = counts.shape
    requested = np.maximum(counts.astype(np.int64), 0)
    total = requested.sum(axis=1)
    begin = np.cumsum(total) - total if stride is None else np.arange(num_sources) * stride
    limit = np.full(num_sources, num_rows) if stride is None else begin + stride
    first = begin[:, None] + np.cumsum(requested, axis=1) - requested
    kept = np.minimum(requested, np.maximum(limit[:, None] - first, 0))
    ids = np.full((num_rows, 1), -1, np.int32)
    arrived = [np.zeros(0, np.int64)]
    for expert in range(num_experts):
        for source in range(num_sources):
            rows = first[source, expert] + np.arange(kept[source, expert])
            ids[rows] = expert
            arrived.append(rows)
    slots = np.concatenate(arrived)
    slot_of_row, row_of_slot = np.full(num_rows, -1, np.int32), np.full(num_rows, -1, np.int32)
    slot_of_row[: len(slots)], row_of_slot[slots] = slots, np.arange(len(slots))
    sizes = kept.sum(axis=0)
    start = np.concatenate([[0], np.cumsum(sizes)])
    missing = min(int((requested - kept).sum()), 2**31 - 1)
    return ids, sizes.astype(np.int32), start.astype(np.int32), slot_of_row, row_of_slot, np.array([missing], np.int32)
