"""Collectives of torch between the ranks that share experts; errors name the message."""

from __future__ import annotations

import datetime
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh

from moe_core.errors import InvalidInput
from moe_core.parallel.header import PeerFailed, compare_headers
from moe_torch.bridge.options import require_instance
from moe_torch.bridge.private import flat_mesh, gather_all
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


class Collective(NamedTuple):
    """begin: a process group's method. options: for the current stream, and for a stream beside it."""

    begin: Callable[..., Any]
    options: tuple[Any, Any]


def _collective(begin: Callable[..., Any], kind: type) -> Collective:
    """Torch's functions check what we know, in more time than the messages of few tokens take."""
    options = kind(), kind()
    for asynchronous, one in enumerate(options):
        # Before torch 2.7, all run on a stream of their own.
        if hasattr(one, "asyncOp"):
            one.asyncOp = bool(asynchronous)
    return Collective(begin, options)


def _gather_by_torch(group: Any, into: torch.Tensor, values: torch.Tensor, options: Any) -> Any:
    return dist.all_gather_into_tensor(into, values, group=group, async_op=True)


_c10d: Any = c10d
_Group = _c10d.ProcessGroup
_ALL_GATHER = _collective(gather_all or _gather_by_torch, _c10d.AllgatherOptions)
_ALL_TO_ALL = _collective(getattr(_Group, "all_to_all_single", None) or _Group.alltoall_base, _c10d.AllToAllOptions)
_ALL_REDUCE = _collective(_Group.allreduce, _c10d.AllreduceOptions)


@dataclass(frozen=True)
class Ranks:
    """The ranks of a process group; `start_*` return a function that waits. timeout: seconds of a message on a CPU;
    None: the group's. On a GPU its watchdog counts. where: mode and layer, for errors. overlaps: messages of a GPU
    leave the current stream until that function is called."""

    group: Any
    timeout: float | None = None
    where: str = "the exchange"
    overlaps: bool = False

    @functools.cached_property
    def rank(self) -> int:
        return dist.get_rank(self.group)

    @functools.cached_property
    def size(self) -> int:
        return dist.get_world_size(self.group)

    def all_gather(self, values: torch.Tensor, what: str) -> torch.Tensor:
        """Return `[W, ...]`, equally shaped values of all ranks."""
        return self.start_all_gather(values, what)()

    def start_all_gather(self, values: torch.Tensor, what: str) -> Arriving:
        if self.size == 1:
            return lambda: values[None]
        gathered = buffer((self.size, *values.shape), values.dtype, values.device)
        arrays = _moved(gathered).flatten(0, 1), _moved(values.contiguous())
        return self._start("all_gather", what, gathered, _ALL_GATHER, *arrays)

    def all_to_all(self, rows: torch.Tensor, what: str, way: Way = _EQUALLY) -> torch.Tensor:
        """Rows `[R, ...]` from every rank, in order, from each one's first. With memory, R is at least that."""
        return self.start_all_to_all(rows, what, way)()

    def start_all_to_all(
        self, rows: torch.Tensor, what: str, way: Way = _EQUALLY, into: torch.Tensor | None = None
    ) -> Arriving:
        """into: where rows arrive, and what the result returns."""
        (sent, received, memory), count, going = way, rows.shape[0], rows.contiguous()
        splits: tuple[Sequence[int], Sequence[int]] = (), ()
        if sent is not None and received is not None:
            count, leaving, splits = sum(received), sum(sent), (received, sent)
            going = going if leaving == rows.shape[0] else going[:leaving]
        most = max(count, memory or 0)
        if self.size == 1 and most <= rows.shape[0] and into is None:
            # Nothing travels.
            return (lambda: rows) if most == rows.shape[0] else functools.partial(rows.narrow, 0, 0, most)
        came = buffer((most, *rows.shape[1:]), rows.dtype, rows.device) if into is None else into
        arrays = _moved(came if count == most else came[:count]), _moved(going)
        return self._start("all_to_all", what, came, _ALL_TO_ALL, *arrays, *splits)

    def total(self, values: torch.Tensor, what: str) -> torch.Tensor:
        """Add integers over ranks, in place."""
        return self._start("all_reduce", what, values, _ALL_REDUCE, [values])()

    def compare(self, headers: np.ndarray, **options: Any) -> int:
        """Call `compare_headers` with headers int32 `[W, 8]`; errors of aborted messages name the ranks that ended."""
        try:
            return compare_headers(headers, self.where, **options)
        except RuntimeError as error:
            if isinstance(error, PeerFailed) and self.rank not in error.ranks:
                raise
            raise self._failed("arrival", "headers", error) from error

    def _start(self, collective: str, what: str, result: torch.Tensor, method: Collective, *given: Any) -> Arriving:
        try:
            work = method.begin(self.group, *given, method.options[self.overlaps])
        except RuntimeError as error:
            raise self._failed(collective, what, error) from error

        def wait() -> torch.Tensor:
            try:
                # None: the current stream has it.
                if work is not None:
                    work.wait(*(() if self.timeout is None else (datetime.timedelta(seconds=self.timeout),)))
            except RuntimeError as error:
                raise self._failed(collective, what, error) from error
            return result

        return wait

    def _failed(self, collective: str, what: str, error: RuntimeError) -> RuntimeError:
        return RuntimeError(
            f"{collective} of {what} in {self.where} failed on rank {self.rank} of {self.size}: {error}; "
            f"{roll_call(self.group, self.where)}"
        )


_PLAIN = frozenset((torch.bfloat16, torch.float16, torch.float32))


def _moved(values: torch.Tensor) -> torch.Tensor:
    """The memory as bytes, which every backend moves, NaN and fp8 included. NCCL moves numbers of 16 and 32 bits."""
    if values.dtype == torch.int32 or (values.is_cuda and values.dtype in _PLAIN):
        return values
    # Empty arrays of NumPy have strides of 0, which views in other dtypes refuse.
    return (values if values.numel() else values.new_empty(values.shape)).view(torch.uint8)


#: Pinned arrays, their views and an event, by device and shapes: the driver takes long to make and to release them.
_copies: dict[tuple[Any, ...], list[Any]] = {}


def _pinned(arrays: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], list[np.ndarray], Any]:
    with torch.inference_mode(False):
        pinned = [torch.empty(array.shape, dtype=array.dtype, pin_memory=True) for array in arrays]
    return pinned, [one.numpy() for one in pinned], torch.cuda.Event()


def read_by_host(*arrays: torch.Tensor) -> Callable[[], list[np.ndarray]]:
    """Start to copy a GPU's int32 arrays. The result, called once, waits for these copies alone."""
    if not arrays[0].is_cuda:
        return lambda: [array.numpy() for array in arrays]
    free = _copies.setdefault((arrays[0].device, *[array.shape for array in arrays]), [])
    try:
        kept = free.pop()
    except IndexError:
        kept = _pinned(arrays)
    pinned, views, event = kept
    for copy, array in zip(pinned, arrays, strict=True):
        copy.copy_(array, non_blocking=True)
    event.record()

    def read() -> list[np.ndarray]:
        event.synchronize()
        results = [view.copy() for view in views]
        free.append(kept)
        return results

    return read


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
