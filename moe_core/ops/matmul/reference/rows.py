"""The rows of a layout that have an expert, gathered once, expert after expert."""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import numpy as np

from moe_core.base.threads import BLOCK_ROWS
from moe_core.specs.routing import LayoutSpec

_ALL = slice(None)


class Rows(NamedTuple):
    """count: of the rows. index: where an array that is indexed by `row`, `slot` or `token` has them. experts: of each
    row, 0 where there is no layout. parts: (expert, its rows) of those that have any."""

    count: int
    index: dict[str, Any]
    experts: Any
    parts: list[tuple[int, slice]]

    def blocks(self) -> list[tuple[int, slice]]:
        """(expert, rows) in pieces of work, the largest first: at the end all threads are busy about as long."""
        found = []
        for expert, part in self.parts:
            for first in range(part.start, part.stop, BLOCK_ROWS):
                found.append((expert, slice(first, min(first + BLOCK_ROWS, part.stop))))
        return sorted(found, key=lambda piece: piece[1].start - piece[1].stop)


def rows_of(
    layout: LayoutSpec | None,
    num_rows: int,
    group_sizes: np.ndarray | None = None,
    group_start: np.ndarray | None = None,
    slot_of_row: np.ndarray | None = None,
) -> Rows:
    """Those of a layout by its arrays. layout None: all num_rows, of one expert."""
    if layout is None:
        return Rows(num_rows, dict.fromkeys(("row", "slot", "token"), _ALL), 0, [(0, slice(0, num_rows))])
    assert group_sizes is not None and group_start is not None and slot_of_row is not None
    if slot_of_row.min(initial=0) >= 0 and layout.capacity == layout.num_slots:
        starts = group_start.tolist()
        ends_of = list(itertools.pairwise(starts))
        whole = (starts[0], starts[-1]) == (0, layout.capacity)
        if whole and [end - start for start, end in ends_of] == group_sizes.tolist():
            # Every slot has a row, without gaps.
            index = {"row": _ALL, "slot": slot_of_row, "token": slot_of_row // layout.top_k}
            parts = [(expert, slice(*ends)) for expert, ends in enumerate(ends_of) if ends[0] < ends[1]]
            return Rows(layout.capacity, index, np.repeat(np.arange(len(group_sizes)), group_sizes), parts)
    sizes = np.maximum(group_sizes, 0)
    experts = np.repeat(np.arange(len(sizes)), sizes)
    rows = np.arange(len(experts)) + np.repeat(group_start[:-1] - (np.cumsum(sizes) - sizes), sizes)
    slots = slot_of_row[rows]
    if (slots < 0).any():
        kept = slots >= 0
        experts, rows, slots = experts[kept], rows[kept], slots[kept]
    index = {"row": rows, "slot": slots, "token": slots // layout.top_k}
    if len(rows) == layout.capacity:
        index["row"] = _ALL  # without gaps
    ends = np.searchsorted(experts, np.arange(len(sizes)), side="right").tolist()
    starts = [0, *ends[:-1]]
    parts = [(expert, slice(*ends_of)) for expert, ends_of in enumerate(zip(starts, ends, strict=True))]
    return Rows(len(rows), index, experts, [(expert, part) for expert, part in parts if part.stop > part.start])
