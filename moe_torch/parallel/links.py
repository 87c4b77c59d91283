"""Measure messages between ranks on this machine, for `moebius-tune --links`."""

from __future__ import annotations

import contextlib
import datetime
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from moe_core.base.checks import as_integer, finite_float, require_choice
from moe_core.errors import InvalidInput, Unsupported
from moe_core.parallel.machine import LinkTiming
from moe_torch.parallel import peer_ops
from moe_torch.parallel.group import Ranks
from moe_torch.parallel.peer.symmetric import Part, Symmetric, symmetric

_BATCHES, _MOST_CALLS = 5, 50
#: Rows of square matrices to multiply, and bytes to add.
_PRODUCT, _SUM = {"cuda": 8192, "cpu": 768}, {"cuda": 2**30, "cpu": 2**25}
_TIMEOUT = 120.0
_ALIGNMENT = 16
_ROW_BYTES = 8192


@dataclass(frozen=True)
class Setting:
    """The measurement. ranks: of this host, set by torchrun. None: its GPUs, or 2 on a CPU. sizes: bytes that a rank
    sends. seconds: for all messages. Raises InvalidInput."""

    backend: str
    ranks: int | None
    sizes: tuple[int, ...]
    seconds: float

    def __post_init__(self) -> None:
        require_choice("backend", self.backend, ("nccl", "gloo"))
        if self.ranks is not None:
            as_integer("ranks", self.ranks, 2)
        for size in self.sizes:
            as_integer("sizes", size, 1)
        if not self.sizes or finite_float("seconds", self.seconds) <= 0:
            raise InvalidInput(f"sizes and seconds must be positive, got {self.sizes} and {self.seconds}; name some")

    @property
    def device(self) -> str:
        return "cuda" if self.backend == "nccl" else "cpu"


@dataclass(frozen=True)
class Found:
    """Results of a rank, equal on all but for its products. domain: ranks of a host. not_measured: (kind, reason)."""

    timings: tuple[LinkTiming, ...]
    domain: int
    tflops: float
    memory: float
    not_measured: tuple[tuple[str, str], ...]


