"""Forwards of mode `peer` whose tokens have places of their own, against one device, bit by bit."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from typing import Any
from unittest import mock

import numpy as np
import pytest

pytest.importorskip("torch")

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint

from moe_core.parallel import ExchangeSpec
from moe_core.specs.tuning import Tuning
from moe_torch.parallel.peer import direct
from moe_torch.parallel.peer.symmetric import Symmetric
from moe_torch.parallel.route import ExchangeCall
from tests.support.parallel.peer import CHUNK_FAULTS, DIRECT_FAULTS
from tests.support.parallel.placements import placement_of
from tests.support.parallel.pool import Pool, ranks
from tests.support.parallel.torch import compare_with_one_device, parallel_moe, parallel_of, trained
from tests.support.parallel.twins import LOADS, PLAIN, Problem, draw_problem
from tests.support.parallel.ways import require_same
from tests.support.strategies import seeds
from tests.support.torch import REAL_KERNELS, running_on, to_torch

__all__ = ["ranks"]

DIRECT = ExchangeSpec("peer")
#: placement, E, W, tokens of ranks, K
SIZES = (
    ("linear", 6, 4, (5, 5, 5, 5), 3),
    ("round_robin", 7, 4, (9, 0, 3, 1), 3),
    ("balanced", 7, 3, (6, 6, 6), 2),
    ("linear", 8, 2, (1, 1), 4),
    ("round_robin", 5, 3, (0, 1, 0), 2),
    ("linear", 3, 4, (3, 3, 3, 3), 1),
    ("balanced", 4, 1, (7,), 2),
    ("linear", 2, 2, (0, 0), 2),
)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_bit_of_one_device(ranks: Pool, dtype: str) -> None:
    for seed, load in enumerate(LOADS):
        for number in range(seed % 2, len(SIZES), 2):
            kind, experts, size, tokens, top_k = SIZES[number]
            placement = placement_of(kind, experts, size, number)
            problem = draw_problem(seed, placement, tokens, top_k, load, dtype, PLAIN, sizes=(16, 8))
            label = f"{placement}, {load}, {tokens}"
            compare_with_one_device(ranks, problem, DIRECT, label, differentiated=False)


@given(seed=seeds(), chunks=st.sampled_from((1, 1, 2)), dtype=st.sampled_from(("float32", "bfloat16")))
def test_drawn_problems(ranks: Pool, seed: int, chunks: int, dtype: str) -> None:
    """BLAS adds up one row in another order than several, so chunks are compared batch-invariantly."""
    random = np.random.default_rng(seed)
    size, experts, top_k = (int(random.integers(1, most)) for most in (5, 10, 5))
    placement = placement_of(("linear", "round_robin", "balanced")[seed % 3], experts, size, seed % 99)
    tokens, load = tuple(random.integers(0, 9, size).tolist()), LOADS[seed % len(LOADS)]
    spec = PLAIN if chunks == 1 else dataclasses.replace(PLAIN, tuning=Tuning(batch_invariant=True))
    problem = draw_problem(seed, placement, tokens, top_k, load, dtype, spec, sizes=(16, 8))
    way, label = dataclasses.replace(DIRECT, chunks=chunks), f"{placement}, {load}, {tokens}"
    compare_with_one_device(ranks, problem, way, label, differentiated=False)


@pytest.mark.skipif(REAL_KERNELS != "interpreter", reason="gloo ranks run kernels in the interpreter alone")
@pytest.mark.parametrize("number, dtype", [(0, "bfloat16"), (1, "float32"), (2, "bfloat16")])
def test_interpreted_kernels_give_every_bit_of_one_device(ranks: Pool, number: int, dtype: str) -> None:
    kind, load = (("linear", "hot_rank"), ("round_robin", "masked"), ("balanced", "random"))[number]
    placement = placement_of(kind, 4, 2, number)
    problem = draw_problem(number, placement, (4, 3 - number), 2, load, dtype, PLAIN, sizes=(16, 8))
    label = f"interpreter, {placement}, {load}"
    compare_with_one_device(ranks, problem, DIRECT, label, engine="interpreter", differentiated=False)


@pytest.mark.parametrize("fault", DIRECT_FAULTS)
def test_planted_faults_are_found(ranks: Pool, fault: str) -> None:
    problem = draw_problem(5, placement_of("linear", 6, 2), (5, 5), 3, "random", "float32", PLAIN, sizes=(16, 8))
    compare_with_one_device(ranks, problem, DIRECT, "without a fault", differentiated=False)
    with pytest.raises(AssertionError, match="output"):
        compare_with_one_device(ranks, problem, DIRECT, "with a fault", differentiated=False, fault=fault)


@pytest.mark.parametrize("fault", CHUNK_FAULTS)
def test_faults_of_chunks_are_found(ranks: Pool, fault: str) -> None:
    """Of four chunks, of which three are on their way when the first is computed."""
    spec = dataclasses.replace(PLAIN, tuning=Tuning(batch_invariant=True))
    problem = draw_problem(5, placement_of("linear", 6, 2), (8, 8), 3, "random", "float32", spec, sizes=(16, 8))
    way = dataclasses.replace(DIRECT, chunks=4)
    compare_with_one_device(ranks, problem, way, "without a fault", differentiated=False)
    with pytest.raises(AssertionError, match="output"):
        compare_with_one_device(ranks, problem, way, "with a fault", differentiated=False, fault=fault)


def outputs_of_layers(group: Any, problems: list[Problem]) -> list[np.ndarray]:
    """Of layers that share memory, one after another, on ranks that wait for each other at barriers alone. The last
    rank is slow to add up, so that others begin the next layer before."""
    rank, real = torch.distributed.get_rank(group), direct.peer_ops.sum_results

    def late(*arguments: Any, **options: Any) -> torch.Tensor:
        time.sleep(0.2 * (rank == torch.distributed.get_world_size(group) - 1))
        return real(*arguments, **options)

    found = []
    with running_on("reference"), mock.patch.object(direct.peer_ops, "sum_results", late), torch.no_grad():
        for number, problem in enumerate(problems):
            own = problem.ranks()[rank]
            x, experts, routing = to_torch((own.x, own.experts, own.routing))
            options: Any = {"parallel": parallel_of(group, DIRECT, problem), "placement": problem.placement}
            with mock.patch.object(ExchangeCall, "check") if number else contextlib.nullcontext():
                found.append(parallel_moe(x, experts, routing, problem.spec, **options).output.numpy().copy())
    return found


def test_layers_with_other_placements_share_memory(ranks: Pool) -> None:
    """Their headers differ, and a rank may be a layer ahead."""
    placements = [placement_of(kind, 6, 3) for kind in ("linear", "round_robin", "linear", "round_robin")]
    problems = [
        draw_problem(seed, placement, (4, 3, 4), 2, "random", "float32", PLAIN, sizes=(16, 8))
        for seed, placement in enumerate(placements)
    ]
    found = ranks.call(outputs_of_layers, [(problems,)] * 3)
    for problem, *parts in zip(problems, *found, strict=True):
        require_same(np.concatenate(parts), problem.alone()["output"], f"{problem.placement}")


def gradients_of_experts(group: Any, problems: list[Problem], waits: bool) -> list[np.ndarray]:
    """Of this rank's experts, from steps that share memory and in which nothing else learns. The last rank is slow to
    read the output's gradient, so that others begin the next step before. waits: whether a step waits for that."""
    rank, start, barrier = torch.distributed.get_rank(group), direct.DirectRoutes.start_push, Symmetric.barrier

    def late(routes: Any, values: torch.Tensor, what: str) -> Any:
        arrived = start(routes, values, what)

        def slowly() -> torch.Tensor:
            rows = arrived()
            time.sleep(0.3 * (what == "d_output" and rank == torch.distributed.get_world_size(group) - 1))
            return rows

        return slowly

    def left_out(memory: Any, ranks: Any, what: str, *rest: Any) -> None:
        if waits or what != "arrival before rows":
            barrier(memory, ranks, what, *rest)

    found = []
    with (
        running_on("reference"),
        mock.patch.object(direct.DirectRoutes, "start_push", late),
        mock.patch.object(Symmetric, "barrier", left_out),
    ):
        for number, problem in enumerate(problems):
            own = to_torch(problem.ranks()[rank], "cpu")
            options: Any = {"parallel": parallel_of(group, DIRECT, problem), "placement": problem.placement}
            found += list(trained(own.experts).values())
            with mock.patch.object(ExchangeCall, "check") if number else contextlib.nullcontext():
                output = parallel_moe(own.x, own.experts, own.routing, problem.spec, **options).output
            output.square().sum().backward()
    return [array.grad.numpy() for array in found]


