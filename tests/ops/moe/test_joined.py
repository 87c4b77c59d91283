"""The experts in one call of threads of the reference engine: both products of the forward, and the backward."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

import tests.support.moe
from moe_core.base import threads
from moe_core.base.target import Target
from moe_core.ops.moe import forward
from moe_core.ops.moe.reference.backward import moe_backward_stages
from moe_core.ops.moe.reference.forward import moe_stages
from moe_core.parity.tolerance import assert_close
from moe_core.plan.steps import ReferenceCall
from moe_core.specs import Activation, MoESpec
from moe_core.specs.operands import MoEOperands
from tests.support.moe import plan_of, run_layer, simple_layer
from tests.support.strategies import RoutingCase


@pytest.mark.parametrize("count", [1, 3, 16])
@pytest.mark.parametrize(("num_tokens", "dtype"), [(9, "float32"), (600, "float32"), (40, "bfloat16")])
def test_both_products_in_one_call_have_the_bits_of_one_after_the_other(
    num_tokens: int, dtype: str, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threads, "_WAKE_NANOSECONDS", 1)
    monkeypatch.setattr("moe_core.ops.matmul.reference.forward._PIECE_NANOSECONDS", 1)
    layer = dataclasses.replace(simple_layer(num_tokens, dtype), token_mask=np.arange(num_tokens) % 5 > 0)
    target, name = Target("reference"), "moe.reference.experts:both_products"
    functions = [step.function for step in plan_of(layer, target).steps if isinstance(step, ReferenceCall)]
    assert functions.count(name) == 1
    with threads.use(count):
        joined = run_layer(layer, target)
        monkeypatch.setattr(forward, "join_twins", lambda plan: plan)
        monkeypatch.setattr(tests.support.moe, "plan_moe", forward.plan_moe.__wrapped__)
        apart = run_layer(layer, target)
    assert {key: array.tobytes() for key, array in joined.items()} == {
        key: array.tobytes() for key, array in apart.items()
    }


@pytest.mark.parametrize("complete", [False, True])
def test_the_backward_of_experts_without_biases(complete: bool) -> None:
    torch = pytest.importorskip("torch")
    from tests.support.training.loop import Loop, draw_problem
    from tests.support.training.tolerances import FP32

    ids = np.array([[0, 2], [2, 0], [1, 2], [3, 2]] if complete else [[0, 2], [2, 0], [-1, 2], [-1, -1]], np.int32)
    case = RoutingCase(ids, np.full((4, 2), 0.6, np.float32), 4)
    problem: Any = draw_problem(case, MoESpec(Activation("silu")), d_model=3, d_ff=2)
    problem = problem.replace(experts=dataclasses.replace(problem.experts, gate_up_bias=None, down_bias=None))
    (x, experts, routing, spec), options = problem.arguments()
    stages = moe_stages(x, experts, routing, spec, **options)
    found = moe_backward_stages(problem.gradients, MoEOperands(x, experts, routing, **options), spec, stages)
    for name, expected in Loop(problem, stages["ids"]).autograd(torch.float64).items():
        rms = np.sqrt(np.square(expected).mean())
        assert_close(found[f"d_{name}"], expected, FP32, f"d_{name}", scale=rms)
