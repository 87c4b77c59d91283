"""The twin of all ranks against one device: forward and every gradient, bit by bit, for hard routings."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_core.errors import InvalidInput, Unsupported
from moe_core.parallel import ExchangeSpec, Placement
from moe_core.parallel.placement import gather_experts, shard_experts
from moe_core.specs import Activation, MoESpec, RouterSpec, Tuning
from moe_core.specs.operands import ExpertWeights, TopK
from tests.support.parallel.placements import placement_of
from tests.support.parallel.twin import arithmetic
from tests.support.parallel.twin.ranks import GroupForward, moe, moe_backward
from tests.support.parallel.twins import LOADS, PLAIN, Problem, draw_problem
from tests.support.strategies import seeds

#: Every way in which slots come home one by one.
WAYS = (
    ExchangeSpec("all_gather"),
    *(ExchangeSpec(mode, rows) for mode in ("all_to_all", "padded", "peer") for rows in ("tokens", "slots")),
)
SAME_TOKENS = ("all_gather", "padded")


def require_same(found: np.ndarray, expected: np.ndarray, label: str) -> None:
    """Same bits, NaN included, but for the sign of NaN."""
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape), label
    found, expected = found.astype(np.float32), expected.astype(np.float32)
    numbers = ~np.isnan(expected)
    assert (np.isnan(found) == ~numbers).all(), label
    np.testing.assert_array_equal(found[numbers].view(np.uint32), expected[numbers].view(np.uint32), label)


def tokens_of(random: np.random.Generator, way: ExchangeSpec, ranks: int, least: int = 0) -> tuple[int, ...]:
    """Of each rank: as many on all where the mode wants it, else some with none."""
    if way.mode in SAME_TOKENS:
        return (int(random.integers(least, 9)),) * ranks
    return tuple(random.integers(least, 9, ranks).tolist())


def compare(problem: Problem, way: ExchangeSpec, label: str) -> GroupForward:
    """Raise unless output and gradients are those of one device."""
    stages = problem.alone()
    forward = moe(problem.ranks(), problem.spec, problem.placement, way)
    assert forward.overflow.tolist() == [0], label
    require_same(np.concatenate([own.output for own in forward.outputs]), stages["output"], f"output, {label}")
    assert all(own.tokens_per_expert.dtype == np.int32 for own in forward.outputs)
    counts = sum(own.tokens_per_expert for own in forward.outputs)
    np.testing.assert_array_equal(counts, stages["tokens_per_expert"], label)
    assert sum(int(own.invalid_ids[0]) for own in forward.outputs) == int(stages["invalid_ids"][0]), label
    received = np.concatenate(forward.received_per_expert)
    held = problem.placement.tables.expert_of_place
    by_expert = np.bincount(held[held >= 0], received[held >= 0], problem.placement.num_experts)
    np.testing.assert_array_equal(by_expert, stages["tokens_per_expert"], label)
    if problem.placement.has_replicas:
        return forward
    expected = problem.alone_backward(stages)
    found = moe_backward(problem.gradients(), problem.ranks(), problem.spec, forward)
    for name, gradient in expected.items():
        if name == "d_x" or name == "d_routing.weights":
            require_same(np.concatenate([own[name] for own in found]), gradient, f"{name}, {label}")
        if name.startswith("d_experts."):
            require_same(gather_experts([own[name] for own in found], problem.placement), gradient, f"{name}, {label}")
    return forward


@pytest.mark.parametrize("load", LOADS)
def test_every_bit_is_that_of_one_device(load: str) -> None:
    cases = itertools.product((1, 2, 3, 4) if load == "random" else (2, 3, 4), WAYS)
    for seed, (ranks, way) in enumerate(cases, 100 * LOADS.index(load)):
        random, kind = np.random.default_rng(seed), ("linear", "round_robin", "balanced")[seed % 3]
        experts, top_k = int(random.integers(1, 10)), int(random.integers(1, 5))
        placement = placement_of(kind, experts, ranks, seed)
        if load == "repeated":
            top_k = min(top_k, placement.per_rank)  # worst cases are those of distinct ids
        dtype = ("float32", "bfloat16")[seed % 2]
        tokens = tokens_of(random, way, ranks)
        problem = draw_problem(seed, placement, tokens, top_k, load, dtype, PLAIN)
        compare(problem, way, f"{load}, {placement}, {way}, {dtype}, tokens {tokens}, K {top_k}")


@pytest.mark.parametrize("load", LOADS)
def test_hosts_give_every_bit_of_one_device(load: str) -> None:
    """Two hosts of two ranks or three, and hosts of one: a token crosses to a host once, whatever its experts."""
    for seed, (ranks, hosts) in enumerate(((4, 2), (6, 2), (6, 3), (4, 4), (2, 2)), 50 * LOADS.index(load)):
        random, kind = np.random.default_rng(seed), ("linear", "round_robin", "balanced", "replicas")[seed % 4]
        experts, top_k = int(random.integers(1, 12)), int(random.integers(1, 5))
        placement, tokens = placement_of(kind, experts, ranks, seed), tuple(random.integers(0, 9, ranks).tolist())
        top_k = min(top_k, placement.per_rank) if load == "repeated" else top_k
        spec = dataclasses.replace(PLAIN, tuning=Tuning(batch_invariant=True)) if kind == "replicas" else PLAIN
        problem = draw_problem(seed, placement, tokens, top_k, load, ("float32", "bfloat16")[seed % 2], spec)
        forward = compare(problem, ExchangeSpec(hosts=hosts), f"{load}, {placement}, {hosts} hosts, tokens {tokens}")
        each = ranks // hosts
        for rank, home in enumerate(forward.routes.homes):
            host_of = np.where(home.places < 0, -1, home.places // each // placement.per_rank)
            assert len(home.arrivals.owner) == sum(len(set(row[row >= 0])) for row in host_of)
            # Replicas elsewhere are used only by hosts without any.
            held = placement.tables.expert_of_place
            away = held[home.places[(host_of >= 0) & (host_of != rank // each)]]
            assert not set(held.reshape(hosts, -1)[rank // each]) & set(away)


@pytest.mark.parametrize("way", WAYS, ids=lambda way: f"{way.mode}-{way.rows}")
def test_one_token_and_no_token_at_all(way: ExchangeSpec) -> None:
    for tokens in ((1, 1), (0, 0), *(() if way.mode in SAME_TOKENS else ((0, 1), (1, 0)))):
        compare(draw_problem(3, Placement.linear(5, 2), tokens, 3, "random", "bfloat16", PLAIN), way, str(tokens))


#: Layers that have everything which stays at home, or is stored in another way.
SPECS = (
    MoESpec(Activation("swiglu_oai", gate_layout="interleaved"), RouterSpec(2, renormalize=True)),
    MoESpec(Activation("silu", gate_layout="separate"), RouterSpec(3, "sigmoid", scale=2.5), out_dtype="float32"),
    MoESpec(Activation("relu2", gated=False), RouterSpec(1), "out_in", "out_in", apply_router_weight_on_input=True),
)


@given(
    seed=seeds(), way=st.sampled_from(WAYS), spec=st.sampled_from(SPECS), dtype=st.sampled_from(("float32", "bfloat16"))
)
def test_router_shared_expert_and_biases(seed: int, way: ExchangeSpec, spec: MoESpec, dtype: str) -> None:
    random = np.random.default_rng(seed)
    assert spec.router is not None
    placement = placement_of(("linear", "round_robin", "balanced")[seed % 3], 7, int(random.integers(1, 5)), seed % 99)
    # BLAS adds up a single row in another order: the router's, and the shared expert's, of a rank's own tokens.
    tokens = tokens_of(random, way, placement.num_ranks, least=2)
    problem = draw_problem(seed, placement, tokens, spec.router.require_top_k(), "random", dtype, spec, extras=True)
    forward = compare(problem, way, f"{placement}, {way}, {spec}, tokens {tokens}")
    stages = problem.alone()
    expected = problem.alone_backward(stages)
    found = moe_backward(problem.gradients(), problem.ranks(), problem.spec, forward)
    for name in expected:
        if name.startswith(("d_shared.", "d_routing.")) and name != "d_routing.weights":
            total = sum(own[name].astype(np.float32) for own in found)
            scale = np.abs(expected[name].astype(np.float32)).max() + 1e-3
            slack = 2e-6 if dtype == "float32" else 2e-2
            assert np.abs(total - expected[name].astype(np.float32)).max() <= slack * len(tokens) * scale, name


@given(seed=seeds(), way=st.sampled_from(WAYS), dtype=st.sampled_from(("float32", "bfloat16")))
def test_replicas_give_the_bits_of_one_device(seed: int, way: ExchangeSpec, dtype: str) -> None:
    """Forward, and with one order of sums for every number of rows, since an expert's rows are at several ranks."""
    random = np.random.default_rng(seed)
    placement = placement_of("replicas", int(random.integers(1, 10)), int(random.integers(2, 5)), seed % 99)
    spec = dataclasses.replace(PLAIN, tuning=Tuning(batch_invariant=True))
    tokens = tokens_of(random, way, placement.num_ranks)
    problem = draw_problem(seed, placement, tokens, 3, LOADS[seed % 6], dtype, spec)
    compare(problem, way, f"{placement}, {way}, tokens {tokens}")


