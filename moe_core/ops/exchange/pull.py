"""Planning of loads: gradients of weights from peers, and rows that have come."""

from __future__ import annotations

from moe_core.base import INT32_LIMIT, ArraySpec, Target, dtypes, keep_plans, require_spec
from moe_core.base.checks import as_integer, require_at_least, require_choice
from moe_core.errors import InvalidInput
from moe_core.formats.fp8 import BLOCK
from moe_core.ops.exchange import checks
from moe_core.ops.exchange.kernels import pull as kernels
from moe_core.ops.exchange.kernels import take as take_kernels
from moe_core.ops.exchange.operands import Places
from moe_core.plan import LaunchPlan, PlanBuilder, declare_kernel, passed

PULL_WEIGHTS = declare_kernel(kernels.pull_weights)


@keep_plans
def plan_combine_pull_weights(places: Places, weights_at: ArraySpec, target: Target, *, num_rows: int) -> LaunchPlan:
    """out fp32 `[T, K]` = entry rows[t, k] of the fp32 `[num_rows]` of peer owners[t, k]; 0 where rows is -1.

    Inputs: owners, rows, weights_at int64 `[W]`.
    """
    checks.require_places(*places)
    rows = places.rows
    num_ranks = checks.require_table("weights_at", weights_at)
    as_integer("num_rows", num_rows, 0, INT32_LIMIT)
    builder = PlanBuilder("combine_pull_weights", target)
    present = builder.inputs({**places._asdict(), "weights_at": weights_at})
    builder.output("out", ArraySpec(rows.shape, "float32"))
    if not target.compiled:
        from moe_core.ops.exchange import reference as twins

        return builder.reference(twins.pull_weights, present, {"num_rows": num_rows}, ("out",))
    block = checks.slots_block(target)
    arguments = builder.pointers("owners", "rows", "weights_at", "out")
    arguments |= passed(num_slots=rows.size, num_ranks=num_ranks, num_rows=num_rows, BLOCK=block)
    builder.launch(PULL_WEIGHTS, (-(-rows.size // block),), arguments)
    return builder.build()


TAKE_ROWS = declare_kernel(take_kernels.take_rows)

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
    checks.require_width("x", width, x.dtype)
    require_spec("rows", rows, ("num_rows", 1), "int32")
    require_spec("group_start", group_start, ("num_experts + 1",), "int32")
    require_at_least("length of group_start", group_start.shape[0], 2)
    checks.require_programs(programs)
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
    block_m, block_n, warps = checks.copy_tile(rows.shape[0], width, itemsize, programs, target)
    arguments = builder.pointers("x", "scales", "rows", "group_start", "y")
    arguments |= passed(num_rows=rows.shape[0], num_sources=x.shape[0], NUM_EXPERTS=group_start.shape[0] - 1)
    arguments |= passed(WIDTH=width, GROUP=_GROUP, GROUPS=groups, BLOCK_M=block_m, BLOCK_N=block_n)
    grid = checks.copy_grid(rows.shape[0], -(-width // block_n), block_m, checks.most_programs(programs, target))
    builder.launch(TAKE_ROWS, grid, arguments, warps, 1)
    return builder.build()
