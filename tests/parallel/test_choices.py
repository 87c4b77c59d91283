"""Chunks of mode `peer`: how many, with which buffers, on how many multiprocessors; and how many ranks."""

from __future__ import annotations

import json
from typing import Any

import pytest

from moe_core.errors import InvalidInput
from moe_core.formats import format_named
from moe_core.layers.spec import MoELayerSpec
from moe_core.parallel import ExchangeSpec, Placement, choose_chunks, choose_ranks, plan_exchange, predict
from moe_core.parallel.bounds import runs_in_lanes, second_multiprocessors
from moe_core.parallel.machine import H200
from moe_core.specs.matmul import Activation
from tests.support.paths import ROOT

LAYERS = {
    "qwen3": MoELayerSpec(2048, 768, 128, 8),
    "gptoss120b": MoELayerSpec(2880, 2880, 128, 4),
    "mixtral": MoELayerSpec(4096, 14336, 8, 2),
    "dsv3": MoELayerSpec(7168, 2048, 256, 8),
    "glm45air": MoELayerSpec(4096, 1408, 128, 8),
}
QWEN3 = LAYERS["qwen3"]
FP8 = format_named("fp8_group")
#: K, D, dtype, placement.
SIZES = 4, 64, "bfloat16", Placement.linear(8, 4)


@pytest.mark.parametrize("chunks", [1, 2, 3, 4, 8])
def test_buffers_of_chunks_whose_products_run_side_by_side(chunks: int) -> None:
    """Four sets of what peers store into, and scratch for two chunks."""
    found = plan_exchange(16, *SIZES, ExchangeSpec("peer", chunks=chunks))
    alone = plan_exchange(-(-16 // chunks), *SIZES, ExchangeSpec("peer"))
    sets = {True: min(chunks, 4), False: min(chunks, 2)}
    wanted = [(buffer.name, sets[buffer.symmetric] * buffer.bytes) for buffer in alone.buffers]
    assert [(buffer.name, buffer.bytes) for buffer in found.buffers] == wanted
    assert runs_in_lanes(found.spec) == (chunks > 1)
    assert found.peak(scratch=2**20) - found.peak(scratch=2**19) == 2**19 * (1 + (chunks > 1))


def test_multiprocessors_of_products_side_by_side() -> None:
    """Product 2 has one matrix of three, or of two without gates."""
    silu, gelu = Activation("silu"), Activation("gelu", gated=False)
    assert [second_multiprocessors(132, one) for one in (silu, gelu)] == [44, 66]
    assert second_multiprocessors(1, silu) == 1


def measured() -> dict[tuple[str, int], dict[int, float]]:
    """(model, tokens of a GPU) -> chunks -> us, of mode `peer` on four H200."""
    chunks, found = {"peer": 1, "peer_2_chunks": 2, "peer_4_chunks": 4}, {}
    for name in ("parallel-qwen3-4-h200.json", "parallel-shapes-4-h200.json"):
        for row in json.loads((ROOT / "benchmarks" / "results" / name).read_text())["rows"]:
            if row["mode"] in chunks:
                found.setdefault((row["shape"], row["tokens"]), {})[chunks[row["mode"]]] = row["graph_us"]
    assert len(found) == 10
    return found


MEASURED = measured()


@pytest.mark.parametrize(("model", "tokens"), MEASURED)
def test_chunks_are_chosen_as_measured(model: str, tokens: int) -> None:
    """Forwards within 13 %, and what chunks gain or lose within 6 % of a forward."""
    layer, times = LAYERS[model], MEASURED[model, tokens]
    found = {chunks: predict(layer, tokens, 4, H200, ExchangeSpec("peer", chunks=chunks)) for chunks in times}
    for chunks, us in times.items():
        assert abs(found[chunks].us / us - 1) < 0.13, (chunks, found[chunks])
        assert abs(found[chunks].us / found[1].us - us / times[1]) < 0.06, (chunks, found[chunks])
    best, why = choose_chunks(layer, tokens, 4, H200)
    assert best == min(times, key=lambda chunks: times[chunks])
    one = found[1]
    gain = "chunks would gain less than 5 %"
    if best > 1:
        gain = f"{best} chunks gain {100 * (1 - found[best].us / one.us):.0f} %"
    travel, compute = one.exchange_us, dict(one.stages)["compute"]
    assert why == f"rows travel for {travel:.0f} us and products take {compute:.0f} us: {gain}"


def test_more_chunks_than_were_measured_are_not_chosen() -> None:
    more = [predict(QWEN3, 2**17, 4, H200, ExchangeSpec("peer", chunks=chunks)).us for chunks in (4, 5)]
    assert more[1] < more[0] and choose_chunks(QWEN3, 2**17, 4, H200)[0] == 4


def test_one_chunk_where_products_take_longer_than_rows_travel() -> None:
    for model in LAYERS.keys() - {"qwen3"}:
        for tokens in (1, 256, 2**17):
            chunks, why = choose_chunks(LAYERS[model], tokens, 4, H200)
            assert chunks == 1 and why.endswith("chunks would gain less than 5 %")
    assert choose_chunks(QWEN3, 256, 4, H200)[0] == 1, "latencies of chunks add up"
    assert choose_chunks(QWEN3, 16384, 1, H200)[0] == 1 and choose_chunks(QWEN3, 0, 4, H200)[0] == 1
    assert choose_chunks(QWEN3, 4096, 4, H200, format=FP8)[0] == 1, "rows of fp8 travel for less long"
    with pytest.raises(InvalidInput, match="tokens must be"):
        choose_chunks(QWEN3, -1, 4, H200)


#: Tokens of all ranks -> (us on one H200, us on four), as measured.
FEW: dict[str, dict[int, tuple[float, float]]] = {
    "qwen3": {1: (39.0, 45.5), 4: (90.7, 60.1), 64: (290.2, 111.2)},
    "gptoss120b": {4: (217, 86), 16: (612, 214), 64: (1287, 375), 256: (1468, 418)},
    "dsv3": {4: (629, 253), 16: (1919, 672), 64: (4159, 1196), 256: (5095, 1325)},
}


@pytest.mark.parametrize(("model", "tokens"), [(model, tokens) for model in FEW for tokens in FEW[model]])
def test_ranks_are_chosen_as_measured(model: str, tokens: int) -> None:
    one, four = FEW[model][tokens]
    best, why = choose_ranks(LAYERS[model], tokens, 4, H200)
    assert best == (1 if one < four else 4), why


def test_fewest_ranks_that_are_hardly_slower() -> None:
    assert choose_ranks(QWEN3, 0, 4, H200)[0] == 1 and choose_ranks(QWEN3, 16384, 1, H200)[0] == 1
    # Two tokens need two ranks: four are no faster.
    best, why = choose_ranks(QWEN3, 2, 4, H200)
    assert best == 2 and why == "predicted us of 2 tokens by ranks that share the experts: 1: 34, 2: 22, 4: 22"
    assert choose_ranks(QWEN3, 2**15, 6, H200)[0] == 6, "3 and 6 divide 6, 4 does not"
    # Messages of another mode have other latencies.
    assert choose_ranks(QWEN3, 4, 4, H200, ExchangeSpec("all_to_all"))[0] == 1
    for wrong in ({"tokens": -1}, {"ranks": 0}):
        arguments: dict[str, Any] = {"tokens": 4, "ranks": 4} | wrong
        with pytest.raises(InvalidInput, match=f"{next(iter(wrong))} must be"):
            choose_ranks(QWEN3, machine=H200, **arguments)
