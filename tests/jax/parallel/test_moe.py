"""Expert parallelism on four host devices against one device: forward and every gradient, bit by bit."""

from __future__ import annotations

import dataclasses
import os

import numpy as np
import pytest

from moe_core.ops.activation.reference import sigmoid
from moe_core.ops.reduction import reference as reduction
from moe_core.parallel import ExchangeSpec
from moe_core.specs import Activation, MoESpec, RouterSpec, Tuning
from moe_core.specs.operands import TopK
from moe_jax.parallel import routes
from tests.support.jax import REAL_KERNELS
from tests.support.parallel.jax import compare_with_one_device, compare_with_twin, group_step, run_group
from tests.support.parallel.placements import placement_of
from tests.support.parallel.twins import LOADS, PLAIN, draw_problem
from tests.support.parallel.ways import BOUNDED, STATIC, WAYS, every_way, most_received, over, require_dropped

#: MOEBIUS_DEPTH=2 compiles programs that are left out here, since they differ little from those that are not.
DEPTH = int(os.environ.get("MOEBIUS_DEPTH", "1"))


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that nothing was received into hold NaN, which no result may show."""
    monkeypatch.setattr(routes, "UNUSED", np.nan)


#: placement, E, W, T of a rank, K
SIZES = (
    ("linear", 6, 4, 5, 3), ("round_robin", 7, 4, 4, 3), ("balanced", 7, 3, 6, 2), ("linear", 8, 2, 1, 4),
    ("round_robin", 5, 3, 1, 2), ("linear", 3, 4, 3, 2), ("balanced", 4, 1, 7, 2),
)  # fmt: skip


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@every_way
def test_every_bit_of_one_device(way: ExchangeSpec, dtype: str) -> None:
    number = 2 * WAYS.index(way) + (dtype == "bfloat16")
    kind, experts, ranks, tokens, top_k = SIZES[number % len(SIZES)]
    placement = placement_of(kind, experts, ranks, number)
    for seed, load in enumerate(LOADS):
        if load == "repeated":  # below
            continue
        problem = draw_problem(seed, placement, (tokens,) * ranks, top_k, load, dtype, PLAIN)
        compare_with_one_device(problem, way, f"{placement}, {load}", check_vma=number % 3 != 0)
    # A rank has no tokens where all of its are masked.
    mask = np.arange(ranks * tokens) >= tokens
    problem = dataclasses.replace(
        draw_problem(9, placement, (tokens,) * ranks, top_k, "random", dtype, PLAIN), token_mask=mask
    )
    compare_with_one_device(problem, way, f"{placement}, none on rank 0", check_vma=number % 3 != 0)
    program = group_step(PLAIN, placement, way, check_vma=number % 3 != 0)
    assert program._cache_size() == 1, "no routing compiles anything again"


@pytest.mark.parametrize("kind", ["round_robin", "linear", "replicas"])
def test_hosts_give_every_bit_of_one_device(kind: str) -> None:
    """Four ranks on two pretended hosts."""
    trained = kind != "replicas"
    spec = PLAIN if trained else dataclasses.replace(PLAIN, tuning=Tuning(batch_invariant=True))
    placement, dtype = placement_of(kind, 7, 4, 1), "bfloat16" if kind == "linear" else "float32"
    for seed, load in enumerate(LOADS):
        if load == "repeated":
            continue
        problem = draw_problem(seed, placement, (4,) * 4, 3, load, dtype, spec)
        compare_with_one_device(problem, ExchangeSpec(hosts=2), f"{placement}, {load}", differentiated=trained)


#: What stays at home or is stored in another way: routers, biases, layouts, dtypes.
SPECS = (
    MoESpec(Activation("swiglu_oai", gate_layout="interleaved"), RouterSpec(2, renormalize=True)),
    MoESpec(Activation("silu", gate_layout="separate"), RouterSpec(3, "sigmoid", scale=2.5), out_dtype="float32"),
    MoESpec(Activation("relu2", gated=False), RouterSpec(2), "out_in", "out_in", recompute=True),
)


@pytest.mark.skipif(REAL_KERNELS != "interpreter", reason="host devices run kernels in the interpreter alone")
@pytest.mark.parametrize("number, spec", [(3, PLAIN), (1, SPECS[0])], ids=["given ids", "routed, with a shared expert"])
def test_interpreted_kernels_give_every_bit_of_one_device(number: int, spec: MoESpec) -> None:
    """Two ranks whose experts are loaded unevenly: an owner's tiles are those of all tokens."""
    placement = placement_of("round_robin", 3, 2)
    problem = draw_problem(number, placement, (4, 4), 2, "hot_rank", "bfloat16", spec, extras=spec.router is not None)
    compare_with_one_device(problem, WAYS[number], "interpreter", engine="interpreter")


