"""Results that experts store where they leave from. Results of its own tokens are home at once."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from moe_torch.parallel import group
from moe_torch.parallel.group import Arriving, Ranks, Way


class StoredResults:
    """Memory of rows: for other ranks, of this rank's own slots, then from other ranks. The last two are at home.

    at int64 `[R * K]`: the address of each arrived slot's result. slots int32: the slot of each result here, in this
    order.
    """

    at: torch.Tensor
    slots: torch.Tensor
    _addresses: torch.Tensor | None = None

    def __init__(self, rank: int, sent: Sequence[int], back: Sequence[int], room: int, like: torch.Tensor) -> None:
        """sent, back: rows of each rank, this one included. room: rows at home, at least those. like: a row."""
        self._own, self._room = sent[rank], room
        leave, come = ([*rows[:rank], 0, *rows[rank + 1 :]] for rows in (sent, back))
        self._way, self._sent, self._came = Way(leave, come), sum(leave), sum(come)
        self._like, self._memory = like, self._made(like)

    def _made(self, like: torch.Tensor) -> torch.Tensor:
        return group.buffer((max(1, self._sent + self._room), *like.shape[1:]), like.dtype, like.device)

    @property
    def first(self) -> torch.Tensor:
        """The first row, for its address."""
        assert self._memory is not None
        return self._memory[:1]

    def start(self, ranks: Ranks, what: str, rows: torch.Tensor | None = None) -> Arriving:
        """Send results, or rows in their order. The result waits and returns the rows at home. Memory is given up."""
        memory, sent, own = self._memory, self._sent, self._own
        if rows is None:
            self._memory = None
        else:
            memory = self._made(rows)
            memory[: sent + own] = rows[: sent + own]
        assert memory is not None, "results leave once"
        home = memory[sent : sent + self._room]
        if ranks.size == 1:
            return lambda: home
        arriving = ranks.start_all_to_all(memory[:sent], what, self._way, home[own : own + self._came])
        return lambda: (arriving(), home)[1]

    def gradients_at(self) -> torch.Tensor:
        """Return int64 `[R * K]`, to which `begin_gradients` writes the addresses of the rows of d_x."""
        self._offsets, self._addresses = self.at - self.first.data_ptr(), torch.empty_like(self.at)
        return self._addresses

    def begin_gradients(self) -> None:
        """Make memory for rows of d_x, if they are stored."""
        if self._addresses is not None:
            self._memory = self._made(self._like)
            torch.add(self._offsets, self._memory.data_ptr(), out=self._addresses)
