"""The index arithmetic of an exchange against loops over slots, and its worked examples."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_core.errors import InvalidInput
from moe_core.formats import QuantizedSpec, QuantizedTensor, format_named
from moe_core.ops.routing.reference import layout as make_layout
from moe_core.parallel import ExchangeSpec, Placement
from moe_core.parallel.bounds import Bounds, bounds_of, rows_received, slots_received, tokens_at_once
from moe_core.parallel.placement import gather_experts, shard_experts
from moe_core.specs.operands import ExpertWeights
from moe_core.specs.routing import LayoutSpec
from tests.support.parallel.placements import placements
from tests.support.parallel.twin import arithmetic
from tests.support.strategies import seeds


def test_worked_examples() -> None:
    places = np.array([[2, 3], [0, 2]], np.int32)
    slots = arithmetic.sends(places, 4)
    assert slots.group_sizes.tolist() == [1, 0, 2, 1] and slots.slot_of_row.tolist() == [2, 0, 3, 1]
    firsts = arithmetic.first_owners(places, 2)
    assert firsts.tolist() == [[1, -1], [0, 1]]
    tokens = arithmetic.sends(firsts, 2)
    assert tokens.group_sizes.tolist() == [1, 2] and (tokens.slot_of_row[:3] // 2).tolist() == [1, 0, 1]
    counts = np.array([[1, 0, 2, 1], [0] * 4], np.int32)
    start = arithmetic.run_starts(counts, "source")
    assert start.tolist() == [[0, 1, 0, 2], [1, 1, 3, 3]]
    assert arithmetic.destinations(slots, places, start[0]).row.tolist() == [[0, 2], [0, 1]]
    bounded = arithmetic.destinations(slots, places, start[0], 2)
    assert bounded.row.tolist() == [[0, -1], [0, 1]] and bounded.overflow.tolist() == [1]
    beside = arithmetic.token_ids(places, np.array([0, 1]), 1, 2)
    assert beside.tolist() == [[0, 1], [-1, 0]] and beside.dtype == np.int32
    table = arithmetic.token_rows(np.array([[7, -1], [8, 9]]), np.array([[1, -1], [0, 2]]), 3)
    assert table.tolist() == [[-1, 7, -1], [8, -1, 9]] and table.dtype == np.int32
    assert arithmetic.slot_rows(table, np.array([[1, 1, -1], [0, 2, 1]])).tolist() == [[7, 7, -1], [8, 9, -1]]
    assert arithmetic.received_ids(np.array([[1, 2], [0, 1]]), "source").tolist() == [0, 1, 1, 1]
    small = np.array([[2, 1], [3, 0]], np.int32)
    assert arithmetic.run_starts(small, "expert").tolist() == [[0, 0], [2, 1]]
    assert arithmetic.run_starts(small, "padded", 4).tolist() == [[0, 0], [4, 4]]
    found = arithmetic.splits(small, 1, 4)
    assert [part.tolist() for part in found] == [[2, 0], [1, 0], [0, 3], [2, 1]]


@given(placement=placements(), seed=seeds(), tokens=st.integers(0, 7), top_k=st.integers(1, 4), first=st.integers(0, 9))
def test_places_of_slots(placement: Placement, seed: int, tokens: int, top_k: int, first: int) -> None:
    random = np.random.default_rng(seed)
    ids = random.integers(-3, placement.num_experts + 2, (tokens, top_k)).astype(np.int32)
    mask = random.random(tokens) < 0.7 if seed % 2 else None
    found = arithmetic.physical_ids(ids, placement, first_token=first, token_mask=mask)
    firsts = arithmetic.first_owners(found.places, placement.per_rank)
    owners = arithmetic.owners_of(found.places, placement.per_rank)
    assert found.places.dtype == firsts.dtype == owners.dtype == np.int32
    assert ((owners >= 0) == (found.places >= 0)).all() and (firsts <= owners).all()
    invalid = 0
    for t in range(tokens):
        seen: set[int] = set()
        for k in range(top_k):
            expert, place = int(ids[t, k]), int(found.places[t, k])
            masked = mask is not None and not mask[t]
            invalid += not masked and (expert < -1 or expert >= placement.num_experts)
            if masked or not 0 <= expert < placement.num_experts:
                assert place == firsts[t, k] == -1
                continue
            replicas = placement.places_of(expert)
            assert place == replicas[(first + t + k) % len(replicas)]
            owner = place // placement.per_rank
            assert firsts[t, k] == (-1 if owner in seen else owner)
            seen.add(owner)
        table = arithmetic.token_rows(np.where(firsts[t : t + 1] < 0, -1, 9), firsts[t : t + 1], placement.num_ranks)
        assert set(np.flatnonzero(table[0] == 9)) == seen
    assert found.invalid_ids.tolist() == [invalid]
    layout = LayoutSpec(tokens, top_k, placement.num_experts)
    *_, counted = make_layout(ids, token_mask=mask, layout=layout)
    assert found.invalid_ids.tolist() == counted.tolist() and found.invalid_ids.dtype == counted.dtype
    whole = arithmetic.physical_ids(np.concatenate([ids, ids]), placement, first_token=first).places
    later = arithmetic.physical_ids(ids, placement, first_token=first + tokens).places
    np.testing.assert_array_equal(whole[tokens:], later, "tokens may be split anywhere")


@given(
    ranks=st.integers(1, 4),
    each=st.integers(1, 3),
    seed=seeds(),
    tokens=st.integers(0, 6),
    top_k=st.integers(1, 3),
    order=st.sampled_from(arithmetic.ORDERS),
)
def test_rows_at_owners_have_the_order_that_is_stated(
    ranks: int, each: int, seed: int, tokens: int, top_k: int, order: str
) -> None:
    random = np.random.default_rng(seed)
    groups = random.integers(-1, ranks * each, (ranks, tokens, top_k)).astype(np.int32)
    sent = [arithmetic.sends(own, ranks * each) for own in groups]
    counts = np.stack([layout.group_sizes for layout in sent])
    block = int(counts.reshape(ranks, ranks, each).sum(axis=2).max()) + 1
    start = arithmetic.run_starts(counts, order, block)
    assert start.dtype == np.int32
    # Every row as (owner, key by which its owner orders rows), and where it goes.
    rows = []
    for home in range(ranks):
        found = arithmetic.destinations(sent[home], groups[home], start[home])
        assert found.overflow.tolist() == [0] and ((found.row < 0) == (groups[home] < 0)).all()
        for slot, group in enumerate(groups[home].reshape(-1).tolist()):
            if group >= 0:
                key = (group, home, slot) if order == "expert" else (home, group, slot)
                rows.append((group // each, key, int(found.row.reshape(-1)[slot])))
    for owner in range(ranks):
        ordered = sorted(row for row in rows if row[0] == owner)
        if order == "padded":
            for home in range(ranks):
                own = [place for _, key, place in ordered if key[0] == home]
                assert own == list(range(home * block, home * block + len(own)))
            continue
        assert [place for *_, place in ordered] == list(range(len(ordered)))
        experts = [key[0 if order == "expert" else 1] % each for _, key, _ in ordered]
        assert arithmetic.received_ids(counts[:, owner * each : (owner + 1) * each], order).tolist() == experts


@given(seed=seeds(), ranks=st.integers(1, 4), each=st.integers(1, 3), block=st.integers(0, 4))
def test_rows_come_back_in_the_order_in_which_they_went(seed: int, ranks: int, each: int, block: int) -> None:
    groups = np.random.default_rng(seed).integers(-1, ranks * each, (5, 2)).astype(np.int32)
    sent = arithmetic.sends(groups, ranks * each)
    np.testing.assert_array_equal(arithmetic.returned_rows(sent, groups, ranks).row.reshape(-1), sent.row_of_slot)
    found = arithmetic.returned_rows(sent, groups, ranks, block)
    lost = 0
    for owner in range(ranks):
        slots = [slot for slot in sent.slot_of_row.tolist() if slot >= 0 and groups.reshape(-1)[slot] // each == owner]
        rows = found.row.reshape(-1)[slots].tolist()
        fit = min(len(slots), block)
        assert rows == [*range(owner * block, owner * block + fit), *[-1] * (len(slots) - fit)]
        lost += len(slots) - fit
    assert found.overflow.tolist() == [lost]


@given(seed=seeds(), ranks=st.integers(1, 4), each=st.integers(1, 3), receive=st.sampled_from((None, 0, 1, 4, 9)))
def test_splits_say_what_destinations_say(seed: int, ranks: int, each: int, receive: int | None) -> None:
    groups = np.random.default_rng(seed).integers(-1, ranks * each, (ranks, 5, 2)).astype(np.int32)
    sent = [arithmetic.sends(own, ranks * each) for own in groups]
    counts = np.stack([layout.group_sizes for layout in sent])
    start = arithmetic.run_starts(counts, "source")
    came = np.zeros((ranks, ranks), int)
    for home in range(ranks):
        own = arithmetic.splits(counts, home, receive)
        row = arithmetic.destinations(sent[home], groups[home], start[home], receive).row.reshape(-1)
        for owner in range(ranks):
            first, size = int(own.sent_start[owner]), int(own.sent[owner])
            slots = sent[home].slot_of_row[first : first + size]
            assert row[slots].tolist() == list(range(own.peer_start[owner], own.peer_start[owner] + size))
            came[home, owner] = size
        assert own.sent.sum() == (row >= 0).sum()
    for owner in range(ranks):
        assert arithmetic.splits(counts, owner, receive).received.tolist() == came[:, owner].tolist()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "nccl"}, "mode must be one of all_gather, all_to_all, padded, peer, got 'nccl'"),
        ({"rows": "bytes"}, "rows must be one of tokens, slots, got 'bytes'"),
        ({"on_overflow": "inf"}, "on_overflow must be one of error, nan, drop, got 'inf'"),
        ({"receive": -1}, "receive must be an integer of at least 0, got -1"),
        ({"chunks": 0}, "chunks must be an integer of at least 1, got 0"),
        ({"chunks": 64}, "chunks must be below 64, got 64"),
        ({"format": "fp8"}, "format must be a Format or None, got str"),
        ({"mode": "all_gather", "rows": "slots"}, "rows must be 'tokens' with mode='all_gather', got 'slots'"),
        ({"mode": "all_gather", "receive": 9}, "receive must be None with mode='all_gather', which takes all"),
    ],
)
def test_wrong_options_are_refused(options: dict, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        ExchangeSpec(**options)


def test_orders_are_checked() -> None:
    with pytest.raises(InvalidInput, match="order must be one of expert, source, padded, got 'owner'"):
        arithmetic.run_starts(np.zeros((1, 1), np.int32), "owner")
    with pytest.raises(InvalidInput, match="order must be one of expert, source, got 'padded'"):
        arithmetic.received_ids(np.zeros((1, 1), np.int32), "padded")


#: Two places a rank.
LINEAR = Placement.linear(8, 4)


@pytest.mark.parametrize(
    ("spec", "bounds", "rows", "slots"),
    [
        (ExchangeSpec(), Bounds(None, None, None), 40, 80),
        (ExchangeSpec(receive=30), Bounds(None, None, 30), 30, 60),
        (ExchangeSpec(rows="slots"), Bounds(None, None, None), 80, 80),
        (ExchangeSpec("padded"), Bounds(10, 20, 40), 40, 80),
        (ExchangeSpec("padded", "slots"), Bounds(20, 20, 80), 80, 80),
        (ExchangeSpec("padded", receive=27), Bounds(6, 12, 24), 24, 48),
        (ExchangeSpec("padded", "slots", receive=27), Bounds(6, 6, 24), 24, 24),
        (ExchangeSpec("all_gather"), Bounds(10, 20, 40), 40, 80),
    ],
    ids=str,
)
def test_bounds_by_hand(spec: ExchangeSpec, bounds: Bounds, rows: int, slots: int) -> None:
    """10 tokens a rank, of 3 slots each, at most 2 of which have one owner."""
    assert bounds_of(spec, 10, 3, LINEAR) == bounds
    assert rows_received(spec, 10, 3, LINEAR) == rows
    assert slots_received(spec, rows, 3, LINEAR) == slots


def test_the_last_chunk_may_be_shorter() -> None:
    assert [tokens_at_once(tokens, ExchangeSpec(chunks=4)) for tokens in (0, 1, 8, 9)] == [0, 1, 2, 3]
    assert bounds_of(ExchangeSpec("padded", receive=400), 10, 1, LINEAR).back == 10, "a token has one slot"


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize("stacked", [False, True])
def test_empty_places_hold_nan(dtype: type, stacked: bool) -> None:
    placement = Placement(3, ((2, 0), (1, -1)))
    lead = (2, 3) if stacked else (3,)
    whole = np.arange(np.prod(lead) * 8).reshape(*lead, 2, 4).astype(dtype)
    layer = np.zeros(1, np.int32) if stacked else None
    parts = shard_experts(ExpertWeights(whole, whole.swapaxes(-1, -2), layer_index=layer), placement)
    axis = int(stacked)
    np.testing.assert_array_equal(parts[0].gate_up, np.take(whole, [2, 0], axis))
    np.testing.assert_array_equal(np.take(parts[1].down, 0, axis), np.take(whole, 1, axis).swapaxes(-1, -2))
    assert np.isnan(np.take(parts[1].gate_up, 1, axis).astype(np.float32)).all()
    assert parts[1].layer_index is layer
    gathered = gather_experts([part.gate_up for part in parts], placement, axis)
    np.testing.assert_array_equal(gathered, whole)


def test_empty_places_of_codes_hold_an_experts() -> None:
    spec = QuantizedSpec(format_named("int8_channel"))
    codes, scales = np.arange(24, dtype=np.int8).reshape(3, 2, 4), np.ones((3, 2, 1), np.float32)
    weight = QuantizedTensor(spec, codes, scales)
    parts = shard_experts(ExpertWeights(weight, weight), Placement(3, ((2, 0), (1, -1))))
    np.testing.assert_array_equal(parts[1].gate_up.values, codes[[1, 0]])
    assert np.isnan(parts[1].gate_up.scales[1]).all() and (parts[1].gate_up.scales[0] == 1).all()
