"""Experts that are split over a tensor axis, on NCCL ranks: compiled kernels against one GPU, bits, graphs, memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

import torch

from moe_core.parallel import ExchangeSpec, TensorSplit, plan_exchange
from moe_core.parallel.exchange import owners_of, physical_ids
from moe_torch.parallel import ExpertParallel, moe
from tests.support.parallel.grid import Grid, require_close
from tests.support.parallel.memory import Allocated, allocated, counts_of, most_on_a_gpu
from tests.support.parallel.placements import placement_of
from tests.support.parallel.pool import Pool, ranks_with_gpus, require_captured
from tests.support.parallel.tensor import axes, run_grid
from tests.support.parallel.torch import run_alone
from tests.support.parallel.twins import PLAIN, draw_problem
from tests.support.parallel.ways import PEER, STATIC, WAYS, every_torch_way, over
from tests.support.torch import to_torch

GPUS = ranks_with_gpus()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(GPUS < 2, reason="needs two GPUs")]
#: Ranks of experts, on as many GPUs as there are.
ROWS = 2 if GPUS >= 4 else 1


@pytest.fixture(scope="module")
def gpus() -> Iterator[Pool]:
    pool = Pool(2 * ROWS, backend="nccl")
    yield pool
    pool.close()


def grid_of(seed: int, tokens: int, dtype: str, kind: str = "split", load: str = "random") -> Grid:
    every = (tokens,) * (2 * ROWS if kind == "split" else ROWS)
    placement = placement_of("round_robin", 10, ROWS)
    problem = draw_problem(seed, placement, every, 4, load, dtype, PLAIN, sizes=(256, 192))
    return Grid(problem, 2, kind)


def require_equal(found: list[dict[str, Any]], again: list[dict[str, Any]]) -> None:
    for own, other in zip(found, again, strict=True):
        for name, array in own.items():
            np.testing.assert_array_equal(np.float32(array), np.float32(other[name]), name)


@every_torch_way
@pytest.mark.parametrize("kind", ["split", "replicated"])
def test_one_gpu_but_for_the_bounds_and_equal_bits_again(gpus: Pool, way: ExchangeSpec, kind: str) -> None:
    for seed, tokens, dtype in ((0, 64, "float32"), (1, 700, "bfloat16"), (2, 1, "bfloat16")):
        load = ("random", "hot_rank", "invalid")[seed]
        grid = grid_of(seed, tokens, dtype, kind, load)
        found = run_grid(gpus, grid, way, "cuda")
        require_close(grid.whole(found), grid, run_alone(grid.problem, "cuda"), f"{way}, {tokens} tokens, {kind}")
        require_equal(found, run_grid(gpus, grid, way, "cuda"))
        if kind == "replicated":
            for number, own in enumerate(found):
                head = found[number // 2 * 2]
                for name in ("output", "d_x", "d_routing.weights"):
                    np.testing.assert_array_equal(np.float32(own[name]), np.float32(head[name]), name)


def replay(group: Any, grids: list[Grid], way: ExchangeSpec) -> list[tuple[np.ndarray, np.ndarray]]:
    """Outputs of a graph captured with the first grid, replayed with all, beside those of calls; nothing may wait."""
    own = axes(ROWS, 2)
    assert own is not None
    device = torch.device("cuda", torch.cuda.current_device())
    given = [to_torch(grid.ranks()[own.row][own.index], device) for grid in grids]
    first, placement = given[0], grids[0].problem.placement
    most = max(grids[0].problem.tokens)
    parallel = ExpertParallel(own.experts, way, most, tensor=own.tensor, tensor_tokens=grids[0].tokens)

    def forward() -> torch.Tensor:
        return moe(first.x, first.experts, first.routing, PLAIN, parallel=parallel, placement=placement).output

    found = []
    with torch.no_grad():
        forward()
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        forward()
        # A capture waits for the device before it begins.
        torch.cuda.set_sync_debug_mode("default")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            output = forward()
        for one in given:
            first.x.copy_(one.x)
            first.routing.ids.copy_(one.routing.ids)
            first.routing.weights.copy_(one.routing.weights)
            graph.replay()
            replayed = output.float().cpu().numpy()
            found.append((replayed, forward().float().cpu().numpy()))
    return found


@over((*STATIC, *PEER))
@pytest.mark.parametrize("kind", ["split", "replicated"])
def test_graphs_are_replayed_with_other_routings(gpus: Pool, way: ExchangeSpec, kind: str) -> None:
    # Over the tensor axis mode peer sends messages, too.
    require_captured("tensor")
    grids = [grid_of(seed, 48, "bfloat16", kind) for seed in range(3)]
    grids = [
        dataclasses.replace(grid, problem=dataclasses.replace(grid.problem, experts=grids[0].problem.experts))
        for grid in grids
    ]
    for found in gpus.call(replay, [(grids, way)] * len(gpus.processes)):
        for replayed, called in found:
            assert replayed.any()
            np.testing.assert_array_equal(replayed, called)
        assert not np.array_equal(found[0][0], found[1][0])


def disagreeing(group: Any, grid: Grid, way: ExchangeSpec) -> bool:
    """Whether the output is NaN where one rank of the tensor axis has another top_k in its header."""
    own = axes(ROWS, 2)
    assert own is not None
    device = torch.device("cuda", torch.cuda.current_device())
    given = to_torch(grid.ranks()[own.row][own.index], device)
    other = dataclasses.replace(way, on_overflow="drop") if own.index else way
    parallel = ExpertParallel(own.experts, other, max(grid.problem.tokens), tensor=own.tensor)
    with torch.no_grad():
        placement = grid.problem.placement
        output = moe(given.x, given.experts, given.routing, PLAIN, parallel=parallel, placement=placement).output
    return bool(output.isnan().all())


@over((*STATIC, *PEER))
def test_ranks_that_disagree_have_nan(gpus: Pool, way: ExchangeSpec) -> None:
    assert all(gpus.call(disagreeing, [(grid_of(0, 16, "bfloat16"), way)] * len(gpus.processes)))


def allocated_on_a_gpu(group: Any, grid: Grid, way: ExchangeSpec) -> Allocated:
    own = axes(ROWS, 2)
    assert own is not None
    operands = grid.ranks()[own.row][own.index]
    device = torch.device("cuda", torch.cuda.current_device())
    return allocated(own.experts, grid.problem, way, device, most_on_a_gpu, (operands, own.tensor))


@pytest.mark.parametrize("way", (WAYS[1], WAYS[2], *PEER), ids=str)
def test_a_call_allocates_what_the_plan_says(gpus: Pool, way: ExchangeSpec) -> None:
    placement = placement_of("linear", 10, ROWS)
    problem = draw_problem(3, placement, (1024,) * (2 * ROWS), 4, "random", "bfloat16", PLAIN, sizes=(1024, 64))
    grid = Grid(problem, 2)
    places = owners_of(physical_ids(problem.routing.ids, placement).places, placement.per_rank)
    for found in gpus.call(allocated_on_a_gpu, [(grid, way)] * len(gpus.processes)):
        counts = counts_of(places == found.rank, found.rank, 2048, way) if way.mode == "all_to_all" else ()
        plan = plan_exchange(1024, 4, 1024, "bfloat16", placement, way, tensor=TensorSplit(2))
        # What ranks share is made once, and not by a call.
        shared = sum(buffer.bytes for buffer in plan.buffers if buffer.symmetric)
        np.testing.assert_allclose(found.peak, plan.peak(*counts, scratch=found.scratch) - shared, 0.05)
