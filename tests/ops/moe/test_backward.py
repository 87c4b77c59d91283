"""The composed backward against the NumPy reference: every activation, layout, routing rule and choice of gradients."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_core import InvalidInput
from moe_core.base import ArraySpec
from moe_core.base.target import Target
from moe_core.ops.matmul.weight_gradient import WEIGHT_GRADIENT
from moe_core.ops.moe.backward import plan_moe_backward
from moe_core.ops.moe.options import BackwardOptions
from moe_core.ops.moe.reference.backward import Request
from moe_core.ops.routing.reference import layout as make_layout
from moe_core.parity.tolerance import assert_close
from moe_core.plan.steps import KernelLaunch, LaunchPlan
from moe_core.specs import Activation, LayoutSpec, MoESpec, RouterSpec
from moe_core.specs.operands import OutputGradients, RouterLogits, map_arrays, named_arrays
from tests.support import strategies
from tests.support.harness import H200, engine_target, spec_of
from tests.support.strategies import draw_array, hard_routing
from tests.support.training.moe_backward import REFERENCE, Problem, draw, routed, specs
from tests.support.training.tolerances import BF16, FP32


@pytest.mark.parametrize(
    ("activation", "weight_layout"),
    list(zip(strategies.all_activations(), itertools.cycle(("in_out", "out_in", "in_out")), strict=False)),
    ids=str,
)
def test_every_activation(activation: Activation, weight_layout: str) -> None:
    """Layouts of weights by turns: every layout of gates, and none, has both."""
    spec = MoESpec(activation, weight_layout=weight_layout)
    draw(hard_routing("missing_ids"), spec, with_shared=True).check()


@pytest.mark.parametrize("name", strategies.HARD_ROUTINGS)
def test_hard_routings(name: str) -> None:
    case = hard_routing(name)
    found = draw(case, MoESpec(Activation("swiglu_oai", gate_layout="interleaved", limit=1.0))).check()
    sizes, _, _, row_of_slot, _ = make_layout(case.ids, case.expert_map, case.token_mask, layout=case.layout())
    absent = row_of_slot.reshape(case.ids.shape) < 0
    for key, gradient in found.items():
        if key.startswith("d_experts."):
            assert not gradient[sizes == 0].any(), f"{key} of an expert without tokens"
    assert not found["d_x"][absent.all(axis=1)].any() and not found["d_routing.weights"][absent].any()


ROUTERS = [
    RouterSpec(3),
    RouterSpec(3, renormalize=True, scale=2.5),
    RouterSpec(3, order="topk_then_softmax"),
    RouterSpec(3, "sigmoid", renormalize=True, slot_order="expert"),
    RouterSpec(3, "sqrt_softplus"),
]


@pytest.mark.parametrize("router", ROUTERS, ids=str)
@pytest.mark.parametrize("name", ["missing_ids", "expert_map", "token_mask"])
def test_routers(router: RouterSpec, name: str) -> None:
    layout = "in_out" if router.renormalize else "out_in"
    spec = MoESpec(Activation("silu"), router_weight_layout=layout)
    problem = draw(hard_routing(name), spec)
    routed(problem, router).check()
    routed(problem, router, from_logits=True).check()


@given(st.data())
def test_drawn_layers(data: st.DataObject) -> None:
    case = data.draw(strategies.routings(max_tokens=16, max_experts=9))
    spec, seed = data.draw(specs(case.top_k)), data.draw(strategies.seeds())
    problem = draw(case, spec, seed=seed, with_shared=data.draw(st.booleans()), with_bias=data.draw(st.booleans()))
    num_global = case.num_experts if case.expert_map is None else len(case.expert_map)
    if data.draw(st.booleans()) and case.top_k <= num_global:
        router = data.draw(strategies.router_specs(num_global, has_bias=True))
        if spec.apply_router_weight_on_input:
            router = RouterSpec(1, "sigmoid")
        problem = routed(problem, router, seed=seed, from_logits=data.draw(st.booleans()))
    (problem.recomputing() if data.draw(st.booleans()) else problem).check()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("on_input", [False, True])
def test_16_bit(dtype: str, on_input: bool) -> None:
    spec = MoESpec(
        Activation("gelu"), shared_activation=Activation("silu", limit=0.75), apply_router_weight_on_input=on_input
    )
    problem = draw(hard_routing("top_1"), spec, dtype=dtype, with_shared=True)
    problem.check(BF16)
    routed(problem, RouterSpec(1, "sigmoid")).check(BF16)


def test_output_gradients_of_another_dtype_are_rounded_once() -> None:
    problem = draw(hard_routing("missing_ids"), MoESpec(Activation("silu")), dtype="bfloat16")
    wide = problem.gradients.output.astype(np.float32) * np.float32(1.001)
    found = dataclasses.replace(problem, gradients=OutputGradients(wide)).backward()
    narrow = OutputGradients(wide.astype(problem.operands.x.dtype))
    wanted = dataclasses.replace(problem, gradients=narrow).backward()
    for name in wanted:
        np.testing.assert_array_equal(found[name], wanted[name], name)


@pytest.mark.parametrize("engine", ["kernels", "reference"])
def test_a_wide_gradient_of_x_is_the_one_before_its_cast(engine: str) -> None:
    problem = draw(hard_routing("missing_ids"), MoESpec(Activation("silu")), dtype="bfloat16", with_shared=True)
    target = None if engine == "kernels" else REFERENCE
    wide, narrow = (problem.backward(target, ("d_x",), wide=wide)["d_x"] for wide in (True, False))
    assert wide.dtype == np.float32 and (wide != narrow.astype(np.float32)).any()
    np.testing.assert_array_equal(wide.astype(narrow.dtype), narrow)
    weighted = draw(hard_routing("top_1"), MoESpec(Activation("silu"), apply_router_weight_on_input=True))
    with pytest.raises(InvalidInput, match="wide must be False with apply_router_weight_on_input"):
        plan_for(weighted, H200, ("d_x",), wide=True)
    plain = draw(hard_routing("missing_ids"), MoESpec(Activation("silu")))
    for one, wide in ((weighted, False), (plain, True)):
        with pytest.raises(InvalidInput, match="results_at must be None but with a TopK, and without shared, wide"):
            plan_for(one, H200, ("d_x",), wide=wide, results_at=ArraySpec((one.operands.routing.ids.size,), "int64"))


@pytest.mark.parametrize("engine", ["kernels", "reference"])
@pytest.mark.parametrize("routing", ["ids", "logits", "x"])
@pytest.mark.parametrize("top_k", [1, 3])
def test_each_gradient_alone_has_the_same_bits(engine: str, routing: str, top_k: int) -> None:
    target = engine_target() if engine == "kernels" else REFERENCE
    spec = MoESpec(Activation("silu", gate_layout="separate"), apply_router_weight_on_input=top_k == 1)
    problem = draw(hard_routing("top_1" if top_k == 1 else "missing_ids"), spec, with_shared=True)
    if routing != "ids":
        problem = routed(problem, RouterSpec(top_k), from_logits=routing == "logits")
    kept = problem.forward(target)[1]
    together = problem.backward(target, kept=kept)
    for name in problem.names():
        alone = problem.backward(target, (name,), kept=kept)
        np.testing.assert_array_equal(alone[name], together[name], name)


def test_recomputing_has_the_same_bits() -> None:
    for name, on_input in (("missing_ids", False), ("top_1", True)):
        spec = MoESpec(Activation("gelu", gate_layout="interleaved"), apply_router_weight_on_input=on_input)
        problem = draw(hard_routing(name), spec, dtype="bfloat16", with_shared=True)
        kept, again = problem.backward(), problem.recomputing().backward()
        plan, _ = problem.recomputing().forward(engine_target())
        assert not [one for one in plan.outputs if one.name.endswith("pre_activation")]
        for key in kept:
            np.testing.assert_array_equal(kept[key], again[key], key)


@pytest.mark.parametrize("activation", strategies.all_activations(), ids=str)
def test_keeping_does_not_change_the_forward(activation: Activation) -> None:
    other = Activation("relu2", activation.gated, activation.gate_layout)
    spec = MoESpec(activation, shared_activation=other)
    problem = draw(hard_routing("missing_ids"), spec, dtype="bfloat16", with_shared=True)
    for target in (engine_target(), REFERENCE):
        (plan, kept), (_, plain) = problem.forward(target), problem.forward(target, save=False)
        for name, array in plain.items():
            np.testing.assert_array_equal(kept[name], array, name)
        extra = [buffer.name for buffer in plan.outputs if buffer.name not in plain]
        assert extra == [f"saved.{name}" for name in SAVED_ARRAYS]


SAVED_ARRAYS = ("pre_activation", "group_start", "slot_of_row", "row_of_slot", "shared_pre_activation", "shared_gate")


def test_gradients_added_to_what_is_there() -> None:
    problem = routed(draw(hard_routing("missing_ids"), MoESpec(Activation("silu")), with_shared=True), RouterSpec(2))
    names = ("d_experts.gate_up", "d_experts.down", "d_shared.gate_up", "d_shared.down", "d_routing.weight")
    rng, arrays = np.random.default_rng(3), problem.arrays()
    into = {name: draw_array(rng, arrays[name.removeprefix("d_")].shape) for name in names}
    alone, expected = problem.backward(wanted=names), problem.expected(Request(frozenset(names), into))
    for target in (engine_target(), REFERENCE):
        found = problem.backward(target, names, into=into)
        for name in names:
            assert_close(found[name], expected[name], FP32, name)
    for name in names:
        np.testing.assert_array_equal(problem.backward(None, names, into=into)[name], into[name] + alone[name])


def test_one_layer_of_a_stack() -> None:
    single = draw(hard_routing("missing_ids"), MoESpec(Activation("silu", gate_layout="separate")), with_shared=True)

    def stacked(bundle, **changes):
        arrays = {name: np.stack([np.full_like(array, np.nan), array]) for name, array in named_arrays(bundle)}
        return dataclasses.replace(bundle, **arrays | changes)

    alone_shared = single.operands.shared
    assert alone_shared is not None
    shared = stacked(alone_shared, gate=alone_shared.gate)
    experts = stacked(single.operands.experts, layer_index=np.array([1], np.int32))
    problem = dataclasses.replace(single, operands=dataclasses.replace(single.operands, experts=experts, shared=shared))
    found, alone = problem.backward(), single.backward()
    for name, gradient in found.items():
        if gradient.shape != alone[name].shape:
            assert not gradient[0].any(), name
            gradient = gradient[1]
        np.testing.assert_array_equal(gradient, alone[name], name)


def plan_for(problem: Problem, target: Target, wanted: tuple[str, ...], **options) -> LaunchPlan:
    gradients = map_arrays(problem.gradients, spec_of)
    return plan_moe_backward(
        gradients, problem.specs(), problem.spec, target, options=BackwardOptions(wanted=wanted, **options)
    )


def test_frozen_weights_cost_nothing() -> None:
    problem = draw(hard_routing("missing_ids"), MoESpec(Activation("silu")))
    launches = [step.kernel for step in plan_for(problem, H200, ("d_x",)).steps if isinstance(step, KernelLaunch)]
    assert WEIGHT_GRADIENT not in launches
    down = plan_for(problem, H200, ("d_experts.down",))
    products = [step for step in down.steps if isinstance(step, KernelLaunch) and "matmul" in step.kernel.function]
    assert len(products) == 1, "z alone"


def test_wrong_requests() -> None:
    problem = draw(hard_routing("missing_ids"), MoESpec(Activation("silu")))
    for wanted in ((), ("d_x", "d_x"), ("d_experts.up",), ("x",)):
        with pytest.raises(InvalidInput, match="wanted must name at least one of d_x"):
            plan_for(problem, H200, wanted)
    assert plan_for(problem, H200, ("d_experts.down",), accumulate=("d_experts.down",)).inputs
    for accumulate in (("d_x",), ("d_experts.down",)):
        with pytest.raises(InvalidInput, match="accumulate must name matrices"):
            plan_for(problem, H200, ("d_x",), accumulate=accumulate)
    given = dataclasses.replace(problem.gradients, z=np.zeros(1, np.float32))
    with pytest.raises(InvalidInput, match=r"gradients\.z must be None where ids and weights are given"):
        plan_for(dataclasses.replace(problem, gradients=given), H200, ("d_x",))
    short = OutputGradients(problem.gradients.output[1:])
    with pytest.raises(InvalidInput, match=r"gradients\.output must be"):
        plan_for(dataclasses.replace(problem, gradients=short), H200, ("d_x",))


def test_capacity_is_the_forwards() -> None:
    """The kept rows are those of a layout without alignment."""
    problem = draw(hard_routing("missing_ids"), MoESpec(Activation("silu")))
    ids = problem.operands.routing.ids
    layout = LayoutSpec(ids.shape[0], ids.shape[1], problem.operands.experts.down.shape[0])
    plan = problem.forward(REFERENCE)[0]
    assert plan.spec("saved.pre_activation").shape == (layout.capacity, 34) and layout.capacity == ids.size


@pytest.mark.parametrize(("activation", "layout"),
    [("silu", "halves"), ("gelu", "interleaved"), ("silu", "separate"), ("gelu", None)])  # fmt: skip
def test_overwriting_has_the_same_bits(activation: str, layout: str | None) -> None:
    """The gradient of the pre-activation in the memory of the pre-activation, and scratch in outputs and without."""
    gated = Activation(activation, gate_layout=layout) if layout else Activation(activation, False)
    for name, dtype in (("missing_ids", "bfloat16"), ("all_experts", "float32")):
        problem = draw(hard_routing(name), MoESpec(gated), dtype=dtype, with_shared=True)
        kept = problem.forward(engine_target())[1]
        wanted = problem.backward(kept=kept)
        for found in (problem.backward(kept=kept, overwrite=True), problem.recomputing().backward(overwrite=True)):
            for key, gradient in found.items():
                np.testing.assert_array_equal(gradient, wanted[key], key)


def test_what_is_accumulated_lends_no_memory() -> None:
    """Its output may lie where the sum so far does."""
    problem = draw(hard_routing("missing_ids"), MoESpec(Activation("silu")))
    plan = plan_for(problem, H200, problem.names(), accumulate=("d_experts.gate_up",), overwrite=True)
    assert "d_experts.gate_up" not in plan.lent and "d_experts.down" in plan.lent
    assert plan.over == (("d_pre", "saved.pre_activation"),)
    assert any(home < len(plan.inputs) for home, _ in plan.scratch_places)
    text = plan.explain()
    assert "scratch d_pre: " in text and ", in saved.pre_activation" in text and ", in d_experts.down" in text


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
