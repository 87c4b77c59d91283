"""Compile on CPU cores, without a GPU, the kernels that ranks run: benchmarks.parallel does it before it starts them.

    python -m benchmarks.parallel_ahead [--ranks 2] [--parts hosts,recipe]      # of benchmarks.parallel_uses

Ranks that wait in NCCL while another compiles waste their GPUs. Here calls run on a CPU with plans for an H200 and
kernels that do nothing. Operators that say how many rows travel run as the NumPy reference. Messages pretend that every
rank sends the rows of this one. Every job is a process with workers, which fill Triton's cache.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import math
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks import parallel_rank, parallel_uses
from benchmarks.parallel_cell import Cell
from benchmarks.shapes import ALL_SHAPES, Shape
from moe_core.base import Target
from moe_core.base.recent import forget_plans
from moe_core.plan.steps import KernelLaunch, LaunchPlan
from moe_core.runtime.compiler import compile_launch
from moe_core.runtime.warmup import distinct_kernels
from moe_core.specs.operands import ExpertWeights
from moe_torch.bridge import operator
from moe_torch.bridge.operator import Operator
from moe_torch.bridge.ready import Ready
from moe_torch.parallel import ExpertParallel
from moe_torch.parallel.group import _EQUALLY, Ranks, Way
from moe_torch.parallel.peer import symmetric
from moe_torch.parallel.peer.counted import CountedRoutes
from moe_torch.parallel.peer.direct import DirectRoutes

_TARGET = Target("cuda", 90, 132)
#: Operators whose results the host reads, or that make them.
_REAL = {"route", "send_tables", "receive_tables", "make_layout", "layout_of_runs", "physical_ids"}
#: Arguments beyond these bytes are never computed with.
_MOST_BYTES = 1 << 26
Kernels = list[tuple[LaunchPlan, KernelLaunch]]


class _Idle:
    """A plan that runs nothing, or the reference in its stead."""

    def __init__(self, plan: LaunchPlan, reference: Any) -> None:
        self.plan, self.reference = plan, reference

    def __call__(self, pointers: Any, stream: int, steps: slice | None = None) -> None:
        if self.reference is not None:
            self.reference(pointers, stream, steps)


class _Memory(symmetric.Symmetric):
    def barrier(self, ranks: Ranks, what: str) -> None:
        """All stand for this rank."""


def _allocate(ranks: Ranks, parts: tuple[symmetric.Part, ...], device: torch.device) -> symmetric.Symmetric:
    memory = torch.empty(max(256, sum(part.bytes for part in parts)), dtype=torch.uint8)
    return _Memory([memory] * ranks.size, parts, ranks.rank, None)


def _all_gather(ranks: Ranks, values: torch.Tensor, what: str) -> Callable[[], torch.Tensor]:
    return lambda: values.expand(ranks.size, *values.shape).contiguous()


def _all_to_all(
    ranks: Ranks, rows: torch.Tensor, what: str, way: Way = _EQUALLY, into: torch.Tensor | None = None
) -> Callable[[], torch.Tensor]:
    if into is not None:
        return lambda: into
    if way.received is None:
        own = rows.view(ranks.size, -1, *rows.shape[1:])[ranks.rank]
        return lambda: own.repeat(ranks.size, *[1] * (rows.dim() - 1))
    size = (max(sum(way.received), way.memory or 0), *rows.shape[1:])
    few = math.prod(size) * rows.itemsize < _MOST_BYTES
    return lambda: rows.new_zeros(size) if few else rows.new_empty(size)


@contextlib.contextmanager
def recorded() -> Iterator[list[LaunchPlan]]:
    """Calls add their plans for a GPU to the list, and run nothing. Needs a process group of the backend `fake`."""
    plans: list[LaunchPlan] = []
    real, count = Operator.ready, CountedRoutes._count

    def ready(self: Any, arguments: Any, names: Any = (), *, first: bool = False) -> Ready:
        size, reference = sum(one.nbytes for one in arguments[:-1] if one is not None), None
        if self.name.partition(".")[0] in _REAL and size < _MOST_BYTES:
            with mock.patch.object(operator, "target_of_device", lambda _: Target("reference")):
                reference = real(self, arguments, names, first=first)

        def prepare(plan: LaunchPlan, index: int) -> Any:
            plans.append(plan)
            return _Idle(plan, None if reference is None else reference.prepared)

        with mock.patch.multiple(operator, target_of_device=lambda _: _TARGET, prepare=prepare):
            made = real(self, arguments, names, first=first)
        # Memory is as large as the computed plan's.
        return made if reference is None else dataclasses.replace(reference, prepared=made.prepared)

    def counted(self: Any, places: torch.Tensor) -> None:
        count(self, places)
        self.group_tokens = self.ranks.size * self.tokens

    def randn(*size: Any, generator: Any = None, **options: Any) -> torch.Tensor:
        return torch.empty(*size, **options)

    calls = "moe_torch.parallel"
    with contextlib.ExitStack() as stack:
        patch = stack.enter_context
        patch(mock.patch.object(Operator, "ready", ready))
        patch(mock.patch.multiple(Ranks, start_all_gather=_all_gather, start_all_to_all=_all_to_all))
        patch(mock.patch.object(Ranks, "total", lambda self, values, what: values))
        patch(mock.patch.object(Ranks, "compare", lambda self, told, **options: int(told[:, 3].sum())))
        patch(mock.patch.object(CountedRoutes, "_count", counted))
        patch(mock.patch.object(symmetric, "_allocate", _allocate))
        patch(mock.patch.object(DirectRoutes, "group_tokens", property(lambda self: self.ranks.size * self.tokens)))
        for module in ("forward", "calls.counted"):
            patch(mock.patch(f"{calls}.{module}.require_room", lambda *_: None))
        patch(mock.patch.object(torch, "randn", randn))
        yield plans


def _bench(shape: Shape) -> Any:
    sizes, count = shape.matrices(), shape.num_experts
    bias = {"gate_up_bias": 2 * shape.d_ff, "down_bias": shape.d_model} if shape.biased else {}
    biases = {name: torch.empty(count, width) for name, width in bias.items()}
    weights = ExpertWeights(*(torch.empty(size, dtype=torch.bfloat16) for size in sizes), **biases)
    bench = SimpleNamespace(rank=0, size=dist.get_world_size(), device=torch.device("cpu"), seed=0)
    bench.group = dist.group.WORLD
    bench.weights, bench.is_gpu, bench.take, bench.free = weights, False, lambda _: None, lambda: None
    return bench


def measured(cell: Cell) -> None:
    """Run all that `parallel_rank.Bench.measure` runs."""
    with torch.set_grad_enabled(cell.training):
        problem = parallel_rank._Problem(_bench(cell.shape), cell)
        for call in (problem.together, problem.alone, problem.owner_call()):
            problem.step(call)()
        problem.together()
        problem.alone(as_in_a_group=True)


class _Uses(parallel_uses.Uses):
    def us(self, call: Callable[[], Any]) -> float:
        call()
        return 1.0

    def everywhere(self, good: bool) -> bool:
        return True

    def total(self, value: int) -> int:
        return value


def use(part: str, shape: Shape, tokens: int) -> None:
    """Run a part of parallel_uses without FSDP."""
    options = SimpleNamespace(shapes=[shape], tokens=[tokens], modes=("all_to_all", "peer"))
    for _ in parallel_uses.PARTS_BY_NAME[part](_Uses(_bench(shape), options)):
        pass


def recipe(shape: Shape, tokens: int, together: bool) -> None:
    """Run the layers of `parallel_uses.training`, as on two ranks or alone."""
    mesh = DeviceMesh("cpu", torch.arange(dist.get_world_size()).view(-1, 2), mesh_dim_names=("efsdp", "ep"))
    parallel = ExpertParallel(mesh["ep"], gradients="mean") if together else None
    block = parallel_uses.Block(shape, torch.device("meta"), parallel).to_empty(device="cpu").bfloat16()
    x = torch.zeros(tokens, shape.d_model, dtype=torch.bfloat16)
    # The first block's input asks for no gradient.
    for rows in (x, x.clone().requires_grad_()):
        block.moe(torch.nn.functional.rms_norm(rows, rows.shape[-1:])).float().square().mean().backward()


def kernels_of(runs: Sequence[Callable[[], None]], ranks: int = 4) -> Kernels:
    """The kernels of calls, each once, as rank 0 of a process group that is made for them."""
    # Known plans are not made again, and those made here run nothing.
    forget_plans()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        with recorded() as plans:
            for run in runs:
                run()
    finally:
        dist.destroy_process_group()
        forget_plans()
    return distinct_kernels(plan for plan in plans if plan.target.on_gpu)


def _compile(kernel: tuple[LaunchPlan, KernelLaunch]) -> None:
    plan, launch = kernel
    compile_launch(plan, launch, plan.target)


def _job(name: str, runs: Sequence[Callable[[], None]], ranks: int, workers: int) -> None:
    torch.set_num_threads(2)
    began, kernels = time.monotonic(), kernels_of(runs, ranks)
    planned = time.monotonic() - began
    # Launches hold what no pipe carries, so workers have them from the fork. The slowest begin.
    kernels.sort(key=lambda kernel: ".sm90." not in kernel[1].kernel.name)
    failed = _failed((lambda n: [*map(_compile, kernels[n::workers])], (n,)) for n in range(workers))
    print(f"{name}: {len(kernels)} kernels, {planned:.0f} s to plan, {time.monotonic() - began:.0f} s", flush=True)
    sys.exit(failed)


def _failed(calls: Iterable[tuple[Callable[..., Any], tuple[Any, ...]]]) -> int:
    """How many of some calls, each in a process, fail."""
    context = multiprocessing.get_context("fork")
    running = [context.Process(target=call, args=arguments) for call, arguments in calls]
    for process in running:
        process.start()
    for process in running:
        process.join()
    return sum(process.exitcode != 0 for process in running)


def compile_ahead(jobs: Mapping[str, Sequence[Callable[[], None]]], ranks: int, workers: int = 8) -> int:
    """Compile what calls run, a process and its workers for each list of them. Returns the number of lists that failed.
    Must run before a GPU is used."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    return _failed((_job, (name, runs, ranks, workers)) for name, runs in jobs.items())


def main(arguments: Sequence[str] | None = None) -> int:
    """Compile what the README's commands of parallel_uses run."""
    jobs = {
        part: [functools.partial(use, part, ALL_SHAPES["qwen3"], 4096)] for part in ("hosts", "batches", "adapters")
    }
    jobs["recipe"] = [functools.partial(recipe, ALL_SHAPES["granite"], 1024, together) for together in (True, False)]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default=",".join(jobs), help="(default: %(default)s)")
    parser.add_argument("--ranks", type=int, default=4, help="(default: %(default)s)")
    options = parser.parse_args(arguments)
    return compile_ahead({part: jobs[part] for part in options.parts.split(",")}, options.ranks)


if __name__ == "__main__":
    sys.exit(main())
