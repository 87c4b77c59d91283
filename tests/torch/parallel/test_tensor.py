"""Experts that are split over a tensor axis, on gloo ranks: the bits of the twin, one device but for its bounds."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

from moe_core.errors import Unsupported
from moe_core.formats import format_named
from moe_core.parallel import ExchangeSpec, TensorSplit, plan_exchange
from moe_core.parallel.exchange import owners_of, physical_ids
from moe_core.specs import Activation, MoESpec, RouterSpec, Tuning
from moe_core.specs.operands import RouterWeights
from moe_torch.parallel import ExpertParallel, Rebalancer, moe
from moe_torch.parallel.moving import MovingPlacement
from tests.support.parallel.grid import Grid, require_close, require_grid_twin
from tests.support.parallel.memory import Allocated, allocated, counts_of, most_on_a_cpu
from tests.support.parallel.placements import placement_of
from tests.support.parallel.pool import Failed, Pool, ranks
from tests.support.parallel.tensor import axes, run_grid, run_rank
from tests.support.parallel.torch import rounded_to_fp8, run_alone
from tests.support.parallel.twins import LOADS, PLAIN, Problem, draw_problem
from tests.support.parallel.ways import PEER, TORCH_WAYS, WAYS, every_torch_way, over, sizes_of
from tests.support.torch import REAL_KERNELS, running_on, to_torch

__all__ = ["ranks"]

#: W ranks of experts, ranks of the tensor axis.
SHAPES = ((2, 2), (1, 4), (1, 3), (1, 2), (2, 2))
KINDS = ("split", "replicated")


def grid_of(
    shape: tuple[int, int],
    tokens: str,
    seed: int,
    load: str,
    dtype: str,
    spec: MoESpec = PLAIN,
    *,
    each: int | tuple[int, ...] = 5,
    extras: bool = False,
    width: int = 12,
) -> Grid:
    """each: tokens of every rank, or of those of every row."""
    rows, size = shape
    of_rows = (each,) * rows if isinstance(each, int) else each
    every = tuple(count for count in of_rows for _ in range(size if tokens == "split" else 1))
    placement = placement_of(("linear", "round_robin", "balanced")[seed % 3], 5, rows, seed)
    problem = draw_problem(seed, placement, every, 2, load, dtype, spec, extras=extras, sizes=(width, 24))
    return Grid(problem, size, tokens)


@pytest.mark.parametrize("tokens", KINDS)
@every_torch_way
def test_the_bits_of_the_twin_and_nearly_one_device(ranks: Pool, way: ExchangeSpec, tokens: str) -> None:
    number = TORCH_WAYS.index(way)
    loads = [load for load in LOADS if load != "repeated"]
    for seed in range(4):
        load, dtype = loads[(2 * seed + number) % len(loads)], ("float32", "bfloat16")[(seed + number) % 2]
        shape = SHAPES[(seed + number) % len(SHAPES)]
        each: Any = (3, 0) if way.mode in ("all_to_all", "peer") and shape[0] == 2 else (5, 1)[seed == 3]
        grid = grid_of(shape, tokens, seed, load, dtype, each=each, width=sizes_of(way)[0])
        label = f"{grid.size} ranks, {load}, {dtype}, {tokens}"
        found = run_grid(ranks, grid, way)
        require_grid_twin(found, grid, way, label)
        inference = run_grid(ranks, grid, way, differentiated=False) if way.mode == "peer" else ()
        for own, other in zip(inference, found, strict=False):
            np.testing.assert_array_equal(np.float32(own["output"]), np.float32(other["output"]), label)
        stages = grid.problem.alone()
        alone = grid.problem.alone_backward(stages) | {"output": stages["output"]}
        require_close(grid.whole(found), grid, alone, label)


#: What is split in another way, or stays whole.
SPECS = (
    MoESpec(Activation("swiglu_oai", gate_layout="interleaved"), RouterSpec(2, renormalize=True)),
    MoESpec(Activation("silu", gate_layout="separate"), RouterSpec(3, "sigmoid", scale=2.5), out_dtype="float32"),
    MoESpec(Activation("relu2", gated=False), RouterSpec(2), "out_in", "out_in", recompute=True),
    MoESpec(Activation("silu"), RouterSpec(2), "out_in"),
)


@pytest.mark.parametrize("tokens", KINDS)
@pytest.mark.parametrize("number", range(4))
def test_routers_biases_and_layouts(ranks: Pool, number: int, tokens: str) -> None:
    spec, dtype = SPECS[number], ("bfloat16", "bfloat16", "float32", "float32")[number]
    grid = grid_of(SHAPES[number], tokens, number, "masked", dtype, spec, each=4, extras=True)
    # A dense product of few rows is summed by BLAS in an order that depends on them.
    grid = dataclasses.replace(grid, problem=dataclasses.replace(grid.problem, shared=None))
    found = run_grid(ranks, grid, WAYS[number])
    require_grid_twin(found, grid, WAYS[number], str(spec))
    stages = grid.problem.alone()
    whole, expected = grid.whole(found), grid.problem.alone_backward(stages) | {"output": stages["output"]}
    slack = {"float32": 1e-5, "bfloat16": 2e-2}[dtype]
    for name in whole.keys() & expected.keys():
        wanted = np.float64(expected[name])
        limit = slack * len(grid.problem.x) * np.abs(wanted).max()
        np.testing.assert_allclose(np.float64(whole[name]), wanted, 0, limit, err_msg=f"{name}, {spec}")
    if tokens == "replicated":
        for other in found[1 : grid.size]:
            # Every rank of the axis has the same bits, of what it has whole too.
            for name in ("output", "d_x", "d_routing.weight", "d_experts.down_bias"):
                np.testing.assert_array_equal(np.float32(other[name]), np.float32(found[0][name]), name)


@pytest.mark.skipif(REAL_KERNELS != "interpreter", reason="gloo ranks run kernels in the interpreter alone")
@pytest.mark.parametrize("tokens, dtype", [("split", "bfloat16"), ("replicated", "float32")])
def test_interpreted_kernels_and_a_shared_expert(ranks: Pool, tokens: str, dtype: str) -> None:
    grid = grid_of((1, 2), tokens, 1, "random", dtype, each=4)
    alone = run_alone(grid.problem, "interpreter")
    found = run_grid(ranks, grid, WAYS[1], "interpreter")
    require_close(grid.whole(found), grid, alone, tokens)
    again = run_grid(ranks, grid, WAYS[1], "interpreter")
    for own, other in zip(found, again, strict=True):
        for name, array in own.items():
            np.testing.assert_array_equal(np.float32(array), np.float32(other[name]), name)
    spec = MoESpec(Activation("silu", gate_layout="interleaved"), RouterSpec(2))
    grid = grid_of((1, 2), tokens, 1, "random", dtype, spec, each=4, extras=True)
    assert grid.problem.shared is not None and isinstance(grid.problem.routing, RouterWeights)
    alone = run_alone(grid.problem, "interpreter")
    whole = grid.whole(run_grid(ranks, grid, WAYS[1], "interpreter"))
    slack = {"float32": 1e-5, "bfloat16": 3e-2}[dtype]
    for name in whole.keys() & alone.keys():
        wanted = np.float64(alone[name])
        np.testing.assert_allclose(np.float64(whole[name]), wanted, 0, slack * np.abs(wanted).max(), err_msg=name)


@over((WAYS[0], WAYS[4], *PEER))
def test_overflow_is_that_of_the_twin(ranks: Pool, way: ExchangeSpec) -> None:
    grid = grid_of((2, 2), "split", 1, "hot_rank", "float32", each=6)
    for options in ({"receive": 6}, {"receive": 6, "on_overflow": "drop"}):
        way = dataclasses.replace(way, **options)
        found = run_grid(ranks, grid, way, differentiated=False)
        require_grid_twin(found, grid, way, str(options))
        assert found[0]["overflow"][0] > 0
        assert any(np.isnan(own["output"]).any() for own in found) == (way.on_overflow != "drop")


@pytest.mark.parametrize("tokens", KINDS)
def test_chunks_and_quantised_rows(ranks: Pool, tokens: str) -> None:
    """Of mode `peer` alone: chunks change no bit, rows in fp8 are those of rounded x."""
    # BLAS adds up few rows in another order than many.
    spec = dataclasses.replace(PLAIN, tuning=Tuning(batch_invariant=True))
    grid = grid_of((2, 2), tokens, 1, "random", "float32", spec, each=7, width=16)

    def output(way: ExchangeSpec, grid: Grid = grid) -> np.ndarray:
        return grid.whole(run_grid(ranks, grid, way, differentiated=False))["output"]

    rounded = dataclasses.replace(grid, problem=dataclasses.replace(grid.problem, x=rounded_to_fp8(grid.problem.x)))
    fp8 = format_named("fp8_group")
    for way in PEER:
        exact = output(way)
        np.testing.assert_array_equal(output(dataclasses.replace(way, chunks=3)), exact)
        np.testing.assert_array_equal(output(dataclasses.replace(way, format=fp8)), output(way, rounded))


def allocated_on_a_grid(group: Any, grid: Grid, way: ExchangeSpec) -> Allocated | None:
    own = axes(grid.problem.placement.num_ranks, grid.size)
    if own is None:
        return None
    with running_on("reference"):
        operands = grid.ranks()[own.row][own.index]
        return allocated(own.experts, grid.problem, way, "cpu", most_on_a_cpu, (operands, own.tensor))


@every_torch_way
def test_a_call_allocates_what_the_plan_says(ranks: Pool, way: ExchangeSpec) -> None:
    placement = placement_of("linear", 6, 2)
    problem = draw_problem(3, placement, (128,) * 4, 3, "random", "bfloat16", PLAIN, sizes=(768, 16))
    grid = Grid(problem, 2)
    places = owners_of(physical_ids(problem.routing.ids, placement).places, placement.per_rank)
    for found in ranks.call(allocated_on_a_grid, [(grid, way)] * 4):
        counts = counts_of(places == found.rank, found.rank, 256, way) if way.mode == "all_to_all" else ()
        plan = plan_exchange(128, 3, 768, "bfloat16", placement, way, tensor=TensorSplit(2))
        # What ranks share is made once, and not by a call.
        shared = sum(buffer.bytes for buffer in plan.buffers if buffer.symmetric)
        np.testing.assert_allclose(found.peak, plan.peak(*counts, scratch=found.scratch) - shared, 0.05)


FAULTS = ("bias_added_twice", "parts_of_others", "tokens_of_others", "part_left_out", "halves_as_one")


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_found(ranks: Pool, fault: str) -> None:
    grid = grid_of((2, 2), "split", 0, "random", "float32", extras=True)
    stages = grid.problem.alone()
    alone = grid.problem.alone_backward(stages) | {"output": stages["output"]}

    def compare(fault: str | None) -> None:
        whole = grid.whole(run_grid(ranks, grid, WAYS[1], fault=fault))
        for name in whole.keys() & alone.keys():
            np.testing.assert_allclose(whole[name], alone[name], 0, 1e-5 * np.abs(alone[name]).max(), err_msg=name)

    compare(None)
    with pytest.raises(AssertionError):
        compare(fault)


def call(pool: Pool, given: list[tuple[Any, ...]]) -> dict[int, tuple[str, str]]:
    """The errors of all ranks."""
    with pytest.raises(Failed) as caught:
        pool.call(run_rank, given)
    return caught.value.errors


def arguments(grid: Grid, way: ExchangeSpec) -> list[tuple[Any, ...]]:
    return [(grid, way, "reference", True, None)] * 4


@pytest.mark.parametrize("way", (WAYS[1], WAYS[4], WAYS[2], PEER[1]), ids=lambda way: way.mode)
def test_a_rank_that_raises_is_known_on_both_axes(ranks: Pool, way: ExchangeSpec) -> None:
    grid = grid_of((2, 2), "split", 0, "random", "float32")
    given = arguments(grid, way)
    spec = dataclasses.replace(PLAIN, apply_router_weight_on_input=True)
    given[1] = (Grid(dataclasses.replace(grid.problem, spec=spec), 2), *given[1][1:])
    errors = call(ranks, given)
    assert {rank: kind for rank, (kind, _) in errors.items()} == {
        0: "PeerFailed",
        1: "Unsupported",
        2: "PeerFailed",
        3: "PeerFailed",
    }
    assert errors[0][1].startswith(f"rank 1 failed before the tensor axis of mode {way.mode}")
    run_grid(ranks, grid, way)


def changed(problem: Problem, **options: Any) -> Problem:
    return dataclasses.replace(problem, **options)


def test_ranks_that_disagree_all_raise(ranks: Pool) -> None:
    grid = grid_of((2, 2), "split", 0, "random", "float32")
    for way in (WAYS[1], WAYS[2], PEER[1]):
        given = arguments(grid, way)
        fewer = changed(grid.problem, tokens=(5, 4, 5, 5))
        given[1] = (dataclasses.replace(grid, problem=fewer), *given[1][1:])
        errors = call(ranks, given)
        assert len(errors) == 4
        for rank in (0, 1):
            assert errors[rank][0] == "InvalidInput" and "got another tokens on rank 1" in errors[rank][1]
            assert "has mode" in errors[rank][1] and " 4 tokens" in errors[rank][1] and " 5 tokens" in errors[rank][1]
        assert {errors[rank][0] for rank in (2, 3)} == {"PeerFailed"}
        # A row without a tensor axis, and one whose tokens are replicated.
        replicated = dataclasses.replace(grid, tokens="replicated")
        for other in ((grid, *given[2][1:-1], "without_tensor"), (replicated, *given[2][1:])):
            errors = call(ranks, [*arguments(grid, way)[:2], other, other])
            assert len(errors) == 4
            for kind, text in errors.values():
                assert kind == "InvalidInput" and "got another tensor" in text, text


def refusals(group: Any) -> list[tuple[str, str]]:
    found, own = [], axes(2, 2)
    assert own is not None
    refused: tuple[dict[str, Any], ...] = (
        {"tensor": own.experts},
        {"tensor": group},
        {"tensor": "tp"},
        {"tensor_tokens": "replicated"},
        {"tensor": own.tensor, "tensor_tokens": "same"},
    )
    for options in refused:
        try:
            ExpertParallel(own.experts, **options)
        except Exception as error:
            found.append((type(error).__name__, str(error)))
    return found


def test_axes_that_are_none_are_refused_on_every_rank(ranks: Pool) -> None:
    for found in ranks.call(refusals, [()] * 4):
        assert all(kind == "InvalidInput" for kind, _ in found) and len(found) == 5
        texts = (
            "tensor must be another axis than mesh, with one rank in common",
            "tensor must be another axis than mesh, with one rank in common",
            "tensor must be a ",
            "tensor_tokens must be left out without tensor",
            "tensor_tokens must be one of split, replicated, got 'same'",
        )
        for (_, message), text in zip(found, texts, strict=True):
            assert message.startswith(text), message


def with_moving_experts(group: Any, grid: Grid) -> list[str]:
    """What raises where experts that move between ranks are split, too."""
    own, found = axes(2, 2), []
    assert own is not None
    parallel = ExpertParallel(own.experts, tensor=own.tensor)
    given = grid.ranks()[own.row][own.index]
    x, experts, routing = to_torch((given.x, given.experts, given.routing))
    moving = MovingPlacement(grid.problem.placement, "cpu")
    for call in (
        lambda: Rebalancer([], parallel),
        lambda: moe(x, experts, routing, PLAIN, parallel=parallel, placement=moving),
    ):
        with pytest.raises(Unsupported) as caught:
            call()
        found.append(str(caught.value))
    return found


def test_experts_that_move_are_not_split(ranks: Pool) -> None:
    problem = draw_problem(0, placement_of("linear", 6, 2), (3,) * 4, 2, "random", "float32", PLAIN)
    for moved, called in ranks.call(with_moving_experts, [(Grid(problem, 2),)] * 4):
        assert moved.startswith("parallel must have no tensor axis, whose ranks would move slices apart")
        assert called.startswith("placement must be a Placement beside a tensor axis, got a MovingPlacement")
