"""Placements: what they hold, how replicas spread, what a change moves, and how wrong ones are refused."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_core.base import codec
from moe_core.errors import InvalidInput
from moe_core.parallel import Move, Placement
from tests.support.parallel.placements import placement_of, placements


def test_worked_examples() -> None:
    assert Placement.linear(5, 2).owners == ((0, 1, 2), (3, 4, -1))
    assert Placement.round_robin(5, 2).owners == ((0, 2, 4), (1, 3, -1))
    assert Placement.linear(2, 4).owners == ((0,), (1,), (-1,), (-1,))
    assert Placement.linear(2, 4).occupied == (1, 1, 0, 0) and Placement.linear(5, 2).occupied == (3, 2)
    hot = Placement.balanced([8, 1, 1, 2], 2, 3)
    assert hot.owners == ((0, 1, 3), (0, 2, 3)), "experts 0 and 3 are the hottest, and have a replica"
    assert hot.places_of(0) == (0, 3) and hot.places_of(1) == (1,) and hot.has_replicas
    assert str(hot) == "4 experts on 2 ranks of 3, 2 replicas, 0 empty, version 0"
    for make in (Placement.linear, Placement.round_robin):
        with pytest.raises(InvalidInput, match="num_experts must be an integer of at least 1, got 0"):
            make(0, 2)
    alone = Placement.balanced([8, 1, 1, 2], 2, 3, max_replicas=1)
    assert alone.owners == ((0, -1, -1), (1, 2, 3)) and not alone.has_replicas


@given(placement=placements())
def test_tables_say_what_owners_say(placement: Placement) -> None:
    held, places, start = placement.tables
    assert held.dtype == places.dtype == start.dtype == np.int32
    assert tuple(map(tuple, held.reshape(placement.num_ranks, -1).tolist())) == placement.owners
    assert sorted(places.tolist()) == list(range(placement.num_places))
    for expert in range(placement.num_experts):
        own = placement.places_of(expert)
        assert own == tuple(np.flatnonzero(held == expert)) == tuple(places[start[expert] : start[expert + 1]])
        assert len({place // placement.per_rank for place in own}) == len(own) >= 1
    assert (held[places[start[-1] :]] == -1).all()
    assert placement.has_replicas == bool((np.diff(start) > 1).any())
    assert codec.loads(codec.dumps(placement)) == placement


@given(
    ranks=st.integers(1, 6), spare=st.integers(0, 3), experts=st.integers(1, 20), nodes=st.integers(1, 3),
    seed=st.integers(0, 99), power=st.sampled_from((0, 1, 3)),
)  # fmt: skip
def test_balanced_fills_every_place_it_may(
    ranks: int, spare: int, experts: int, nodes: int, seed: int, power: int
) -> None:
    load = np.random.default_rng(seed).integers(0, 9, experts).astype(float) ** power
    ranks *= nodes
    per_rank = -(-experts // ranks) + spare
    placement = Placement.balanced(load, ranks, per_rank, nodes=nodes)
    assert placement == Placement.balanced(load.tolist(), ranks, per_rank, nodes=nodes)
    own = ranks // nodes
    copies = np.diff(placement.tables.start)
    assert copies.max() <= own
    node_of = [{place // per_rank // own for place in placement.places_of(expert)} for expert in range(experts)]
    assert all(len(nodes_of) == 1 for nodes_of in node_of), "replicas stay on a node"
    for node in range(nodes):
        members = [expert for expert in range(experts) if node_of[expert] == {node}]
        assert copies[members].sum() == min(own * per_rank, len(members) * own)
    alone = Placement.balanced(load, ranks, per_rank, nodes=nodes, max_replicas=1)
    assert not alone.has_replicas


def test_a_replica_finds_room_that_another_expert_gives_up() -> None:
    """The last replica of expert 2 finds room on the rank alone that has the other: an expert moves there for it."""
    placement = Placement.balanced([1000, 400, 10, *[9] * 6], 3, 4, max_replicas=2)
    assert placement.owners == ((0, 1, 2, 3), (0, 6, 7, 8), (1, 2, 4, 5))


def test_balance_of_zipf_loads() -> None:
    """Mean over maximum of the ranks' rows, of loads by Zipf's law with exponent 0.6 in any order of experts."""

    def mean(experts: int, ranks: int, per_rank: int | None) -> float:
        found = []
        for seed in range(5):
            load = np.random.default_rng(seed).permutation(np.arange(1, experts + 1) ** -0.6)
            linear = Placement.linear(experts, ranks)
            found.append((Placement.balanced(load, ranks, per_rank) if per_rank else linear).balancedness(load))
        return float(np.mean(found))

    assert round(mean(128, 4, None), 2) == 0.85 and round(mean(128, 4, 32), 2) == 0.99
    assert round(mean(256, 64, None), 2) == 0.25 and round(mean(256, 64, 5), 2) == 0.99


@given(placement=placements(), seed=st.integers(0, 99))
def test_balancedness_is_mean_over_maximum_of_ranks(placement: Placement, seed: int) -> None:
    load = np.random.default_rng(seed).integers(0, 9, placement.num_experts)
    copies = np.diff(placement.tables.start)
    ranks = [sum(load[expert] / copies[expert] for expert in rank if expert >= 0) for rank in placement.owners]
    expected = np.mean(ranks) / np.max(ranks) if any(ranks) else 1.0
    np.testing.assert_allclose(placement.balancedness(load), expected, 1e-12)


@given(
    ranks=st.integers(1, 4), nodes=st.integers(1, 2), experts=st.integers(4, 12), spare=st.integers(0, 2),
    seed=st.integers(0, 99),
)  # fmt: skip
def test_a_near_placement_has_the_same_shares_and_moves_little(
    ranks: int, nodes: int, experts: int, spare: int, seed: int
) -> None:
    random, ranks = np.random.default_rng(seed), ranks * nodes
    per_rank = min(experts, -(-experts // ranks) + spare)
    load = random.integers(0, 50, experts)
    old, new = (Placement.balanced(given, ranks, per_rank, nodes=nodes) for given in (load, random.permutation(load)))
    near = new.near(old, nodes=nodes)
    own = ranks // nodes
    for node in range(nodes):
        both = [sorted(map(sorted, one.owners[node * own : (node + 1) * own])) for one in (new, near)]
        assert both[0] == both[1], "each rank of the node has what one of them was to have"
    for before, after in zip(old.owners, near.owners, strict=True):
        for place, expert in enumerate(before):
            assert expert not in after or after[place] == expert, "an expert that stays keeps its place"
    assert len(old.moved(near)) <= len(old.moved(new))
    assert old.near(old, nodes=nodes) is old and near.version == old.version + (near.owners != old.owners)
    again = Placement.balanced(load, ranks, per_rank, nodes=nodes)
    assert again.near(old, nodes=nodes) is old, "equal loads move nothing"


def test_a_near_placement_counts_what_all_ranks_keep() -> None:
    random = np.random.default_rng(10)
    load = random.integers(0, 50, 5)
    old, new = (Placement.balanced(given, 2, 3) for given in (load, random.permutation(load)))
    assert len(old.moved(new.near(old))) == 2, "of the ways of two ranks, the one that moves fewer experts"


def test_near_placements_by_hand() -> None:
    old = Placement(4, ((0, 1), (2, 3)), 5)
    swapped = Placement(4, ((2, 3), (0, 1)))
    assert swapped.near(old) is old
    assert Placement(4, ((1, 2), (0, 3))).near(old).owners == ((2, 1), (0, 3))
    wider = Placement.balanced([9, 1, 1, 1], 2, 3).near(old)
    assert wider == Placement(4, ((0, 1, 2), (0, 3, 1)), 6)
    for wrong in (Placement.linear(4, 4), Placement.linear(3, 2), wider):
        with pytest.raises(InvalidInput, match="previous must have 4 experts, 2 ranks and at most 2 places on each"):
            swapped.near(wrong)
    with pytest.raises(InvalidInput, match="load must be of the 4 experts, got 3 numbers"):
        old.balancedness([1, 2, 3])


@given(data=st.data(), experts=st.integers(1, 9), ranks=st.integers(1, 4))
def test_moves_turn_one_placement_into_the_other(data: st.DataObject, experts: int, ranks: int) -> None:
    kinds = ("replicas",) * 2 if data.draw(st.booleans()) else ("linear", "round_robin")
    first, second = (placement_of(kind, experts, ranks, 2 * data.draw(st.integers(0, 9))) for kind in kinds)
    weights = np.full(first.num_places, -7.0)
    before, after = first.tables.expert_of_place, second.tables.expert_of_place
    weights[before >= 0] = before[before >= 0]
    result = weights.copy()
    for expert, source, target in first.moved(second):
        assert before[source] == expert
        near = [place for place in first.places_of(expert) if place // first.per_rank == target // first.per_rank]
        assert not near or source in near
        result[target] = weights[source]
    assert (result[after >= 0] == after[after >= 0]).all()
    assert first.moved(first) == ()


def test_moves_take_sources_in_turn() -> None:
    old = Placement(2, ((0, -1), (0, -1), (1, -1), (1, -1)))
    new = Placement(2, ((0, 1), (0, 1), (1, 0), (1, 0)), 1)
    assert old.moved(new) == (Move(1, 4, 1), Move(1, 6, 3), Move(0, 0, 5), Move(0, 2, 7))


GOOD = Placement(3, ((0, 1), (2, -1)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_experts": 0}, "num_experts must be an integer of at least 1, got 0"),
        ({"version": -1}, "version must be an integer of at least 0, got -1"),
        ({"owners": ()}, "owners must give every rank equally many places, at least one, got 0 ranks"),
        ({"owners": ((), ())}, "owners must give every rank equally many places, at least one, got 2 ranks"),
        ({"owners": ((0, 1), (2,))}, r"equally many places, at least one, got 2 ranks with \[1, 2\] places; fill up"),
        ({"owners": ((0, 1), (2, 3))}, r"owners must hold ids in \[-1, 3\), -1 for an empty place, got 3"),
        ({"owners": ((0, 1), (2, 2))}, r"once on a rank at most, got \[2, 2\] on rank 1"),
        ({"owners": ((0, 1), (0, 1))}, r"owners must hold each of the 3 experts, got none of \[2\]"),
    ],
)
def test_wrong_placements_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        dataclasses.replace(GOOD, **change)


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        (([1, 2, 3], 2, 1), {}, "per_rank must be at least 2 for 3 experts on 2 ranks, got 1"),
        (([1, 2, 3], 4, 1), {"nodes": 3}, "nodes must divide num_ranks = 4, got 3"),
        (([1, 2, 3], 4, 1), {"nodes": 0}, "nodes must be an integer of at least 1, got 0"),
        (([1, -0.5], 2, 1), {}, "load must be [num_experts] of finite numbers of at least 0"),
        (([1, np.nan], 2, 1), {}, "load must be [num_experts] of finite numbers of at least 0"),
        (([], 2, 1), {}, "load must be [num_experts]"),
        (([1], 0, 1), {}, "num_ranks must be an integer of at least 1, got 0"),
        (([1], 1, 1), {"max_replicas": 0}, "max_replicas must be an integer of at least 1, got 0"),
    ],
)
def test_wrong_loads_are_refused(arguments: tuple[Any, ...], options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInput, match=re.escape(message)):
        Placement.balanced(*arguments, **options)


def test_other_sizes_cannot_be_moved_to() -> None:
    with pytest.raises(InvalidInput, match=r"other must have \(3, 2, 2\) experts, ranks and places per rank, got"):
        GOOD.moved(Placement.linear(3, 3))
    with pytest.raises(InvalidInput, match="expert must be below 3, got 3"):
        GOOD.places_of(3)