def test_a_step_waits_for_what_others_still_read(ranks: Pool) -> None:
    """A backward of experts alone sends nothing home, so nobody knows that its rows have been read."""
    placement = placement_of("linear", 6, 2)
    problems = [draw_problem(seed, placement, (5, 5), 2, "random", "float32", PLAIN, sizes=(16, 8)) for seed in (1, 2)]
    wanted = [ranks.call(gradients_of_experts, [([problem], True)] * 2) for problem in problems]
    for waits in (True, False):
        found = ranks.call(gradients_of_experts, [(problems, waits)] * 2)
        same = [
            np.array_equal(one, other)
            for own, *alone in zip(found, *wanted, strict=True)
            for one, other in zip(own, [*alone[0], *alone[1]], strict=True)
        ]
        assert all(same) == waits, same


def checkpointed(group: Any, problem: Problem, way: ExchangeSpec, reentrant: bool | None) -> list[np.ndarray]:
    """Gradients of a layer whose forward runs again in its backward; None: it does not."""
    with running_on("reference"):
        own = to_torch(problem.ranks()[torch.distributed.get_rank(group)], "cpu")
        options: Any = {"parallel": parallel_of(group, way, problem), "placement": problem.placement}
        leaves = [own.x.requires_grad_(), *trained(own.experts).values(), *trained(own.routing).values()]

        def layer(x: torch.Tensor) -> torch.Tensor:
            return parallel_moe(x, own.experts, own.routing, problem.spec, **options).output

        output = layer(leaves[0]) if reentrant is None else checkpoint(layer, leaves[0], use_reentrant=reentrant)
        output.square().sum().backward()
    return [leaf.grad.numpy() for leaf in leaves]


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("way", [DIRECT, ExchangeSpec("peer", "slots")], ids=lambda way: way.rows)
def test_activations_may_be_checkpointed(ranks: Pool, way: ExchangeSpec, reentrant: bool) -> None:
    """A forward that runs again stores its rows where those of the output's gradient arrive."""
    problem = draw_problem(3, placement_of("linear", 6, 2), (5, 4), 3, "random", "float32", PLAIN, sizes=(16, 8))
    wanted, found = (ranks.call(checkpointed, [(problem, way, one)] * 2) for one in (None, reentrant))
    for own, one in zip(found, wanted, strict=True):
        for array, other in zip(own, one, strict=True):
            np.testing.assert_array_equal(array, other)
