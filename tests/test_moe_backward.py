"""The composed backward against the NumPy reference: every activation, layout, routing rule and choice of gradients."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_core import InvalidInput
from moe_core.arrays import ArraySpec
from moe_core.moe import plan_moe
from moe_core.moe_backward import gradient_names, plan_moe_backward
from moe_core.operands import (
    ExpertWeights,
    MoEOperands,
    OutputGradients,
    RouterLogits,
    RouterWeights,
    SharedExpert,
    TopK,
    map_arrays,
    named_arrays,
)
from moe_core.parity.tolerance import Tolerance, assert_close
from moe_core.plan import KernelLaunch, LaunchPlan
from moe_core.reference.backward_moe import Request, moe_backward_stages
from moe_core.reference.moe import moe_stages
from moe_core.reference.routing import layout as make_layout
from moe_core.specs import Activation, LayoutSpec, MoESpec, RouterSpec
from moe_core.target import Target
from tests import strategies
from tests.harness import engine_target, run_plan
from tests.strategies import RoutingCase, draw_array, hard_routing

H200, REFERENCE = Target("cuda", 90, 132), Target("reference")
#: Two sides that round alike: fp32 sums in another order, amplified by a derivative; worst: by a clamp's neighbourhood.
FP32 = Tolerance(2e-6, 1e-4)
#: z in bf16 on one side, in fp32 on the other, then the flips of three casts.
BF16 = Tolerance(1.5e-2, 0.2)


@dataclasses.dataclass(frozen=True, eq=False)
class Problem:
    """The arrays of one layer and what flows back into it."""

    operands: MoEOperands
    spec: MoESpec
    gradients: OutputGradients

    def arrays(self) -> dict[str, np.ndarray]:
        operands, found = self.operands, {"x": self.operands.x}
        for name in ("experts", "routing", "shared"):
            if getattr(operands, name) is not None:
                found |= dict(named_arrays(getattr(operands, name), f"{name}."))
        masks = {name: getattr(operands, name) for name in ("token_mask", "expert_map")}
        return found | {name: array for name, array in masks.items() if array is not None}

    def specs(self) -> MoEOperands:
        operands = self.operands
        return MoEOperands(*(spec_of(getattr(operands, field.name)) for field in dataclasses.fields(operands)))

    def names(self) -> tuple[str, ...]:
        return gradient_names(self.operands)

    def forward(self, target: Target, keep: bool = True) -> tuple[LaunchPlan, dict[str, np.ndarray]]:
        """(plan, outputs)."""
        specs = self.specs()
        extras = {name: getattr(specs, name) for name in ("token_mask", "expert_map", "shared")}
        plan = plan_moe(specs.x, specs.experts, specs.routing, self.spec, target, **extras, keep=keep)
        return plan, run_plan(plan, self.arrays())

    def backward(
        self,
        target: Target | None = None,
        wanted: tuple[str, ...] | None = None,
        *,
        into: dict[str, np.ndarray] | None = None,
        kept: dict[str, np.ndarray] | None = None,
    ) -> dict[str, np.ndarray]:
        """kept: the outputs of the target's forward, which runs now if there is none."""
        target, into = target or engine_target(), into or {}
        kept = self.forward(target)[1] if kept is None else kept
        arrays = self.arrays() | kept | dict(named_arrays(self.gradients, "gradients."))
        arrays |= {f"into.{name.removeprefix('d_')}": array for name, array in into.items()}
        plan = plan_moe_backward(
            map_arrays(self.gradients, spec_of),
            self.specs(),
            self.spec,
            target,
            wanted=wanted or self.names(),
            accumulate=tuple(into),
        )
        assert [buffer.name for buffer in plan.outputs] == list(wanted or self.names())
        return run_plan(plan, {buffer.name: arrays[buffer.name] for buffer in plan.inputs})

    def expected(self, request: Request | None = None) -> dict[str, np.ndarray]:
        operands = self.operands
        arguments = (operands.x, operands.experts, operands.routing, self.spec)
        extras = {name: getattr(operands, name) for name in ("token_mask", "expert_map", "shared")}
        stages = moe_stages(*arguments, **extras)
        return moe_backward_stages(self.gradients, *arguments, stages, **extras, request=request or Request())

    def recomputing(self) -> Problem:
        return dataclasses.replace(self, spec=dataclasses.replace(self.spec, recompute=True))

    def check(self, tolerance: Tolerance = FP32) -> dict[str, np.ndarray]:
        found, expected = self.backward(), self.expected()
        for name, gradient in found.items():
            assert gradient.dtype == expected[name].dtype and np.isfinite(gradient).all(), name
            wanted = expected[name].astype(np.float64)
            rms = np.sqrt(np.square(wanted).sum() / max(wanted.size, 1))
            assert_close(gradient, expected[name], tolerance, name, scale=np.full(wanted.shape, rms))
        return found