def test_replicas_share_their_slots_however_tokens_are_split() -> None:
    placement = placement_of("replicas", 5, 3, 1)
    received = []
    for tokens in ((9, 0, 0), (4, 4, 1), (0, 2, 7)):
        problem = draw_problem(2, placement, tokens, 3, "hot_expert", "float32", PLAIN)
        received.append(np.concatenate(moe(problem.ranks(), PLAIN, placement).received_per_expert).tolist())
    assert received[0] == received[1] == received[2]


@pytest.mark.parametrize("way", WAYS[:3], ids=lambda way: f"{way.mode}-{way.rows}")
def test_a_stack_of_layers(way: ExchangeSpec) -> None:
    """Experts with a layer axis; the layer that was not used has gradients of exact zeros."""
    placement = Placement.round_robin(5, 2)
    problem = draw_problem(7, placement, (4, 4), 2, "random", "float32", PLAIN)
    arrays = (problem.experts.gate_up, problem.experts.down)
    stack = ExpertWeights(*(np.stack([array + 1, array]) for array in arrays), layer_index=np.array([1], np.int32))
    stages = problem.alone()
    expected = problem.alone_backward(stages)
    ranks = dataclasses.replace(problem, experts=stack).ranks()
    forward = moe(ranks, PLAIN, placement, way)
    require_same(np.concatenate([own.output for own in forward.outputs]), stages["output"], "output")
    found = moe_backward(problem.gradients(), ranks, PLAIN, forward)
    for name in ("d_experts.gate_up", "d_experts.down"):
        whole = gather_experts([own[name] for own in found], placement, axis=1)
        require_same(whole[1], expected[name], name)
        assert not whole[0].any(), name


