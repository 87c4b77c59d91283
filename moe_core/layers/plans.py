"""What a layer would run, planned and explained; with a capacity limit, stage by stage."""

from __future__ import annotations

import dataclasses

from moe_core.base.arrays import ArraySpec
from moe_core.base.target import Target
from moe_core.layers.spec import MoELayerSpec, Storage
from moe_core.ops.moe.backward import explain_training, plan_training
from moe_core.ops.moe.forward import plan_moe
from moe_core.ops.norm.backward import NORM_GRADIENTS, plan_rms_norm_backward
from moe_core.ops.norm.forward import plan_rms_norm
from moe_core.ops.router.backward import ROUTER_GRADIENTS, plan_router_backward
from moe_core.ops.router.forward import plan_router
from moe_core.ops.routing.backward import plan_routing_backward
from moe_core.ops.routing.layout import plan_layout
from moe_core.ops.routing.topk import plan_routing
from moe_core.plan.float64 import any_precision
from moe_core.plan.steps import LaunchPlan
from moe_core.specs import MoESpec
from moe_core.specs.operands import MoEOperands, RouterWeights, RoutingGradients, TopK
from moe_core.specs.routing import LayoutSpec, LogitsSpec

Plans = tuple[LaunchPlan, ...]


@any_precision
def layer_plans(
    operands: MoEOperands, spec: MoELayerSpec, default: Storage, target: Target, training: bool = False
) -> tuple[Plans, Plans]:
    """The plans of a forward, in order, and, with training, what a training step runs in place of the last one.

    operands: of specs, with RouterWeights. default: as in `MoELayerSpec.moe_spec`.
    """
    moe_spec, x, router = spec.moe_spec(default), operands.x, operands.routing
    routing: Plans = ()
    backward: Plans = ()
    if spec.in_stages:
        routing, backward = _routing_plans(x, router, spec, moe_spec, target)
        ids, weights = (ArraySpec((x.shape[0], spec.top_k), dtype) for dtype in ("int32", "float32"))
        operands = dataclasses.replace(operands, routing=TopK(ids, weights), token_mask=None)
        moe_spec = dataclasses.replace(moe_spec, router=None)
    given = {"token_mask": operands.token_mask, "shared": operands.shared}
    whole = plan_moe(x, operands.experts, operands.routing, moe_spec, target, **given)
    steps = plan_training(operands, moe_spec, target, one_layer=True) if training else ()
    return (*routing, whole), (*steps, *backward) if training else ()


def _routing_plans(
    x: ArraySpec, router: RouterWeights, spec: MoELayerSpec, moe_spec: MoESpec, target: Target
) -> tuple[Plans, Plans]:
    """What a layer in stages runs before its experts, and the backwards of that, in order.

    Norm and expert scales are taken to have the dtype of the router's weight, which is theirs unless weights of another
    were loaded.
    """
    tokens, logits_spec = x.shape[0], moe_spec.logits_spec()
    logits = ArraySpec((tokens, spec.num_experts), "float32")
    ids, weights = (ArraySpec((tokens, spec.top_k), dtype) for dtype in ("int32", "float32"))
    wanted = ROUTER_GRADIENTS if router.bias is not None else ROUTER_GRADIENTS[:2]
    forward: list[LaunchPlan] = []
    backward: list[LaunchPlan] = []
    if spec.router_norm is not None:
        norm = (x, ArraySpec((spec.d_model,), router.weight.dtype), spec.router_norm, target)
        forward.append(plan_rms_norm(*norm))
        backward.append(plan_rms_norm_backward(x, *norm, wanted=NORM_GRADIENTS))
    forward.append(plan_router(x, router.weight, router.bias, logits_spec, target))
    backward.append(plan_router_backward(logits, x, router.weight, router.bias, logits_spec, target, wanted=wanted))
    forward.append(plan_routing(logits, spec.router, target, correction_bias=router.correction_bias))
    backward.append(plan_routing_backward(RoutingGradients(weights), logits, ids, spec.router, target))
    if spec.expert_scale:
        shapes = (tokens, 1), (1, spec.num_experts), (spec.num_experts,)
        rows = (*(ArraySpec(shape, "float32") for shape in shapes), LogitsSpec(), target)
        forward.append(plan_router(*rows))
        backward.append(plan_router_backward(logits, *rows, wanted=("d_bias",)))
    forward.append(plan_layout(ids, LayoutSpec(tokens, spec.top_k, spec.num_experts), target))
    return tuple(forward), tuple(reversed(backward))


def explain_layer(
    operands: MoEOperands, spec: MoELayerSpec, default: Storage, target: Target, training: bool = False
) -> str:
    """The plans of a forward, or of a training step, as text, in order; arguments as in `layer_plans`."""
    (*routing, whole), steps = layer_plans(operands, spec, default, target, training)
    if not spec.in_stages:
        return explain_training(steps) if training else whole.explain()
    lines = []
    if spec.capacity_factor is not None:
        capacity = spec.capacity(operands.x.shape[0])
        lines.append(f"capacity limit: slots behind the first {capacity} of an expert get id -1")
    plans = steps if training else (whole,)
    return "\n\n".join([*(plan.explain() for plan in routing), *lines, *(plan.explain() for plan in plans)])
