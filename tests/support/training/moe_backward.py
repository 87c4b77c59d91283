"""Problems of the layer's backward pass and their answers."""

from __future__ import annotations

import dataclasses

import numpy as np
from hypothesis import strategies as st

from moe_core.base.target import Target
from moe_core.ops.moe.backward import gradient_names, plan_moe_backward
from moe_core.ops.moe.forward import plan_moe
from moe_core.ops.moe.options import BackwardOptions, ForwardOptions
from moe_core.ops.moe.reference.backward import Request, moe_backward_stages
from moe_core.ops.moe.reference.forward import moe_stages
from moe_core.ops.routing.reference import layout as make_layout
from moe_core.parity.tolerance import Tolerance, assert_close
from moe_core.plan.steps import LaunchPlan
from moe_core.specs import MoESpec, RouterSpec
from moe_core.specs.operands import (
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
from tests.support import strategies
from tests.support.harness import engine_target, run_plan, spec_of
from tests.support.strategies import RoutingCase, draw_array
from tests.support.training.tolerances import FP32

REFERENCE = Target("reference")


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

    def forward(self, target: Target, save: bool = True) -> tuple[LaunchPlan, dict[str, np.ndarray]]:
        """(plan, outputs)."""
        specs = self.specs()
        extras = {name: getattr(specs, name) for name in ("token_mask", "expert_map", "shared")}
        plan = plan_moe(
            specs.x, specs.experts, specs.routing, self.spec, target, options=ForwardOptions(**extras, save=save)
        )
        return plan, run_plan(plan, self.arrays())

    def backward(
        self,
        target: Target | None = None,
        wanted: tuple[str, ...] | None = None,
        *,
        into: dict[str, np.ndarray] | None = None,
        kept: dict[str, np.ndarray] | None = None,
        wide: bool = False,
        one_layer: bool = False,
        overwrite: bool = False,
    ) -> dict[str, np.ndarray]:
        """kept: the outputs of the target's forward, which runs now if there is none. wide: d_x is fp32."""
        target, into = target or engine_target(), into or {}
        kept = self.forward(target)[1] if kept is None else kept
        arrays = self.arrays() | kept | dict(named_arrays(self.gradients, "gradients."))
        arrays |= {f"into.{name.removeprefix('d_')}": array for name, array in into.items()}
        plan = plan_moe_backward(
            map_arrays(self.gradients, spec_of),
            self.specs(),
            self.spec,
            target,
            options=BackwardOptions(wanted=wanted or self.names(), accumulate=tuple(into), one_layer=one_layer,
                wide=wide, overwrite=overwrite),
        )  # fmt: skip
        assert [buffer.name for buffer in plan.outputs] == list(wanted or self.names())
        return run_plan(plan, {buffer.name: arrays[buffer.name] for buffer in plan.inputs})

    def expected(self, request: Request | None = None) -> dict[str, np.ndarray]:
        operands = self.operands
        arguments = (operands.x, operands.experts, operands.routing, self.spec)
        extras = {name: getattr(operands, name) for name in ("token_mask", "expert_map", "shared")}
        stages = moe_stages(*arguments, **extras)
        return moe_backward_stages(self.gradients, operands, self.spec, stages, request=request or Request())

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
