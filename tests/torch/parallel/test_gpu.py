"""Expert parallelism on NCCL ranks: compiled kernels against one GPU bit by bit, and CUDA graphs."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

import torch
from torch.distributed.device_mesh import DeviceMesh

import moe_torch
from moe_core.errors import InvalidInput
from moe_core.formats import format_named
from moe_core.layers import ExpertsSpec, MoELayerSpec
from moe_core.parallel import ExchangeSpec
from moe_core.specs import Activation, MoESpec, RouterSpec, Tuning
from moe_torch import MoE
from moe_torch.parallel import ExpertParallel, Rebalancer, exchange, moe, parallelize
from tests.support.parallel.memory import Allocated, allocated, most_on_a_gpu, planned_peak
from tests.support.parallel.placements import placement_of
from tests.support.parallel.pool import Pool, ranks_with_gpus, require_captured
from tests.support.parallel.torch import (
    compare_with_one_device,
    of_all_ranks,
    parallel_of,
    rounded_to_fp8,
    run_alone,
    run_group,
    trained,
)
from tests.support.parallel.twins import PLAIN, Problem, draw_problem
from tests.support.parallel.ways import PEER, STATIC, TORCH_WAYS, WAYS, every_torch_way, over, require_same
from tests.support.torch import to_numpy, to_torch

GPUS = ranks_with_gpus()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(GPUS < 2, reason="needs two GPUs")]


@pytest.fixture(scope="module")
def gpus() -> Iterator[Pool]:
    pool = Pool(2 if GPUS < 4 else 4, backend="nccl")
    yield pool
    pool.close()


def problem_of(pool: Pool, seed: int, tokens: int, dtype: str = "bfloat16", spec: MoESpec = PLAIN) -> Problem:
    size = len(pool.processes)
    placement, load = placement_of("round_robin", 10, size), ("random", "hot_rank", "invalid")[seed % 3]
    return draw_problem(seed, placement, (tokens,) * size, 4, load, dtype, spec, sizes=(256, 192), extras=False)


@every_torch_way
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_bit_of_one_gpu(gpus: Pool, way: ExchangeSpec, dtype: str) -> None:
    # Kernels are compiled for every dtype and about every number of tokens.
    for seed, tokens in ((0, 64),) if dtype == "float32" else ((1, 700), (2, 1)):
        problem = problem_of(gpus, seed, tokens, dtype)
        compare_with_one_device(gpus, problem, way, f"{way}, {tokens} tokens", engine="cuda")


def test_a_router_a_shared_expert_and_uneven_tokens(gpus: Pool) -> None:
    spec = MoESpec(Activation("swiglu_oai", gate_layout="interleaved"), RouterSpec(4, renormalize=True))
    size = len(gpus.processes)
    placement = placement_of("linear", 10, size)
    for way, tokens in ((WAYS[1], (300,) * size), (WAYS[2], (300,) * size), (PEER[1], (300,) * size)):
        problem = draw_problem(3, placement, tokens, 4, "masked", "bfloat16", spec, extras=True, sizes=(256, 192))
        compare_with_one_device(gpus, problem, way, str(way), engine="cuda")
    uneven = (1300, 0, 33, 7)[:size]
    problem = draw_problem(4, placement, uneven, 4, "random", "bfloat16", PLAIN, sizes=(256, 192))
    compare_with_one_device(gpus, problem, WAYS[0], "uneven", engine="cuda")
    # No host knows the tokens of all ranks.
    spec = dataclasses.replace(PLAIN, tuning=Tuning(expected_tokens=sum(uneven)))
    for way in PEER:
        told = dataclasses.replace(problem, spec=spec)
        compare_with_one_device(gpus, told, way, f"uneven, {way}", engine="cuda")


def replay(group: Any, problems: list[Problem], way: ExchangeSpec) -> list[np.ndarray]:
    """Outputs of a graph captured with the first problem, replayed with all; nothing may wait for the device."""
    rank = torch.distributed.get_rank(group)
    device = torch.device("cuda", torch.cuda.current_device())
    given = [to_torch(problem.ranks()[rank], device) for problem in problems]
    first, parallel = given[0], parallel_of(group, way, problems[0])

    def forward() -> torch.Tensor:
        options = {"parallel": parallel, "placement": problems[0].placement}
        return moe(first.x, first.experts, first.routing, problems[0].spec, **options).output

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
        # Other calls may make so many constants that those of the capture are forgotten, and their memory is taken.
        exchange._constants.cache_clear()
        taken = [torch.full((128,), -7, dtype=torch.int32, device=device) for _ in range(64)]
        torch.cuda.synchronize()
        found = []
        torch.cuda.set_sync_debug_mode("error")
        for own in given:
            first.x.copy_(own.x)
            first.routing.ids.copy_(own.routing.ids)
            first.routing.weights.copy_(own.routing.weights)
            graph.replay()
            found.append(output.clone())
        torch.cuda.set_sync_debug_mode("default")
        del taken
    return [output.float().cpu().numpy() for output in found]


@over((*STATIC, *PEER, dataclasses.replace(PEER[1], chunks=3)))
def test_graphs_are_replayed_with_other_routings(gpus: Pool, way: ExchangeSpec) -> None:
    require_captured(way.mode)
    problems = [problem_of(gpus, seed, 48) for seed in range(3)]
    problems = [dataclasses.replace(problem, experts=problems[0].experts) for problem in problems]
    found = gpus.call(replay, [(problems, way)] * len(gpus.processes))
    for number, problem in enumerate(problems):
        x, experts, routing = to_torch((problem.x, problem.experts, problem.routing), "cuda")
        alone = moe_torch.moe(x, experts, routing, problem.spec).output.float().cpu().numpy()
        np.testing.assert_array_equal(np.concatenate([rank[number] for rank in found]), alone)


def replay_steps(group: Any, problems: list[Problem], way: ExchangeSpec) -> list[dict[str, np.ndarray]]:
    """Outputs and gradients of a training step that is captured with the first problem and replayed with all; nothing
    may wait for the device."""
    rank = torch.distributed.get_rank(group)
    device = torch.device("cuda", torch.cuda.current_device())
    given = [to_torch((problem.ranks()[rank], problem.gradients()[rank].output), device) for problem in problems]
    (first, d_output), parallel = given[0], parallel_of(group, way, problems[0])
    leaves = {"x": first.x.requires_grad_()}
    leaves |= {f"experts.{name}": array for name, array in trained(first.experts).items()}
    leaves |= {f"routing.{name}": array for name, array in trained(first.routing).items()}

    def step() -> dict[str, torch.Tensor]:
        options = {"parallel": parallel, "placement": problems[0].placement}
        output = moe(first.x, first.experts, first.routing, problems[0].spec, **options).output
        gradients = torch.autograd.grad(output, tuple(leaves.values()), d_output.to(output.dtype))
        return {"output": output.detach()} | {f"d_{name}": one for name, one in zip(leaves, gradients, strict=True)}

    step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    step()
    # A capture waits for the device before it begins.
    torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    found = []
    for own, d_own in given:
        with torch.no_grad():
            first.x.copy_(own.x)
            first.routing.ids.copy_(own.routing.ids)
            first.routing.weights.copy_(own.routing.weights)
            d_output.copy_(d_own)
        graph.replay()
        found.append({name: to_numpy(array) for name, array in results.items()})
    return found


@over((*STATIC, *PEER))
def test_training_steps_are_replayed_with_other_routings(gpus: Pool, way: ExchangeSpec) -> None:
    require_captured(way.mode)
    problems = [problem_of(gpus, seed, 48) for seed in range(3)]
    problems = [dataclasses.replace(problem, experts=problems[0].experts) for problem in problems]
    found = gpus.call(replay_steps, [(problems, way)] * len(gpus.processes))
    for number, problem in enumerate(problems):
        results, alone = of_all_ranks([rank[number] for rank in found], problem.placement), run_alone(problem, "cuda")
        assert set(results) == set(alone) >= {"output", "d_x", "d_experts.gate_up", "d_routing.weights"}
        for name, array in alone.items():
            require_same(results[name], array, f"{name}, {number}")


SERVED = MoELayerSpec(256, 192, 16, 4, RouterSpec(4, renormalize=True), ExpertsSpec(bias=True), router_bias=True)


def served(seed: int, hot: int, dtype: torch.dtype = torch.bfloat16) -> MoE:
    """A layer on this GPU whose router prefers two experts that begin on the same of two ranks."""
    torch.manual_seed(seed)
    layer = MoE.from_spec(SERVED, dtype=dtype)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(std=0.1)
        layer.router.bias[hot : hot + 4 : 2] += 2.0
    return layer.cuda()


def prefer(layer: MoE, experts: tuple[int, ...]) -> None:
    """Have every token choose these experts."""
    with torch.no_grad():
        layer.router.bias.zero_()
        layer.router.bias[list(experts)] = 20.0


def replay_between_moves(group: Any, way: ExchangeSpec) -> tuple[list[np.ndarray], list[int], tuple[int, ...], int]:
    """Outputs of one captured graph while experts move between its replays, how many moved, the experts of the first
    rank that are preferred from step 4 on, and bytes at the peak."""
    rank, size = torch.distributed.get_rank(group), torch.distributed.get_world_size(group)
    mesh = DeviceMesh.from_group(group, "cuda", mesh_dim_names=("ep",))
    parallel, layer = ExpertParallel(mesh, way), served(0, 7)
    parallelize(layer, parallel)
    rebalancer = Rebalancer([layer], parallel, every=2, window=2, places_per_rank=16 // size + 1)
    x = torch.zeros(64, 256, dtype=torch.bfloat16, device="cuda")
    outputs, moved, crowded = [], [], ()
    with torch.no_grad():
        layer(x)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = layer(x)
        with (
            pytest.raises(InvalidInput, match="step must be called between replays"),
            torch.cuda.graph(torch.cuda.CUDAGraph()),
        ):
            x.add_(0)
            rebalancer.step()
        rebalancer._load.zero_()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        for step in range(6):
            if step == 4:
                # Whatever was chosen before, the first rank now has half as much again as the others.
                crowded = rebalancer.placements[0].owners[0][:4]
                prefer(layer, crowded)
            x.copy_(tokens_of(step, size)[rank * 64 :][:64])
            graph.replay()
            outputs.append(y.float().cpu().numpy())
            moved.append(sum(len(one.moves) for one in rebalancer.step()))
        peak = torch.cuda.max_memory_allocated() - before
    return outputs, moved, crowded, peak


def tokens_of(step: int, size: int) -> torch.Tensor:
    return torch.randn(64 * size, 256, generator=torch.Generator().manual_seed(step)).bfloat16().cuda()


@over(STATIC)
def test_a_graph_stays_valid_while_experts_move(gpus: Pool, way: ExchangeSpec) -> None:
    require_captured(way.mode)
    size = len(gpus.processes)
    found = gpus.call(replay_between_moves, [(way,)] * size)
    layer = served(0, 7)
    # As many rows as on all ranks: tiles are those of the whole batch.
    with torch.no_grad():
        for step in range(6):
            if step == 4:
                prefer(layer, found[0][2])
            y = layer(tokens_of(step, size)).float().cpu().numpy()
            np.testing.assert_array_equal(np.concatenate([own[0][step] for own in found]), y, f"step {step}")
    for _, moved, _, peak in found:
        assert moved == found[0][1] and moved[1] > 0 and moved[5] > 0
        # All moved experts of the largest array, sent and received, and small things.
        assert peak <= 2 * 17 * 2 * 192 * 256 * 2 + 2**20


@pytest.mark.skipif(GPUS < 4, reason="needs four GPUs")
def test_two_hosts_of_two_ranks(gpus: Pool) -> None:
    for seed, tokens in ((0, 64), (1, 700), (2, 1)):
        problem = problem_of(gpus, seed, tokens)
        compare_with_one_device(gpus, problem, ExchangeSpec(hosts=2), f"{tokens} tokens", engine="cuda")


def test_chunks_and_quantised_rows(gpus: Pool) -> None:
    """Rows that travel in fp8 are those of x rounded beforehand."""
    problem = problem_of(gpus, 1, 700)
    chunked = dataclasses.replace(PEER[1], chunks=4)
    compare_with_one_device(gpus, problem, chunked, "chunks", engine="cuda", differentiated=False)
    rounded = dataclasses.replace(problem, x=rounded_to_fp8(problem.x))
    for way in (*PEER, dataclasses.replace(PEER[1], chunks=2)):
        given = dataclasses.replace(way, format=format_named("fp8_group"))
        found, alone = (
            run_group(gpus, *one, "cuda", differentiated=False) for one in ((problem, given), (rounded, way))
        )
        np.testing.assert_array_equal(found["output"].astype(np.float32), alone["output"].astype(np.float32), str(way))


def allocated_on_a_gpu(group: Any, problem: Problem, way: ExchangeSpec) -> Allocated:
    return allocated(group, problem, way, torch.device("cuda", torch.cuda.current_device()), most_on_a_gpu)


@over((*TORCH_WAYS, *(dataclasses.replace(way, chunks=4) for way in PEER)))
def test_a_call_allocates_what_the_plan_says(gpus: Pool, way: ExchangeSpec) -> None:
    size = len(gpus.processes)
    placement = placement_of("round_robin", 10, size)
    problem = draw_problem(3, placement, (2048,) * size, 4, "hot_expert", "bfloat16", PLAIN, sizes=(1024, 64))
    index_arrays = 4 * np.dtype(np.int32).itemsize * size * 2048 * 4  # a few int32 for each slot: no part of a plan
    for found in gpus.call(allocated_on_a_gpu, [(problem, way)] * size):
        np.testing.assert_allclose(found.peak, planned_peak(problem, way, found), 0.05, index_arrays)
