"""Planning of token rounding (`moe_core.specs.routing.TokenRounding`) and of its backward."""

from __future__ import annotations

import dataclasses

from moe_core.base import ArraySpec, Target, keep_plans, require_kind, require_spec
from moe_core.errors import InvalidInput
from moe_core.ops.routing.backward import plan_routing_backward
from moe_core.ops.routing.kernels import rounding as kernels
from moe_core.ops.routing.layout import plan_layout, require_experts
from moe_core.ops.routing.topk import describe_selection, launch_routing, require_routing
from moe_core.plan import LaunchPlan, PlanBuilder, Role, declare_kernel, passed
from moe_core.specs import LayoutSpec, RouterSpec, TokenRounding
from moe_core.specs.operands import RoutingGradients

KEEP_CANDIDATES = declare_kernel(kernels.keep_candidates, counts_slots=True)
SPLIT_GRADIENTS = declare_kernel(kernels.split_gradients)

_BLOCK, _WARPS = {"gpu": 1024, "interpreter": 64}, 8


@keep_plans
def plan_candidates(
    logits: ArraySpec,
    spec: RouterSpec,
    rounding: TokenRounding,
    target: Target,
    *,
    correction_bias: ArraySpec | None = None,
    token_mask: ArraySpec | None = None,
) -> LaunchPlan:
    """ids int32 and weights fp32 `[T, W]` of the W best experts: as `plan_routing`, then by score * scale."""
    wide = _check(logits, spec, rounding, correction_bias is not None)
    require_routing(logits, wide, correction_bias, token_mask)
    builder = PlanBuilder("candidates", target)
    inputs = builder.inputs({"logits": logits, "correction_bias": correction_bias, "token_mask": token_mask})
    width = wide.require_top_k()
    outputs = [builder.output(name, ArraySpec((logits.shape[0], width), kind)) for name, kind in _KEPT]
    if target.compiled:
        return launch_routing(builder, spec, width)
    describe_selection(builder, spec, correction_bias is not None)
    builder.sums("softmax and renormalisation: NumPy's pairwise sums, fp32")
    constants = {"spec": spec, "wide": wide}
    from moe_core.ops.routing import reference_rounding as twins

    return builder.reference(twins.route_candidates, inputs, constants, outputs)


