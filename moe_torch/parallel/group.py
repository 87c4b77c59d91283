"""Collectives of torch between the ranks that share experts; errors name the message."""

from __future__ import annotations

import datetime
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from moe_core.errors import InvalidInput
from moe_torch.bridge.options import require_instance
from moe_torch.bridge.private import flat_mesh
from moe_torch.parallel.rollcall import roll_call

#: Waits for a message, and returns it.
Arriving = Callable[[], torch.Tensor]


class Way(NamedTuple):
    """Rows sent to and received from each rank, None: equally many. memory: rows that there is room for."""

    sent: Sequence[int] | None = None
    received: Sequence[int] | None = None
    memory: int | None = None


_EQUALLY = Way()


def buffer(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=device)


@dataclass(frozen=True)
class Ranks:
    """The ranks of a process group; `start_*` return a function that waits. timeout: seconds of a message on a CPU;
    None: the group's. On a GPU its watchdog counts. where: mode and layer, for errors."""

    group: Any
    timeout: float | None = None
    where: str = "the exchange"

    @property
    def rank(self) -> int:
        return dist.get_rank(self.group)

    @property
    def size(self) -> int:
        return dist.get_world_size(self.group)

    def all_gather(self, values: torch.Tensor, what: str) -> torch.Tensor:
        """Return `[W, ...]`, equally shaped values of all ranks."""
        return self.start_all_gather(values, what)()

    def start_all_gather(self, values: torch.Tensor, what: str) -> Arriving:
        gathered = buffer((self.size, *values.shape), values.dtype, values.device)
        into, sent = _moved(gathered).flatten(0, 1), _moved(values.contiguous())
        return self._start("all_gather", what, gathered, lambda: _all_gather(into, sent, self.group, async_op=True))

    def all_to_all(self, rows: torch.Tensor, what: str, way: Way = _EQUALLY) -> torch.Tensor:
        """Return rows `[R, ...]` from every rank, one rank after another, from the first ones of each.

        With memory, R is at least that; the rest holds anything.
        """
        return self.start_all_to_all(rows, what, way)()

    def start_all_to_all(self, rows: torch.Tensor, what: str, way: Way = _EQUALLY) -> Arriving:
        (sent, received, memory), count, going = way, len(rows), rows.contiguous()
        splits = None, None
        if sent is not None and received is not None:
            count, leaving = sum(received), sum(sent)
            splits = list(received), list(sent)
            going = going if leaving == len(rows) else going[:leaving]
        came = buffer((max(count, memory or 0), *rows.shape[1:]), rows.dtype, rows.device)
        into, source = _moved(came if count == len(came) else came[:count]), _moved(going)
        start = functools.partial(dist.all_to_all_single, into, source, *splits, group=self.group, async_op=True)
        return self._start("all_to_all", what, came, start)

    def total(self, values: torch.Tensor, what: str) -> torch.Tensor:
        """Add integers over ranks, in place."""
        start = functools.partial(dist.all_reduce, values, group=self.group, async_op=True)
        return self._start("all_reduce", what, values, start)()

    def _start(self, collective: str, what: str, result: torch.Tensor, start: Callable[[], Any]) -> Arriving:
        def checked(step: Callable[[], Any]) -> Any:
            try:
                return step()
            except RuntimeError as error:
                raise RuntimeError(
                    f"{collective} of {what} in {self.where} failed on rank {self.rank} of {self.size}: {error}; "
                    f"{roll_call(self.group, self.where)}"
                ) from error

        work = checked(start)
        limit = () if self.timeout is None else (datetime.timedelta(seconds=self.timeout),)

        def wait() -> torch.Tensor:
            checked(lambda: work.wait(*limit))
            return result

        return wait


#: The first name exists from torch 2.13 on.
_all_gather: Any = getattr(dist, "all_gather_single", None) or getattr(dist, "all_gather_into_tensor", None)


def _moved(values: torch.Tensor) -> torch.Tensor:
    """The memory as bytes, which every backend moves, NaN and fp8 included; int32 stays."""
    if values.dtype == torch.int32:
        return values
    # Empty arrays of NumPy have strides of 0, which views in other dtypes refuse.
    return (values if values.numel() else values.new_empty(values.shape)).view(torch.uint8)


def as_bytes(values: torch.Tensor) -> torch.Tensor:
    return values.view(len(values), values[:1].numel() if len(values) else 0).view(torch.uint8)


def ranks_of(mesh: Any, timeout: float | None, where: str, name: str = "mesh", axis: str = "ep") -> Ranks:
    """Return the ranks of a DeviceMesh of one axis or a process group. name, axis: the argument and its usual axis."""
    mesh = mesh if levels_of(mesh) is None or name != "mesh" else flat_mesh(mesh)
    if isinstance(mesh, DeviceMesh):
        if mesh.ndim != 1:
            raise InvalidInput(
                f"{name} must have one axis, got {mesh.ndim} axes {mesh.mesh_dim_names}; pass one, such as "
                f"mesh[{axis!r}]"
            )
        _require_member(mesh.get_coordinate() is not None, name, mesh)
        return Ranks(mesh.get_group(), timeout, where)
    _require_member(mesh is not dist.GroupMember.NON_GROUP_MEMBER, name, "a group of others")
    require_instance(name, mesh, dist.ProcessGroup)
    return Ranks(mesh, timeout, where)


def levels_of(mesh: Any) -> tuple[Any, Any] | None:
    """The axes of hosts and of the ranks of a host, of a DeviceMesh of two axes. None: of one, or a group."""
    if not isinstance(mesh, DeviceMesh) or mesh.ndim != 2:
        return None
    hosts, local = mesh.mesh_dim_names or (None, None)
    if hosts is None or local is None:
        raise InvalidInput(f"mesh must name its axes, got {mesh}; pass mesh_dim_names=('host', 'local')")
    return mesh[hosts], mesh[local]


def _require_member(is_one: bool, name: str, mesh: Any) -> None:
    if not is_one:
        raise InvalidInput(
            f"{name} must have this process among its ranks, got {mesh} in rank {dist.get_rank()} of all; make it of "
            "this rank too, or leave the call to its ranks"
        )
