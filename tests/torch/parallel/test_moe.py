"""Expert parallelism on gloo ranks against one device: forward and every gradient, bit by bit."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("torch")

import torch
from torch.utils.checkpoint import checkpoint

import moe_torch
from moe_core.base.dtypes import numpy_dtype
from moe_core.formats import format_named
from moe_core.parallel import ExchangeSpec
from moe_core.parallel.header import STATIC_MODES
from moe_core.specs import Activation, MoESpec, RouterSpec, Tuning
from moe_core.specs.operands import ExpertWeights, RouterLogits, SharedExpert, TopK
from moe_torch.parallel.dense import shared_output
from tests.support.parallel.peer import PEER_FAULTS
from tests.support.parallel.placements import placement_of
from tests.support.parallel.pool import Pool, ranks
from tests.support.parallel.torch import (
    compare_with_one_device,
    compare_with_twin,
    parallel_moe,
    parallel_of,
    poisoned,
    rounded_to_fp8,
    run_alone,
    run_group,
    trained,
)
from tests.support.parallel.twins import LOADS, PLAIN, Problem, draw_problem
from tests.support.parallel.ways import (
    BOUNDED,
    COUNTED,
    PEER,
    TORCH_WAYS,
    WAYS,
    most_received,
    over,
    require_dropped,
    require_one_device,
    require_same,
    sizes_of,
)
from tests.support.strategies import seeds
from tests.support.torch import REAL_KERNELS, running_on, to_numpy, to_torch

__all__ = ["ranks"]

ALL_WAYS = (*TORCH_WAYS, COUNTED)
#: placement, E, W, tokens of ranks, K
SIZES = (
    ("linear", 6, 4, (5, 5, 5, 5), 3),
    ("round_robin", 7, 4, (9, 0, 3, 1), 3),
    ("balanced", 7, 3, (6, 6, 6), 2),
    ("linear", 8, 2, (1, 1), 4),
    ("round_robin", 5, 3, (0, 1, 0), 2),
    ("linear", 3, 4, (3, 3, 3, 3), 2),
    ("balanced", 4, 1, (7,), 2),
)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@over(ALL_WAYS)
def test_every_bit_of_one_device(ranks: Pool, way: ExchangeSpec, dtype: str) -> None:
    number = 2 * ALL_WAYS.index(way) + (dtype == "bfloat16")
    for seed, load in enumerate(LOADS):
        kind, experts, size, tokens, top_k = SIZES[(number + seed) % len(SIZES)]
        if way.mode not in ("all_to_all", "peer"):
            tokens = (max(tokens),) * size
        if way.mode != "all_to_all" and load == "repeated":
            continue
        placement = placement_of(kind, experts, size, number)
        problem = draw_problem(seed, placement, tokens, top_k, load, dtype, PLAIN, sizes=sizes_of(way))
        traced = way.mode in STATIC_MODES and number % 2 == 0
        compare_with_one_device(ranks, problem, way, f"{placement}, {load}, {tokens}", traced=traced)


@given(seed=seeds(), way=st.sampled_from(TORCH_WAYS), dtype=st.sampled_from(("float32", "bfloat16")))
def test_drawn_problems(ranks: Pool, seed: int, way: ExchangeSpec, dtype: str) -> None:
    random = np.random.default_rng(seed)
    size, experts, top_k = (int(random.integers(1, most)) for most in (5, 10, 5))
    placement = placement_of(("linear", "round_robin", "balanced")[seed % 3], experts, size, seed % 99)
    tokens = tuple(random.integers(0, 9, size).tolist())
    if way.mode not in ("all_to_all", "peer"):
        tokens = tokens[:1] * size
    load = LOADS[seed % len(LOADS)]
    if load == "repeated":
        top_k = min(top_k, placement.per_rank)
    problem = draw_problem(seed, placement, tokens, top_k, load, dtype, PLAIN, sizes=sizes_of(way))
    compare_with_one_device(ranks, problem, way, f"{placement}, {load}, {tokens}")


@pytest.mark.skipif(REAL_KERNELS != "interpreter", reason="gloo ranks run kernels in the interpreter alone")
@pytest.mark.parametrize("number", [0, 1, 2, 4, 5, 6])
def test_interpreted_kernels_give_every_bit_of_one_device(ranks: Pool, number: int) -> None:
    """Two ranks whose experts are loaded unevenly: an owner's tiles are those of all tokens."""
    way, dtype = TORCH_WAYS[number], "float32" if number == 4 else "bfloat16"
    experts, top_k = (5, 3) if number == 1 else (3, 2)
    placement = placement_of("round_robin", experts, 2)
    problem = draw_problem(number, placement, (4, 4), top_k, "hot_rank", dtype, PLAIN, sizes=sizes_of(way))
    compare_with_one_device(ranks, problem, way, "interpreter", engine="interpreter")


