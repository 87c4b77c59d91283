"""The index arithmetic on traced arrays against that of the core, in NumPy."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from moe_core.parallel import Placement
from moe_core.specs.operands import RaggedLayout
from moe_jax.parallel import exchange as traced
from tests.support.jax import running_on, to_jax, to_numpy
from tests.support.parallel.placements import placement_of
from tests.support.parallel.twin import arithmetic as core
from tests.support.strategies import seeds

#: Few shapes, so that few programs are compiled.
PLACEMENTS = (placement_of("linear", 7, 3), placement_of("replicas", 4, 2, 1), placement_of("round_robin", 2, 4))
TOKENS, TOP_K = 6, 3


def require_equal(found: Any, expected: Any) -> None:
    found = np.asarray(found)
    np.testing.assert_array_equal(found, expected)
    assert found.dtype == np.asarray(expected).dtype


def draw_places(placement: Placement, seed: int) -> np.ndarray:
    random = np.random.default_rng(seed)
    places = random.integers(-1, placement.num_places, (TOKENS, TOP_K)).astype(np.int32)
    return places if seed % 5 else np.full_like(places, placement.num_places - 1)


@functools.partial(jax.jit, static_argnames="placement")
def places_and_owners(ids: jax.Array, first: int, mask: jax.Array, placement: Placement) -> Any:
    places = traced.physical_ids(ids, placement, first_token=first, token_mask=mask)
    owners = traced.owners_of(places.places, placement.per_rank)
    return *places, owners, traced.first_owners(owners)


@given(placement=st.sampled_from(PLACEMENTS), seed=seeds(), first=st.integers(0, 9))
def test_places_and_owners(placement: Placement, seed: int, first: int) -> None:
    random = np.random.default_rng(seed)
    ids = random.integers(-3, placement.num_experts + 2, (TOKENS, TOP_K)).astype(np.int32)
    mask = random.random(TOKENS) < 0.7
    expected = core.physical_ids(ids, placement, first_token=first, token_mask=mask)
    of_places = [function(expected.places, placement.per_rank) for function in (core.owners_of, core.first_owners)]
    found = places_and_owners(ids, first, mask, placement)
    for one, other in zip(found, (*expected, *of_places), strict=True):
        require_equal(one, other)


@functools.partial(jax.jit, static_argnames="ranks")
def group_of_ranks(counts: jax.Array, layouts: Any, groups: Any, receive: int, ranks: int) -> Any:
    """Of every rank: rows that fit and begin of each home, its rows in runs, and the rows of runs that it receives."""
    pairs, found = traced.pair_counts(counts, ranks), []
    for rank in range(ranks):
        own = traced.fitting(pairs[:, rank], receive), traced.starts(pairs[:, rank]), traced.starts(pairs[rank])
        number = traced.rows_in_runs(layouts[rank], groups[rank], ranks)
        runs = counts.reshape(ranks, ranks, -1)[:, rank]
        found.append((*own, number, traced.first_rows(runs, receive)))
    return pairs, found


@given(placement=st.sampled_from(PLACEMENTS[:2]), seed=seeds(), by_slot=st.booleans(), receive=st.integers(0, 40))
def test_rows_of_an_all_to_all(placement: Placement, seed: int, by_slot: bool, receive: int) -> None:
    ranks, each = placement.num_ranks, placement.per_rank
    places = [draw_places(placement, seed + rank) for rank in range(ranks)]
    groups = [own if by_slot else core.first_owners(own, each) for own in places]
    sent = [core.sends(own, placement.num_places if by_slot else ranks) for own in groups]
    counts = np.stack([layout.group_sizes for layout in sent])
    starts = core.run_starts(counts, "source")
    pairs, found = to_numpy(group_of_ranks(counts, as_jax(sent), groups, receive, ranks))
    require_equal(pairs, counts.reshape(ranks, ranks, -1).sum(axis=2).astype(np.int32))
    for rank, (own, layout) in enumerate(zip(groups, sent, strict=True)):
        fit, _, first, number, kept = found[rank]
        there, begins = (np.array([peer[one][rank] for peer in found]) for one in (0, 1))
        for one, other in zip((there, fit, first, begins), core.splits(counts, rank, receive), strict=True):
            require_equal(one, other)
        owner = np.maximum(own, 0) // (each if by_slot else 1)
        fits = (number >= 0) & (number < there[owner])
        expected = core.destinations(layout, own, starts[rank], receive)
        require_equal(np.where(fits, begins[owner] + number, -1), expected.row)
        at_home = np.where(number < 0, -1, first[owner] + number)
        require_equal(at_home, core.returned_rows(layout, own, ranks).row)
        runs = counts.reshape(ranks, ranks, -1)[:, rank]
        require_equal(core.received_ids(kept, "source"), core.received_ids(runs, "source")[:receive])


@functools.partial(jax.jit, static_argnames=("ranks", "block", "fits"))
def blocks(layout: RaggedLayout, groups: jax.Array, ranks: int, block: int, fits: int) -> Any:
    return traced.rows_in_runs(layout, groups, ranks), traced.rows_of_blocks(layout, ranks, block, fits)


@given(placement=st.sampled_from(PLACEMENTS[1:]), seed=seeds(), by_slot=st.booleans(), block=st.sampled_from([2, 9]))
def test_rows_of_blocks(placement: Placement, seed: int, by_slot: bool, block: int) -> None:
    ranks, each = placement.num_ranks, placement.per_rank
    places = draw_places(placement, seed)
    groups = places if by_slot else core.first_owners(places, each)
    layout = core.sends(groups, placement.num_places if by_slot else ranks)
    fits, owner = block - 1, np.maximum(groups, 0) // (each if by_slot else 1)
    number, slots = to_numpy(blocks(as_jax(layout), groups, ranks, block, fits))
    expected = core.returned_rows(layout, groups, ranks, block).row
    require_equal(np.where((number >= 0) & (number < block), owner * block + number, -1).astype(np.int32), expected)
    wanted = np.full(ranks * block, -1, np.int32)
    going = (expected >= 0) & (number < fits)
    wanted[expected[going]] = np.flatnonzero(going.reshape(-1))
    require_equal(slots, wanted)


def as_jax(layout: Any) -> Any:
    with running_on("reference"):
        return to_jax(layout)


@given(seed=seeds(), most=st.integers(1, 3))
def test_slots_beyond_what_distinct_ids_need(seed: int, most: int) -> None:
    owners = np.random.default_rng(seed).integers(-1, 3, (TOKENS, TOP_K)).astype(np.int32)
    found = np.asarray(traced.nearest_slots(jnp.asarray(owners), most))
    for token, own in enumerate(owners):
        for k, owner in enumerate(own):
            assert owner < 0 or found[token, k] == ((own[:k] == owner).sum() < most)
