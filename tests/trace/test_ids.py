"""Traces of ids alone: read from serving engines, and replayed with the weights of live logits, in both frameworks."""

from __future__ import annotations

import base64
import dataclasses
import io
import pathlib
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
jax = pytest.importorskip("jax")
pytest.importorskip("flax")

import jax.numpy as jnp

import moe_jax
import moe_torch
from moe_core.errors import InvalidInput, Unsupported
from moe_core.layers import MoELayerSpec
from moe_core.specs import Activation, MoESpec, NormSpec, RouterSpec
from moe_core.specs.operands import ExpertWeights, RouterLogits, RouterWeights, TopK
from moe_core.trace import LayerRouting, RoutingTrace
from moe_jax import trace as jax_trace
from moe_torch import OutputSpec
from moe_torch import trace as torch_trace
from tests.support import jax as jax_support
from tests.support import torch as torch_support
from tests.support.flax import nnx_layer
from tests.support.layers import draw_weights
from tests.support.torch_layers import make

T, D, E, K = 7, 16, 8, 2
PLAIN = MoELayerSpec(D, 24, E, K, RouterSpec(renormalize=True))
GROUPED = RouterSpec(scoring="sigmoid", num_groups=4, topk_group=2, scale=1.5)
SPECS = {
    "softmax": PLAIN,
    "softmax of the chosen": dataclasses.replace(PLAIN, router=RouterSpec(order="topk_then_softmax")),
    "grouped with a correction bias": dataclasses.replace(PLAIN, router=GROUPED, correction_bias=True),
    "capacity limit": dataclasses.replace(PLAIN, capacity_factor=1.0),
    "scaled experts": dataclasses.replace(PLAIN, expert_scale=True),
    "norm of experts": dataclasses.replace(PLAIN, output=OutputSpec(NormSpec(1e-6), "experts")),
}
IDS = np.random.default_rng(5).permuted(np.tile(np.arange(E, dtype=np.int32), (T, 1)), axis=1)[:, :K].copy()
IDS[-1] = -1


def npy(array: np.ndarray) -> str:
    file = io.BytesIO()
    np.save(file, array)
    return base64.b64encode(file.getvalue()).decode()


def test_what_engines_return() -> None:
    """vLLM: uint8, uint16 or int32 with dense layers, or a .npy in base64. SGLang: int32 in base64, without a shape."""
    ids = np.random.default_rng(0).permuted(np.tile(np.arange(E), (5, 4, 1)), axis=-1)[..., :K]
    wanted = np.concatenate([ids, np.full((1, 4, K), -1)])
    raw = base64.b64encode(ids.astype("<i4").tobytes())
    forms: list[Any] = [*(ids.astype(dtype) for dtype in (np.uint8, np.uint16, np.int16, np.int32, np.int64))]
    forms += [ids.tolist(), torch.from_numpy(ids), npy(ids.astype(np.uint8)), raw, raw.decode()]
    for form in forms:
        trace = RoutingTrace.from_routed_experts(form, E, layers=(1, 3), num_tokens=6, shape=(4, K))
        assert [layer.weights for layer in trace] == [None, None] and {layer.ids.dtype.name for layer in trace} == {
            "int32"
        }
        np.testing.assert_array_equal(np.stack([layer.ids for layer in trace], 1), wanted[:, [1, 3]])
    several = RoutingTrace.from_routed_experts([ids, npy(ids[:2]), raw], E, num_tokens=5, shape=(4, K))
    assert len(several) == 4
    np.testing.assert_array_equal(several[0].ids[5:10], np.pad(ids[:2, 0], ((0, 3), (0, 0)), constant_values=-1))


