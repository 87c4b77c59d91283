"""Layers under `torch.autocast`: what torch.nn.Linear does, with the router as it is."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from moe_core.errors import InvalidInput, Unsupported
from moe_core.formats import scheme_named, scheme_names
from moe_core.layers import ExpertsSpec, MoELayerSpec, SharedExpertsSpec
from moe_core.specs import Activation, RouterSpec
from moe_core.specs.operands import RouterWeights
from moe_torch import MoE, moe
from tests.support.quantized.layers import D_MODEL, quantized_weights
from tests.support.torch import running_on

D, F, E, K, T = 32, 48, 4, 2, 9
ROUTER = RouterSpec(renormalize=True)
EVERYTHING = MoELayerSpec(
    D, F, E, K, ROUTER, ExpertsSpec(Activation("silu"), bias=True), SharedExpertsSpec(16, gate=True), router_bias=True
)
LAYERS = {
    "plain": MoELayerSpec(D, F, E, K, ROUTER),
    "everything": EVERYTHING,
    "separate": MoELayerSpec(D, F, E, K, ROUTER, ExpertsSpec(gate_layout="separate")),
    "capacity": MoELayerSpec(D, F, E, K, ROUTER, capacity_factor=0.75),
}


def _like(layer: MoE, dtype: torch.dtype) -> MoE:
    """The layer with experts and shared experts cast, biases and router as they are: what autocast computes with."""
    other = copy.deepcopy(layer)
    for name, parameter in other.named_parameters():
        if not name.startswith("router.") and not name.endswith(("bias", "shared_experts.gate")):
            parameter.data = parameter.data.to(dtype)
    return other


def _gradients(layer: MoE, x: torch.Tensor) -> dict[str, torch.Tensor]:
    layer.zero_grad()
    leaf = x.clone().requires_grad_()
    y, aux = layer(leaf, return_aux=True)
    (y.float().square().sum() + aux.load_balance_loss).backward()
    found = {"y": y.detach(), "x": leaf.grad, **{name: one.grad for name, one in layer.named_parameters()}}
    return {name: one for name, one in found.items() if one is not None}


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("is_cast", [False, True])
def test_a_float32_layer_computes_in_the_dtype_of_autocast(name: str, dtype: torch.dtype, is_cast: bool) -> None:
    torch.manual_seed(0)
    given = dtype if is_cast else torch.float32
    x = torch.randn(T, D).to(given)
    with running_on("reference"):
        layer = MoE.from_spec(LAYERS[name])
        wanted = _gradients(_like(layer, dtype), x.to(dtype))
        with torch.autocast("cpu", dtype):
            found = _gradients(layer, x)
    assert found["y"].dtype == dtype and found["x"].dtype == given
    for key, gradient in found.items():
        assert torch.equal(gradient.float(), wanted[key].float()), key
        if key not in ("x", "y"):
            assert gradient.dtype == torch.float32, key


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_model_with_linears_around_the_layer(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    for own, given in ((torch.float32, torch.float32), (dtype, torch.float32), (torch.float32, dtype)):
        with running_on("reference"):
            model = torch.nn.Sequential(
                torch.nn.Linear(D, D, dtype=own), MoE(D, F, E, K, dtype=own), torch.nn.Linear(D, D, dtype=own)
            )
            with torch.autocast("cpu", dtype):
                y = model(torch.randn(3, 5, D, dtype=given))
            assert y.dtype == dtype
            y.float().sum().backward()
        assert {one.grad.dtype for one in model.parameters() if one.grad is not None} == {own}


def test_off_and_nested_autocast_change_nothing() -> None:
    x = torch.randn(T, D)
    with running_on("reference"), torch.no_grad():
        layer = MoE.from_spec(EVERYTHING)
        y = layer(x)
        with torch.autocast("cpu", torch.bfloat16), torch.autocast("cpu", enabled=False):
            assert torch.equal(layer(x), y)
            with pytest.raises(InvalidInput, match=r"x must be torch\.float32 like the layer's parameters"):
                layer(x.bfloat16())


def test_parts_with_hooks_run_as_without() -> None:
    x = torch.randn(T, D)
    with running_on("reference"), torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        layer = MoE.from_spec(MoELayerSpec(D, F, E, K, ROUTER))
        y, seen = layer(x), []
        layer.experts.register_forward_hook(lambda *call: seen.append(call[-1].dtype))
        assert torch.equal(layer(x), y)
    assert seen == [torch.bfloat16]


@pytest.mark.parametrize("scheme", scheme_names())
@pytest.mark.parametrize("shared", [None, SharedExpertsSpec(16)], ids=["routed", "shared"])
def test_quantised_experts_take_rows_of_autocast(scheme: str, shared: SharedExpertsSpec | None) -> None:
    """The router keeps its float32, quantised matrices their bytes, and x is rounded once."""
    x, dtype = torch.randn(T, D_MODEL, generator=torch.Generator().manual_seed(0)), torch.bfloat16
    with running_on("reference"), torch.no_grad():
        plain = MoE.from_weights(quantized_weights(scheme)[0])
        layer = MoE.from_spec(dataclasses.replace(plain.spec, shared_experts=shared))
        layer.load_state_dict(plain.state_dict(), strict=False)
        with torch.autocast("cpu", dtype):
            dense = None if layer.shared_experts is None else layer.shared_experts.operands()
            arguments: Any = (layer.experts.operands(), RouterWeights(layer.router.weight), layer.moe_spec)
            wanted = moe(x.to(dtype), *arguments, shared=dense)
            for rows in (x, x.to(dtype)):
                assert torch.equal(layer(rows), wanted.output)
            y, aux = layer(x, return_aux=True, gate_inputs=x)
    assert y.dtype == dtype and wanted.output.abs().max() > 0 and torch.equal(aux.ids, wanted.ids)


def test_compiled() -> None:
    x = torch.randn(T, D)
    with running_on("reference"), torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        layer = MoE.from_spec(EVERYTHING)
        compiled: Any = torch.compile(layer, fullgraph=True, backend="aot_eager")
        assert torch.equal(compiled(x), layer(x))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_quantised_experts_keep_their_arrays(dtype: torch.dtype) -> None:
    spec = MoELayerSpec(D, 64, E, K, ROUTER, ExpertsSpec(scheme=scheme_named("mxfp4_w4a16")), SharedExpertsSpec(16))
    with running_on("reference"), torch.no_grad():
        layer = MoE.from_spec(spec)
        x = torch.randn(T, D)
        with torch.autocast("cpu", dtype):
            y = layer(x)
        layer.shared_experts.to(dtype)
        assert y.dtype == dtype and torch.equal(layer(x.to(dtype)), y)


def test_main_grad_is_refused() -> None:
    layer = MoE.from_spec(MoELayerSpec(D, F, E, K, ROUTER, main_grad=True))
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(Unsupported, match=r"main_grad must be False under"):
        layer(torch.randn(T, D))