def spec_of(value) -> Any:
    """ArraySpecs in the place of arrays."""
    if value is None or isinstance(value, np.ndarray):
        return None if value is None else ArraySpec(value.shape, value.dtype.name)
    return map_arrays(value, spec_of)


def draw(
    case: RoutingCase,
    spec: MoESpec,
    *,
    seed: int = 0,
    widths: tuple[int, int, int] = (20, 17, 9),
    dtype: str = "float32",
    with_shared: bool = False,
    with_bias: bool = True,
) -> Problem:
    """A layer with given ids and weights; rows and experts that nothing may read hold NaN. widths: D, F and that of the
    shared expert."""
    rng, activation, experts_of = np.random.default_rng(seed), spec.activation, case.num_experts
    d_model, d_ff, d_shared = widths
    one_buffer = activation.gate_layout in ("halves", "interleaved")

    def matrix(inside: int, outside: int, *lead: int) -> np.ndarray:
        shape = (inside, outside) if spec.weight_layout == "in_out" else (outside, inside)
        return draw_array(rng, (*lead, *shape), dtype, inside**-0.5)

    def pair(width: int, *lead: int) -> dict[str, np.ndarray]:
        found = {"gate_up": matrix(d_model, 2 * width if one_buffer else width, *lead)}
        found["down"] = matrix(width, d_model, *lead)
        return found | ({"up": matrix(d_model, width, *lead)} if activation.gate_layout == "separate" else {})

    arrays = pair(d_ff, experts_of)
    if with_bias:
        sizes = {"gate_up_bias": 2 * d_ff if one_buffer else d_ff, "down_bias": d_model}
        sizes |= {"up_bias": d_ff} if activation.gate_layout == "separate" else {}
        arrays |= {name: draw_array(rng, (experts_of, size), dtype, 0.3) for name, size in sizes.items()}
    shared = SharedExpert(**pair(d_shared), gate=matrix(d_model, 1)) if with_shared else None
    x, d_out = (draw_array(rng, (case.num_tokens, d_model), dtype) for _ in range(2))
    weights = case.weights.copy()
    sizes, _, _, row_of_slot, _ = make_layout(case.ids, case.expert_map, case.token_mask, layout=case.layout())
    absent = row_of_slot.reshape(case.ids.shape) < 0
    weights[absent] = np.nan
    for array in arrays.values():
        array[sizes == 0] = np.nan
    if not with_shared:
        x[absent.all(axis=1)], d_out[absent.all(axis=1)] = np.nan, np.inf
    operands = MoEOperands(
        x, ExpertWeights(**arrays), TopK(case.ids, weights), case.token_mask, case.expert_map, shared
    )
    return Problem(operands, spec, OutputGradients(d_out))


