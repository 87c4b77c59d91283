"""What an expert-parallel call of torch allocates, beside what its plan says."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

from moe_core.base.recent import forget_plans
from moe_core.parallel import ExchangeSpec, plan_exchange
from moe_core.parallel.exchange import owners_of, physical_ids
from moe_torch.bridge import eager
from moe_torch.bridge.operator import Operator
from moe_torch.parallel import ExpertParallel
from moe_torch.parallel import moe as parallel_moe
from moe_torch.parallel.calls import joined
from moe_torch.parallel.group import Ranks
from tests.support.parallel.twins import Problem
from tests.support.torch import to_torch


class Allocated(NamedTuple):
    """peak: bytes at once at most; scratch: of the owner's op."""

    rank: int
    peak: int
    scratch: int


def most_on_a_cpu(call: Callable[[], Any], mode: str) -> int:
    """The most bytes at once: every allocation of torch's is in a profile. gloo's threads may hold what has been sent
    for a moment longer, so messages end a little later, and the least of some calls counts. Those
    of mode `peer` have no messages. The first one is remembered, and the others are like it."""
    start = Ranks._start

    def patient(*arguments: Any) -> Callable[[], torch.Tensor]:
        wait = start(*arguments)

        def waited() -> torch.Tensor:
            result = wait()
            time.sleep(0.005)
            return result

        return waited

    with mock.patch.object(Ranks, "_start", patient):
        peaks = [_once_on_a_cpu(call) for _ in range(8)]
    return max(peaks) if mode == "peer" else min(peaks)


def most_on_a_gpu(call: Callable[[], Any], mode: str) -> int:
    """Of a call that is remembered and, in mode `peer`, of one like it."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    for _ in range(1 + (mode == "peer")):
        kept = call()
        torch.cuda.synchronize()
        assert kept is not None
        del kept
    return torch.cuda.max_memory_allocated() - before


def _once_on_a_cpu(call: Callable[[], Any]) -> int:
    # Calls that are watched, or on a CPU, would not repeat known ones, as calls on a GPU do.
    plain = mock.patch.object(eager, "plain_thread", lambda: True)
    devices = mock.patch.object(joined, "DEVICES", {"cpu"})
    with plain, devices, profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        kept = call()
    profiler: Any = profiled.profiler
    events = profiler.kineto_results.events()
    changes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    assert kept is not None
    return max(itertools.accumulate(size for _, size in changes))


def allocated(
    group: Any,
    problem: Problem,
    way: ExchangeSpec,
    device: Any,
    most: Callable[..., int],
    grid: tuple[Any, Any] | None = None,
) -> Allocated:
    """Of a forward of a rank without gradients. most: the most bytes that a call has allocated at once. grid: operands
    and the tensor axis of a rank that has slices of experts."""
    rank = torch.distributed.get_rank(group)
    own: Any = problem.ranks()[rank] if grid is None else grid[0]
    x, experts, routing = to_torch((own.x, own.experts, own.routing), device)
    parallel = ExpertParallel(group, way, problem.tokens[0], tensor=grid and grid[1])
    scratch, real = [], Operator.ready

    def observed(self: Operator, *arguments: Any, **options: Any) -> Any:
        found = real(self, *arguments, **options)
        if self.name.startswith(("moe.", "experts_")):
            scratch.append(found.prepared.plan.scratch_bytes)
        return found

    def call() -> Any:
        return parallel_moe(x, experts, routing, problem.spec, parallel=parallel, placement=problem.placement)

    forget_plans()
    with torch.no_grad():
        with mock.patch.object(Operator, "ready", observed):
            call()
        return Allocated(rank, most(call, way.mode), max(scratch))


def planned_peak(problem: Problem, way: ExchangeSpec, found: Allocated) -> int:
    """What the plan says, of counts where the host knows them."""
    placement, ids = problem.placement, problem.routing.ids
    plan = plan_exchange(
        problem.tokens[0], ids.shape[1], problem.x.shape[1], problem.x.dtype.name, placement, way, training=False
    )
    if way.mode != "all_to_all":
        # What ranks share is made once, and not by a call.
        shared = sum(buffer.bytes for buffer in plan.buffers if buffer.symmetric)
        return plan.peak(scratch=found.scratch) - shared
    here = owners_of(physical_ids(ids, placement).places, placement.per_rank) == found.rank
    assert len(set(problem.tokens)) == 1
    return plan.peak(*counts_of(here, found.rank, problem.tokens[0], way), scratch=found.scratch)


def counts_of(here: np.ndarray, rank: int, tokens: int, way: ExchangeSpec) -> tuple[int, int, int]:
    """Rows and slots that an owner receives, and slots of its own tokens. here bool `[W * tokens, K]`: of slots."""
    slots = int(here.sum())
    own = int(here[rank * tokens : (rank + 1) * tokens].sum())
    return slots if way.rows == "slots" else int(here.any(axis=1).sum()), slots, own