@pytest.mark.parametrize("number, dtype", [(0, "float32"), (1, "bfloat16"), (2, "float32")])
def test_routers_biases_and_shared_experts(number: int, dtype: str) -> None:
    spec = SPECS[number]
    assert spec.router is not None
    placement = placement_of(("linear", "round_robin", "balanced")[number], 6, 2 + number % 3)
    top_k = spec.router.require_top_k()
    problem = draw_problem(number, placement, (5,) * placement.num_ranks, top_k, "masked", dtype, spec, extras=True)
    compare_with_one_device(problem, (WAYS[3], WAYS[2], WAYS[1])[number], f"{spec}")


def test_the_sum_at_home_applies_the_gate_of_a_shared_expert(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where product and sum are one rounding, as compiled kernels may have it, they are one in a group too."""
    monkeypatch.setattr(reduction, "sigmoid", lambda gate: sigmoid(gate).astype(np.float64))
    placement, spec = placement_of("linear", 6, 2), dataclasses.replace(SPECS[0], out_dtype="float32")
    for seed in range(3):
        problem = draw_problem(seed, placement, (9, 9), 2, "random", "bfloat16", spec, extras=True, sizes=(64, 8))
        compare_with_one_device(problem, WAYS[3], f"draw {seed}")


@pytest.mark.parametrize("number", [3, 1])
def test_replicas_give_the_bits_of_one_device(number: int) -> None:
    """With one order of sums for every number of rows, since an expert's rows are at several ranks."""
    spec = dataclasses.replace(PLAIN, tuning=Tuning(batch_invariant=True))
    placement = placement_of("replicas", 5, 4, number)
    assert placement.has_replicas
    for seed, load in enumerate(LOADS):
        problem = draw_problem(seed, placement, (5,) * 4, 3, load, "bfloat16", spec)
        compare_with_one_device(problem, WAYS[number], load, differentiated=False)


@over(BOUNDED)
def test_overflow_is_counted_exactly(way: ExchangeSpec) -> None:
    """At bounds around the rows of the rank that has most, NaN and all, and where rows are dropped."""
    placement, spec = placement_of("round_robin", 6, 3), dataclasses.replace(PLAIN, tuning=Tuning(batch_invariant=True))
    problem = draw_problem(11, placement, (5, 5, 5), 3, "hot_rank", "float32", spec)
    most = most_received(problem, way)
    found = []
    for receive in (0, 1, most - 1, most):
        found.append(compare_with_twin(problem, dataclasses.replace(way, receive=receive), f"{receive}"))
    assert found[-1] == 0 and all(found[:-1]) and sorted(found, reverse=True) == found
    if way == WAYS[4] or DEPTH > 1:
        dropped = dataclasses.replace(way, receive=most - 1, on_overflow="drop")
        assert compare_with_twin(problem, dropped, "drop") > 0


@over(BOUNDED if DEPTH > 1 else WAYS[1::3])
def test_gradients_of_dropped_slots(way: ExchangeSpec) -> None:
    """They are 0, and all others are those of a routing without these slots."""
    placement, spec = placement_of("round_robin", 6, 3), dataclasses.replace(PLAIN, tuning=Tuning(batch_invariant=True))
    dropped = dataclasses.replace(way, receive=6, on_overflow="drop")
    for seed, load in enumerate(("random", "hot_rank", "masked", "absent")):
        problem = draw_problem(seed, placement, (5, 5, 5), 3, load, "bfloat16", spec)
        require_dropped(run_group(problem, dropped), problem, dropped, load)


def test_repeated_ids_beyond_the_worst_case_are_counted() -> None:
    """Memory is for distinct ids: of a token whose two slots want one expert of a rank with one place, one is lost."""
    placement = placement_of("linear", 2, 2)
    problem = draw_problem(0, placement, (2, 2), 2, "random", "float32", PLAIN)
    ids = np.array([[0, 0], [0, 0], [0, 1], [1, 0]], np.int32)
    problem = dataclasses.replace(problem, routing=TopK(ids, problem.routing.weights))
    for way in STATIC if DEPTH > 1 else WAYS[4:]:
        assert compare_with_twin(problem, way, way.mode) == 2
    for way in WAYS[:2] if DEPTH > 1 else WAYS[1:2]:
        found = run_group(problem, way, differentiated=False)
        assert found["overflow"].tolist() == [2]
        assert np.isnan(found["output"]).any(axis=1).tolist() == [True, True, False, False]