def routed(problem: Problem, router: RouterSpec, *, seed: int = 0, from_logits: bool = False) -> Problem:
    """The problem with a router in place of given ids, gradients of all its outputs, and NaN in masked tokens."""
    operands, spec = problem.operands, problem.spec
    rng, dtype = np.random.default_rng(seed), operands.x.dtype.name
    tokens, d_model = operands.x.shape
    num_experts = operands.experts.down.shape[0] if operands.expert_map is None else len(operands.expert_map)
    if from_logits:
        routing = RouterLogits(draw_array(rng, (tokens, num_experts)), draw_array(rng, (num_experts,), rms=0.1))
    else:
        weight = draw_array(rng, (d_model, num_experts), dtype, d_model**-0.5)
        weight = weight if spec.router_weight_layout == "in_out" else np.ascontiguousarray(weight.T)
        routing = RouterWeights(weight, draw_array(rng, (num_experts,), dtype))
    finite = {name: np.nan_to_num(array, posinf=1.0) for name, array in named_arrays(operands.experts)}
    x, d_out = (np.nan_to_num(array, posinf=1.0) for array in (operands.x, problem.gradients.output))
    given = OutputGradients(
        d_out,
        draw_array(rng, (tokens, router.require_top_k())),
        draw_array(rng, (tokens, num_experts), rms=0.1),
        np.array([0.7], np.float32),
        np.array([-0.3], np.float32),
    )
    if operands.token_mask is not None:
        absent = ~operands.token_mask
        given.weights[absent] = given.logits[absent] = np.nan
        if operands.shared is None:
            x[absent], d_out[absent] = np.nan, np.inf
    operands = dataclasses.replace(operands, x=x, routing=routing, experts=ExpertWeights(**finite))
    return Problem(operands, dataclasses.replace(spec, router=router), given)


@st.composite
def specs(draw_: st.DrawFn, top_k: int) -> MoESpec:
    return MoESpec(
        activation=draw_(strategies.activations()),
        weight_layout=draw_(strategies.weight_layouts()),
        router_weight_layout=draw_(strategies.weight_layouts()),
        apply_router_weight_on_input=top_k == 1 and draw_(st.booleans()),
    )


@pytest.mark.parametrize("activation", strategies.all_activations(), ids=str)
@pytest.mark.parametrize("weight_layout", ["in_out", "out_in"])
def test_every_activation(activation: Activation, weight_layout: str) -> None:
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
    spec = MoESpec(Activation("gelu"), apply_router_weight_on_input=on_input)
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
    problem = draw(hard_routing("missing_ids"), MoESpec(activation), dtype="bfloat16", with_shared=True)
    for target in (engine_target(), REFERENCE):
        (plan, kept), (_, plain) = problem.forward(target), problem.forward(target, keep=False)
        for name, array in plain.items():
            np.testing.assert_array_equal(kept[name], array, name)
        extra = [buffer.name for buffer in plan.outputs if buffer.name not in plain]
        assert extra == [f"kept.{name}" for name in KEPT_ARRAYS]


KEPT_ARRAYS = ("pre_activation", "group_start", "slot_of_row", "row_of_slot", "shared_pre_activation", "shared_gate")


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
    experts = stacked(single.operands.experts, layer=np.array([1], np.int32))
    problem = dataclasses.replace(single, operands=dataclasses.replace(single.operands, experts=experts, shared=shared))
    found, alone = problem.backward(), single.backward()
    for name, gradient in found.items():
        if gradient.shape != alone[name].shape:
            assert not gradient[0].any(), name
            gradient = gradient[1]
        np.testing.assert_array_equal(gradient, alone[name], name)


def plan_for(problem: Problem, target: Target, wanted: tuple[str, ...], **options) -> LaunchPlan:
    gradients = map_arrays(problem.gradients, spec_of)
    return plan_moe_backward(gradients, problem.specs(), problem.spec, target, wanted=wanted, **options)


def test_frozen_weights_cost_nothing() -> None:
    problem = draw(hard_routing("missing_ids"), MoESpec(Activation("silu")))
    launches = [step.kernel for step in plan_for(problem, H200, ("d_x",)).steps if isinstance(step, KernelLaunch)]
    assert "weight_gradient:weight_gradient" not in launches
    down = plan_for(problem, H200, ("d_experts.down",))
    products = [step for step in down.steps if isinstance(step, KernelLaunch) and "matmul" in step.kernel]
    assert len(products) == 1, "z alone"


def test_wrong_requests() -> None:
    problem = draw(hard_routing("missing_ids"), MoESpec(Activation("silu")))
    for wanted in ((), ("d_x", "d_x"), ("d_experts.up",), ("x",)):
        with pytest.raises(InvalidInput, match="wanted must name at least one of d_x"):
            plan_for(problem, H200, wanted)
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
    assert plan.spec("kept.pre_activation").shape == (layout.capacity, 34) and layout.capacity == ids.size
