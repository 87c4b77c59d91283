"""A rank's plans add up in the order of one device, for compiled kernels, without a device."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from moe_core.base.arrays import ArraySpec
from moe_core.ops.moe.backward import plan_moe_backward
from moe_core.ops.moe.forward import plan_moe
from moe_core.ops.moe.options import BackwardOptions, ForwardOptions
from moe_core.ops.router.backward import plan_router_backward
from moe_core.ops.router.forward import plan_router
from moe_core.plan.steps import LaunchPlan
from moe_core.specs import Activation, LogitsSpec, MoESpec, Tuning
from moe_core.specs.operands import ExpertWeights, MoEOperands, OutputGradients, SharedExpert, TopK
from tests.support.harness import H200

#: D, F, E, K, width of a shared expert.
MODELS = {
    "gptoss120b": (2880, 2880, 128, 4, 0),
    "qwen3": (2048, 768, 128, 8, 512),
    "mixtral": (4096, 14336, 8, 2, 0),
    "dsv3": (7168, 2048, 256, 8, 2048),
    "small": (256, 192, 10, 4, 128),
}
PLAIN = MoESpec(Activation("silu"))


def array(*shape: int, dtype: str = "bfloat16") -> ArraySpec:
    return ArraySpec(shape, dtype)


def operands_of(tokens: int, top_k: int, experts: int, model: str, shared: Any = None, d_ff: int = 0) -> MoEOperands:
    d, f, *_ = MODELS[model]
    f = d_ff or f
    weights = ExpertWeights(array(experts, d, 2 * f), array(experts, f, d))
    routing = TopK(array(tokens, top_k, dtype="int32"), array(tokens, top_k, dtype="float32"))
    return MoEOperands(array(tokens, d), weights, routing, None, None, shared)


def plans(operands: MoEOperands, spec: MoESpec, wanted: tuple[str, ...], **options: Any) -> list[LaunchPlan]:
    forward = plan_moe(
        operands.x, operands.experts, operands.routing, spec, H200, options=ForwardOptions(shared=operands.shared)
    )
    gradients = OutputGradients(operands.x)
    return [
        forward,
        plan_moe_backward(gradients, operands, spec, H200, options=BackwardOptions(wanted=wanted, **options)),
    ]


def sums(found: list[LaunchPlan], keep: Any) -> list[str]:
    kept = [line for plan in found for line in plan.summation if keep(line)]
    assert kept, "there is something to compare"
    return kept


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("tokens", [1, 128, 4096])
def test_an_owner_adds_up_as_one_device(model: str, tokens: int) -> None:
    """Whatever share of all rows it has."""
    *_, experts, top_k, _ = MODELS[model]
    wanted = ("d_x", "d_experts.gate_up", "d_experts.down", "d_routing.weights")
    whole = 4 * tokens
    expected = sums(plans(operands_of(whole, top_k, experts, model), PLAIN, wanted), lambda line: "slots" not in line)
    # Where scratch lies decides which gradient comes first, and not how it is added up.
    expected.sort()
    tuning = Tuning(expected_tokens=whole * top_k, expected_experts=experts)
    for load in (0.1, 1, 4):
        rows = max(1, min(whole * top_k, int(load * tokens * top_k)))
        own = operands_of(rows, 1, -(-experts // 4), model)
        found = plans(own, dataclasses.replace(PLAIN, tuning=tuning), wanted)
        assert sorted(sums(found, lambda line: "slots" not in line)) == expected, load


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("tokens", [1, 128, 4096])
def test_an_owner_of_tokens_with_places_adds_up_as_one_device(model: str, tokens: int) -> None:
    """It has room for all ranks' tokens, and a quarter of the experts."""
    *_, experts, top_k, _ = MODELS[model]
    whole = operands_of(4 * tokens, top_k, experts, model)
    alone = plan_moe(whole.x, whole.experts, whole.routing, PLAIN, H200)
    tuning = Tuning(expected_tokens=4 * tokens, expected_experts=experts)
    for room in (4 * tokens, 8 * tokens):
        own = operands_of(room, top_k, -(-experts // 4), model)
        spec = dataclasses.replace(PLAIN, tuning=tuning)
        assert isinstance(own.routing, TopK)
        results_at = ArraySpec((own.routing.ids.size,), "int64")
        for limits in (None, (88, 44), (None, 1)):
            options: Any = {"results_at": results_at, "multiprocessors": limits}
            found = plan_moe(own.x, own.experts, own.routing, spec, H200, options=ForwardOptions(**options))
            assert sums([found], lambda line: True) == sums([alone], lambda line: "slots" not in line)


@pytest.mark.parametrize("model", MODELS)
def test_a_home_adds_up_as_one_device(model: str) -> None:
    """Its router, and its shared expert but for the gradients of their weights, which are a rank's addends."""
    d, _, experts, top_k, width = MODELS[model]
    weight, options = array(d, experts), {"bias": None, "target": H200}
    for tokens in (1, 128, 4096):
        whole = 4 * tokens
        for spec, rows in ((LogitsSpec(), whole), (LogitsSpec(expected_tokens=whole), tokens)):
            x, d_logits = array(rows, d), array(rows, experts, dtype="float32")
            found = [plan_router(x=x, weight=weight, spec=spec, **options)]
            found.append(
                plan_router_backward(d_logits=d_logits, x=x, weight=weight, spec=spec, wanted=("d_x",), **options)
            )
            if rows == whole:
                expected = sums(found, lambda line: True)
        assert sums(found, lambda line: True) == expected
        if width:
            shared = SharedExpert(array(d, 2 * width), array(width, d), None, array(d, 1))
            alone = plans(operands_of(whole, top_k, experts, model, shared), PLAIN, ("d_x",))
            spec = dataclasses.replace(PLAIN, tuning=Tuning(expected_tokens=whole))
            own = plans(operands_of(tokens, 1, 1, model, shared, 32), spec, ("d_x",), wide=True)
            assert sums(own, lambda line: "shared" in line) == sums(alone, lambda line: "shared" in line)


def test_without_expected_tokens_orders_differ() -> None:
    """So the tests above compare what can differ."""
    found = []
    for rows in (100, 16384):
        own = plans(operands_of(rows, 1, 3, "small"), PLAIN, ("d_experts.down",))
        found.append(sums(own, lambda line: "slots" not in line))
    assert found[0] != found[1]
