"""Planning of the sum of a token's slots, and of row scaling."""

from __future__ import annotations

from moe_core.base import ArraySpec, Target, dtypes, keep_plans, require_choice, require_spec, row_stride
from moe_core.base.sizes import elementwise_tile, padded
from moe_core.errors import InvalidInput
from moe_core.ops.reduction.kernels import reduce as kernels
from moe_core.plan import LaunchPlan, PlanBuilder, declare_kernel, passed
from moe_core.specs import LayoutSpec

REDUCE = declare_kernel(kernels.reduce, pdl="layout")
SCALE_ROWS = declare_kernel(kernels.scale_rows, pdl="start")

#: Up to this K the loop is unrolled: all loads are in flight at once.
_UNROLL_LIMIT = 16
#: Columns per program for few and for many tokens, preferred first. A thread has 8: 16 bytes of a 16-bit row.
_FEW_COLUMNS, _MANY_COLUMNS, _COLUMNS_PER_WARP = 256, (2048, 1024), 256


def unrolled(top_k: int) -> bool:
    return top_k <= _UNROLL_LIMIT


def reduce_tile(num_tokens: int, width: int, target: Target) -> tuple[int, int, int]:
    """(tokens, columns, warps) per program of the reduction, which is memory bound.

    Many tokens: a whole row, or the tile with the least padding. With K = 8 an H100 multiprocessor then has 196 KB in
    flight; bandwidth times latency is 40 KB. Few tokens: more, smaller programs, since only latency counts.
    """
    if target.interpreted:
        return *elementwise_tile(width, target), 4
    columns = min(_MANY_COLUMNS, key=lambda size: -(-width // size) * size)
    if num_tokens * -(-width // columns) < 2 * target.num_sms:
        columns = _FEW_COLUMNS
    columns = min(columns, padded(width))
    return 1, columns, max(1, columns // _COLUMNS_PER_WARP)


def require_beside(shared: ArraySpec | None, shared_gate: ArraySpec | None, shape: tuple[int, int]) -> None:
    if shared is not None:
        row_stride("shared", require_spec("shared", shared, shape, dtypes.MATMUL_DTYPES, contiguous=False))
    if shared_gate is not None:
        if shared is None:
            raise InvalidInput("shared_gate must be None without shared, got an array; pass shared or leave it out")
        require_spec("shared_gate", shared_gate, (shape[0], 1), "float32")


@keep_plans
def plan_reduce(
    y: ArraySpec,
    row_of_slot: ArraySpec,
    layout: LayoutSpec,
    target: Target,
    *,
    order: str = "slot",
    shared: ArraySpec | None = None,
    shared_gate: ArraySpec | None = None,
    out_dtype: str | None = None,
) -> LaunchPlan:
    """out `[T, D]`: the fp32 sum of the rows of y of a token's slots, in the order k = 0..K-1.

    y: `[T * K, D]` by slot (order `slot`) or `[capacity, D]` by layout row (order `row`). row_of_slot int32 `[T * K]`:
    -1 adds nothing. shared `[T, D]` is added in fp32, times the sigmoid of shared_gate (fp32 `[T, 1]`) unless None. One
    cast to out_dtype (None: the dtype of y).
    """
    require_choice("order", order, ("slot", "row"))
    require_spec("layout.row_of_slot", row_of_slot, (layout.num_slots,), "int32")
    rows = layout.num_slots if order == "slot" else layout.capacity
    require_spec("y", y, (rows, "d_model"), dtypes.MATMUL_DTYPES)
    tokens, width, top_k = layout.num_tokens, y.shape[1], layout.top_k
    require_beside(shared, shared_gate, (tokens, width))
    out_dtype = dtypes.canonical(out_dtype or y.dtype)
    require_choice("out_dtype", out_dtype, dtypes.MATMUL_DTYPES)

    builder = PlanBuilder("reduce", target)
    inputs = {"y": y, "row_of_slot": row_of_slot, "shared": shared, "shared_gate": shared_gate}
    present = builder.inputs(inputs)
    builder.output("out", ArraySpec((tokens, width), out_dtype))
    builder.sums("slots k = 0..K-1 in order, fp32" + (", then the shared expert" if shared is not None else ""))
    if not target.compiled:
        options = {"top_k": top_k, "order": order, "out_dtype": out_dtype}
        from moe_core.ops.reduction import reference as twins

        return builder.reference(twins.reduce, present, options, ("out",))
    block_t, block_n, num_warps = reduce_tile(tokens, width, target)
    stride = row_stride("shared", shared) if shared is not None else 0
    arguments = builder.pointers("y", "row_of_slot", "shared", "shared_gate", "out")
    arguments |= passed(num_tokens=tokens, num_rows=y.shape[0], TOP_K=top_k, WIDTH=width, SHARED_STRIDE=stride)
    arguments |= passed(BY_ROW=order == "row", UNROLL=unrolled(top_k))
    arguments |= passed(BLOCK_T=block_t, BLOCK_N=block_n, PDL=None)
    builder.launch(REDUCE, (-(-tokens // block_t), -(-width // block_n)), arguments, num_warps)
    return builder.build()


@keep_plans
def plan_scale_rows(x: ArraySpec, weights: ArraySpec, target: Target) -> LaunchPlan:
    """x `[T, D]` * weights fp32 `[T, 1]` in fp32, cast to the dtype of x."""
    row_stride("x", require_spec("x", x, ("num_tokens", "d_model"), dtypes.MATMUL_DTYPES, contiguous=False))
    rows, width = x.shape
    require_spec("weights", weights, (rows, 1), "float32")
    builder = PlanBuilder("scale_rows", target)
    present = builder.inputs({"x": x, "weights": weights})
    builder.output("y", ArraySpec((rows, width), x.dtype))
    if not target.compiled:
        from moe_core.ops.reduction import reference as twins

        return builder.reference(twins.scale_rows, present, {}, ("y",))
    block_m, block_n = elementwise_tile(width, target)
    arguments = builder.pointers("x", "weights", "y") | passed(num_rows=rows, WIDTH=width, X_STRIDE=row_stride("x", x))
    arguments |= passed(BLOCK_M=block_m, BLOCK_N=block_n, PDL=None)
    builder.launch(SCALE_ROWS, (-(-rows // block_m), -(-width // block_n)), arguments)
    return builder.build()
