"""Experts by load on the ranks of a node, for `Placement.balanced`."""

from __future__ import annotations

import heapq

import numpy as np

#: An empty place.
HOLE = -1


def share_out(loads: np.ndarray, groups: int) -> list[list[int]]:
    """Groups of at most ceil(E / groups) experts and equal load: the heaviest into the lightest with room."""
    room = -(-len(loads) // groups)
    parts: list[list[int]] = [[] for _ in range(groups)]
    lightest = [(0.0, group) for group in range(groups)]
    for expert in np.argsort(-loads, kind="stable").tolist():
        total, group = heapq.heappop(lightest)
        parts[group].append(expert)
        if len(parts[group]) < room:
            heapq.heappush(lightest, (total + float(loads[expert]), group))
    return parts


class NodeShares:
    def __init__(self, loads: np.ndarray, copies: dict[int, int], ranks: int, per_rank: int) -> None:
        self.part = {expert: loads[expert] / count for expert, count in copies.items()}
        self.held: list[list[int]] = [[] for _ in range(ranks)]
        self.total, self.per_rank = [0.0] * ranks, per_rank
        self.lightest = [(0.0, rank) for rank in range(ranks)]
        for expert in sorted(copies, key=lambda expert: (-self.part[expert], expert)):
            for _ in range(copies[expert]):
                self._place(expert)

    def _place(self, expert: int) -> None:
        passed_over = []
        while self.lightest and expert in self.held[self.lightest[0][1]]:
            passed_over.append(heapq.heappop(self.lightest))
        if self.lightest:
            rank = heapq.heappop(self.lightest)[1]
        else:
            rank = self._make_room(passed_over.pop(0)[1], expert)
        for entry in passed_over:
            heapq.heappush(self.lightest, entry)
        self._add(rank, expert)

    def _make_room(self, room: int, expert: int) -> int:
        """Move another expert of a full rank to `room`, which holds `expert`. Return the full rank."""
        ranks = (rank for rank in range(len(self.held)) if expert not in self.held[rank])
        rank = min(ranks, key=lambda rank: (self.total[rank], rank))
        # Never empty: the full rank holds more experts, and not this one.
        able = (other for other in self.held[rank] if other not in self.held[room])
        moved = min(able, key=lambda other: (self.part[other], other))
        self.held[rank].remove(moved)
        self.total[rank] -= self.part[moved]
        self._add(room, moved)
        return rank

    def _add(self, rank: int, expert: int) -> None:
        self.held[rank].append(expert)
        self.total[rank] += self.part[expert]
        if len(self.held[rank]) < self.per_rank:
            heapq.heappush(self.lightest, (self.total[rank], rank))

    def owners(self) -> list[tuple[int, ...]]:
        return [(*sorted(rank), *[HOLE] * (self.per_rank - len(rank))) for rank in self.held]
