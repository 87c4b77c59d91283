"""The rows of a layout that have an expert, gathered once, expert after expert."""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import numpy as np

from moe_core.base.threads import BLOCK_ROWS
from moe_core.specs.routing import LayoutSpec

_ALL = slice(None)
#: As many rows of an expert as take about as long as fewer: its matrix is read.
FEWEST_ROWS = 16
#: Elements that are worth an operation of their own.
_PIECE_ELEMENTS = 65536

#: (expert, its rows) of neighbours.
Piece = tuple[tuple[int, slice], ...]


class Rows(NamedTuple):
    """count: of the rows. index: where an array that is indexed by `row`, `slot` or `token` has them. experts: of each
    row, 0 where there is no layout. parts: (expert, its rows) of those that have any."""

    count: int
    index: dict[str, Any]
    experts: Any
    parts: list[tuple[int, slice]]

    def pieces(self, threads: int, width: int) -> list[Piece]:
        """Pieces of work for a product of this width, the largest first: at the end all threads are busy about as long.

        Threads wait for Python's lock between any two operations of NumPy. So neighbouring experts of few rows share a
        piece where there are two for each thread, and have their operations on elements together.
        """
        blocks = [
            (expert, slice(first, min(first + BLOCK_ROWS, part.stop)))
            for expert, part in self.parts
            for first in range(part.start, part.stop, BLOCK_ROWS)
        ]
        pieces = [(block,) for block in blocks]
        if len(blocks) >= 2 * threads and self.count * width < _PIECE_ELEMENTS * len(blocks):
            costs = [max(block.stop - block.start, FEWEST_ROWS) for _, block in blocks]
            most = max(*costs, sum(costs) / threads)
            while len(pieces := _joined(blocks, costs, most)) > threads:
                most *= 1.05
        return sorted(pieces, key=lambda piece: piece[0][1].start - piece[-1][1].stop)


def _joined(blocks: list[tuple[int, slice]], costs: list[int], most: float) -> list[Piece]:
    """Neighbours together, up to a sum of costs."""
    pieces: list[Piece] = []
    room = 0.0
    for block, cost in zip(blocks, costs, strict=True):
        if cost > room:
            pieces.append(())
            room = most
        pieces[-1] = (*pieces[-1], block)
        room -= cost
    return pieces


def rows_of(
    layout: LayoutSpec | None,
    num_rows: int,
    group_sizes: np.ndarray | None = None,
    group_start: np.ndarray | None = None,
    slot_of_row: np.ndarray | None = None,
    known: Rows | None = None,
) -> Rows:
    """Those of a layout by its arrays, or what is known already. layout None: all num_rows, of one expert."""
    if known is not None:
        return known
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
