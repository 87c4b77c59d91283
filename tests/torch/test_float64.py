"""Float64 on the reference engine: what is computed in it, and what layers refuse."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import moe_torch
from moe_core.layers import ExpertsSpec, MoELayerSpec, SharedExpertsSpec
from moe_torch import Activation, ExpertWeights, InvalidInput, MoE, MoESpec, RouterSpec, RouterWeights, Unsupported
from moe_torch.layers.lora.stages import LowRank, run_stages
from tests.support.torch import running_on

T, D, F, E, K, S = 3, 4, 3, 6, 2, 2

pytestmark = pytest.mark.usefixtures("reference_engine_of_torch")


def draw(*shape: int, seed: int = 0) -> Any:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape) + seed), dtype=torch.float64)
    return values.requires_grad_()


SPEC = MoELayerSpec(
    D, F, E, K, router=RouterSpec(K, scoring="sigmoid", renormalize=True, scale=1.5), experts=ExpertsSpec(bias=True),
    shared_experts=SharedExpertsSpec(S, gate=True), router_bias=True, correction_bias=True,
)  # fmt: skip


def test_layers_are_cast() -> None:
    layer = MoE.from_spec(SPEC).double()
    assert {tensor.dtype for tensor in layer.state_dict().values()} == {torch.float64}
    assert layer.float().get_buffer("router.correction_bias").dtype == torch.float32
    assert layer.double().bfloat16().get_buffer("router.correction_bias").dtype == torch.float32


def test_everything_is_computed_in_float64() -> None:
    """A plain forward by torch's own operations: equal to float64's rounding, far below float32's."""
    x, router = draw(T, D).detach(), draw(D, E).detach()
    weights = {"gate_up": draw(E, D, 2 * F), "down": draw(E, F, D, seed=1)}
    weights |= {"gate_up_bias": draw(E, 2 * F), "down_bias": draw(E, D)}
    spec = MoESpec(Activation("gelu_tanh"), RouterSpec(K, scale=math.pi))
    with torch.no_grad():
        found = moe_torch.moe(x, ExpertWeights(**weights), RouterWeights(router), spec)
        scores = torch.softmax(x @ router, dim=-1)
        chosen, ids = scores.topk(K)
        slots = []
        for token, experts in enumerate(ids.tolist()):
            for k, expert in enumerate(experts):
                pre = x[token] @ weights["gate_up"][expert] + weights["gate_up_bias"][expert]
                hidden = torch.nn.functional.gelu(pre[:F], approximate="tanh") * pre[F:]
                y = hidden @ weights["down"][expert] + weights["down_bias"][expert]
                slots.append(y * chosen[token, k] * math.pi)
    torch.testing.assert_close(found.output, torch.stack(slots).view(T, K, D).sum(1), rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(found.weights, chosen * math.pi, rtol=1e-13, atol=0)


def test_low_rank_factors_of_separate_matrices_are_those_of_float32() -> None:
    """Stages against one call."""
    spec = MoESpec(Activation("silu", gate_layout="separate"))
    weights = {"gate_up": draw(E, D, F), "up": draw(E, D, F, seed=1), "down": draw(E, F, D)}
    weights |= {"gate_up_bias": draw(E, F), "up_bias": draw(E, F, seed=1), "down_bias": draw(E, D)}
    factors = {"a1": draw(E, D, 16), "b1": draw(E, 16, 2 * F), "a2": draw(E, F, 16), "b2": draw(E, 16, D)}
    ids, found = torch.arange(T * K, dtype=torch.int32).view(T, K), []
    for dtype in (torch.float64, torch.float32):
        experts, low_rank = ({name: one.detach().to(dtype) for name, one in all.items()} for all in (weights, factors))
        routing = moe_torch.TopK(ids, draw(T, K).detach().to(dtype))
        x = draw(T, D).detach().to(dtype)
        found.append(run_stages(x, ExpertWeights(**experts), routing, spec, low_rank=LowRank(**low_rank, scale=0.5)))
    torch.testing.assert_close(found[0].float(), found[1], rtol=1e-4, atol=1e-5)


def test_what_is_refused() -> None:
    layer, x = MoE.from_spec(SPEC, dtype=torch.float64), draw(T, D)
    with (
        running_on("interpreter"),
        pytest.raises(Unsupported, match=r"float64 runs on the CPU's reference engine alone"),
    ):
        layer(x)
    for text in (layer.explain(T, training=True), layer.explain(T)):
        assert "float64[3, 4]" in text and "float32" not in text.partition("sums")[0]
    assert layer(x).dtype == torch.float64, "cpu_engine('reference') is what the message says"
    with pytest.raises(InvalidInput, match=r"x must be torch.float64 like the layer's parameters, got torch.float32"):
        layer(x.float())
    layer.router.float()
    with pytest.raises(InvalidInput, match=r"routing.weight must be float64 like x, got float32; cast every array"):
        layer(x)


def test_shapes_without_data() -> None:
    layer = MoE.from_spec(SPEC, dtype=torch.float64, device="meta")
    y, aux = layer(torch.empty(T, D, dtype=torch.float64, device="meta"), return_aux=True)
    assert (y.dtype, aux.weights.dtype, aux.ids.dtype) == (torch.float64, torch.float64, torch.int32)