#: What stays at home or is stored in another way: routers, biases, layouts, dtypes.
SPECS = (
    MoESpec(Activation("swiglu_oai", gate_layout="interleaved"), RouterSpec(2, renormalize=True)),
    MoESpec(Activation("silu", gate_layout="separate"), RouterSpec(3, "sigmoid", scale=2.5), out_dtype="float32"),
    MoESpec(Activation("relu2", gated=False), RouterSpec(2), "out_in", "out_in", recompute=True),
)


@pytest.mark.parametrize("number", range(3))
def test_routers_and_biases(ranks: Pool, number: int) -> None:
    spec, dtype = SPECS[number], ("bfloat16", "bfloat16", "float32")[number]
    assert spec.router is not None
    placement = placement_of(("linear", "round_robin", "balanced")[number], 6, 2 + number % 3)
    top_k = spec.router.require_top_k()
    tokens = (5,) * placement.num_ranks if number else (5, 3)
    problem = draw_problem(number, placement, tokens, top_k, "masked", dtype, spec, extras=True)
    problem = dataclasses.replace(problem, shared=None)
    compare_with_one_device(ranks, problem, WAYS[(2 * number) % 5 if number else 1], f"{spec}")
    logits = to_numpy(moe_torch.router(*to_torch((problem.x, problem.routing.weight)), spec=spec.logits_spec()))
    given = dataclasses.replace(problem, routing=RouterLogits(logits, problem.routing.correction_bias))
    compare_with_one_device(ranks, given, WAYS[2 * number or 1], f"{spec}, logits", traced=number > 0)


@pytest.mark.skipif(REAL_KERNELS != "interpreter", reason="gloo ranks run kernels in the interpreter alone")
@pytest.mark.parametrize("number", range(5))
def test_shared_experts(ranks: Pool, number: int) -> None:
    """In bf16, where the gradient of x is rounded once for experts, shared expert and router together."""
    spec, way = SPECS[number % 3], (*WAYS[:3], *reversed(PEER))[number]
    assert spec.router is not None
    placement = placement_of("linear", 4, 2)
    top_k, sizes = spec.router.require_top_k(), sizes_of(way)
    problem = draw_problem(number, placement, (3, 3), top_k, "random", "bfloat16", spec, extras=True, sizes=sizes)
    if number == 1:
        assert problem.shared is not None
        problem = dataclasses.replace(problem, shared=dataclasses.replace(problem.shared, gate=None))
    compare_with_one_device(ranks, problem, way, f"{spec}", engine="interpreter")
    if way.mode == "peer":
        chunked = dataclasses.replace(way, chunks=2)
        compare_with_one_device(ranks, problem, chunked, "chunks", engine="interpreter", differentiated=False)


def trained_on_the_first_rank(group: Any, problem: Problem, way: ExchangeSpec) -> list[bool]:
    rank = torch.distributed.get_rank(group)
    with running_on("reference"):
        own = to_torch(problem.ranks()[rank], "cpu")
        own.shared.gate_up.requires_grad_(rank == 0)
        options: Any = {"parallel": parallel_of(group, way, problem), "placement": problem.placement}
        output = parallel_moe(own.x, own.experts, own.routing, problem.spec, shared=own.shared, **options).output
    return [output.requires_grad, bool(output.isfinite().all())]


@over(WAYS[:3])
def test_a_shared_expert_may_be_trained_on_one_rank(ranks: Pool, way: ExchangeSpec) -> None:
    """All ranks send their messages in one order."""
    problem = draw_problem(0, placement_of("linear", 4, 2), (3, 3), 2, "random", "bfloat16", SPECS[0], extras=True)
    assert ranks.call(trained_on_the_first_rank, [(problem, way)] * 2) == [[True, True], [False, True]]


