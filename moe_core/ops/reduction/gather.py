"""Planning of the gather from tokens to layout rows."""

from __future__ import annotations

from moe_core.base import ArraySpec, Target, dtypes, keep_plans, require_spec, row_stride
from moe_core.base.sizes import elementwise_tile
from moe_core.ops.reduction.kernels import rowwise as kernels
from moe_core.plan import LaunchPlan, PlanBuilder, declare_kernel, passed
from moe_core.specs import LayoutSpec

GATHER_ROWS = declare_kernel(kernels.gather_rows)


@keep_plans
def plan_gather_rows(
    x: ArraySpec,
    slot_of_row: ArraySpec,
    row_of_slot: ArraySpec,
    layout: LayoutSpec,
    target: Target,
    *,
    wide: ArraySpec | None = None,
) -> LaunchPlan:
    """y `[capacity, D]`: each layout row's token of x `[T, D]`, zeros for rows without a slot.

    row_of_slot int32 `[T * K]` and wide fp32 `[T, D]` are for the backward, `plan_reduce` of order `row`, and only
    checked. Inputs: x, slot_of_row int32 `[capacity]`.
    """
    row_stride("x", require_spec("x", x, (layout.num_tokens, "d_model"), dtypes.MATMUL_DTYPES, contiguous=False))
    require_spec("layout.slot_of_row", slot_of_row, (layout.capacity,), "int32")
    require_spec("layout.row_of_slot", row_of_slot, (layout.num_slots,), "int32")
    require_wide(wide, x)
    rows, width = layout.capacity, x.shape[1]
    builder = PlanBuilder("gather_rows", target)
    present = builder.inputs({"x": x, "slot_of_row": slot_of_row})
    builder.output("y", ArraySpec((rows, width), x.dtype))
    if not target.compiled:
        from moe_core.ops.reduction import reference as twins

        return builder.reference(twins.gather_rows, present, {"top_k": layout.top_k}, ("y",))
    block_m, block_n = elementwise_tile(width, target)
    arguments = builder.pointers("x", "slot_of_row", "y") | passed(num_rows=rows, num_tokens=layout.num_tokens)
    arguments |= passed(TOP_K=layout.top_k, WIDTH=width, X_STRIDE=row_stride("x", x))
    arguments |= passed(BLOCK_M=block_m, BLOCK_N=block_n)
    builder.launch(GATHER_ROWS, (-(-rows // block_m), -(-width // block_n)), arguments)
    return builder.build()


def require_wide(wide: ArraySpec | None, x: ArraySpec) -> None:
    if wide is not None:
        require_spec("wide", wide, x.shape, "float32", contiguous=False)
