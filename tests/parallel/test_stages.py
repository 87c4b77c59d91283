"""`dispatch` and `combine` of `moe_torch.parallel`: two micro-batches that overlap, with the bits of `moe`."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest

pytest.importorskip("torch")

import torch

import moe_torch
from moe_core.parallel import ExchangeSpec
from moe_core.specs import Tuning
from moe_core.specs.operands import TopK
from moe_torch.parallel import ExpertParallel, combine, dispatch
from moe_torch.parallel.group import Ranks
from moe_torch.parallel.stages import Arrived
from tests.support.parallel.placements import placement_of
from tests.support.parallel.pool import Pool, ranks
from tests.support.parallel.torch import broken, run_group, trained
from tests.support.parallel.twins import LOADS, PLAIN, Problem, draw_problem
from tests.support.torch import running_on, to_numpy, to_torch

__all__ = ["ranks"]

WAYS = (
    ExchangeSpec(),
    ExchangeSpec(rows="slots"),
    ExchangeSpec("padded"),
    ExchangeSpec("all_gather"),
    ExchangeSpec(receive=4, on_overflow="drop"),
)


def overlapped(
    group: Any, problems: tuple[Problem, ...], way: ExchangeSpec, fault: str | None
) -> tuple[list[dict[str, Any]], list[str]]:
    """Results and gradients of a rank for each micro-batch, and its calls in order.

    All rows leave first. While those of a micro-batch travel, experts compute the one before it.
    """
    rank, calls, real = torch.distributed.get_rank(group), [], Ranks._start

    def start(self: Ranks, kind: str, what: str, *message: Any) -> Any:
        wait = real(self, kind, what, *message)
        calls.append(f"start {what}")

        def waited() -> Any:
            calls.append(f"wait {what}")
            return wait()

        return waited

    sent, homing, leaves, outputs, results = [], [], [], [], []
    with running_on("reference"), mock.patch.object(Ranks, "_start", start), broken(fault):
        for number, problem in enumerate(problems):
            one = problem.ranks()[rank]
            x, experts, routing, mask = to_torch((one.x, one.experts, one.routing, one.token_mask))
            leaves.append({"x": x.requires_grad_()} | {f"experts.{k}": v for k, v in trained(experts).items()})
            leaves[-1]["routing.weights"] = routing.weights.requires_grad_()
            parallel = ExpertParallel(group, way)
            options: Any = {"parallel": parallel, "placement": problem.placement, "token_mask": mask}
            sent.append((dispatch(x, routing.ids, routing.weights, **options, number=number), experts, problem))
        for dispatching, experts, problem in sent:
            begun = len(calls)
            arrived = dispatching.wait()
            assert not any(call.startswith("start") for call in calls[begun:]), "ranks may wait in any order"
            calls.append("experts")
            routing = TopK(arrived.ids, arrived.weights)
            found = moe_torch.moe(arrived.rows, experts, routing, arrived.spec(problem.spec)).output
            homing.append(combine(found, arrived))
        outputs = [one.wait() for one in homing]
        forward = list(calls)
        d_outputs = [to_torch(problem.gradients()[rank].output) for problem in problems]
        torch.autograd.backward(outputs, d_outputs)
    for output, arrays in zip(outputs, leaves, strict=True):
        results.append({"output": to_numpy(output.detach())} | {f"d_{k}": to_numpy(v.grad) for k, v in arrays.items()})
    return results, forward


def problems_of(load: str, dtype: str, tokens: tuple[int, ...] = (7, 7)) -> tuple[Problem, ...]:
    placement = placement_of("round_robin", 6, len(tokens))
    return tuple(draw_problem(seed, placement, tokens, 3, load, dtype, PLAIN) for seed in range(2))


def differences(pool: Pool, problems: tuple[Problem, ...], way: ExchangeSpec, fault: str | None = None) -> list[str]:
    """Names of results with other bits than those of `moe`."""
    found = pool.call(overlapped, [(problems, way, fault)] * len(problems[0].tokens))
    wrong = []
    for number, problem in enumerate(problems):
        whole = run_group(pool, problem, way)
        for name in found[0][0][number]:
            if not name.startswith("d_experts."):
                joined = np.concatenate([rank[number][name] for rank, _ in found])
                wrong += [] if joined.tobytes() == whole[name].tobytes() else [f"{name} of {number}"]
                continue
            for rank, experts in enumerate(problem.placement.owners):
                for local, expert in enumerate(experts):
                    same = found[rank][0][number][name][local].tobytes() == whole[name][expert].tobytes()
                    wrong += [] if same else [f"{name} of {number}"]
    return wrong


@pytest.mark.parametrize("way", WAYS, ids=lambda way: f"{way.mode}-{way.rows}-{way.receive}")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_micro_batches_that_overlap_have_the_bits_of_moe(ranks: Pool, way: ExchangeSpec, dtype: str) -> None:
    for load in LOADS if dtype == "float32" and way == WAYS[0] else ("random", "hot_rank"):
        assert not differences(ranks, problems_of(load, dtype), way), load


def test_tiles_are_for_the_rows_of_all_ranks() -> None:
    """Each of 14 tokens brings a row for each of its 3 experts, or one with all of its ids."""
    routes: Any = SimpleNamespace(group_tokens=14)
    routes.call = SimpleNamespace(plan=SimpleNamespace(placement=placement_of("linear", 6, 2)))
    some, wide = torch.zeros(5, 1), torch.zeros(5, 3)
    for array, tuning, rows in ((some, None, 42), (wide, None, 14), (some, Tuning(expected_tokens=8), 24)):
        arrived = Arrived(some, array.int(), array, some, routes, 3)
        made = arrived.spec(dataclasses.replace(PLAIN, tuning=tuning))
        assert made.tuning == Tuning(expected_tokens=rows, expected_experts=6)


def test_ranks_without_tokens_take_part(ranks: Pool) -> None:
    assert not differences(ranks, problems_of("random", "float32", (5, 0, 3)), ExchangeSpec())


@pytest.mark.parametrize("fault", ["wrong_place", "permuted_weights", "gradient_not_returned", "counts_off_by_one"])
def test_planted_faults_change_the_bits(ranks: Pool, fault: str) -> None:
    assert differences(ranks, problems_of("random", "float32"), ExchangeSpec(), fault)


@pytest.mark.parametrize("way", WAYS[:3], ids=lambda way: f"{way.mode}-{way.rows}")
def test_rows_travel_while_experts_compute(ranks: Pool, way: ExchangeSpec) -> None:
    """Rows of both micro-batches leave before the first experts, and results of the first before the second's."""
    for _, calls in ranks.call(overlapped, [(problems_of("random", "float32"), way, None)] * 2):
        starts, waits, experts, results = (
            [at for at, call in enumerate(calls) if call == wanted]
            for wanted in ("start rows", "wait rows", "experts", "start results")
        )
        assert len(starts) == len(waits) == len(experts) == len(results) == 2
        assert starts[1] < waits[0] < experts[0] < results[0] < waits[1] < experts[1] < results[1]
        assert calls.index("wait results") > results[1]


