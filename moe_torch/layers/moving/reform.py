"""Go on without ranks that died, in the same processes."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from moe_core.base.checks import as_integer, finite_float
from moe_core.errors import InvalidInput
from moe_core.parallel.placement import HOLE, Placement
from moe_torch.bridge.private import group_of, group_timeout
from moe_torch.layers.moving.shares import rows_of, shares_of
from moe_torch.parallel.axes import ExpertParallel
from moe_torch.parallel.rollcall import survivors_of

#: Of survivors, by the group of before. Models share them.
_meshes: weakref.WeakKeyDictionary[Any, dict[tuple[int, ...], DeviceMesh]] = weakref.WeakKeyDictionary()


@torch.no_grad()
def reform(model: Any, survivors: Sequence[int] | None = None, *, seconds: float = 60.0) -> ExpertParallel:
    """Go on with a model whose ranks partly died. All survivors call it. Replicas cover the experts of dead ranks.

    Nothing moves: layers forget the dead ranks' replicas, and the next forward has the same bits. The survivors are a
    new process group, on the old one's store. A `Rebalancer` of the layers ends; make a new one for the next death.
    Training without replicas: see `Mirror`.

    Args:
        model: a module with layers of `parallelize`.
        survivors: ranks of their mesh. None: those that call `reform`; the others must have ended.
        seconds: to wait for other ranks, which may still wait for a message themselves.

    Returns:
        the ranks that are left, with the options of before. Its mesh is new.

    Raises:
        InvalidInput: no shared-out layers, or experts that only dead ranks held: load a checkpoint.
        RuntimeError: other ranks neither called in time nor ended, or went on without this one.
    """
    shares = shares_of(model)
    old = shares[0].exchange.parallel
    alive = survivors_of_mesh(old, survivors, seconds)
    placements = [_left(share.placement, alive) for share in shares]
    parallel = without(old, alive)
    for share, placement in zip(shares, placements, strict=True):
        share.replace(rows_of(share), placement, parallel)
        share.exchange.moving, share.exchange.calls.number = None, 0
    return parallel


def survivors_of_mesh(parallel: ExpertParallel, survivors: Sequence[int] | None, seconds: float) -> list[int]:
    """The numbers of ranks that are left, ascending, the same on all of them."""
    ranks, seconds = parallel.ranks("reform"), finite_float("seconds", seconds)
    if survivors is None:
        return survivors_of(ranks.group, seconds)
    alive = sorted({as_integer("survivors", rank, 0, ranks.size) for rank in survivors})
    if ranks.rank not in alive:
        raise InvalidInput(f"survivors must hold this rank, {ranks.rank}, got {alive}; call it on survivors alone")
    return alive


def _left(placement: Placement, alive: Sequence[int]) -> Placement:
    owners = tuple(placement.owners[rank] for rank in alive)
    lost = sorted(set(range(placement.num_experts)) - {expert for rank in owners for expert in rank})
    if lost:
        raise InvalidInput(
            f"survivors must hold every expert, got none of {lost[:8]} on ranks {list(alive)} of {placement}; load a "
            "checkpoint on these ranks, keep replicas on other ranks, or train with a Mirror"
        )
    return Placement(placement.num_experts, owners, placement.version + 1)


def without(parallel: ExpertParallel, alive: Sequence[int]) -> ExpertParallel:
    """Make the group of survivors. A collective of theirs."""
    ranks, kind = parallel.ranks("reform"), parallel.axis.device_type
    meshes = _meshes.setdefault(ranks.group, {})
    if tuple(alive) not in meshes:
        numbers = dist.get_process_group_ranks(ranks.group)
        name = f"moebius {ranks.group.group_name} {list(alive)}"
        timeout = group_timeout(ranks.group, torch.device(kind))
        group = group_of(name, [numbers[rank] for rank in alive], dist.get_backend(ranks.group), timeout)
        meshes[tuple(alive)] = DeviceMesh.from_group(group, kind, mesh_dim_names=("ep",))
    # Hosts may have unequal numbers of ranks now.
    return dataclasses.replace(
        parallel, mesh=meshes[tuple(alive)], exchange=dataclasses.replace(parallel.exchange, hosts=1)
    )


def full_up(owners: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    """Owners with equally many places."""
    most = max(map(len, owners))
    return tuple((*rank, *[HOLE] * (most - len(rank))) for rank in owners)


def numbers_of(parallel: ExpertParallel, value: int) -> list[int]:
    """Every rank's integer."""
    told = torch.tensor([value], device=parallel.axis.device_type)
    return parallel.ranks("mirror").all_gather(told, "saves").view(-1).tolist()
