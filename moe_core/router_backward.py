"""Planning of the router product's backward, where it runs apart from a whole MoE."""

from __future__ import annotations

import functools

from moe_core import dtypes
from moe_core.arrays import ArraySpec, require_spec
from moe_core.backward_rows import plan_cast_rows
from moe_core.errors import InvalidInput
from moe_core.matmul_ogs import TRANSPOSED
from moe_core.plan import LaunchPlan, PlanBuilder
from moe_core.routing import plan_router
from moe_core.specs import LogitsSpec
from moe_core.target import Target
from moe_core.weight_gradient import WeightGradientOperands, WeightGradientSpec, plan_weight_gradient

#: Every gradient there is.
ROUTER_GRADIENTS = ("d_x", "d_weight", "d_bias")


@functools.lru_cache(maxsize=4096)
def plan_router_backward(
    d_logits: ArraySpec,
    x: ArraySpec,
    weight: ArraySpec,
    bias: ArraySpec | None,
    spec: LogitsSpec,
    target: Target,
    *,
    wanted: tuple[str, ...],
) -> LaunchPlan:
    """The backward of `plan_router` from d_logits fp32 `[T, E]`; formulas: docs/training.md.

    wanted: of ROUTER_GRADIENTS, those to compute. bias: says the dtype of d_bias, None = there is none. Inputs:
    d_logits, x, weight; outputs: wanted, in that order, with the shape and dtype of what each is the gradient of: IEEE
    fp32 sums, one cast. Raises InvalidInput, Unsupported.
    """
    known = ROUTER_GRADIENTS[: 3 if bias is not None else 2]
    if not wanted or not set(wanted) <= set(known) or len(set(wanted)) != len(wanted):
        raise InvalidInput(f"wanted must name at least one of {', '.join(known)}, each once, got {wanted}; correct it")
    # Checks what the forward checks.
    logits = plan_router(x, weight, bias, spec, target).spec("logits")
    require_spec("d_logits", d_logits, logits.shape, "float32")
    builder = PlanBuilder("router_backward", target)
    for name, array in (("d_logits", d_logits), ("x", x), ("weight", weight)):
        builder.input(name, array)
    made = {"d_x": ArraySpec(x.shape, x.dtype), "d_weight": weight}
    if bias is not None:
        made["d_bias"] = bias
    for name in wanted:
        builder.output(name, made[name])
    if not target.compiled:
        constants = {"spec": spec, "wanted": wanted, "bias_dtype": None if bias is None else bias.dtype}
        builder.sums("products and sums: the order of NumPy, fp32")
        inputs = {name: name for name in ("d_logits", "x", "weight")}
        builder.reference("backward_plan:router_backward_plan", inputs, constants, wanted)
        return builder.build()
    _launch_weight(builder, d_logits, x, spec)
    if "d_x" in wanted:
        options = LogitsSpec(TRANSPOSED[spec.weight_layout])
        plan = plan_router(d_logits, weight, None, options, target, split=True)
        direct = x.dtype == "float32"
        product = "d_x" if direct else builder.scratch("product", plan.spec("logits"))
        builder.call(plan, "input", {"x": "d_logits", "weight": "weight", "logits": product})
        if not direct:
            plan = plan_cast_rows(builder.spec(product), dtypes.canonical(x.dtype), target)
            builder.call(plan, "round", {"x": product, "y": "d_x"})
    return builder.build()


def _launch_weight(builder: PlanBuilder, d_logits: ArraySpec, x: ArraySpec, spec: LogitsSpec) -> None:
    """d_weight and d_bias, those that `builder` has as outputs."""
    results = {name: builder.spec(name).dtype for name in ("d_weight", "d_bias") if builder.has(name)}
    if not results:
        return
    sides, bias_side = (("x", x), ("d_logits", d_logits)), "right"
    if spec.weight_layout == "out_in":
        sides, bias_side = sides[::-1], "left"
    (left, left_array), (right, right_array) = sides
    options = WeightGradientSpec(
        results.get("d_weight"),
        bias_side=bias_side if "d_bias" in results else None,
        bias_dtype=results.get("d_bias", "float32"),
    )
    plan = plan_weight_gradient(WeightGradientOperands(left_array, right_array), None, options, builder.target)
    builder.call(plan, "weight", {"left": left, "right": right} | {name: name for name in results})
