"""`expected_tokens`: parts of a batch, of any size, add up in the order of the whole. Plans alone, no device."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

from benchmarks.shapes import SHAPES, Shape
from moe_core.base.arrays import ArraySpec
from moe_core.base.target import Target
from moe_core.errors import InvalidInput
from moe_core.ops.matmul.backward import plan_matmul_ogs_backward
from moe_core.ops.matmul.forward import plan_matmul_ogs
from moe_core.ops.moe.backward import gradient_names, plan_moe_backward
from moe_core.ops.moe.forward import plan_moe
from moe_core.ops.moe.options import BackwardOptions, ForwardOptions
from moe_core.ops.router.backward import plan_router_backward
from moe_core.ops.router.forward import plan_router
from moe_core.plan.steps import LaunchPlan
from moe_core.specs import Activation, LayoutSpec, LogitsSpec, MatmulSpec, MatmulTuning, MoESpec, Tuning
from moe_core.specs.operands import ExpertWeights, MatmulOperands, MoEOperands, OutputGradients, SharedExpert, TopK

H200 = Target("cuda", 90, 132)
RANKS, LOADS = 4, (0.1, 0.5, 1, 2, 4)
MODELS = ("qwen3", "gptoss120b", "mixtral", "dsv3", "gptoss20b")


def rows_of(rows: int, width: int, dtype: str = "bfloat16") -> ArraySpec:
    return ArraySpec((rows, width), dtype)


def plans(shape: Shape, tokens: int, experts: int, top_k: int, tuning: Tuning | None) -> list[LaunchPlan]:
    """A forward, one that saves, and its backward, of given ids."""
    d, f = shape.d_model, shape.d_ff
    weights = ExpertWeights(ArraySpec((experts, d, 2 * f), "bfloat16"), ArraySpec((experts, f, d), "bfloat16"))
    routing = TopK(rows_of(tokens, top_k, "int32"), rows_of(tokens, top_k, "float32"))
    operands, spec = MoEOperands(rows_of(tokens, d), weights, routing), MoESpec(Activation("silu"), tuning=tuning)
    forward = [
        plan_moe(operands.x, weights, routing, spec, H200, options=ForwardOptions(save=save)) for save in (False, True)
    ]
    upstream = OutputGradients(operands.x)
    return [
        *forward,
        plan_moe_backward(upstream, operands, spec, H200, options=BackwardOptions(wanted=gradient_names(operands))),
    ]


def orders(found: list[LaunchPlan]) -> list[list[str]]:
    """Of every plan; which of its stages comes first does not matter."""
    return [sorted(plan.summation) for plan in found]


@pytest.mark.parametrize("tokens", [16, 128, 4096])
@pytest.mark.parametrize("model", MODELS)
def test_a_rank_adds_up_as_one_device(model: str, tokens: int) -> None:
    """Whatever share of the slots it gets: half as many as the mean, four times as many, in forward and backward."""
    shape = SHAPES[model]
    slots = RANKS * tokens * shape.top_k
    expected = orders(plans(shape, RANKS * tokens, shape.num_experts, shape.top_k, None))
    tuning = Tuning(expected_tokens=slots, expected_experts=shape.num_experts)
    for load in LOADS:
        received = math.ceil(load * slots / RANKS)
        found = orders(plans(shape, received, shape.num_experts // RANKS, 1, tuning))
        assert found == expected, f"load {load}"


@pytest.mark.parametrize("model", MODELS)
def test_without_it_loads_differ(model: str) -> None:
    """What the test above would find."""
    shape = SHAPES[model]
    found = [
        orders(plans(shape, math.ceil(load * tokens * shape.top_k), shape.num_experts // RANKS, 1, None))
        for tokens in (16, 128, 4096)
        for load in LOADS
    ]
    assert len({str(one) for one in found}) > 1


@pytest.mark.parametrize("tokens", [1, 256, 4096])
def test_stages_add_up_as_the_whole_batch(tokens: int) -> None:
    """The router, a shared expert and products by themselves, of a rank's tokens."""
    d, e, f, whole = 2048, 128, 768, RANKS * tokens

    def of(tokens: int, expected: int | None) -> list[LaunchPlan]:
        x, weight, gate_up = rows_of(tokens, d), rows_of(d, e), rows_of(d, 2 * f)
        logits = LogitsSpec(expected_tokens=expected)
        router = (x, weight, None, logits, H200)
        found = [plan_router(*router)]
        found.append(plan_router_backward(rows_of(tokens, e, "float32"), *router, wanted=("d_x",)))
        dense = MatmulSpec("in_out", tuning=MatmulTuning(expected_tokens=expected))
        found.append(plan_matmul_ogs(MatmulOperands(x, gate_up), None, dense, H200))
        operands = MatmulOperands(x, ArraySpec((e, d, 2 * f), "bfloat16"), row_weight=rows_of(tokens, 8, "float32"))
        layout, product = LayoutSpec(tokens, 8, e), dataclasses.replace(dense, gather="token", scatter="slot")
        found.append(plan_matmul_ogs(operands, layout, product, H200))
        wanted = ("d_x", "d_weight", "d_row_weight")
        d_y = rows_of(8 * tokens, 2 * f)
        return [*found, plan_matmul_ogs_backward(d_y, operands, layout, product, H200, wanted=wanted)]

    assert orders(of(tokens, whole)) == orders(of(whole, None))
    assert orders(of(1, None)) != orders(of(4096, None))


def test_a_composed_layer_with_a_shared_expert() -> None:
    d, e, f = 2048, 64, 1408

    def of(tokens: int, expected: int | None) -> tuple[str, ...]:
        experts = ExpertWeights(ArraySpec((e, d, 2 * f), "bfloat16"), ArraySpec((e, f, d), "bfloat16"))
        shared = SharedExpert(rows_of(d, 2 * f), rows_of(f, d), gate=rows_of(d, 1))
        routing = TopK(rows_of(tokens, 6, "int32"), rows_of(tokens, 6, "float32"))
        spec = MoESpec(Activation("silu"), tuning=Tuning(expected_tokens=expected))
        return plan_moe(
            rows_of(tokens, d), experts, routing, spec, H200, options=ForwardOptions(shared=shared)
        ).summation

    assert of(16, 4096) == of(512, 4096) == of(4096, None) != of(16, None)


@pytest.mark.parametrize("kind", [Tuning, MatmulTuning])
def test_bad_expectations(kind: Any) -> None:
    with pytest.raises(InvalidInput, match="expected_tokens must be an integer of at least 1, got 0"):
        kind(expected_tokens=0)
    with pytest.raises(InvalidInput, match="expected_experts must be an integer of at least 1, got -1"):
        kind(expected_tokens=8, expected_experts=-1)
    with pytest.raises(InvalidInput, match="expected_experts must be None without expected_tokens, got 8; give both"):
        kind(expected_experts=8)
    with pytest.raises(InvalidInput, match="expected_tokens must be an integer of at least 1"):
        LogitsSpec(expected_tokens=0)
