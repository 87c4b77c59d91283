"""A layout's rows that have an expert, gathered once."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from moe_core.base.threads import BLOCK_ROWS
from moe_core.specs import LAYOUT_INPUTS, LayoutSpec

_ALL = slice(None)
#: Fewer rows take about as long: reading the matrix dominates.
FEWEST_ROWS = 16
#: Elements worth one operation.
_PIECE_ELEMENTS = 65536

Piece = tuple[tuple[int, slice], ...]


class Rows(NamedTuple):
    """Rows by expert. layout None: dense rows, which share expert 0. index: their positions in an array indexed by
    `row`, `slot` or `token`. experts: of each row. parts: (expert, its rows) of every expert with rows."""

    layout: LayoutSpec | None
    count: int
    index: dict[str, Any]
    experts: Any
    parts: list[tuple[int, slice]]

    def pieces(self, threads: int, width: int) -> list[Piece]:
        """Pieces of work for a product of this width, largest first so that threads finish together. Threads wait for
        the GIL, so neighbouring experts with few rows share a piece if each thread still has two."""
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


def in_slot_order(rows: Rows) -> Rows:
    """The same rows, each expert's in the order of slots, on which BLAS's bits depend."""
    order = np.lexsort((rows.index["slot"], rows.experts))
    numbers = np.arange(rows.count)[order] if isinstance(rows.index["row"], slice) else rows.index["row"][order]
    index = {"row": numbers, "slot": rows.index["slot"][order], "token": rows.index["token"][order]}
    return rows._replace(index=index)


def _joined(blocks: list[tuple[int, slice]], costs: list[int], most: float) -> list[Piece]:
    pieces: list[Piece] = []
    room = 0.0
    for block, cost in zip(blocks, costs, strict=True):
        if cost > room:
            pieces.append(())
            room = most
        pieces[-1] = (*pieces[-1], block)
        room -= cost
    return pieces


def dense_rows(count: int) -> Rows:
    return Rows(None, count, dict.fromkeys(("row", "slot", "token"), _ALL), 0, [(0, slice(0, count))])


def planned_rows(layout: LayoutSpec | None, arrays: Mapping[str, np.ndarray], count: int) -> Rows:
    """The rows of a plan's layout, or `count` dense rows."""
    return dense_rows(count) if layout is None else rows_of(layout, *(arrays[name] for name in LAYOUT_INPUTS))


def rows_of(layout: LayoutSpec, group_sizes: np.ndarray, group_start: np.ndarray, slot_of_row: np.ndarray) -> Rows:
    if slot_of_row.min(initial=0) >= 0 and layout.capacity == layout.num_slots:
        starts = group_start.tolist()
        ends_of = list(itertools.pairwise(starts))
        whole = (starts[0], starts[-1]) == (0, layout.capacity)
        if whole and [end - start for start, end in ends_of] == group_sizes.tolist():
            index = {"row": _ALL, "slot": slot_of_row, "token": slot_of_row // layout.top_k}
            parts = [(expert, slice(*ends)) for expert, ends in enumerate(ends_of) if ends[0] < ends[1]]
            return Rows(layout, layout.capacity, index, np.repeat(np.arange(len(group_sizes)), group_sizes), parts)
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
    return Rows(layout, len(rows), index, experts, [(expert, part) for expert, part in parts if part.stop > part.start])
