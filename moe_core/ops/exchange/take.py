"""Planning of the copy of arrived tokens to rows of slots."""

from __future__ import annotations

from moe_core.base import ArraySpec, Target, dtypes, keep_plans, require_spec
from moe_core.base.checks import require_at_least, require_choice
from moe_core.errors import InvalidInput
from moe_core.formats.fp8 import BLOCK
from moe_core.ops.exchange.checks import copy_grid, copy_tile, most_programs, require_programs, require_width
from moe_core.ops.exchange.kernels import take as kernels
from moe_core.plan import LaunchPlan, PlanBuilder, declare_kernel, passed

TAKE_ROWS = declare_kernel(kernels.take_rows)

_GROUP = BLOCK


@keep_plans
def plan_take_rows(
    x: ArraySpec,
    rows: ArraySpec,
    group_start: ArraySpec,
    target: Target,
    *,
    scales: ArraySpec | None = None,
    dtype: str | None = None,
    programs: int | None = None,
) -> LaunchPlan:
    """y `[R, D]`: row r is row rows[r] of x `[N, D]`, for r below the end of group_start; others are not written.

    x: bf16, fp16 or fp32, or codes of e4m3 with scales fp32 `[N, ceil(D / 128)]`: then y has the bits of `dequantize`,
    one cast to dtype. rows int32 `[R, 1]`: outside [0, N) the row is zeros. group_start int32 `[L + 1]`. dtype: of y,
    by default that of x. programs: as for `plan_dispatch_push`.

    Inputs: x, [scales], rows, group_start.
    """
    kinds = dtypes.MATMUL_DTYPES if scales is None else ("float8_e4m3fn",)
    require_spec("x", x, ("num_sources", "d_model"), kinds)
    width = x.shape[1]
    require_width("x", width, x.dtype)
    require_spec("rows", rows, ("num_rows", 1), "int32")
    require_spec("group_start", group_start, ("num_experts + 1",), "int32")
    require_at_least("length of group_start", group_start.shape[0], 2)
    require_programs(programs)
    groups = -(-width // _GROUP)
    if scales is not None:
        require_spec("scales", scales, (x.shape[0], groups), "float32")
        require_choice("dtype", dtype, dtypes.MATMUL_DTYPES)
    elif dtype not in (None, x.dtype):
        raise InvalidInput(f"dtype must be {x.dtype} like x without scales, got {dtype}; leave it out")
    builder = PlanBuilder("take_rows", target)
    present = builder.inputs({"x": x, "scales": scales, "rows": rows, "group_start": group_start})
    builder.output("y", ArraySpec((rows.shape[0], width), dtype or x.dtype))
    if not target.compiled:
        from moe_core.ops.exchange import reference as twins

        return builder.reference(twins.take_rows, present, {}, ("y",))
    itemsize = dtypes.itemsize(builder.spec("y").dtype)
    block_m, block_n, warps = copy_tile(rows.shape[0], width, itemsize, programs, target)
    arguments = builder.pointers("x", "scales", "rows", "group_start", "y")
    arguments |= passed(num_rows=rows.shape[0], num_sources=x.shape[0], NUM_EXPERTS=group_start.shape[0] - 1)
    arguments |= passed(WIDTH=width, GROUP=_GROUP, GROUPS=groups, BLOCK_M=block_m, BLOCK_N=block_n)
    grid = copy_grid(rows.shape[0], -(-width // block_n), block_m, most_programs(programs, target))
    builder.launch(TAKE_ROWS, grid, arguments, warps, 1)
    return builder.build()