def refused(group: Any, change: str) -> str:
    problem = problems_of("random", "float32")[0]
    one, rank = problem.ranks()[torch.distributed.get_rank(group)], torch.distributed.get_rank(group)
    x, routing = to_torch((one.x, one.routing))
    options: dict[str, Any] = {"placement": problem.placement, "parallel": ExpertParallel(group)}
    options["parallel"] = {
        "peer": lambda: ExpertParallel(group, ExchangeSpec("peer"), max_tokens=9),
        "mean": lambda: ExpertParallel(group, gradients="mean"),
        "tokens": lambda: ExpertParallel(group, max_tokens=3),
    }.get(change, lambda: options["parallel"])()
    options |= {"placement": placement_of("linear", 6, 3)} if change == "placement" else {}
    options |= {"number": rank} if change == "number" else {}
    ids = routing.ids[:-1] if change == "ids" or (change == "one rank" and rank) else routing.ids
    with running_on("reference"):
        try:
            sent = dispatch(x[0] if change == "x" else x, ids, routing.weights, **options)
            arrived = sent.wait()
            if change == "twice":
                sent.wait()
            rows = arrived.rows[:-1] if change == "rows" else arrived.rows
            home = combine(rows, arrived)
            home.wait()
            home.wait()
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    return ""


REFUSED = {
    "peer": "Unsupported: exchange.mode='peer' of parallel cannot be had in dispatch; pass 'all_to_all' or 'padded'",
    "mean": "Unsupported: gradients='mean' of parallel cannot be had in dispatch; pass 'sum'",
    "tokens": "InvalidInput: x must have at most max_tokens = 3 tokens, got 7",
    "placement": "InvalidInput: placement must be of the 2 ranks of the mesh",
    "x": "InvalidInput: x must be bf16, fp16 or fp32 [T, D], got torch.float32 [12]",
    "ids": "InvalidInput: routing.ids",
    "rows": "InvalidInput: rows must be torch.float32 [",
    "twice": "InvalidInput: wait must be called once for each dispatch",
    "home": "InvalidInput: wait must be called once for each combine",
    "number": "InvalidInput: ",
}


@pytest.mark.parametrize("change", REFUSED)
def test_what_is_refused(ranks: Pool, change: str) -> None:
    for said in ranks.call(refused, [(change,)] * 2):
        assert said.startswith(REFUSED[change]), said


def test_other_ranks_are_told_of_a_failure(ranks: Pool) -> None:
    first, second = ranks.call(refused, [("one rank",)] * 2)
    assert first.startswith("PeerFailed: ") and second.startswith("InvalidInput: ")
