"""Chunks of mode `peer`: how many, with which buffers, on how many multiprocessors."""

from __future__ import annotations

from typing import Any

import pytest

from moe_core.errors import InvalidInput
from moe_core.formats import format_named
from moe_core.layers.spec import MoELayerSpec
from moe_core.parallel import ExchangeSpec, Placement, choose_chunks, plan_exchange, predict
from moe_core.parallel.bounds import runs_in_lanes, second_multiprocessors
from moe_core.parallel.machine import H200
from moe_core.specs.matmul import Activation

QWEN3, GPTOSS120B = MoELayerSpec(2048, 768, 128, 8), MoELayerSpec(2880, 2880, 128, 4)
MIXTRAL, DSV3 = MoELayerSpec(4096, 14336, 8, 2), MoELayerSpec(7168, 2048, 256, 8)
FP8 = format_named("fp8_group")
#: K, D, dtype, placement.
SIZES = 4, 64, "bfloat16", Placement.linear(8, 4)


@pytest.mark.parametrize("chunks", [1, 2, 3, 4, 8])
def test_buffers_of_chunks_whose_products_run_side_by_side(chunks: int) -> None:
    """Four sets of what peers store into, and scratch for two chunks; with sums at owners two sets and one."""
    for sums, most in (("slots", 4), ("ranks", 2)):
        options: dict[str, Any] = {"sums": sums}
        found = plan_exchange(16, *SIZES, ExchangeSpec("peer", chunks=chunks, **options))
        alone = plan_exchange(-(-16 // chunks), *SIZES, ExchangeSpec("peer", **options))
        sets = {True: min(chunks, most), False: min(chunks, 2)}
        wanted = [(buffer.name, sets[buffer.symmetric] * buffer.bytes) for buffer in alone.buffers]
        assert [(buffer.name, buffer.bytes) for buffer in found.buffers] == wanted
        lanes = sums == "slots" and chunks > 1
        assert runs_in_lanes(found.spec, training=False) == lanes and not runs_in_lanes(found.spec, training=True)
        assert found.peak(scratch=2**20) - found.peak(scratch=2**19) == 2**19 * (1 + lanes)


def test_multiprocessors_of_products_side_by_side() -> None:
    """Product 2 has one matrix of three, or of two without gates."""
    silu, gelu = Activation("silu"), Activation("gelu", gated=False)
    assert [second_multiprocessors(132, one) for one in (silu, gelu)] == [44, 66]
    assert second_multiprocessors(1, silu) == 1


#: On four H200: microseconds with chunks, measured; docs/notebook/2026-11-27-mode-peer.md.
CHUNKED = {16384: {1: 3157, 2: 2812, 4: 2672}, 4096: {1: 829, 2: 778, 4: 829}}


@pytest.mark.parametrize("tokens", CHUNKED)
def test_chunks_are_chosen_as_measured(tokens: int) -> None:
    measured = CHUNKED[tokens]
    for chunks, us in measured.items():
        found = predict(QWEN3, tokens, 4, H200, ExchangeSpec("peer", chunks=chunks))
        assert abs(found.us / us - 1) < 0.08, (chunks, found)
    best, why = choose_chunks(QWEN3, tokens, 4, H200)
    assert best == min(measured, key=lambda chunks: measured[chunks])
    assert why.endswith(f"{best} chunks gain {15 if tokens == 16384 else 5} %")
    one = predict(QWEN3, tokens, 4, H200, ExchangeSpec("peer"))
    assert f"travel for {one.exchange_us:.0f} us and products take {dict(one.stages)['compute']:.0f} us" in why


def test_more_chunks_than_were_measured_are_not_chosen() -> None:
    more = [predict(QWEN3, 2**17, 4, H200, ExchangeSpec("peer", chunks=chunks)).us for chunks in (4, 5)]
    assert more[1] < more[0] and choose_chunks(QWEN3, 2**17, 4, H200)[0] == 4


def test_one_chunk_where_products_take_longer_than_rows_travel() -> None:
    for layer in (GPTOSS120B, MIXTRAL, DSV3):
        for tokens in (1, 256, 4096, 16384):
            chunks, why = choose_chunks(layer, tokens, 4, H200)
            assert chunks == 1 and why.endswith("chunks would gain less than 3 %")
    assert choose_chunks(QWEN3, 256, 4, H200)[0] == 1, "latencies of chunks add up"
    assert choose_chunks(QWEN3, 16384, 1, H200)[0] == 1 and choose_chunks(QWEN3, 0, 4, H200)[0] == 1
    assert choose_chunks(QWEN3, 4096, 4, H200, format=FP8)[0] == 1, "rows of fp8 travel for less long"
    with pytest.raises(InvalidInput, match="tokens must be"):
        choose_chunks(QWEN3, -1, 4, H200)
