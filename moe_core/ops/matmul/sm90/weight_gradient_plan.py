"""Planning of weight gradients for Hopper (`kernels.sm90_weight_gradient`)."""

from __future__ import annotations

from moe_core.base import INT32_LIMIT, ArraySpec, Target, row_stride
from moe_core.ops.matmul.sm90.kernels import weight_gradient as kernels
from moe_core.ops.matmul.sm90.plan import SM90_BLOCK_K, SM90_STAGES, SM90_WIDTH
from moe_core.ops.routing.layout import ZERO_COUNTERS
from moe_core.plan import PlanBuilder, TensorMap, declare_kernel, passed
from moe_core.specs import LayoutSpec, WeightGradientSpec
from moe_core.specs.operands import LAYOUT_INPUTS, WeightGradientOperands

SM90_WEIGHT_GRADIENT = declare_kernel(kernels.weight_gradient)

#: 16-bit elements in the 16 bytes that TMA and cp.async move.
_VECTOR = 8
#: Result rows per consumer, columns per store.
_CONSUMER_ROWS, _PIECE = 64, 128
SM90_GRADIENT_TILE = (2 * _CONSUMER_ROWS, SM90_WIDTH)


def why_not_sm90_gradient(
    operands: WeightGradientOperands,
    layout: LayoutSpec | None,
    spec: WeightGradientSpec,
    shape: tuple[int, int],
    target: Target,
) -> str:
    """The reason why the kernel cannot compute a gradient of shape (M, N), or ""."""
    left, right, (m, n) = operands.left, operands.right, shape
    if not target.is_sm90:
        return f"it needs sm_90, its wgmma and TMA instructions, got {target}"
    if layout is None:
        return "it is dense, and only ragged layouts have groups"
    if layout.num_slots == 0:
        return "it has no rows, which TMA cannot describe"
    if spec.out_dtype is None:
        return "no gradient of a weight is wanted"
    if operands.layer_index is not None or operands.into is not None:
        return "it neither fills a stack of layers nor adds to an array"
    if left.dtype not in ("bfloat16", "float16") or not left.dtype == right.dtype == spec.out_dtype:
        return f"it reads and writes one dtype of 16 bits, got {left.dtype}, {right.dtype} and {spec.out_dtype}"
    if m % _CONSUMER_ROWS or n % _VECTOR:
        return f"d_weight must have a multiple of {_CONSUMER_ROWS} rows and of {_VECTOR} columns, got {m} x {n}"
    for name, columns in (("left", spec.left_columns), ("right", spec.right_columns)):
        stride, start = row_stride(name, getattr(operands, name)), (columns or (0, 0))[0]
        if stride % _VECTOR or start % _VECTOR:
            return f"rows of {name} must start at multiples of 16 bytes, got stride {stride} and first column {start}"
    if layout.num_experts * m >= INT32_LIMIT:
        return f"d_weight must have fewer than 2**31 rows over all experts, got {layout.num_experts} x {m}"
    return ""


def launch_sm90_gradient(
    builder: PlanBuilder, layout: LayoutSpec, spec: WeightGradientSpec, starts: tuple[int, int], shape: tuple[int, int]
) -> bool:
    """Add the launch and the one that clears its counter, with `plan_weight_gradient`'s buffers. starts: first columns
    of left and right. shape: (M, N). Returns True if d_bias is computed too, which takes a consumer without rows."""
    (m, n), groups = shape, layout.num_experts
    # Triton 3.6 does not compile the sums of a single-tile gradient.
    idle = m > SM90_GRADIENT_TILE[0] and m % SM90_GRADIENT_TILE[0] != 0 and spec.gather[0] != "row"
    idle = idle and groups * n < INT32_LIMIT
    sums = spec.bias_side == "right" and idle and not builder.has("row_weight")
    d_bias = "d_bias" if sums else None
    counter = builder.scratch("tile_counter", ArraySpec((1,), "int32"))
    builder.launch(ZERO_COUNTERS, (1,), passed(counters=counter, COUNT=1), 1, 1)
    strides = [row_stride(name, builder.spec(name)) for name in ("left", "right")]

    def rows_map(name: str, gather: str, stride: int, columns: int) -> TensorMap | None:
        if gather != "row":
            return None
        rows, width = builder.spec(name).shape
        return TensorMap(name, (rows, width), stride, (SM90_BLOCK_K, columns))

    d_weight_map = TensorMap("d_weight", (groups * m, n), n, (_CONSUMER_ROWS, _PIECE))
    arguments = {
        **passed(left="left", left_map=rows_map("left", spec.gather[0], strides[0], _CONSUMER_ROWS)),
        **passed(right="right", right_map=rows_map("right", spec.gather[1], strides[1], SM90_WIDTH)),
        **(builder.pointers(*LAYOUT_INPUTS) | passed(counters=counter, d_weight_map=d_weight_map, d_bias=d_bias)),
        **passed(num_rows=layout.capacity, num_slots=layout.num_slots),
        **passed(NUM_GROUPS=groups, M=m, N=n, LEFT_STRIDE=strides[0], RIGHT_STRIDE=strides[1]),
        **passed(LEFT_START=starts[0], RIGHT_START=starts[1]),
        **passed(LEFT_GATHER=spec.gather[0], RIGHT_GATHER=spec.gather[1]),
        **passed(TOP_K=layout.top_k, STAGES=SM90_STAGES),
    }
    tiles = groups * -(-m // SM90_GRADIENT_TILE[0]) * -(-n // SM90_GRADIENT_TILE[1])
    grid = min(tiles, builder.target.num_sms)
    builder.launch(SM90_WEIGHT_GRADIENT, (grid,), arguments, 4, 1)
    builder.sums(f"rows of a group in order, {SM90_BLOCK_K} at a time, fp32, wgmma 64 x 256 x 16; no split")
    if sums:
        builder.sums("d_bias: as d_weight, with ones for left")
    return sums