def measure(setting: Setting) -> Found | None:
    """Measure on the ranks of torchrun, or on new processes. None on all ranks but the first. Raises Unsupported."""
    gpus = torch.cuda.device_count()
    if dist.is_torchelastic_launched():
        with _joined(setting, int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"]), {}) as bench:
            results = bench.run()
            return results if dist.get_rank() == 0 else None
    ranks = setting.ranks or (gpus if setting.backend == "nccl" else 2)
    if setting.backend == "nccl" and not 2 <= ranks <= gpus:
        raise Unsupported(
            f"links between GPUs need two on this host, and one for each rank, got {ranks} ranks and {gpus} GPUs; "
            "measure on such a machine, or between processes on this CPU with --backend gloo"
        )
    with tempfile.TemporaryDirectory() as folder:
        spawn: Any = torch.multiprocessing
        try:
            spawn.start_processes(_serve, (setting, ranks, folder), ranks, start_method="spawn")
        except (spawn.ProcessRaisedException, spawn.ProcessExitedException) as error:
            raise RuntimeError(f"a rank failed: {error}") from error
        results = torch.load(Path(folder) / "found", weights_only=False)
    return results


def _serve(rank: int, setting: Setting, ranks: int, folder: str) -> None:
    where = {"init_method": f"file://{folder}/store", "rank": rank, "world_size": ranks}
    with _joined(setting, rank, ranks, where) as bench:
        results = bench.run()
        if rank == 0:
            torch.save(results, Path(folder) / "found")


@contextlib.contextmanager
def _joined(setting: Setting, local_rank: int, domain: int, where: dict[str, Any]) -> Iterator[_Bench]:
    device = torch.device("cpu")
    if setting.device == "cuda":
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
        where = where | {"device_id": device}
    else:
        torch.set_num_threads(1)
    dist.init_process_group(setting.backend, timeout=datetime.timedelta(seconds=_TIMEOUT), **where)
    try:
        yield _Bench(setting, device, domain)
    finally:
        dist.destroy_process_group()


class _Bench:
    def __init__(self, setting: Setting, device: torch.device, domain: int) -> None:
        self.setting, self.device, self.domain = setting, device, domain
        rank, world = dist.get_rank(), dist.get_world_size()
        if world % domain:
            raise InvalidInput(f"hosts must have equally many ranks, got {world} of which one has {domain}; start so")
        # Every rank makes every group, in one order.
        hosts = [list(range(first, first + domain)) for first in range(0, world, domain)]
        across = [list(range(local, world, domain)) for local in range(domain)]
        groups = {tuple(ranks): dist.new_group(ranks) for ranks in (*hosts, *across) if len(ranks) > 1}
        rank_groups = (hosts[rank // domain], across[rank % domain])
        self.groups = {
            where: Ranks(groups[tuple(ranks)], None, f"links of the {where}")
            for where, ranks in zip(("domain", "network"), rank_groups, strict=True)
            if len(ranks) > 1
        }

    def run(self) -> Found:
        timings: list[LinkTiming] = []
        missing: dict[str, str] = {}
        # Other hosts' memory cannot be stored to.
        kinds = [(where, kind) for where in self.groups for kind in MESSAGES if where == "domain" or kind not in _PEERS]
        wanted = [(where, kind, size) for where, kind in kinds for size in self.setting.sizes]
        each = self.setting.seconds / max(1, len(wanted))
        for where, kind, size in wanted:
            if kind in missing:
                continue
            try:
                timings.append(self._message(where, kind, size, each))
            except Unsupported as error:
                missing[kind] = str(error)
        tflops, memory = self._products(each)
        return Found(tuple(timings), self.domain, tflops, memory, tuple(missing.items()))

    def _message(self, where: str, kind: str, size: int, seconds: float) -> LinkTiming:
        ranks = self.groups[where]
        call, sent = MESSAGES[kind](ranks, size, self.device)
        us = self._us(call, seconds, ranks)
        return LinkTiming(kind, self.setting.backend, where, ranks.size, sent, us)

    def _us(self, call: Callable[[], Any], seconds: float, ranks: Ranks | None = None) -> float:
        """Microseconds of a call: the median of batches, or of graph replays on a GPU, of the slowest rank."""
        for _ in range(3):
            call()
        first = self._slowest(self._timed(call, 1), ranks)
        count = int(min(_MOST_CALLS, max(1.0, seconds * 1e6 / _BATCHES / first)))
        run, graph = call, None
        if self.device.type == "cuda":
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                for _ in range(count):
                    call()
            run = graph.replay
            run()
        times = []
        for _ in range(_BATCHES):
            taken = self._timed(run, 1 if graph else count) / count
            times.append(self._slowest(taken, ranks))
        if graph is not None:
            graph.reset()
        return statistics.median(times)

    def _slowest(self, us: float, ranks: Ranks | None) -> float:
        if ranks is None:
            return us
        # All ranks must make equally many calls.
        told = torch.tensor([us], dtype=torch.float64, device=self.device)
        return float(ranks.all_gather(told, "times").max())

    def _timed(self, call: Callable[[], Any], count: int) -> float:
        if self.device.type == "cpu":
            start = time.perf_counter()
            for _ in range(count):
                call()
            return (time.perf_counter() - start) * 1e6
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(count):
            call()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) * 1e3

    def _products(self, seconds: float) -> tuple[float, float]:
        """10^12 operations per second of a bf16 product (fp32 on a CPU), and GB/s of reading memory."""
        kind = self.device.type
        rows, dtype = _PRODUCT[kind], torch.bfloat16 if kind == "cuda" else torch.float32
        left, right = (torch.randn(rows, rows, device=self.device).to(dtype) for _ in range(2))
        product = self._us(lambda: torch.matmul(left, right), seconds)
        values = torch.zeros(_SUM[kind] // 4, device=self.device)
        added = self._us(values.sum, seconds)
        return 2 * rows**3 / product / 1e6, _SUM[kind] / added / 1e3


#: From ranks, bytes and device: a call that sends a message, and its bytes.
Message = Callable[[Ranks, int, torch.device], tuple[Callable[[], Any], int]]


def _all_gather(ranks: Ranks, size: int, device: torch.device) -> tuple[Callable[[], Any], int]:
    each = _aligned(size, ranks.size - 1)
    sent = torch.zeros(each, dtype=torch.uint8, device=device)
    return lambda: ranks.all_gather(sent, "bytes"), each * (ranks.size - 1)


def _all_to_all(ranks: Ranks, size: int, device: torch.device) -> tuple[Callable[[], Any], int]:
    each = _aligned(size, ranks.size - 1)
    rows = torch.zeros(ranks.size, each, dtype=torch.uint8, device=device)
    return lambda: ranks.all_to_all(rows, "bytes"), each * (ranks.size - 1)


def _between_gpus(make: Callable[[Ranks, int, torch.device], tuple[Callable[[], Any], torch.Tensor, int]]) -> Message:
    def message(ranks: Ranks, size: int, device: torch.device) -> tuple[Callable[[], Any], int]:
        if device.type != "cuda":
            raise Unsupported(
                "stores to peers and loads are timed between GPUs alone: on a CPU they run in NumPy; run it on GPUs"
            )
        call, _, sent = make(ranks, size, device)
        return call, sent

    return message


def peer_call(ranks: Ranks, size: int, device: torch.device) -> tuple[Callable[[], Any], torch.Tensor, int]:
    """Return a call that stores rows of this rank's number + 1 at its peers and waits for theirs; the rows stored here,
    bf16 `[W, R, columns]` by rank; and the bytes sent."""
    memory, places = _rows_of_peers(ranks, size, device)
    here, addresses = memory.regions[0]
    world, count, columns = here.shape
    x = torch.full((len(places.owners), columns), ranks.rank + 1.0, dtype=here.dtype, device=device)

    def call() -> None:
        peer_ops.dispatch_push(x, places, addresses, num_rows=world * count, memory=here)
        memory.barrier(ranks, "bytes")

    return call, here, x.nbytes


def pull_call(ranks: Ranks, size: int, device: torch.device) -> tuple[Callable[[], Any], torch.Tensor, int]:
    """Return a call that waits for its peers and returns rows loaded from one after another, bf16 `[(W - 1) * R,
    columns]`; the rows that others load here, bf16 `[W, R, columns]`; and the bytes that a rank loads."""
    memory, _ = _rows_of_peers(ranks, size, device)
    here = memory.regions[0].own
    rows = [peer[: here.nbytes].view(here.dtype).view(here.shape)[ranks.rank] for peer in memory.peers]
    rows = rows[ranks.rank + 1 :] + rows[: ranks.rank]
    into = torch.cat(rows)

    def call() -> torch.Tensor:
        memory.barrier(ranks, "bytes")
        return torch.cat(rows, out=into)

    return call, here, into.nbytes


def _rows_of_peers(ranks: Ranks, size: int, device: torch.device) -> tuple[Symmetric, peer_ops.PeerPlaces]:
    """Memory `[W, R, columns]` by rank, and places of this rank's rows at its peers, `(W - 1) * R`, in turn."""
    peers, each = ranks.size - 1, _aligned(size, ranks.size - 1)
    columns = min(each, _ROW_BYTES) // torch.bfloat16.itemsize
    count = -(-each // _ROW_BYTES)
    memory = symmetric(ranks, (Part((ranks.size, count, columns), torch.bfloat16),), device)
    number = torch.arange(peers * count, dtype=torch.int32, device=device)[:, None]
    owners = (ranks.rank + 1 + number % peers) % ranks.size
    none = number[:1]
    return memory, peer_ops.PeerPlaces(owners.contiguous(), ranks.rank * count + number // peers, none, none)


def _aligned(size: int, peers: int) -> int:
    return max(1, -(-size // peers // _ALIGNMENT)) * _ALIGNMENT


MESSAGES: dict[str, Message] = {
    "all_gather": _all_gather,
    "all_to_all": _all_to_all,
    "peer": _between_gpus(peer_call),
    "peer_pull": _between_gpus(pull_call),
}
_PEERS = {"peer", "peer_pull"}
#: Default of `moebius-tune --links`.
SIZES: dict[str, Sequence[int]] = {
    "nccl": tuple(4**power for power in range(5, 15)),
    "gloo": tuple(4**power for power in range(5, 12)),
}
