"""Plans the router product's backward."""

from __future__ import annotations

from moe_core.base import TRANSPOSED, ArraySpec, Target, keep_plans, require_spec
from moe_core.base.checks import require_wanted
from moe_core.ops.matmul.backward import Side, add_weight_gradient
from moe_core.ops.reduction.rowwise import plan_cast_rows
from moe_core.ops.router.forward import plan_router
from moe_core.plan import LaunchPlan, PlanBuilder, Role
from moe_core.specs import LogitsSpec, MatmulSpec

ROUTER_GRADIENTS = ("d_x", "d_wide", "d_weight", "d_bias")


@keep_plans
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
    """Plan `router_backward` of the reference. wanted: of ROUTER_GRADIENTS. Inputs: d_logits, x, weight. Outputs:
    wanted, each like its array: IEEE fp32 sums, one cast. d_wide is d_x in fp32, without the cast.
    """
    require_wanted(wanted, ROUTER_GRADIENTS[: 4 if bias is not None else 3])
    logits = plan_router(x, weight, bias, spec, target).spec("logits")
    require_spec("d_logits", d_logits, logits.shape, "float32")
    builder = PlanBuilder("router_backward", target)
    inputs = builder.inputs({"d_logits": d_logits, "x": x, "weight": weight})
    wide = ArraySpec(x.shape, "float32")
    made = {"d_x": ArraySpec(x.shape, x.dtype), "d_wide": wide, "d_weight": weight, "d_bias": bias}
    for name in wanted:
        builder.output(name, made[name])
    if not target.compiled:
        constants = {"spec": spec, "wanted": wanted, "bias_dtype": None if bias is None else bias.dtype}
        builder.sums("products and sums: the order of NumPy, fp32")
        from moe_core.ops.router import reference as twins

        return builder.reference(twins.router_backward_plan, inputs, constants, wanted)
    options, results = MatmulSpec(spec.weight_layout), {name: name for name in wanted}
    sides = Side("x"), Side("d_logits", role=Role.D_LOGITS)
    add_weight_gradient(builder, "weight", *sides, None, options, results)
    of_x = [name for name in ("d_wide", "d_x") if name in wanted]
    if of_x:
        direct = next((name for name in of_x if made[name] == wide), None)
        product = add_router_input_gradient(builder, "input", "d_logits", "weight", spec, Role.D_ROWS, d_x=direct)
        for name in of_x:
            if name != direct:
                plan = plan_cast_rows(builder.spec(product), x.dtype, target)
                builder.call(plan, "round", {"x": product, "y": name}, {"x": Role.D_ROWS, "y": Role.D_ROWS})
    return builder.build()


def add_router_input_gradient(
    builder: PlanBuilder,
    label: str,
    d_logits: str,
    weight: str,
    spec: LogitsSpec,
    role: Role = Role.ADDEND,
    *,
    d_x: str | None = None,
) -> str:
    """Add fp32 `[T, D]` = d_logits . weight^T. Returns its buffer. spec: the forward's; role: of the result; d_x: its
    buffer, if there is one."""
    options = LogitsSpec(TRANSPOSED[spec.weight_layout], expected_tokens=spec.expected_tokens)
    plan = plan_router(builder.spec(d_logits), builder.spec(weight), None, options, builder.target, split=True)
    bindings = {"x": d_logits, "weight": weight}
    roles = {"x": Role.D_LOGITS, "logits": role}
    return builder.call(plan, label, bindings if d_x is None else bindings | {"logits": d_x}, roles)
