"""Copies of a training state on two ranks, so that training goes on when one of them dies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from moe_core.errors import InvalidInput
from moe_core.parallel.placement import Placement
from moe_torch.layers.listed import part_of
from moe_torch.layers.moving.reform import full_up, numbers_of, survivors_of_mesh, without
from moe_torch.layers.moving.shares import rows_of, shares_of
from moe_torch.layers.placed import held_experts
from moe_torch.parallel.axes import ExpertParallel
from moe_torch.parallel.group import Ranks, Way


class _State:
    """One saved step of a rank: rows of its experts and of its neighbour's by layer, copies of all else. number:
    of the save, -1: incomplete. size: of ranks. states: how many parameters of each optimizer had one."""

    def __init__(self) -> None:
        self.number, self.step, self.size, self.placements = -1, -1, 0, list[Placement]()
        self.states: list[int] = []
        self.held: list[list[torch.Tensor]] = []
        self.neighbours: list[list[torch.Tensor]] = []
        self.whole: list[torch.Tensor] = []


class Mirror:
    """Keeps the last step's state of a model in training so that it survives the death of a rank, with equal bits.

    Every rank keeps copies of its own and the previous rank's experts, with their optimizer states. Routers,
    other parameters and their states are on all ranks. After a death, each dead rank's experts go on at the next rank
    (docs/user/parallel-training.md).

    The next step's loss is that of a run without a death, bit by bit, if the ranks together have the same tokens in the
    same order. Sums of gradients over ranks, as of routers, are in another order with fewer ranks.

    It takes four times the memory of the rank's experts and their states, and a save sends them once. Other ranks of
    larger meshes, as of data parallelism, are the caller's.

    Args:
        model: with layers of `parallelize`, all on the same ranks. Its other parameters must be alike on all.
        optimizers: all of them.

    Attributes:
        step: of the state that `reform` went back to or that was saved last, counted by saves. -1: none.

    Raises InvalidInput without shared-out layers, Unsupported for experts in `fully_shard` or a tensor axis.
    """

    def __init__(self, model: Any, optimizers: Sequence[torch.optim.Optimizer] | torch.optim.Optimizer) -> None:
        self.optimizers = [optimizers] if isinstance(optimizers, torch.optim.Optimizer) else list(optimizers)
        self.model, self.step, self._number = model, -1, -1
        shares_of(model, self.optimizers)
        # A rank that dies during a save leaves some ranks a step behind.
        self._states = _State(), _State()

    @torch.no_grad()
    def save(self) -> None:
        """Copy the state after a step. A collective. Raises RuntimeError if a message fails."""
        self._save(self.step + 1)

    def _save(self, step: int) -> None:
        shares = shares_of(self.model, self.optimizers)
        parallel = shares[0].exchange.parallel
        ranks, told = parallel.ranks("mirror"), numbers_of(parallel, self._number)
        if len(set(told)) != 1:
            raise InvalidInput(f"all ranks must save after the same step, got {told} by rank; call save on all of them")
        # All ranks are here, so all have the state before.
        state = self._states[(self._number + 1) % 2]
        state.number, state.step, state.size = -1, step, ranks.size
        state.placements = [share.placement for share in shares]
        state.held = [[rows.clone() for rows in rows_of(share)] for share in shares]
        state.neighbours = []
        for share, held in zip(shares, state.held, strict=True):
            way = _to_next(ranks, share.placement)
            names = [name for name, _ in share.arrays()]
            came = [ranks.all_to_all(rows, f"experts.{name}", way) for name, rows in zip(names, held, strict=True)]
            state.neighbours.append(came)
        state.whole = [one.clone() for one in self._whole()]
        state.states = [len(optimizer.state) for optimizer in self.optimizers]
        self._number, self.step = self._number + 1, step
        state.number = self._number

    def _whole(self) -> list[torch.Tensor]:
        """Tensors that every rank has: other parameters and buffers, and all other states of optimizers."""
        moving = {id(array) for share in shares_of(self.model, self.optimizers) for _, array in share.arrays()}
        named = (*self.model.named_parameters(), *self.model.named_buffers())
        tensors = [one for _, one in named if id(one) not in moving]
        for optimizer in self.optimizers:
            states = [optimizer.state.get(one, {}) for group in optimizer.param_groups for one in group["params"]]
            tensors += [one for state in states for _, one in sorted(state.items()) if isinstance(one, torch.Tensor)]
        return [part_of(one).detach() for one in tensors if id(one) not in moving]

    @torch.no_grad()
    def reform(self, survivors: Sequence[int] | None = None, *, seconds: float = 60.0) -> ExpertParallel:
        """Go back to the last step that all survivors saved, without the dead ranks. All survivors call it.

        Arguments, result and errors are as for `moe_torch.parallel.reform`; experts are lost only if a rank and the one
        behind it died.
        """
        shares = shares_of(self.model, self.optimizers)
        old = shares[0].exchange.parallel
        alive = survivors_of_mesh(old, survivors, seconds)
        ranks = old.ranks("mirror")
        lost = [rank for rank in range(ranks.size) if rank not in alive and (rank + 1) % ranks.size not in alive]
        if lost:
            raise InvalidInput(
                f"survivors must hold a copy of every expert, got {alive} of {ranks.size} ranks: rank {lost[0]} and "
                "the next one, with its copy, are gone; load a checkpoint"
            )
        parallel = without(old, alive)
        told = numbers_of(parallel, self._number)
        state = self._states[min(told) % 2]
        if state.number != min(told) or state.number < 0:
            raise InvalidInput(f"a step must be saved before reform, got saves {told} by rank; call save after steps")
        if state.size != ranks.size:
            raise InvalidInput(
                f"the copies must be of these {ranks.size} ranks, got those of {state.size}, since a rank died while "
                "survivors made new ones; load a checkpoint"
            )
        for optimizer, count in zip(self.optimizers, state.states, strict=True):
            optimizer.zero_grad()
            if not count:  # The step that failed was the first.
                optimizer.state.clear()
        heir = (ranks.rank - 1) % ranks.size not in alive
        for share, placement, held, came in zip(shares, state.placements, state.held, state.neighbours, strict=True):
            owners = []
            for rank in alive:
                before = (rank - 1) % ranks.size
                owners.append([one for at in (rank, before) if at == rank or at not in alive
                               for one in held_experts(placement, at)])  # fmt: skip
            new = Placement(placement.num_experts, full_up(owners), placement.version + 1)
            rows = [torch.cat([own, next_to]) for own, next_to in zip(held, came, strict=True)]
            share.replace(rows if heir else [own.clone() for own in held], new, parallel)
            share.exchange.calls.number = 0
        for one, kept in zip(self._whole(), state.whole, strict=True):
            one.copy_(kept)
        # Copies of the new neighbours.
        self._number = state.number
        self._save(state.step)
        return parallel


def _to_next(ranks: Ranks, placement: Placement) -> Way:
    sent, received = [0] * ranks.size, [0] * ranks.size
    before = (ranks.rank - 1) % ranks.size
    sent[(ranks.rank + 1) % ranks.size] = len(held_experts(placement, ranks.rank))
    received[before] = len(held_experts(placement, before))
    return Way(sent, received)
