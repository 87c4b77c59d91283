"""Plans of a layer, with explanations."""

from __future__ import annotations

import dataclasses

from moe_core.base import ArraySpec, Target
from moe_core.layers.spec import MoELayerSpec, Storage
from moe_core.layers.stage_plans import StagePlans
from moe_core.ops.moe.backward import explain_training, plan_training
from moe_core.ops.moe.forward import plan_moe
from moe_core.ops.moe.options import ForwardOptions
from moe_core.ops.router.backward import plan_router_backward
from moe_core.ops.router.forward import plan_router
from moe_core.ops.routing.backward import plan_routing_backward
from moe_core.ops.routing.layout import plan_layout
from moe_core.ops.routing.rounding import plan_route_rounded, plan_route_rounded_backward
from moe_core.ops.routing.topk import plan_routing
from moe_core.plan import Explanation, LaunchPlan
from moe_core.plan.float64 import any_precision
from moe_core.specs import LayoutSpec, MoESpec, RouterSpec, TokenRounding
from moe_core.specs.operands import LoRAFactors, MoEOperands, RoutingGradients, TopK

Plans = tuple[LaunchPlan, ...]


@any_precision
def layer_plans(
    operands: MoEOperands, spec: MoELayerSpec, default: Storage, target: Target, training: bool = False
) -> tuple[Plans, Plans]:
    """The plans of a forward, or a training step, of operands' specs. default: as in `MoELayerSpec.moe_spec`."""
    moe_spec, x = spec.moe_spec(default), operands.x
    first, last = StagePlans(target), StagePlans(target)
    rounding, lora = spec.token_rounding if training else None, operands.lora
    if lora is not None:
        own = lora.of_experts()
        operands = dataclasses.replace(operands, lora=own, adapter_ids=own and operands.adapter_ids)
    if spec.in_stages or rounding is not None or (lora is not None and lora.beyond_experts):
        _routing_plans(first, operands, spec, moe_spec, rounding, lora)
        width = spec.top_k if rounding is None else rounding.width(spec.top_k, spec.num_experts)
        ids, weights = (ArraySpec((x.shape[0], width), dtype) for dtype in ("int32", "float32"))
        operands = dataclasses.replace(operands, routing=TopK(ids, weights), token_mask=None)
        limit = None if rounding is None or operands.lora is not None else rounding.row_limit(spec.top_k)
        moe_spec = dataclasses.replace(moe_spec, router=None, row_limit=limit)
    rows = x
    if spec.latent is not None:
        rows = first.projection(x, spec.latent.width, moe_spec)
        rows = rows if spec.latent.norm is None else first.norm(rows, spec.latent.norm)
    whole, steps, shared = (), (), operands.shared
    if spec.norm_of_experts is not None:
        operands = dataclasses.replace(operands, shared=None)
        last.normalised_experts(rows, operands.experts, moe_spec, spec)
    else:
        if spec.latent is not None or (lora is not None and (lora.a1_shared or lora.a2_shared)):
            operands = dataclasses.replace(operands, x=rows, shared=None)
        optional = {name: getattr(operands, name) for name in ("token_mask", "shared", "lora", "adapter_ids")}
        plain = dataclasses.replace(moe_spec, shared_activation=operands.shared and moe_spec.shared_activation)
        whole = (
            plan_moe(operands.x, operands.experts, operands.routing, plain, target, options=ForwardOptions(**optional)),
        )
        steps = plan_training(operands, plain, target, one_layer=True) if training else ()
    if spec.latent is not None:
        last.projection(rows, spec.d_model, moe_spec)
    if shared is not None and operands.shared is None:
        last.shared(x, shared, moe_spec, lora)
    output = spec.output
    if output is not None and output.norm is not None and not output.of_experts:
        last.norm(x, output.norm)
    if output is not None and output.bias:
        last.rows_of_bias(*x.shape)
    forward = (*first.forward, *whole, *last.forward)
    if not training:
        return forward, ()
    backward = (*reversed(last.backward), *steps[1:], *reversed(first.backward))
    return forward, (*first.forward, *steps[:1], *last.forward, *backward)


def _routing_plans(
    plans: StagePlans,
    operands: MoEOperands,
    spec: MoELayerSpec,
    moe_spec: MoESpec,
    rounding: TokenRounding | None,
    lora: LoRAFactors | None,
) -> None:
    """Norm and expert scales are assumed to have the dtype of the router's weight."""
    x, router, adapted = operands.x, operands.routing, lora is not None and lora.a_router is not None
    tokens, logits_spec, target = x.shape[0], moe_spec.logits_spec(), plans.target
    logits_spec = dataclasses.replace(logits_spec, logits_dtype="float32") if adapted else logits_spec
    logits = ArraySpec((tokens, spec.num_experts), "float32")
    ids, weights = (ArraySpec((tokens, spec.top_k), dtype) for dtype in ("int32", "float32"))
    wanted = ("d_x", "d_weight", *(("d_bias",) if router.bias is not None else ()))
    if spec.router_norm is not None:
        plans.norm(x, spec.router_norm, router.weight.dtype)
    arguments = (x, router.weight, router.bias, logits_spec, target)
    plans.forward.append(plan_router(*arguments))
    plans.backward.append(plan_router_backward(logits, *arguments, wanted=wanted))
    if lora is not None and lora.a_router is not None:
        plans.change(x, lora.a_router, lora.b_router, moe_spec)
    if rounding is not None:
        plan = plan_route_rounded(logits, spec.router, rounding, target, correction_bias=router.correction_bias)
        plans.forward.append(plan)
        table = plan.spec("weights"), logits, plan.spec("ids"), plan.spec("candidates")
        plans.backward.append(plan_route_rounded_backward(*table, spec.router, rounding, target))
        if spec.expert_scale:
            plans.rows_of_bias(tokens, spec.num_experts)
        return
    options = {"given": ids} if spec.token_table else {"correction_bias": router.correction_bias}
    chosen, times = spec.router, 1
    if spec.sparse_mixer is not None:
        chosen, times = RouterSpec(1), spec.top_k
    one = [ArraySpec((tokens, spec.top_k // times), array.dtype) for array in (ids, weights)]
    for _ in range(times):
        plans.forward.append(plan_routing(logits, chosen, target, **options))
        plans.backward.append(plan_routing_backward(RoutingGradients(one[1]), logits, one[0], chosen, target))
    if spec.expert_scale:
        plans.rows_of_bias(tokens, spec.num_experts)
    plans.forward.append(plan_layout(ids, LayoutSpec(tokens, spec.top_k, spec.num_experts), target))


def explain_layer(
    operands: MoEOperands, spec: MoELayerSpec, default: Storage, target: Target, training: bool = False
) -> Explanation:
    """The plans of a forward or training step as text. Arguments as in `layer_plans`."""
    beyond = operands.lora is not None and operands.lora.beyond_experts
    forward, steps = layer_plans(operands, spec, default, target, training)
    plans = steps if training else forward
    rounds = training and spec.token_rounding is not None
    if not spec.in_stages and not rounds and not beyond and spec.output is None:
        return explain_training(plans) if training else Explanation.of(plans[0])
    lines = []
    if spec.capacity_factor is not None:
        capacity = spec.capacity(operands.x.shape[0])
        lines.append(f"capacity limit: slots behind the first {capacity} of an expert get id -1")
    if rounds:
        lines.append(f"{spec.token_rounding}: of training alone; evaluation routes by top-k")
    return Explanation.of(*plans, heading=lines)
