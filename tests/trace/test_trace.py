"""Routing traces without any framework: what they hold, their file, and how wrong ones are refused."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_core.errors import InvalidInput
from moe_core.specs import Activation, MoESpec, RouterSpec
from moe_core.specs.operands import ExpertWeights, RouterLogits, RouterWeights, TopK
from moe_core.trace import LayerRouting, Playback, RoutingTrace, layers_of, sizes_of

E = 6


def draw_layer(random: np.random.Generator, *shape: int, num_experts: int = E) -> LayerRouting:
    """Random ids, -1 included, and weights; shape (num_tokens, top_k), perhaps with steps before."""
    ids = random.integers(-1, num_experts, shape).astype(np.int32)
    return LayerRouting(ids, random.random(shape, np.float32), num_experts)


def require_equal(first: RoutingTrace, second: RoutingTrace) -> None:
    assert len(first) == len(second)
    for one, other in zip(first, second, strict=True):
        assert one.num_experts == other.num_experts
        assert (one.ids.dtype, one.weights.dtype) == (other.ids.dtype, other.weights.dtype) == (np.int32, np.float32)
        np.testing.assert_array_equal(one.ids, other.ids)
        np.testing.assert_array_equal(one.weights.view(np.uint32), other.weights.view(np.uint32))


@given(
    sizes=st.lists(st.tuples(st.integers(0, 5), st.integers(1, 4), st.integers(1, 9)), min_size=1, max_size=11),
    seed=st.integers(0, 99),
)
def test_file_round_trip(tmp_path_factory: pytest.TempPathFactory, sizes: list[Any], seed: int) -> None:
    random = np.random.default_rng(seed)
    trace = RoutingTrace(tuple(draw_layer(random, T, K, num_experts=experts) for T, K, experts in sizes))
    path = tmp_path_factory.mktemp("trace") / "routing.safetensors"
    trace.save(path)
    require_equal(RoutingTrace.load(path), trace)
    require_equal(RoutingTrace.load(str(path)), trace)


def test_a_trace_owns_its_arrays() -> None:
    given = draw_layer(np.random.default_rng(0), 3, 2)
    trace = RoutingTrace((given,))
    before = trace[0].ids.copy()
    given.ids[:] = 5
    np.testing.assert_array_equal(trace[0].ids, before)


def test_scans_stack_and_unstack_in_the_order_of_the_calls() -> None:
    random = np.random.default_rng(1)
    stacks = (draw_layer(random, 3, 5, 2), draw_layer(random, 3, 5, 1, num_experts=4))
    trace = RoutingTrace.from_scan(stacks)
    assert [layer.num_experts for layer in trace] == [E, 4] * 3
    np.testing.assert_array_equal(trace[3].ids, stacks[1].ids[1])
    for one, other in zip(trace.for_scan(layers_per_step=2), stacks, strict=True):
        np.testing.assert_array_equal(one.ids, other.ids)
        np.testing.assert_array_equal(one.weights, other.weights)
    require_equal(RoutingTrace.from_scan(trace.for_scan(2)), trace)
    for layers_per_step in (1, 4):
        with pytest.raises(InvalidInput, match=f"layers_per_step = {layers_per_step}"):
            trace.for_scan(layers_per_step)
    with pytest.raises(InvalidInput, match="one number of steps"):
        RoutingTrace.from_scan((stacks[0], draw_layer(random, 2, 5, 2)))
    with pytest.raises(InvalidInput, match="no stacks"):
        RoutingTrace.from_scan(draw_layer(random, 5, 2))


def test_playback_hands_out_every_layer_once() -> None:
    layers = tuple(draw_layer(np.random.default_rng(2), T, 2) for T in (3, 4))
    playback = Playback(layers)
    assert playback.next(3, 2, E) is layers[0]
    with pytest.raises(InvalidInput, match="all 2 layers of the trace must be used, got 1"):
        playback.finish()
    for wrong in ((3, 2, E), (4, 1, E)):
        with pytest.raises(InvalidInput, match="layer 1 of the trace must have ids and weights"):
            playback.next(*wrong)
    with pytest.raises(InvalidInput, match="layer 1 of the trace must choose among 7 experts, got 6"):
        playback.next(4, 2, 7)
    for wrong in (LayerRouting(layers[0].ids, layers[1].weights, E), LayerRouting(layers[1].ids, layers[0].weights, E)):
        with pytest.raises(InvalidInput, match=r"layer 0 of the trace must have ids and weights .* = \(3, 2\), got"):
            Playback((wrong,)).next(3, 2, E)
    assert playback.next(4, 2, E) is layers[1]
    playback.finish()
    with pytest.raises(InvalidInput, match="must hold every MoE layer that runs, got 2"):
        playback.next(3, 2, E)


WRONG: dict[str, Callable[[], Any]] = {
    "at least one MoE layer": lambda: RoutingTrace(()),
    "sequence of LayerRouting, got str": lambda: RoutingTrace("layers"),  # type: ignore[arg-type]
    "sequence of LayerRouting, got list": lambda: layers_of([np.zeros((2, 2))]),
    "ids of layer 0 must be int32": lambda: RoutingTrace(
        (LayerRouting(np.zeros((3, 2), np.int64), np.zeros((3, 2), np.float32), E),)
    ),
    "weights of layer 0 must be float32": lambda: RoutingTrace(
        (LayerRouting(np.zeros((3, 2), np.int32), np.zeros((3, 1), np.float32), E),)
    ),
    "RoutingTrace.from_scan for a scan": lambda: RoutingTrace((draw_layer(np.random.default_rng(0), 2, 3, 2),)),
    "num_experts of layer 0": lambda: RoutingTrace(
        (LayerRouting(np.zeros((3, 2), np.int32), np.zeros((3, 2), np.float32), 0),)
    ),
}


@pytest.mark.parametrize("wrong", [-2, E, 2**31 - 1])
def test_ids_of_no_expert_are_refused(wrong: int, tmp_path: pathlib.Path) -> None:
    right, layer = (draw_layer(np.random.default_rng(seed), 3, 2) for seed in (3, 4))
    layer.ids[1, 1] = wrong
    message = rf"ids of layer 1 must be in \[-1, 6\), -1 for no expert, got {wrong} among 1 wrong ones; give the layer"
    with pytest.raises(InvalidInput, match=message):
        RoutingTrace((right, layer))
    numpy_files = pytest.importorskip("safetensors.numpy")
    path = tmp_path / "routing.safetensors"
    metadata = {"format": "moebius.routing_trace", "version": "1", "num_experts": "[6, 6]"}
    arrays = {"layers.0.ids": right.ids, "layers.0.weights": right.weights}
    numpy_files.save_file(arrays | {"layers.1.ids": layer.ids, "layers.1.weights": layer.weights}, path, metadata)
    with pytest.raises(InvalidInput, match=message):
        RoutingTrace.load(path)


@pytest.mark.parametrize("message", WRONG)
def test_wrong_traces_are_refused(message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        WRONG[message]()


def test_wrong_files_are_refused(tmp_path: pathlib.Path) -> None:
    numpy_files = pytest.importorskip("safetensors.numpy")
    path = tmp_path / "routing.safetensors"
    with pytest.raises(InvalidInput, match=r"routing\.safetensors"):
        RoutingTrace.load(path)
    path.write_bytes(b"no tensors")
    with pytest.raises(InvalidInput, match="readable safetensors file"):
        RoutingTrace.load(path)
    arrays = {"layers.0.ids": np.zeros((3, 2), np.int32), "layers.0.weights": np.zeros((3, 2), np.float32)}
    ours = {"format": "moebius.routing_trace", "version": "1"}
    for metadata, message in (
        (None, "must hold a moebius.routing_trace of version 1"),
        (ours | {"version": "2"}, "must hold a moebius.routing_trace of version 1"),
        (ours, "got 0 layers"),
        (ours | {"num_experts": "[6, 6]"}, "layers.1.ids"),
    ):
        numpy_files.save_file(arrays, path, metadata)
        with pytest.raises(InvalidInput, match=message):
            RoutingTrace.load(path)
    numpy_files.save_file(arrays | {"layers.1.ids": arrays["layers.0.ids"]}, path, ours | {"num_experts": "[6]"})
    with pytest.raises(InvalidInput, match=r"and nothing else, got 1 layers .* but \['layers.1.ids'\]; save"):
        RoutingTrace.load(path)
    numpy_files.save_file({}, path, ours | {"num_experts": "[6]"})
    with pytest.raises(InvalidInput, match=r"got 1 layers and no \['layers.0.ids', 'layers.0.weights'\]"):
        RoutingTrace.load(path)


def test_sizes_of_every_kind_of_routing() -> None:
    weights = np.zeros((3, 8, 16), np.float32)
    experts, routed = ExpertWeights(weights, weights), MoESpec(Activation("silu"), RouterSpec(2))
    decided = MoESpec(Activation("silu"))
    ids, expert_map = np.zeros((5, 4), np.int32), np.zeros(9, np.int32)
    assert sizes_of(experts, TopK(ids, ids), decided, None) == (4, 3)
    assert sizes_of(experts, TopK(ids, ids), decided, expert_map) == (4, 9)
    stacked = ExpertWeights(weights[None], weights[None], layer_index=np.zeros(1, np.int32))
    assert sizes_of(stacked, TopK(ids, ids), decided, None) == (4, 3)
    assert sizes_of(experts, RouterLogits(np.zeros((5, 9))), routed, expert_map) == (2, 9)
    assert sizes_of(experts, RouterWeights(np.zeros((8, 9))), routed, None) == (2, 9)
    out_in = MoESpec(Activation("silu"), RouterSpec(2), router_weight_layout="out_in")
    assert sizes_of(experts, RouterWeights(np.zeros((9, 8))), out_in, None) == (2, 9)
    with pytest.raises(InvalidInput, match="router of spec must be a RouterSpec"):
        sizes_of(experts, RouterLogits(np.zeros((5, 9))), decided, None)
