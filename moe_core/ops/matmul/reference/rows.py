"""The rows of a layout that have an expert, gathered once, expert after expert."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from moe_core.base.threads import row_blocks
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
            for block in row_blocks(part.stop - part.start):
                found.append((expert, slice(part.start + block.start, min(part.start + block.stop, part.stop))))
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