@keep_plans
def plan_keep_candidates(
    candidates: ArraySpec, top_k: int, num_experts: int, rounding: TokenRounding, target: Target, *, masked: bool = True
) -> LaunchPlan:
    """ids int32 and weights fp32 `[T, W]` of the candidates int32 `[T, W]` that their experts keep, else -1 and 0.

    A token's candidates are distinct experts, best first, -1 in all columns of a masked token. The first top_k are the
    chosen. Each expert keeps the number of `TokenRounding`: chosen ones by weight, then others by weight. Ties go to
    the lower token, NaN comes last. masked=False: no candidate is -1. Further input: candidate_weights fp32 `[T, W]`.
    Further output: tokens_per_expert int32 `[E]`, the tokens that chose each.
    """
    num_tokens, width = require_spec("candidates", candidates, ("num_tokens", "width"), "int32").shape
    builder = PlanBuilder("keep_candidates", target)
    builder.input("candidates", candidates, Role.IDS)
    builder.input("candidate_weights", ArraySpec((num_tokens, width), "float32"), Role.ROW_WEIGHT)
    outputs = [builder.output(name, ArraySpec((num_tokens, width), kind)) for name, kind in _KEPT]
    outputs.append(builder.output("tokens_per_expert", ArraySpec((num_experts,), "int32")))
    builder.note(
        f"counts of tokens are rounded to multiples of {rounding.tile} ({rounding.mode}), among {width} candidates each"
    )
    if not target.compiled:
        inputs = {name: name for name in ("candidates", "candidate_weights")}
        constants = {"top_k": top_k, "rounding": rounding, "num_experts": num_experts}
        from moe_core.ops.routing import reference_rounding as twins

        return builder.reference(twins.keep_candidates, inputs, constants, outputs)
    require_experts(num_experts)
    layout = LayoutSpec(num_tokens, width, num_experts)
    plan = plan_layout(candidates, layout, target)
    arrays = {name: builder.scratch(name, plan.spec(name)) for name in ("group_start", "slot_of_row")}
    builder.call(plan, "candidates", {"ids": "candidates"} | arrays)
    arguments = builder.pointers("candidates", "candidate_weights", *arrays, "ids", "weights", "tokens_per_expert")
    arguments |= passed(num_slots=layout.num_slots, NUM_EXPERTS=num_experts, TOP_K=top_k, WIDTH=width)
    block = _BLOCK[target.engine]
    arguments |= passed(TILE=rounding.tile, MODE=rounding.mode, BLOCK=block)
    filling = min(-(-layout.num_slots // block), target.num_sms if target.on_gpu else 2) if masked else 0
    builder.launch(KEEP_CANDIDATES, (num_experts + filling,), arguments, _WARPS)
    return builder.build()


_KEPT = (("ids", "int32"), ("weights", "float32"))


def _check(logits: ArraySpec, spec: RouterSpec, rounding: TokenRounding, has_bias: bool) -> RouterSpec:
    require_kind("rounding", rounding, TokenRounding)
    num_tokens, num_experts = require_spec("logits", logits, ("num_tokens", "num_experts"), "float32").shape
    wide = rounding.wide(spec, num_experts, has_bias)
    if 0 < num_tokens < rounding.tile:
        raise InvalidInput(
            f"tile must be at most num_tokens = {num_tokens}, got {rounding.tile}: no expert could keep a token; lower "
            "tile, or route without rounding"
        )
    return wide


@keep_plans
def plan_route_rounded(
    logits: ArraySpec,
    spec: RouterSpec,
    rounding: TokenRounding,
    target: Target,
    *,
    correction_bias: ArraySpec | None = None,
    token_mask: ArraySpec | None = None,
) -> LaunchPlan:
    """Routing that gives experts multiples of `rounding.tile` tokens: `plan_candidates`, then `plan_keep_candidates`.

    Outputs: ids int32 and weights fp32 `[T, W]`, tokens_per_expert int32 `[E]` before rounding, candidates int32 `[T,
    W]` for the backward. A chosen expert has the weight of `plan_routing`, whatever is dropped.
    """
    routing = plan_candidates(logits, spec, rounding, target, correction_bias=correction_bias, token_mask=token_mask)
    builder = PlanBuilder("route_rounded", target)
    bindings = builder.inputs({"logits": logits, "correction_bias": correction_bias, "token_mask": token_mask})
    for name, _ in _KEPT:
        builder.output(name, routing.spec(name))
    builder.output("tokens_per_expert", ArraySpec(logits.shape[1:], "int32"))
    bindings["ids"] = builder.output("candidates", routing.spec("ids"), Role.IDS)
    bindings["weights"] = builder.scratch("candidate_weights", routing.spec("weights"), Role.ROW_WEIGHT)
    builder.call(routing, "candidates", bindings)
    sizes, masked = (spec.require_top_k(), logits.shape[1]), token_mask is not None
    kept = plan_keep_candidates(routing.spec("ids"), *sizes, rounding, target, masked=masked)
    names = ("candidates", "candidate_weights", "ids", "weights", "tokens_per_expert")
    builder.call(kept, "rounding", {name: name for name in names})
    return builder.build()


@keep_plans
def plan_route_rounded_backward(
    d_weights: ArraySpec,
    logits: ArraySpec,
    ids: ArraySpec,
    candidates: ArraySpec,
    spec: RouterSpec,
    rounding: TokenRounding,
    target: Target,
) -> LaunchPlan:
    """d_logits fp32 `[T, E]` of d_weights fp32 `[T, W]`, with logits, ids and candidates of `plan_route_rounded`.

    Dropped slots' weights are constants, but their experts still count in the sum that renormalises.
    """
    plain = dataclasses.replace(spec, num_groups=1, topk_group=1, group_score=None)
    wide = _check(logits, plain, rounding, False)
    (num_tokens, num_experts), top_k, width = logits.shape, spec.require_top_k(), wide.require_top_k()
    for name, array, kind in (
        ("d_weights", d_weights, "float32"),
        ("ids", ids, "int32"),
        ("candidates", candidates, "int32"),
    ):
        require_spec(name, array, (num_tokens, width), kind)
    builder = PlanBuilder("route_rounded_backward", target)
    builder.input("d_weights", d_weights)
    builder.inputs({"logits": logits, "ids": ids})
    builder.input("candidates", candidates, Role.IDS)
    builder.output("d_logits", ArraySpec((num_tokens, num_experts), "float32"))
    parts = {"chosen": top_k} | ({"extra": width - top_k} if width > top_k else {})
    split: list[str] = []
    for name, columns in parts.items():
        split.append(builder.scratch(name, ArraySpec((num_tokens, columns), "int32"), Role.IDS))
        split.append(builder.scratch(f"d_{name}", ArraySpec((num_tokens, columns), "float32"), Role.D_ROW_WEIGHT))
    if not target.compiled:
        inputs = {name: name for name in ("d_weights", "ids", "candidates")}
        from moe_core.ops.routing import reference_rounding as twins

        builder.reference(twins.split_gradients, inputs, {"top_k": top_k}, split)
    else:
        arguments = builder.pointers("d_weights", "ids", "candidates", "chosen", "d_chosen", "extra", "d_extra")
        slots, block = num_tokens * width, _BLOCK[target.engine]
        arguments |= passed(num_slots=slots, TOP_K=top_k, WIDTH=width, BLOCK=block)
        programs = -(-slots // block)
        builder.launch(SPLIT_GRADIENTS, (min(programs, target.num_sms * 4) if target.on_gpu else programs,), arguments)
    d_logits, rules = None, {"chosen": plain, "extra": dataclasses.replace(wide, top_k=max(1, width - top_k))}
    for name in parts:
        gradients = RoutingGradients(builder.spec(f"d_{name}"), None if d_logits is None else builder.spec(d_logits))
        plan = plan_routing_backward(gradients, logits, builder.spec(name), rules[name], target)
        bindings = {"logits": "logits", "ids": name, "gradients.weights": f"d_{name}"}
        bindings |= {} if d_logits is None else {"gradients.logits": d_logits}
        if name == list(parts)[-1]:
            bindings["d_logits"] = "d_logits"
        d_logits = builder.call(plan, name, bindings)
    return builder.build()
