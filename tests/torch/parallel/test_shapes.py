"""Calls with other numbers of tokens: kernels that are compiled once, and memory that the plan says."""

from __future__ import annotations

import dataclasses
from typing import Any
from unittest import mock

import numpy as np
import pytest

pytest.importorskip("torch")

from moe_core.base.recent import forget_plans
from moe_core.base.target import Target
from moe_core.parallel import ExchangeSpec
from moe_core.plan.steps import KernelLaunch
from moe_core.runtime.warmup import kernel_identity
from moe_torch.bridge.operator import Operator
from tests.support.parallel.memory import Allocated, allocated, most_on_a_cpu, planned_peak
from tests.support.parallel.placements import placement_of
from tests.support.parallel.pool import Pool, ranks
from tests.support.parallel.torch import run_rank
from tests.support.parallel.twins import PLAIN, Problem, draw_problem
from tests.support.parallel.ways import PEER, TORCH_WAYS, every_torch_way, over
from tests.support.torch import running_on

__all__ = ["ranks"]


LOADS = ("random", "hot_rank", "hot_expert", "empty_rank")
#: Numbers of tokens of a warm-up, with every load and each rank without rows, and of the calls after it, all different.
WARM, SIZES = (200, 399) * 6, tuple(np.random.default_rng(0).permutation(np.arange(200, 400)).tolist())


def kernels_of_calls(group: Any, sizes: tuple[int, ...], way: ExchangeSpec, differentiated: bool) -> list[int]:
    """How many kernels a GPU has compiled after each call with so many tokens a rank.

    Every operator of a call is planned for an H100 too: a kernel is compiled for each `kernel_identity` that is new.
    """
    kernels: set[Any] = set()
    plans: list[Any] = []
    real = Operator.plan

    def planned(self: Operator, arguments: Any, target: Target) -> Any:
        plans.append(real(self, arguments, Target("cuda", 90, 132)))
        return real(self, arguments, target)

    forget_plans()
    counts, placement = [], placement_of("round_robin", 6, 2)
    with mock.patch.object(Operator, "plan", planned):
        for number, tokens in enumerate(sizes):
            load = LOADS[number % len(LOADS)]
            problem = draw_problem(number, placement, (tokens, tokens), 3, load, "bfloat16", PLAIN, sizes=(16, 16))
            run_rank(group, problem, way, "reference", differentiated, None)
            assert plans or tokens in sizes[:number], "another number of tokens is planned anew"
            for plan in plans:
                kernels |= {kernel_identity(plan, step) for step in plan.steps if isinstance(step, KernelLaunch)}
            plans.clear()
            counts.append(len(kernels))
    return counts


@every_torch_way
def test_other_numbers_of_tokens_compile_no_other_kernel(ranks: Pool, way: ExchangeSpec) -> None:
    """200 of them forward with the default way, and some with a backward with the others."""
    many = way == ExchangeSpec()
    sizes = (*WARM, *(SIZES if many else SIZES[:12]))
    for counts in ranks.call(kernels_of_calls, [(sizes, way, not many)] * 2):
        assert counts[0] > (5 if many else 10)
        np.testing.assert_array_equal(counts[len(WARM) :], counts[len(WARM) - 1])


def allocated_on_a_cpu(group: Any, problem: Problem, way: ExchangeSpec) -> Allocated:
    with running_on("reference"):
        return allocated(group, problem, way, "cpu", most_on_a_cpu)


@over((*TORCH_WAYS, *(dataclasses.replace(way, chunks=4) for way in PEER)))
def test_a_call_allocates_what_the_plan_says(ranks: Pool, way: ExchangeSpec) -> None:
    placement = placement_of("round_robin", 6, 2)
    problem = draw_problem(3, placement, (256, 256), 3, "hot_expert", "bfloat16", PLAIN, sizes=(768, 16))
    for found in ranks.call(allocated_on_a_cpu, [(problem, way)] * 2):
        np.testing.assert_allclose(found.peak, planned_peak(problem, way, found), 0.05)
