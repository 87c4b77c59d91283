"""Planning of the addresses that a product stores results to."""

from __future__ import annotations

from moe_core.base import ArraySpec, Target, dtypes, keep_plans, require_spec
from moe_core.base.checks import as_integer, require_at_least, require_choice
from moe_core.base.sizes import INT32_LIMIT
from moe_core.ops.exchange.checks import require_table, require_width, slots_block
from moe_core.ops.exchange.kernels import results as kernels
from moe_core.plan import LaunchPlan, PlanBuilder, declare_kernel, passed

RESULT_ADDRESSES = declare_kernel(kernels.result_addresses)


@keep_plans
def plan_result_addresses(
    sources: ArraySpec,
    group_start: ArraySpec,
    slots_at: ArraySpec,
    target: Target,
    *,
    num_slots: int,
    width: int,
    dtype: str,
) -> LaunchPlan:
    """results_at int64 `[R]`: the address of row slot of an array `[num_slots, width]` of dtype of peer home.

    (home, slot) = sources[r], int32 `[R, 2]`, of `plan_push_slots`; 0 if row r has none. group_start int32 `[L + 1]`:
    its last entry is the number of rows with a source. slots_at int64 `[W]`: addresses of the peers' arrays.
    """
    require_spec("sources", sources, ("num_rows", 2), "int32")
    require_spec("group_start", group_start, ("num_experts + 1",), "int32")
    require_at_least("length of group_start", group_start.shape[0], 2)
    num_ranks = require_table("slots_at", slots_at)
    as_integer("num_slots", num_slots, 0, INT32_LIMIT)
    as_integer("width", width, 1, INT32_LIMIT)
    require_choice("dtype", dtype, dtypes.MATMUL_DTYPES)
    require_width("results", width, dtype)
    builder = PlanBuilder("result_addresses", target)
    present = builder.inputs({"sources": sources, "group_start": group_start, "slots_at": slots_at})
    rows, row_bytes = sources.shape[0], width * dtypes.itemsize(dtype)
    builder.output("results_at", ArraySpec((rows,), "int64"))
    if not target.compiled:
        from moe_core.ops.exchange import reference as twins

        constants = {"num_slots": num_slots, "row_bytes": row_bytes}
        return builder.reference(twins.result_addresses, present, constants, ("results_at",))
    block = slots_block(target)
    arguments = builder.pointers("sources", "group_start", "slots_at", "results_at")
    arguments |= passed(num_ranks=num_ranks, num_rows=rows, num_slots=num_slots)
    arguments |= passed(NUM_EXPERTS=group_start.shape[0] - 1, ROW_BYTES=row_bytes, BLOCK=block)
    builder.launch(RESULT_ADDRESSES, (-(-rows // block),), arguments)
    return builder.build()
