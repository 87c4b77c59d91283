"""Plans the backward of the normalisation of rows."""

from __future__ import annotations

from moe_core.base import ArraySpec, Target, dtypes, keep_plans, require_spec
from moe_core.base.checks import require_wanted
from moe_core.ops.matmul.backward import Side, add_weight_gradient
from moe_core.ops.norm.forward import check_norm, norm_launch, order_of_sums
from moe_core.ops.norm.kernels import norm as kernels
from moe_core.plan import LaunchPlan, PlanBuilder, Role, declare_kernel
from moe_core.specs import MatmulSpec, NormSpec

RMS_NORM_BACKWARD = declare_kernel(kernels.rms_norm_backward)
NORM_GRADIENTS = ("d_x", "d_weight")


@keep_plans
def plan_rms_norm_backward(
    d_y: ArraySpec, x: ArraySpec, weight: ArraySpec, spec: NormSpec, target: Target, *, wanted: tuple[str, ...]
) -> LaunchPlan:
    """Plan `rms_norm_backward` of the reference. wanted: of NORM_GRADIENTS. Outputs: wanted, each like its array."""
    require_wanted(wanted, NORM_GRADIENTS)
    check_norm(x, weight)
    require_spec("d_y", d_y, x.shape, dtypes.MATMUL_DTYPES)
    builder = PlanBuilder("rms_norm_backward", target)
    present = builder.inputs({"d_y": d_y, "x": x, "weight": weight})
    made = {"d_x": ArraySpec(x.shape, x.dtype), "d_weight": ArraySpec(weight.shape, weight.dtype)}
    for name in wanted:
        builder.output(name, made[name], Role.D_BIAS if name == "d_weight" else None)
    if not target.compiled:
        builder.sums("means over d_model and sums over rows: NumPy's pairwise sums, fp32")
        constants = {"spec": spec, "wanted": wanted}
        from moe_core.ops.norm import reference as twins

        return builder.reference(twins.rms_norm_backward, present, constants, wanted)
    if "d_weight" in wanted:
        builder.scratch("products", ArraySpec(x.shape, "float32"), Role.D_ROWS)
    builder.sums(order_of_sums(x, target))
    grid, arguments, num_warps = norm_launch(x, spec, target)
    names = ("d_y", "x", "weight", "d_x", "products")
    builder.launch(RMS_NORM_BACKWARD, grid, builder.pointers(*names) | arguments, num_warps)
    if "d_weight" in wanted:
        options = MatmulSpec("in_out")
        add_weight_gradient(builder, "weight", None, Side("products"), None, options, {"d_bias": "d_weight"})
    return builder.build()
