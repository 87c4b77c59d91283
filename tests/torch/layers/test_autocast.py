"""Layers under `torch.autocast`: what torch.nn.Linear does, with the router as it is."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from moe_core.errors import InvalidInput
from moe_core.formats import scheme_names
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