def test_a_shared_expert_keeps_no_rows_of_its_result() -> None:
    """Beside x, its weights and what the backward reads, among it the gate's logits."""
    x, wide = torch.randn(6, 16), torch.randn(6, 16, requires_grad=True)
    shared = SharedExpert(torch.randn(16, 48), torch.randn(24, 16), gate=torch.randn(16, 1))
    experts, silu = ExpertWeights(torch.randn(2, 16, 16), torch.randn(2, 8, 16)), Activation("silu")
    kept: list[int] = []

    def pack(one: torch.Tensor) -> torch.Tensor:
        kept.append(one.data_ptr())
        return one

    with running_on("reference"), torch.autograd.graph.saved_tensors_hooks(pack, lambda one: one):
        rows, logits = shared_output(x, wide, shared, experts, MoESpec(silu, shared_activation=silu), 6)
    assert rows.requires_grad and logits is not None and {x.data_ptr(), logits.data_ptr()} < {*kept}
    assert rows.data_ptr() not in kept


@over(PEER)
@pytest.mark.parametrize("engine", ["reference", REAL_KERNELS])
def test_quantised_rows_are_those_of_one_device(ranks: Pool, way: ExchangeSpec, engine: str) -> None:
    """The bits are those of x rounded beforehand."""
    if engine == "cuda":
        pytest.skip("gloo ranks run kernels in the interpreter alone")
    placement = placement_of("round_robin", 5, 3)
    problem = draw_problem(3, placement, (4, 2, 0), 3, "random", "bfloat16", PLAIN, sizes=(144, 8))
    given = dataclasses.replace(way, format=format_named("fp8_group"))
    found = run_group(ranks, problem, given, engine, differentiated=False)
    near = dataclasses.replace(problem, x=rounded_to_fp8(problem.x))
    require_one_device(found, near, run_alone(near, engine), "x rounded beforehand")


@over(PEER)
@pytest.mark.parametrize("chunks", [2, 5])
def test_chunks_have_the_forward_of_one_device(ranks: Pool, way: ExchangeSpec, chunks: int) -> None:
    """Also where a rank has fewer tokens than chunks, or none, and in rows of 8 bytes; gradients are refused."""
    way, spec = dataclasses.replace(way, chunks=chunks), dataclasses.replace(PLAIN, tuning=Tuning(batch_invariant=True))
    for seed, load in enumerate(("random", "hot_rank", "masked")):
        kind, experts, size, tokens, top_k = SIZES[seed]
        placement = placement_of(kind, experts, size)
        problem = draw_problem(seed, placement, tokens, top_k, load, "float32", spec, sizes=sizes_of(way))
        compare_with_one_device(ranks, problem, way, load, differentiated=False)
    narrow = dataclasses.replace(spec, out_dtype="bfloat16")
    problem = draw_problem(4, placement, tokens, top_k, "random", "float32", narrow, sizes=(4, 8))
    compare_with_one_device(ranks, problem, way, "outputs in bf16", differentiated=False)
    with pytest.raises(AssertionError, match=f"training moves all tokens at once, got chunks={chunks}.*micro-batches"):
        run_group(ranks, problem, way)


@pytest.mark.parametrize("number", [0, 1, 2])
def test_replicas_give_the_bits_of_one_device(ranks: Pool, number: int) -> None:
    """With one order of sums for every number of rows, since an expert's rows are at several ranks."""
    spec = dataclasses.replace(PLAIN, tuning=Tuning(batch_invariant=True))
    placement = placement_of("replicas", 5, 4, number)
    assert placement.has_replicas
    tokens = (5,) * 4 if number == 2 else (4, 0, 7, 1)
    for seed, load in enumerate(LOADS):
        if load != "repeated":
            problem = draw_problem(seed, placement, tokens, 3, load, "bfloat16", spec)
            compare_with_one_device(ranks, problem, WAYS[number], load, differentiated=False)


@over((*BOUNDED, *PEER))
@pytest.mark.parametrize("load", ["hot_rank", "masked"])
def test_overflow_is_counted_exactly(ranks: Pool, way: ExchangeSpec, load: str) -> None:
    """At bounds around the rows of the rank that has most, NaN and all, and where rows are dropped."""
    placement, spec = placement_of("round_robin", 6, 3), dataclasses.replace(PLAIN, tuning=Tuning(batch_invariant=True))
    problem = draw_problem(11, placement, (5, 5, 5), 3, load, "float32", spec, sizes=sizes_of(way))
    most = most_received(problem, way)
    found = []
    for receive in (0, 1, most - 1, most):
        found.append(compare_with_twin(ranks, problem, dataclasses.replace(way, receive=receive), f"{receive}"))
    assert found[-1] == 0 and all(found[:-1]) and sorted(found, reverse=True) == found
    dropped = dataclasses.replace(way, receive=most - 1, on_overflow="drop")
    assert compare_with_twin(ranks, problem, dropped, "drop") > 0