def test_weights_on_the_input_have_the_gradients_of_one_device() -> None:
    problem = draw_problem(5, Placement.linear(6, 3), (5, 4, 3), 1, "random", "float32", SPECS[2], extras=True)
    forward = moe(problem.ranks(), problem.spec, problem.placement)
    found = moe_backward(problem.gradients(), problem.ranks(), problem.spec, forward)
    expected = problem.alone_backward(problem.alone())
    np.testing.assert_allclose(np.concatenate([own["d_x"] for own in found]), expected["d_x"], 1e-5, 1e-5)


@pytest.mark.parametrize(
    "way", [way for way in WAYS if way.mode != "all_gather"], ids=lambda way: f"{way.mode}-{way.rows}"
)
@pytest.mark.parametrize("load", ["random", "hot_rank", "masked"])
def test_overflow_is_counted_exactly(way: ExchangeSpec, load: str) -> None:
    placement, tokens, top_k = Placement.round_robin(6, 3), (5, 5, 5), 3
    spec = dataclasses.replace(PLAIN, tuning=Tuning(batch_invariant=True))
    problem = draw_problem(11, placement, tokens, top_k, load, "bfloat16", spec)
    places = arithmetic.physical_ids(problem.routing.ids, placement, token_mask=problem.token_mask).places
    groups = places if way.rows == "slots" else arithmetic.first_owners(places, 2)
    owners = arithmetic.owners_of(groups, 2) if way.rows == "slots" else groups
    # Rows from each home to each owner, counted one by one.
    rows = np.array([[(problem.of_rank(home, owners) == owner).sum() for owner in range(3)] for home in range(3)])
    most = int(rows.sum(axis=0).max())
    for receive in (0, 1, 3, most - 1, most, 3 * int(rows.max()) - 1, 3 * int(rows.max())):
        bounded = dataclasses.replace(way, receive=receive)
        if way.mode == "padded":
            expected = np.maximum(rows - receive // 3, 0).sum()
        else:
            expected = np.maximum(rows.sum(axis=0) - receive, 0).sum()
        forward = moe(problem.ranks(), spec, placement, bounded)
        assert forward.overflow.tolist() == [expected], (way, receive)
        lost = np.concatenate(forward.routes.lost)
        assert lost.any() == bool(expected) and not (lost & (places < 0)).any()
        dropped = dataclasses.replace(
            problem, routing=TopK(np.where(lost, -1, problem.routing.ids), problem.routing.weights)
        )
        reference = dropped.alone()["output"]
        drop = moe(problem.ranks(), spec, placement, dataclasses.replace(bounded, on_overflow="drop"))
        require_same(np.concatenate([own.output for own in drop.outputs]), reference, "what fits, is added")
        reference[lost.any(axis=1)] = np.nan
        require_same(np.concatenate([own.output for own in forward.outputs]), reference, "what does not, makes NaN")


def test_repeated_ids_beyond_the_worst_case_are_counted() -> None:
    """Blocks are as large as distinct ids need: T * min(K, L) slots. A token whose two slots want one expert of a rank
    with one place sends one too many."""
    placement = Placement.linear(2, 2)
    problem = draw_problem(0, placement, (2, 2), 2, "random", "float32", PLAIN)
    ids = np.array([[0, 0], [0, 0], [0, 1], [1, 0]], np.int32)
    problem = dataclasses.replace(problem, routing=TopK(ids, problem.routing.weights))
    for way in (ExchangeSpec("padded", "slots"), ExchangeSpec("padded"), ExchangeSpec("all_gather")):
        forward = moe(problem.ranks(), PLAIN, placement, way)
        assert forward.overflow.tolist() == [2]
        assert np.isnan(forward.outputs[0].output).any() and not np.isnan(forward.outputs[1].output).any()
    compare(problem, ExchangeSpec("all_to_all"), "exact counts")


def test_wrong_calls_are_refused() -> None:
    placement = Placement.linear(4, 2)
    ranks = draw_problem(0, placement, (2, 2), 2, "random", "float32", PLAIN).ranks()
    with pytest.raises(InvalidInput, match="ranks must be the placement's 2, got 1"):
        moe(ranks[:1], PLAIN, placement)
    with pytest.raises(InvalidInput, match="rank 0 must hold its 3 places of experts and no expert_map, got 2 experts"):
        moe(ranks, PLAIN, Placement.balanced([1] * 4, 2, 3))
    with pytest.raises(InvalidInput, match=r"experts must hold the placement's 5 experts, got \(4, 12, 16\); pass all"):
        shard_experts(draw_problem(0, placement, (2, 2), 2, "random", "float32", PLAIN).experts, Placement.linear(5, 2))
    with pytest.raises(Unsupported, match="the twin moves rows as they are and at once, got chunks=2"):
        moe(ranks, PLAIN, placement, ExchangeSpec(chunks=2))
    uneven = draw_problem(0, placement, (2, 3), 2, "random", "float32", PLAIN).ranks()
    with pytest.raises(
        InvalidInput, match=r"tokens must be as many on every rank with mode='padded', got \[2, 3\]; pad"
    ):
        moe(uneven, PLAIN, placement, ExchangeSpec("padded"))


def wrong_place(monkeypatch: pytest.MonkeyPatch) -> None:
    real = arithmetic.run_starts
    monkeypatch.setattr(
        "tests.support.parallel.twin.routes.run_starts", lambda counts, *rest: np.roll(real(counts, *rest), 1, axis=0)
    )


def counts_off_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    real = arithmetic.run_starts

    def miscounted(counts: np.ndarray, *rest: Any) -> np.ndarray:
        counts = counts.copy()
        counts[0, 0] += 1
        return real(counts, *rest)

    monkeypatch.setattr("tests.support.parallel.twin.routes.run_starts", miscounted)


def permuted_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.support.parallel.twin.routes import Routes

    real = Routes.push_weights
    monkeypatch.setattr(Routes, "push_weights", lambda *arguments: real(*arguments)[::-1])


def other_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    real = arithmetic.owners_of
    monkeypatch.setattr(
        "tests.support.parallel.twin.routes.owners_of",
        lambda places, each: np.where(places < 0, -1, real(places, each) ^ 1),
    )


@pytest.mark.parametrize("fault", [wrong_place, counts_off_by_one, permuted_weights, other_replica])
@pytest.mark.parametrize("way", [ExchangeSpec(), ExchangeSpec(rows="slots")], ids=lambda way: way.rows)
def test_planted_faults_are_found(fault, way: ExchangeSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = draw_problem(5, Placement.linear(6, 2), (4, 5), 3, "random", "float32", PLAIN)
    compare(problem, way, "without a fault")
    fault(monkeypatch)
    with pytest.raises((AssertionError, IndexError, ValueError)):
        compare(problem, way, "with a fault")
