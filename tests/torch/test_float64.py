"""Float64 on the reference engine: `torch.autograd.gradcheck` of ops and layers, and what float64 is refused."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch

import moe_torch
from moe_core.layers import ExpertsSpec, MoELayerSpec, SharedExpertsSpec
from moe_torch import (
    Activation,
    ExpertWeights,
    InvalidInput,
    MatmulOperands,
    MatmulSpec,
    MoE,
    MoESpec,
    RouterLogits,
    RouterSpec,
    RouterWeights,
    SharedExpert,
    TopK,
    Unsupported,
)
from tests.support.torch import running_on

T, D, F, E, K, S = 3, 4, 3, 6, 2, 2
ROUTERS = {
    "softmax": RouterSpec(K),
    "renormalised": RouterSpec(K, renormalize=True, scale=2.5),
    "topk_then_softmax": RouterSpec(K, order="topk_then_softmax"),
    "sigmoid groups": RouterSpec(K, scoring="sigmoid", renormalize=True, num_groups=2, topk_group=1),
    "sqrt_softplus": RouterSpec(K, scoring="sqrt_softplus"),
}
ACTIVATIONS = [
    Activation("silu"),
    Activation("gelu"),
    Activation("gelu_tanh"),
    Activation("relu2", gated=False),
    Activation("silu", limit=0.7),
    Activation("clamped_silu", limit=0.4),
    Activation("swiglu_oai", limit=1.1, gate_layout="interleaved"),
    Activation("softcapped_silu"),
    Activation("silu", gate_layout="separate"),
]


@pytest.fixture(autouse=True)
def reference() -> Any:
    with running_on("reference"):
        yield


def draw(*shape: int, seed: int = 0) -> Any:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape) + seed), dtype=torch.float64)
    return values.requires_grad_()


def weights_of(activation: Activation, with_bias: bool = True) -> dict[str, Any]:
    separate = activation.gate_layout == "separate"
    width = F if separate else activation.input_width(F)
    made = {"gate_up": draw(E, D, width), "down": draw(E, F, D, seed=1)}
    made |= {"up": draw(E, D, F, seed=2)} if separate else {}
    if with_bias:
        made |= {"gate_up_bias": draw(E, width), "down_bias": draw(E, D)}
        made |= {"up_bias": draw(E, F, seed=3)} if separate else {}
    return made


def require_gradients(function: Any, tensors: dict[str, Any]) -> None:
    """gradcheck of a function of named tensors."""
    assert torch.autograd.gradcheck(
        lambda *given: function(**dict(zip(tensors, given, strict=True))), [*tensors.values()]
    )


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=lambda one: f"{one.name}-{one.gate_layout}-{one.limit}")
def test_moe(activation: Activation) -> None:
    tensors = {"x": draw(T, D), "router": draw(D, E, seed=4), "router_bias": draw(E, seed=5)} | weights_of(activation)

    def outputs(x: Any, router: Any, router_bias: Any, **experts: Any) -> Any:
        routing = RouterWeights(router, router_bias)
        found = moe_torch.moe(x, ExpertWeights(**experts), routing, MoESpec(activation, RouterSpec(K)))
        return found.output, found.weights, found.logits

    require_gradients(outputs, tensors)


@pytest.mark.parametrize("router", ROUTERS.values(), ids=ROUTERS)
def test_routers_and_shared_experts(router: RouterSpec) -> None:
    activation = Activation("silu")
    tensors = {"x": draw(T, D), "logits": draw(T, E)} | weights_of(activation, with_bias=False)
    tensors |= {"shared_up": draw(D, 2 * S), "shared_down": draw(S, D), "gate": draw(D, 1)}

    def outputs(x: Any, logits: Any, shared_up: Any, shared_down: Any, gate: Any, **experts: Any) -> Any:
        shared, spec = SharedExpert(shared_up, shared_down, gate=gate), MoESpec(activation, router)
        found = moe_torch.moe(x, ExpertWeights(**experts), RouterLogits(logits), spec, shared=shared)
        return found.output, found.weights

    require_gradients(outputs, tensors)


def test_given_ids_and_recompute() -> None:
    ids = torch.tensor([[0, 3], [5, -1], [2, 2]], dtype=torch.int32)
    tensors = {"x": draw(T, D), "weights": draw(T, K)} | weights_of(Activation("gelu"))

    def output(x: Any, weights: Any, **experts: Any) -> Any:
        spec = MoESpec(Activation("gelu"), recompute=True)
        return moe_torch.moe(x, ExpertWeights(**experts), TopK(ids, weights), spec).output

    require_gradients(output, tensors)


def test_stage_ops() -> None:
    ids = torch.tensor([[0, 3], [5, -1], [2, 1]], dtype=torch.int32)
    layout = moe_torch.make_layout(ids, E)
    tensors = {"x": draw(T, D), "weight": draw(E, D, 2 * F), "bias": draw(E, 2 * F), "row_weight": draw(T, K)}

    def output(x: Any, weight: Any, bias: Any, row_weight: Any) -> Any:
        operands = MatmulOperands(x, weight, bias=bias, row_weight=row_weight)
        slots = moe_torch.matmul_ogs(operands, layout, MatmulSpec("in_out", "token", "slot"))
        hidden = moe_torch.activation(slots, Activation("silu"), out_dtype=torch.float64)
        return moe_torch.reduce(hidden, layout)

    require_gradients(output, tensors)
    router = {"x": draw(T, D), "weight": draw(D, E)}
    spec = RouterSpec(K, scoring="sigmoid", renormalize=True)
    require_gradients(lambda x, weight: moe_torch.route(moe_torch.router(x, weight), spec).weights, router)


def test_the_bias_of_a_router_has_a_gradient_in_float64() -> None:
    x, weight, bias, flowing = draw(T, D).detach(), draw(D, E).detach(), draw(E), draw(T, E).detach()
    (found,) = torch.autograd.grad(moe_torch.router(x, weight, bias=bias), bias, flowing)
    torch.testing.assert_close(found, flowing.sum(0), rtol=1e-14, atol=1e-15)


def test_losses_are_computed_in_float64() -> None:
    logits = torch.tensor([[-34.0, -20.0, 25.0], [-30.0, -33.0, -18.0]], dtype=torch.float64)
    ids = torch.tensor([[0], [1]], dtype=torch.int32)
    scores = torch.log1p(torch.exp(logits)).sqrt()
    wanted = 3 * (torch.tensor([0.5, 0.5, 0.0]) * (scores / scores.sum(1, keepdim=True)).mean(0)).sum()
    found = moe_torch.load_balance_loss(logits, ids, scoring="sqrt_softplus")
    torch.testing.assert_close(found, wanted, rtol=1e-13, atol=0)


SPEC = MoELayerSpec(
    D,
    F,
    E,
    K,
    router=RouterSpec(K, scoring="sigmoid", renormalize=True, scale=1.5),
    experts=ExpertsSpec(bias=True),
    shared_experts=SharedExpertsSpec(S, gate=True),
    router_bias=True,
    correction_bias=True,
)


@pytest.mark.parametrize("kind", ["whole", "capacity", "stages"])
def test_layer(kind: str) -> None:
    """Output, losses and every parameter; the stages are run where a part has a hook."""
    torch.manual_seed(0)
    layer = MoE.from_spec(dataclasses.replace(SPEC, capacity_factor=1.0 if kind == "capacity" else None)).double()
    assert {tensor.dtype for tensor in layer.state_dict().values()} == {torch.float64}
    if kind == "stages":
        layer.experts.register_forward_hook(lambda *_: None)
        layer.shared_experts.register_forward_hook(lambda *_: None)  # pyright: ignore[reportOptionalMemberAccess]
    names = [name for name, _ in layer.named_parameters()]

    def outputs(x: Any, *parameters: Any) -> Any:
        given = dict(zip(names, parameters, strict=True))
        y, aux = torch.func.functional_call(layer, given, (x,), {"return_aux": True})
        return y, aux.load_balance_loss, aux.z_loss

    assert torch.autograd.gradcheck(outputs, (draw(T, D), *layer.parameters()))
    assert layer.float().get_buffer("router.correction_bias").dtype == torch.float32
    assert layer.double().bfloat16().get_buffer("router.correction_bias").dtype == torch.float32


def test_everything_is_computed_in_float64() -> None:
    """A plain forward by torch's own operations: equal to float64's rounding, far below float32's."""
    x, router, weights = draw(T, D).detach(), draw(D, E).detach(), weights_of(Activation("gelu_tanh"))
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
    with pytest.raises(InvalidInput, match="out_dtype must be left out for float64 arrays, got float32"):
        moe_torch.activation(x, Activation("silu"), out_dtype=torch.float32)
    spec = MatmulSpec("in_out", out_dtype="float32")
    with pytest.raises(InvalidInput, match="out_dtype must be left out for float64 arrays, got float32"):
        moe_torch.matmul_ogs(MatmulOperands(x, draw(D, F)), None, spec)


def test_shapes_without_data() -> None:
    layer = MoE.from_spec(SPEC, dtype=torch.float64, device="meta")
    y, aux = layer(torch.empty(T, D, dtype=torch.float64, device="meta"), return_aux=True)
    assert (y.dtype, aux.weights.dtype, aux.ids.dtype) == (torch.float64, torch.float64, torch.int32)
