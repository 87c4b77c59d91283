"""Memory that all ranks of a group load and store, and barriers."""

from __future__ import annotations

import math
import os
import queue
import tempfile
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from moe_core.errors import InvalidInput, Unsupported
from moe_torch.bridge.private import group_timeout, symmetric_memory
from moe_torch.parallel.group import Ranks
from moe_torch.parallel.rollcall import host_id

#: A multiple of what kernels store at once.
_ALIGNMENT = 256
#: Of a barrier on a GPU, if the group has no timeout.
_BARRIER_SECONDS = 600.0
#: Of torch's rendezvous over hosts.
_FABRIC_SECONDS = 60.0


class Region(NamedTuple):
    """Part of a symmetric allocation. own: this rank's. addresses int64 `[W]`, on the device: all ranks'."""

    own: torch.Tensor
    addresses: torch.Tensor


class Part(NamedTuple):
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        return -(-self.size * self.dtype.itemsize // _ALIGNMENT) * _ALIGNMENT


class Symmetric:
    """One allocation of every rank of a group, made by `symmetric`.

    peers: every rank's bytes as memory of this process, uint8 `[bytes]` each. regions: consecutive arrays in it, the
    same at every rank.
    """

    def __init__(self, peers: Sequence[torch.Tensor], parts: Sequence[Part], rank: int, handle: Any) -> None:
        self.peers, self.device, self._handle = tuple(peers), peers[rank].device, handle
        regions, begin = [], 0
        for part in parts:
            local = peers[rank][begin:][: part.size * part.dtype.itemsize].view(part.dtype).view(part.shape)
            addresses = [peer.data_ptr() + begin for peer in peers]
            regions.append(Region(local, torch.tensor(addresses, dtype=torch.int64, device=self.device)))
            begin += part.bytes
        self.regions = tuple(regions)
        self._milliseconds: dict[float | None, int] = {}

    def barrier(self, ranks: Ranks, what: str) -> None:
        """Wait (on a GPU the stream) until all ranks' stores can be loaded, and memory that they loaded overwritten."""
        if len(self.peers) == 1:
            return
        if self._handle is not None:
            limit = self._milliseconds.get(ranks.timeout)
            if limit is None:
                limit = self._milliseconds[ranks.timeout] = _milliseconds(ranks, self.device)
            self._handle.barrier(0, limit)
        else:
            ranks.all_gather(torch.zeros(1, dtype=torch.int32), what)


def _milliseconds(ranks: Ranks, device: torch.device) -> int:
    seconds = ranks.timeout
    if seconds is None:
        timeout = group_timeout(ranks.group, device)
        seconds = _BARRIER_SECONDS if timeout is None else timeout.total_seconds()
    return max(1, int(seconds * 1000))


_Made = TypeVar("_Made")
_MOST_PLANS = 256
_of_plans: weakref.WeakKeyDictionary[Any, dict[Any, tuple[Any, Any]]] = weakref.WeakKeyDictionary()


def once_for_plan(make: Callable[[Ranks, Any, torch.device, int], _Made]) -> Callable[..., _Made]:
    """Decorate what finds the memory of a plan: it is found once for a group, plan, device and number of the set."""

    def found(ranks: Ranks, plan: Any, device: torch.device, number: int = 0) -> _Made:
        known, key = _of_plans.setdefault(ranks.group, {}), (make, id(plan), device, number)
        if key not in known:
            if len(known) >= _MOST_PLANS:
                known.clear()
            # The plan is kept, so that no other gets its address.
            known[key] = plan, make(ranks, plan, device, number)
        return known[key][1]

    return found


_Known = dict[tuple[torch.device, tuple[Part, ...], int], Symmetric]
_known: weakref.WeakKeyDictionary[Any, _Known] = weakref.WeakKeyDictionary()


def symmetric(ranks: Ranks, parts: tuple[Part, ...], device: torch.device, number: int = 0) -> Symmetric:
    """Return memory for these parts, the same for all calls of a group with equal parts and number.

    Bytes are zero at first. The first call is a collective that waits. Raises InvalidInput if ranks have other parts,
    and Unsupported on every rank if one cannot reach another's memory, or captures a CUDA graph.
    """
    known = _known.setdefault(ranks.group, {})
    key = device, parts, number
    if key not in known:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise Unsupported(
                "memory that ranks share must be there before a CUDA graph is captured; call once with the same sizes"
            )
        # It stays: captured graphs and saved tensors hold its addresses.
        known[key] = _allocate(ranks, parts, device)
    return known[key]


def _allocate(ranks: Ranks, parts: tuple[Part, ...], device: torch.device) -> Symmetric:
    size = max(_ALIGNMENT, sum(part.bytes for part in parts))
    sizes = _told(ranks, size)
    if len(set(sizes)) != 1:
        raise InvalidInput(
            f"all ranks must share as many bytes before {ranks.where}, got {sizes} by rank; give max_tokens, and all "
            "else that sizes follow from, alike"
        )
    with torch.inference_mode(False):
        peers, handle = _on_gpus(ranks, size, device) if device.type == "cuda" else (_on_cpu(ranks, size), None)
        return Symmetric(peers, parts, ranks.rank, handle)


def _told(ranks: Ranks, value: Any) -> list[Any]:
    values_of_ranks: list[Any] = [None] * ranks.size
    dist.all_gather_object(values_of_ranks, value, group=ranks.group)
    return values_of_ranks


def _require_none(ranks: Ranks, problem: str | None) -> None:
    wrong = {rank: why for rank, why in enumerate(_told(ranks, problem)) if why}
    if wrong:
        rank, why = next(iter(wrong.items()))
        raise Unsupported(
            f"mode 'peer' needs ranks that reach each other's memory, got on rank {rank}: {why}; use mode 'padded' or "
            "'all_to_all'"
        )


def _on_cpu(ranks: Ranks, size: int) -> list[torch.Tensor]:
    """Shared memory of processes: a file that every rank maps."""
    folder = "/dev/shm" if os.path.isdir("/dev/shm") else None
    with tempfile.NamedTemporaryFile(dir=folder, prefix=f"moebius-{os.getpid()}-") as file:
        problem = None
        try:
            if hasattr(os, "posix_fallocate"):
                # Touching a missing page of /dev/shm would end the process.
                os.posix_fallocate(file.fileno(), 0, size)
            else:
                os.ftruncate(file.fileno(), size)
        except OSError as error:
            problem = f"{size} bytes of shared memory cannot be had: {error}"
        names, peers = _told(ranks, (host_id(), file.name)), []
        try:
            for host, name in names:
                if host != names[ranks.rank][0]:
                    raise OSError("it is on another host")
                peers.append(torch.from_file(name, shared=True, size=size, dtype=torch.uint8))
        except (OSError, RuntimeError) as error:
            problem = problem or f"rank {len(peers)}'s memory cannot be mapped: {error}"
        # Every rank has mapped every file, so names may go.
        _require_none(ranks, problem)
    return peers


def _in_time(rendezvous: Callable[[], Any], away: Sequence[int]) -> Any:
    """Call rendezvous. away: ranks on other hosts than rank 0, whose memory torch maps inside a fabric alone. Without
    one it waits for ever for what cannot cross hosts. Raises RuntimeError."""
    if not away:
        return rendezvous()
    results: queue.Queue[Any] = queue.Queue()

    def run() -> None:
        try:
            results.put((rendezvous(), None))
        except Exception as error:
            results.put((None, error))

    threading.Thread(target=run, daemon=True).start()
    try:
        handle, error = results.get(timeout=_FABRIC_SECONDS)
    except queue.Empty:
        raise RuntimeError(
            f"it did not map it in {_FABRIC_SECONDS:g} s, and rank {', '.join(map(str, away))} is on another host than "
            "rank 0, with no fabric between them"
        ) from None
    if error is not None:
        raise RuntimeError(str(error)) from error
    return handle


def _on_gpus(ranks: Ranks, size: int, device: torch.device) -> tuple[list[torch.Tensor], Any]:
    """Memory that torch maps into every rank, and torch's handle."""
    memory = symmetric_memory()
    told, problem = _told(ranks, (host_id(), device.index)), None
    away = [rank for rank, (host, _) in enumerate(told) if host != told[0][0]]
    for rank, (host, index) in enumerate(told):
        near = host == told[ranks.rank][0] and index != device.index
        if near and not torch.cuda.can_device_access_peer(device, index):
            problem = f"GPU {device.index} has no peer access to GPU {index} of rank {rank}"
    _require_none(ranks, problem)
    peers, handle = [], None
    try:
        # torch fills it on this stream, and zeros must precede peers' stores. Messages of hosts by gloo do not wait for
        # the device.
        stream = torch.cuda.default_stream(device)
        with torch.cuda.stream(stream):
            local = memory.empty(size, dtype=torch.uint8, device=device).zero_()
        stream.synchronize()
    except RuntimeError as error:
        local, problem = None, f"torch shares no memory: {error}"
    # Now all have memory, so no rank waits in vain.
    _require_none(ranks, problem)
    assert local is not None
    try:
        handle = _in_time(lambda: memory.rendezvous(local, ranks.group), away)
        peers = [handle.get_buffer(rank, (size,), torch.uint8) for rank in range(ranks.size)]
        assert peers[ranks.rank].data_ptr() == local.data_ptr(), "a rank's own memory is where it was allocated"
    except RuntimeError as error:
        problem = f"torch shares no memory: {error}"
    _require_none(ranks, problem)
    return peers, handle
