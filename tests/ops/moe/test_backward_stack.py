"""The composed backward on stacks of layers whose index lies outside."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from moe_core import InvalidInput
from moe_core.base.target import Target
from moe_core.specs import Activation, MoESpec, RouterSpec
from moe_core.specs.operands import RouterLogits, named_arrays
from tests.support.harness import engine_target
from tests.support.strategies import draw_array, hard_routing
from tests.support.training.moe_backward import Problem, draw

LAYERS = 2


def outside(problem: Problem, layer: int) -> Problem:
    """The problem's layer twice, as a stack, and an index that is none of it."""
    stack = {name: np.stack([array] * LAYERS) for name, array in named_arrays(problem.operands.experts)}
    experts = dataclasses.replace(problem.operands.experts, **stack, layer_index=np.array([layer], np.int32))
    return dataclasses.replace(problem, operands=dataclasses.replace(problem.operands, experts=experts))


@pytest.mark.parametrize("layer", [-1, LAYERS, 2**31 - 1])
def test_a_layer_outside_the_stack_shows_in_d_x_and_spoils_no_other_layer(layer: int) -> None:
    problem = outside(draw(hard_routing("missing_ids"), MoESpec(Activation("silu"))), layer)
    present = problem.operands.routing.ids >= 0
    into = {"d_experts.down": np.ones((LAYERS, *problem.operands.experts.down.shape[1:]), np.float32)}
    found = problem.backward(into=into)
    np.testing.assert_array_equal(np.isnan(found["d_x"]), np.repeat(present.any(1)[:, None], 20, 1))
    np.testing.assert_array_equal(np.isnan(found["d_routing.weights"]), present)
    for name in ("gate_up", "gate_up_bias", "down_bias"):
        gradient = found[f"d_experts.{name}"]
        assert gradient.shape[0] == LAYERS and not gradient.any(), name
    np.testing.assert_array_equal(found["d_experts.down"], into["d_experts.down"])


def test_a_layer_outside_the_stack_shows_in_the_gradient_of_the_logits() -> None:
    problem = draw(hard_routing("missing_ids"), MoESpec(Activation("silu"), RouterSpec(2)))
    tokens, experts = problem.operands.x.shape[0], problem.operands.experts.down.shape[0]
    logits = RouterLogits(draw_array(np.random.default_rng(0), (tokens, experts)))
    operands = dataclasses.replace(problem.operands, routing=logits, token_mask=None, expert_map=None)
    problem = outside(dataclasses.replace(problem, operands=operands), LAYERS)
    found = problem.backward(wanted=("d_x", "d_routing.logits", "d_experts.down"))
    assert np.isnan(found["d_x"]).all() and np.isnan(found["d_routing.logits"]).any(axis=1).all()
    assert not found["d_experts.down"].any()


@pytest.mark.parametrize("target", [Target("reference"), engine_target()], ids=lambda target: target.kind)
def test_gradients_are_of_the_whole_stack_or_of_the_layer_used(target: Target) -> None:
    single = draw(hard_routing("missing_ids"), MoESpec(Activation("silu")), with_shared=True)
    shared = single.operands.shared
    assert shared is not None
    stack = {name: np.stack([array] * LAYERS) for name, array in named_arrays(shared) if name != "gate"}
    operands = dataclasses.replace(outside(single, 1).operands, shared=dataclasses.replace(shared, **stack))
    problem = dataclasses.replace(single, operands=operands)
    alone, whole, used = single.backward(target), problem.backward(target), problem.backward(target, one_layer=True)
    for name, gradient in alone.items():
        np.testing.assert_array_equal(used[name], gradient, name)
        if name.startswith(("d_experts.", "d_shared.")) and name != "d_shared.gate":
            gradient = np.stack([np.zeros_like(gradient), gradient])
        np.testing.assert_array_equal(whole[name], gradient, name)


def test_the_reference_raises() -> None:
    problem = outside(draw(hard_routing("missing_ids"), MoESpec(Activation("silu"))), LAYERS)
    with pytest.raises(InvalidInput, match=r"layer_index must be in \[0, 2\), got 2"):
        problem.forward(Target("reference"))