@pytest.mark.parametrize(
    ("routed", "options", "message"),
    [
        (np.zeros((2, 1), np.int32), {}, r"integers \[tokens, layers, top_k\], or base64 text, got int32\[2, 1\]"),
        (np.zeros((2, 1, 1)), {}, r"got float64\[2, 1, 1\]"),
        ("AAAA", {}, r"got text; pass shape=\(layers, top_k\) with SGLang's text"),
        ("AAAA", {"shape": (1, 1)}, "base64 of a .npy file or of int32 of shape"),
        ("no base64!", {}, "base64 of a .npy file"),
        (npy(np.array([{}], object)), {}, "base64 of a .npy file"),
        ([[[1]], [[1, 2]]], {}, "base64 of a .npy file"),
        ([], {}, r"got float64\[0\]"),
        ([np.zeros((2, 1, 1), int), np.zeros((2, 2, 1), int)], {}, "must be of one model, got layers and top_k"),
        (np.zeros((2, 1, 1), np.int32), {"num_tokens": 1}, "num_tokens must be an integer of at least 2, got 1"),
        (np.zeros((2, 1, 1), np.int32), {"layers": [1]}, "layers must be below 1, got 1"),
        (np.full((2, 1, 1), 8, np.uint8), {}, r"ids of layer 0 must be in \[-1, 8\)"),
        (np.full((2, 1, 1), 2**40), {}, r"ids of layer 0 must be in \[-1, 8\)"),
        (np.array([[[0, -1]]]), {}, r"ids of layer 0 must be distinct experts, or -1 .* got \[0, -1\]"),
        (np.array([[[3, 3]]]), {}, r"ids of layer 0 must be distinct experts, or -1 .* got \[3, 3\]"),
    ],
)  # fmt: skip
def test_what_no_engine_returns(routed: Any, options: Any, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        RoutingTrace.from_routed_experts(routed, E, **options)


def test_files_and_scans_of_ids(tmp_path: pathlib.Path) -> None:
    trace = RoutingTrace(tuple(LayerRouting(IDS, None, E) for _ in range(4)))
    trace.save(tmp_path / "ids")
    loaded = RoutingTrace.load(tmp_path / "ids")
    assert [layer.weights for layer in loaded] == [None] * 4 and all((layer.ids == IDS).all() for layer in loaded)
    stacks = trace.for_scan(2)
    assert [stack.ids.shape for stack in stacks] == [(2, T, K)] * 2 and len(RoutingTrace.from_scan(stacks)) == 4
    with pytest.raises(InvalidInput, match="layers must all have weights or none"):
        RoutingTrace((LayerRouting(IDS, None, E), LayerRouting(IDS, np.zeros((T, K), np.float32), E)))


@pytest.mark.parametrize("name", SPECS)
def test_the_weights_are_those_of_live_logits(name: str) -> None:
    """As a layer with these expert_ids, gradients included; a token with -1 visits no expert."""
    spec, x = SPECS[name], np.random.default_rng(1).standard_normal((T, D)).astype("f4")
    weights = draw_weights(spec, 0)
    with torch_support.running_on("reference") as device:
        layer, results = make(weights, device, capacity_factor=spec.capacity_factor).requires_grad_(), []
        for replays in (False, True):
            leaf = torch_support.to_torch(x, device).requires_grad_()
            layer.zero_grad()
            if replays:
                with torch_trace.replay(LayerRouting(IDS, None, E)):
                    y = layer(leaf)
            else:
                y = layer(leaf, expert_ids=torch.from_numpy(IDS))
            (y.square().sum()).backward()
            results.append([y.detach(), leaf.grad, *(one.grad for one in layer.parameters())])
    for new, old in zip(*results, strict=True):
        torch.testing.assert_close(new, old, rtol=1e-4, atol=1e-5)
    assert layer.router.weight.grad.abs().max() > 1e-3
    with jax_support.running_on("reference"):
        model = nnx_layer(weights, spec)

        def loss(x: Any) -> Any:
            y = jax_trace.replay(lambda x: model(x))(RoutingTrace((LayerRouting(IDS, None, E),)), x)
            return (y**2).sum(), y

        gradient, y = jax.jit(jax.grad(loss, has_aux=True))(jnp.asarray(x))
    np.testing.assert_allclose(np.asarray(y), results[0][0].numpy(), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(np.asarray(gradient), results[0][1].numpy(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("options", [{"dim": 0}, {"largest": False}], ids=str)
def test_only_a_top_k_of_rows_is_a_router(options: Any) -> None:
    """Others have the shapes of a router here, and keep their results."""
    layer, scores = moe_torch.MoE(D, 8, E, K), torch.rand(T, E)
    with torch_trace.replay(LayerRouting(IDS, None, E)):
        found = torch.topk(scores, K, **options)
        layer(torch.rand(T, D))
    assert all(map(torch.equal, found, torch.topk(scores, K, **options)))


DRAW = np.random.default_rng(3)
X, GATE_UP, DOWN, LOGITS, ROUTER = (
    DRAW.standard_normal(shape).astype("f4") for shape in ((T, D), (E, D, 16), (E, 8, D), (T, E), (D, E))
)


@pytest.mark.parametrize("front_end", [moe_torch, moe_jax], ids=["torch", "jax"])
def test_ops(front_end: Any) -> None:
    is_torch = front_end is moe_torch
    array = torch.from_numpy if is_torch else jnp.asarray
    experts, router, decided = ExpertWeights(array(GATE_UP), array(DOWN)), RouterSpec(K), MoESpec(Activation("silu"))
    routed = dataclasses.replace(decided, router=router)

    def replay(call: Any) -> Any:
        layer = LayerRouting(IDS, None, E)
        if not is_torch:
            return jax_trace.replay(call)(layer)
        with torch_trace.replay(layer):
            return call()

    run = lambda routing, spec: front_end.moe(array(X), experts, routing, spec).output  # noqa: E731
    logits = front_end.router(array(X), array(ROUTER))
    for scores, kinds in (
        (array(LOGITS), [lambda: run(RouterLogits(array(LOGITS)), routed),
                         lambda: run(TopK(*front_end.route(array(LOGITS), router)), decided)]),
        (logits, [lambda: run(RouterWeights(array(ROUTER)), routed)]),
    ):  # fmt: skip
        wanted = run(TopK(*front_end.route(scores, router, ids=array(IDS))), decided)
        for call in kinds:
            np.testing.assert_array_equal(np.asarray(replay(call)), np.asarray(wanted))
    elsewhere = TopK(array(np.abs(IDS)), array(np.ones((T, K), np.float32)))
    with pytest.raises(Unsupported, match="a trace of ids alone needs the logits of each layer, got weights from else"):
        replay(lambda: run(elsewhere, decided))
