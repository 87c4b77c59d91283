"""Bounds of an exchange by hand, and the experts of each rank with empty places."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from moe_core.formats import QuantizedSpec, QuantizedTensor, format_named
from moe_core.parallel import ExchangeSpec, Placement
from moe_core.parallel.bounds import Bounds, bounds_of, rows_received, slots_received, tokens_at_once
from moe_core.parallel.placement import gather_experts, shard_experts
from moe_core.specs.operands import ExpertWeights

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