@over((*BOUNDED, *PEER))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gradients_of_dropped_slots(ranks: Pool, way: ExchangeSpec, dtype: str) -> None:
    """They are 0, and all others are those of a routing without these slots."""
    placement, spec = placement_of("round_robin", 6, 3), dataclasses.replace(PLAIN, tuning=Tuning(batch_invariant=True))
    for seed, load in enumerate(("random", "hot_rank", "masked", "absent")):
        problem = draw_problem(seed, placement, (5, 5, 5), 3, load, dtype, spec, sizes=sizes_of(way))
        for receive in (0, most_received(problem, way) - 1):
            dropped = dataclasses.replace(way, receive=receive, on_overflow="drop")
            require_dropped(run_group(ranks, problem, dropped), problem, dropped, f"{load}, {receive}")
    for fault in ("gradient_not_returned", "output_gradient_of_another"):
        found = run_group(ranks, problem, dropped, fault=fault)
        with pytest.raises(AssertionError):
            require_dropped(found, problem, dropped, fault)


def test_repeated_ids_beyond_the_worst_case_are_counted(ranks: Pool) -> None:
    """Blocks are for distinct ids: of a token whose two slots want one expert of a rank with one place, one is lost."""
    placement = placement_of("linear", 2, 2)
    problem = draw_problem(0, placement, (2, 2), 2, "random", "float32", PLAIN)
    ids = np.array([[0, 0], [0, 0], [0, 1], [1, 0]], np.int32)
    problem = dataclasses.replace(problem, routing=TopK(ids, problem.routing.weights))
    for way in WAYS[2:]:
        assert compare_with_twin(ranks, problem, way, way.mode) == 2
    for way in WAYS[:2]:
        compare_with_one_device(ranks, problem, way, "exact counts")
    hot = dataclasses.replace(problem, routing=TopK(np.zeros_like(ids), problem.routing.weights))
    compare_with_one_device(ranks, hot, PEER[1], "a place for each token", differentiated=False)
    for way in (PEER[0], dataclasses.replace(PEER[1], receive=6)):
        # Memory is for the slots that distinct ids of the most tokens have, whose they are.
        found = run_group(ranks, hot, way, differentiated=False)
        # Of up to three tokens, as `parallel_of` says.
        assert found["overflow"].tolist() == [2] and np.isnan(found["output"]).all(axis=1).tolist() == [False] * 3 + [
            True
        ]


@over(TORCH_WAYS)
def test_int64_ids_and_weights_of_16_bits(ranks: Pool, way: ExchangeSpec) -> None:
    """Results and gradients are those of casting both first."""
    placement, sizes = placement_of("round_robin", 6, 2), sizes_of(way)
    problem = draw_problem(0, placement, (4, 4), 2, "random", "float32", PLAIN, sizes=sizes)
    ids, weights = problem.routing.ids.astype(np.int64), problem.routing.weights.astype(numpy_dtype("bfloat16"))
    ids[0, 0], ids[-1, 0] = 2**32 + 1, -(2**40)
    own = TopK(ids, weights)
    cast = TopK(np.clip(ids, -2, 2**31 - 1).astype(np.int32), weights.astype(np.float32))
    found, wanted = (run_group(ranks, dataclasses.replace(problem, routing=one), way) for one in (own, cast))
    assert int(wanted["invalid_ids"].sum()) == 2
    wanted["d_routing.weights"] = wanted["d_routing.weights"].astype(weights.dtype)
    for name, array in wanted.items():
        require_same(found[name], array, name)


@pytest.mark.parametrize("number, dtype", [(1, "bfloat16"), (3, "float32")])
def test_every_rank_is_a_shard_of_jax(ranks: Pool, number: int, dtype: str) -> None:
    """Both frameworks send as many slots of a routing to the same places: all results are equal, rank by rank."""
    pytest.importorskip("jax")
    from tests.support.parallel import jax

    problem = draw_problem(7, placement_of("round_robin", 5, 3), (4, 4, 4), 2, "random", dtype, PLAIN)
    found, shards = run_group(ranks, problem, WAYS[number]), jax.run_group(problem, WAYS[number])
    assert found.keys() == shards.keys()
    for name, array in found.items():
        require_same(array, shards[name], name)


