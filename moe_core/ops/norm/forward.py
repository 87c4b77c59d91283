"""Plans the normalisation of rows."""

from __future__ import annotations

from moe_core.base import ArraySpec, Target, dtypes, keep_plans, padded, require_spec, row_stride
from moe_core.ops.norm.kernels import norm as kernels
from moe_core.plan import Argument, LaunchPlan, PlanBuilder, declare_kernel, passed
from moe_core.specs import NormSpec

RMS_NORM = declare_kernel(kernels.rms_norm)

_TILE = {"gpu": (1, 2048), "interpreter": (16, 256)}


def check_norm(x: ArraySpec, weight: ArraySpec) -> None:
    require_spec("x", x, ("num_rows", "d_model"), dtypes.MATMUL_DTYPES, contiguous=False)
    require_spec("weight", weight, (x.shape[1],), dtypes.MATMUL_DTYPES)


def norm_launch(x: ArraySpec, spec: NormSpec, target: Target) -> tuple[tuple[int, ...], dict[str, Argument], int]:
    rows, width = x.shape
    block_m, columns = _TILE[target.engine]
    block_n = min(columns, padded(width))
    arguments = passed(num_rows=rows, WIDTH=width, X_STRIDE=row_stride("x", x))
    arguments |= passed(EPSILON=spec.epsilon, SCALE=spec.scale, CENTRED=spec.centred, WEIGHT_FIRST=spec.weight_first)
    arguments |= passed(BLOCK_M=block_m, BLOCK_N=block_n)
    return (-(-rows // block_m),), arguments, max(1, min(8, block_n // 256))


def order_of_sums(x: ArraySpec, target: Target) -> str:
    columns = min(_TILE[target.engine][1], padded(x.shape[1]))
    return f"means over d_model: {columns} partial sums in order, then a tree over them, fp32"


@keep_plans
def plan_rms_norm(x: ArraySpec, weight: ArraySpec, spec: NormSpec, target: Target) -> LaunchPlan:
    """`NormSpec` of x `[R, D]`, strided rows too, and weight `[D]`: bf16, fp16 or fp32 each. Output: y."""
    check_norm(x, weight)
    builder = PlanBuilder("rms_norm", target)
    present = builder.inputs({"x": x, "weight": weight})
    builder.output("y", ArraySpec(x.shape, x.dtype))
    if not target.compiled:
        builder.sums("means over d_model: NumPy's pairwise sums, fp32")
        from moe_core.ops.norm import reference as twins

        return builder.reference(twins.rms_norm, present, {"spec": spec}, ("y",))
    builder.sums(order_of_sums(x, target))
    grid, arguments, num_warps = norm_launch(x, spec, target)
    builder.launch(RMS_NORM, grid, builder.pointers("x", "weight", "y") | arguments, num_warps)
    return builder.build()
