"""Four processes that are the ranks of gloo groups, started once for all tests of a process."""

from __future__ import annotations

import multiprocessing
import os
import pathlib
import tempfile
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import pytest

MOST_RANKS = 4
#: What ranks that load models, compile or shard would import each for itself, for up to seven seconds.
_IMPORTED = [f"transformers.models.{name}.modeling_{name}" for name in ("mixtral", "gpt_oss")]
_IMPORTED += ["torch._dynamo", "torch.distributed.fsdp"]
#: Seconds until a call of the ranks counts as hanging, and until gloo gives up. Ranks on GPUs compile kernels first.
TIMEOUT, GLOO_TIMEOUT, GPU_TIMEOUT = 60, 40, 120
#: More groups than a call makes.
_GROUPS = 1000
#: Ranks that share the first GPU, over gloo in place of NCCL: for bits of compiled kernels where there is but one GPU.
SHARING = int(os.environ.get("MOEBIUS_RANKS_ON_A_GPU", "0"))


def require_captured(mode: str) -> None:
    """Skip a test of CUDA graphs whose messages are gloo's, which no graph has."""
    if SHARING and mode != "peer":
        pytest.skip("gloo's messages are no part of a CUDA graph")


def ranks_with_gpus() -> int:
    """How many ranks of "nccl" this machine has GPUs for, or are to share one."""
    import torch

    return SHARING or torch.cuda.device_count()


def _serve(rank: int, ranks: int, store: str, pipe: Any, backend: str, timeout: float) -> None:
    import datetime

    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    options: Any = {"timeout": datetime.timedelta(seconds=timeout)}
    if backend == "nccl" and SHARING:
        os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
        torch.cuda.set_device(0)
        backend = "gloo"
    elif backend == "nccl":
        torch.cuda.set_device(rank)
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=ranks, **options)
    groups = {size: dist.new_group(list(range(size)), **options) for size in range(1, ranks + 1)}
    pipe.send("ready")
    while (call := pipe.recv()) is not None:
        function, size, arguments, *first = call
        if first:  # torch names groups by a count, and ranks that made some without the others would wait for ever
            dist.distributed_c10d._world.group_count = first[0]
        try:
            pipe.send((True, function(groups[size], *arguments)))
        except BaseException as error:
            pipe.send((False, (type(error).__name__, str(error), traceback.format_exc())))
    os._exit(0)


class Failed(AssertionError):
    """A rank raised. errors: (name of the class, text) by rank."""

    def __init__(self, errors: dict[int, tuple[str, str]], text: str) -> None:
        super().__init__(text)
        self.errors = errors


class Pool:
    """Ranks that call functions. timeout: of messages, in seconds; None = as the backend needs."""

    def __init__(self, ranks: int = MOST_RANKS, timeout: float | None = None, backend: str = "gloo") -> None:
        if timeout is None:
            timeout = GLOO_TIMEOUT if backend == "gloo" else GPU_TIMEOUT
        self.limit = max(TIMEOUT, timeout + TIMEOUT - GLOO_TIMEOUT)
        # Forks of a process that has imported everything and has run nothing; a GPU's driver survives no fork.
        context: Any = multiprocessing.get_context("forkserver" if backend == "gloo" else "spawn")
        if backend == "gloo":
            context.set_forkserver_preload(["tests.support.parallel.torch", *_IMPORTED])
        self.folder = tempfile.TemporaryDirectory()
        store = str(pathlib.Path(self.folder.name) / "store")
        self.pipes, self.processes, self.calls = [], [], 0
        for rank in range(ranks):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(rank, ranks, store, there, backend, timeout), daemon=True)
            process.start()
            there.close()
            self.pipes.append(here)
            self.processes.append(process)
        for pipe in self.pipes:
            assert pipe.poll(120) and pipe.recv() == "ready", "a rank does not start"

    def start(self, function: Callable[..., Any], arguments: Sequence[Sequence[Any]]) -> None:
        """Begin `function(group, *arguments[rank])` on as many ranks as there are arguments."""
        self.calls += 1
        for rank, given in enumerate(arguments):
            self.pipes[rank].send((function, len(arguments), tuple(given), _GROUPS * self.calls))

    def result(self, rank: int, timeout: float | None = None) -> tuple[bool, Any]:
        """(whether it returned, what it returned or its error); a rank that is gone has raised `Gone`."""
        pipe, timeout = self.pipes[rank], self.limit if timeout is None else timeout
        if not pipe.poll(timeout):
            self.close()
            raise AssertionError(f"rank {rank} hangs: nothing after {timeout} s")
        try:
            return pipe.recv()
        except EOFError:
            return False, ("Gone", f"the process of rank {rank} is gone", "")

    def call(self, function: Callable[..., Any], arguments: Sequence[Sequence[Any]]) -> list[Any]:
        """The results of all ranks. Raises Failed where one raised."""
        self.start(function, arguments)
        found = [self.result(rank) for rank in range(len(arguments))]
        wrong = {rank: error for rank, (good, error) in enumerate(found) if not good}
        if wrong:
            text = "\n".join(f"rank {rank}: {trace}" for rank, (*_, trace) in wrong.items())
            raise Failed({rank: error[:2] for rank, error in wrong.items()}, text)
        return [value for _, value in found]

    def close(self) -> None:
        for process in self.processes:
            process.kill()
        for process, pipe in zip(self.processes, self.pipes, strict=True):
            process.join(10)
            pipe.close()
        self.folder.cleanup()

    def works(self) -> bool:
        """Whether all ranks answer."""
        try:
            return self.call(_nothing, [()] * len(self.processes)) == [None] * len(self.processes)
        except (AssertionError, OSError):
            return False


def _nothing(group: Any) -> None:
    """What a rank that lives can do."""


_shared: list[Pool] = []


@pytest.fixture(scope="module")
def ranks() -> Pool:
    """The pool of all modules of a process; a new one where a test left ranks that no longer answer."""
    if not (_shared and _shared[0].works()):
        for pool in _shared:
            pool.close()
        _shared[:] = [Pool()]
    return _shared[0]