FAULTS = (
    ("wrong_place", 3),
    ("wrong_rows", 4),
    ("other_owner", 1),
    ("other_owner", 2),
    ("permuted_weights", 1),
    ("permuted_weights", 3),
    ("counts_off_by_one", 0),
    ("slots_not_in_order", 1),
    ("gradient_not_returned", 0),
    ("output_gradient_of_another", 2),
    ("gradient_not_returned", 5),
    ("output_gradient_of_another", 7),
    ("gradient_not_returned", 6),
    ("output_gradient_of_another", 6),
    ("weight_gradient_of_another", 6),
    *((fault, 5 + number % 2 * 2) for number, fault in enumerate(PEER_FAULTS)),
)


@pytest.mark.parametrize("fault, number", FAULTS)
def test_planted_faults_are_found(ranks: Pool, fault: str, number: int) -> None:
    problem = draw_problem(5, placement_of("linear", 6, 2), (5, 5), 3, "random", "float32", PLAIN, sizes=(16, 8))
    compare_with_one_device(ranks, problem, ALL_WAYS[number], "without a fault")
    with pytest.raises(AssertionError):
        compare_with_one_device(ranks, problem, ALL_WAYS[number], "with a fault", fault=fault)


def expert_gradients(group: Any, problems: list[Problem], way: ExchangeSpec, alone: bool) -> list[np.ndarray]:
    """Of this rank's experts, from calls that share memory; alone: each backward runs before the next forward."""
    rank, outputs, found = torch.distributed.get_rank(group), [], []
    with running_on("reference"):
        for problem in problems:
            own = to_torch(problem.ranks()[rank], "cpu")
            options: Any = {"parallel": parallel_of(group, way, problem), "placement": problem.placement}
            found += list(trained(own.experts).values())
            outputs.append(parallel_moe(own.x, own.experts, own.routing, problem.spec, **options).output.sum())
            if alone:
                outputs.pop().backward()
        for output in outputs:
            output.backward()
    return [array.grad.numpy() for array in found]


@over(PEER)
def test_frozen_routers_weights_stay_until_a_backward(ranks: Pool, way: ExchangeSpec) -> None:
    """Only the experts learn, so nothing but their op keeps what came: the next call receives in the same memory."""
    placement = placement_of("linear", 6, 2, 0)
    drawn = [
        draw_problem(seed, placement, (5, 5), 2, "random", "float32", PLAIN, sizes=sizes_of(way)) for seed in (1, 2)
    ]
    found, expected = (ranks.call(expert_gradients, [(drawn, way, alone)] * 2) for alone in (False, True))
    for array, other in zip(*(itertools.chain(*one) for one in (found, expected)), strict=True):
        np.testing.assert_array_equal(array, other, str(way))


def gradients_of(group: Any, problem: Problem, how: str, way: ExchangeSpec) -> list[np.ndarray]:
    own = to_torch(problem.ranks()[torch.distributed.get_rank(group)], "cpu")
    leaves = [own.x.requires_grad_(), *trained(own.experts).values()]
    options: Any = {"parallel": parallel_of(group, way, problem), "placement": problem.placement}

    def call(x: torch.Tensor) -> torch.Tensor:
        return parallel_moe(x, own.experts, own.routing, problem.spec, **options).output

    saved: Any = torch.autograd.graph.allow_mutation_on_saved_tensors if how == "written" else contextlib.nullcontext
    if how == "copied":
        saved = functools.partial(torch.autograd.graph.saved_tensors_hooks, torch.clone, torch.clone)
    with running_on("reference"), poisoned(), saved(), torch.autograd.set_detect_anomaly(how == "searched for NaN"):
        y = (functools.partial(checkpoint, call, use_reentrant=False) if how == "made again" else call)(own.x)
        if how == "twice":
            torch.autograd.grad(y.sum(), leaves, retain_graph=True)
        return [one.numpy() for one in torch.autograd.grad(y.sum(), leaves)]


@pytest.mark.parametrize("how", ["copied", "made again", "searched for NaN", "twice", "written"])
def test_gradients_where_saved_tensors_are_others(ranks: Pool, how: str) -> None:
    """A rank has room behind the rows that arrive, of which nothing is read."""
    for way in TORCH_WAYS:
        tokens = (36 + (way in WAYS[2:]), 37)  # blocks need ranks of one size
        problem = draw_problem(1, placement_of("linear", 6, 2, 0), tokens, 3, "random", "float32", PLAIN, sizes=(16, 8))
        found, expected = (ranks.call(gradients_of, [(problem, one, way)] * 2) for one in (how, ""))
        for array, other in zip(*(itertools.chain(*one) for one in (found, expected)), strict=True):
            np.testing.assert_array_equal(array, other, how)
