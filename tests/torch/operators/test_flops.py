"""torch's FlopCounterMode counts what `layer.cost` says; XLA's cost analysis sees no custom call."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch.nn.functional import ScalingType
from torch.utils.flop_counter import FlopCounterMode

from moe_core.formats import scheme_named
from moe_torch import (
    Activation,
    ExpertsSpec,
    ExpertWeights,
    LatentSpec,
    MoE,
    MoELayerSpec,
    MoESpec,
    NormSpec,
    OutputSpec,
    RouterLogits,
    RouterSpec,
    SharedExpertsSpec,
    TopK,
    grouped_mm,
    moe,
    route,
    router,
    scaled_grouped_mm,
)  # fmt: skip
from tests.support.quantized.layers import quantized_weights
from tests.support.torch import running_on

PLAIN = MoELayerSpec(16, 24, 4, 2)
SHARED = SharedExpertsSpec(8, gate=True)
SPECS = {
    "plain": PLAIN,
    "shared": dataclasses.replace(PLAIN, shared_experts=SHARED, router_bias=True),
    "separate": dataclasses.replace(PLAIN, experts=ExpertsSpec(gate_layout="separate")),
    "ungated": dataclasses.replace(PLAIN, experts=ExpertsSpec(Activation("relu2", gated=False), bias=True)),
    "recompute": dataclasses.replace(PLAIN, recompute=True),
    "norm of experts": dataclasses.replace(PLAIN, output=OutputSpec(NormSpec(1e-6), "experts")),
    "norm of the router": dataclasses.replace(PLAIN, router_norm=NormSpec(1e-6)),
    "norm of the output": dataclasses.replace(PLAIN, output=OutputSpec(NormSpec(1e-6))),
    "latent": dataclasses.replace(PLAIN, latent=LatentSpec(8), shared_experts=SHARED),
}


def counted(call: Any) -> int:
    with FlopCounterMode(display=False) as counter:
        call()
    return counter.get_total_flops()


@pytest.mark.parametrize("name", SPECS)
def test_layers_cost_what_they_say(name: str) -> None:
    with running_on("reference"):
        layer, x = MoE.from_spec(SPECS[name]), torch.randn(2, 5, 16)
        with torch.no_grad():
            assert counted(lambda: layer(x)) == layer.cost(x.shape).flops
        x.requires_grad_()
        assert counted(lambda: layer(x).sum().backward()) == layer.cost(x.shape, training=True).flops


@pytest.mark.parametrize("scheme", ["int4_w4a16", "fp8_block"])
def test_quantised_layers(scheme: str) -> None:
    with running_on("reference"):
        layer = MoE.from_weights(quantized_weights(scheme)[0])
        x = torch.randn(5, 128, dtype=layer.router.weight.dtype)
        with torch.no_grad():
            assert counted(lambda: layer(x)) == layer.cost(x.shape).flops
        if scheme_named(scheme).activations is None:
            x.requires_grad_()
            assert counted(lambda: layer(x).sum().backward()) == layer.cost(x.shape, training=True).flops


def test_frozen_parts_cost_less_and_other_routings_have_no_router() -> None:
    with running_on("reference"):
        layer, x = MoE.from_spec(PLAIN), torch.randn(10, 16)
        product = 2 * 10 * 2 * 16 * 24  # of one matrix [16, 24]
        routing = 2 * 10 * 16 * 4
        assert counted(lambda: layer(x).sum().backward()) == 3 * product + routing + 4 * product + routing
        layer.experts.requires_grad_(False)
        layer.router.requires_grad_(False)
        assert counted(lambda: layer(x.requires_grad_()).sum().backward()) == 6 * product + 2 * routing
        weights, spec = layer.experts.operands(), layer.moe_spec
        logits = router(x, layer.router.weight, spec=spec.logits_spec())
        chosen = TopK(*route(logits, RouterSpec(2)))
        with torch.no_grad():
            plain = dataclasses.replace(spec, router=None)
            assert counted(lambda: moe(x, weights, RouterLogits(logits), spec)) == 3 * product
            assert counted(lambda: moe(x, weights, chosen, plain)) == 3 * product
            assert counted(lambda: moe(x[:0], weights, TopK(chosen.ids[:0], chosen.weights[:0]), plain)) == 0


@pytest.mark.parametrize(("trained", "products"), [("", 3), ("up", 5), ("gate_up", 5), ("gate_up up", 6), ("x", 6)])
def test_separate_matrices_may_be_trained_alone(trained: str, products: int) -> None:
    arrays = {"x": torch.randn(6, 16), "gate_up": torch.randn(4, 16, 8), "up": torch.randn(4, 16, 8)}
    for name in trained.split():
        arrays[name].requires_grad_()
    x, gate_up, up = arrays.values()
    routing, spec = TopK(torch.zeros(6, 2).int(), torch.ones(6, 2)), MoESpec(Activation("silu", gate_layout="separate"))
    with running_on("reference"):
        run = lambda: moe(x, ExpertWeights(gate_up, torch.randn(4, 8, 16), up=up), routing, spec).output  # noqa: E731
        assert counted(lambda: run().sum().backward() if trained else run()) == products * 2 * 12 * 16 * 8


def test_grouped_products() -> None:
    """Rows outside of groups count, as their number is on the device."""
    a, b = torch.randn(48, 16, requires_grad=True), torch.randn(5, 16, 32, requires_grad=True)
    offs, flops, row = torch.tensor((8, 8, 24, 32, 40)), 2 * 48 * 16 * 32, ScalingType.RowWise
    with running_on("reference"):
        assert counted(lambda: grouped_mm(a, b, offs).sum().backward()) == 3 * flops
        codes = torch.zeros(48, 16).to(torch.float8_e4m3fn), torch.zeros(5, 32, 16).to(torch.float8_e4m3fn).mT
        scales = torch.ones(48), torch.ones(5, 32)
        assert counted(lambda: scaled_grouped_mm(*codes, scales[0], row, scales[1], row, offs=offs)) == flops


def test_the_counter_may_be_imported_before_or_after() -> None:
    script = """
import os, sys, torch
child = os.fork()
if child:
    import moe_torch
    assert "triton" not in sys.modules
    import torch.utils.flop_counter as counter
else:
    import torch.utils.flop_counter as counter
    import moe_torch
assert torch.ops.moebius.moe in counter.flop_registry
assert not child or os.waitpid(child, 0)[1] == 0
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", script], check=True, timeout=100)


def test_jax_has_the_cost_of_a_layer_and_xla_none_of_custom_calls() -> None:
    jax = pytest.importorskip("jax")
    pytest.importorskip("flax")
    from flax import nnx

    import moe_jax.nnx

    layer = moe_jax.nnx.MoE(16, 24, 4, 2, rngs=nnx.Rngs(0))
    x = jax.numpy.ones((10, 16))
    analysis = jax.jit(lambda x: layer(x)).lower(x).compile().cost_analysis()
    assert layer.cost(x.shape).flops == 3 * 2 * 10 * 2 * 16 * 24 + 2 * 10 * 16 * 4 > (analysis or {}).get("flops", 0)
