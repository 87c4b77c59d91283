"""Planning of the experts' weight gradients for Hopper (`kernels.hopper_weight_gradient`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moe_core.activation import row_stride
from moe_core.arrays import ArraySpec
from moe_core.plan import Argument, Constant, PlanBuilder, Pointer, Scalar, TensorMap
from moe_core.specs import INT32_LIMIT, LayoutSpec
from moe_core.target import Target
from moe_core.tuning import HOPPER_BLOCK_K, HOPPER_STAGES, HOPPER_WIDTH

if TYPE_CHECKING:
    from moe_core.weight_gradient import WeightGradientOperands, WeightGradientSpec

#: Elements of 16 bits in the 16 bytes that TMA and cp.async take at a time.
_VECTOR = 8
#: Rows of the result that one consumer has, columns that one store takes, tiles of rows that share columns.
_CONSUMER_ROWS, _PIECE, _GROUP_M = 64, 128, 8
#: Rows and columns of the result that a block computes at a time.
HOPPER_GRADIENT_TILE = (2 * _CONSUMER_ROWS, HOPPER_WIDTH)


def why_not_hopper_gradient(
    operands: WeightGradientOperands,
    layout: LayoutSpec | None,
    spec: WeightGradientSpec,
    shape: tuple[int, int],
    target: Target,
) -> str:
    """The reason the kernel cannot compute a gradient `shape` = (M, N), empty if it can."""
    left, right, (m, n) = operands.left, operands.right, shape
    if target.kind != "cuda" or target.arch != 90:
        return f"it needs sm_90, its wgmma and TMA instructions, got {target}"
    if layout is None:
        return "it is dense, and only ragged layouts have groups"
    if layout.num_slots == 0:
        return "it has no rows, which TMA cannot describe"
    if spec.out_dtype is None:
        return "no gradient of a weight is wanted"
    if operands.layer is not None or operands.into is not None:
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


def launch_hopper_gradient(
    builder: PlanBuilder, layout: LayoutSpec, spec: WeightGradientSpec, starts: tuple[int, int], shape: tuple[int, int]
) -> None:
    """Add the launch, and before it the one that clears its counter. Buffers by the names of `plan_weight_gradient`.

    starts: the first columns of left and of right; shape: (M, N).
    """
    (m, n), groups = shape, layout.num_experts
    counter = builder.scratch("tile_counter", ArraySpec((1,), "int32"))
    builder.launch("schedule:zero", (1,), {"counters": Pointer(counter), "COUNT": Constant(1)}, 1, 1)
    strides = [row_stride(name, builder.spec(name)) for name in ("left", "right")]

    def rows_map(name: str, gather: str, stride: int, columns: int) -> Argument:
        if gather != "row":
            return Constant(None)
        rows, width = builder.spec(name).shape
        return TensorMap(name, (rows, width), stride, (HOPPER_BLOCK_K, columns))

    arguments: dict[str, Argument] = {
        "left": Pointer("left"),
        "left_map": rows_map("left", spec.gather[0], strides[0], _CONSUMER_ROWS),
        "right": Pointer("right"),
        "right_map": rows_map("right", spec.gather[1], strides[1], HOPPER_WIDTH),
        **{name: Pointer(name) for name in ("group_sizes", "group_start", "slot_of_row")},
        "counters": Pointer(counter),
        "d_weight_map": TensorMap("d_weight", (groups * m, n), n, (_CONSUMER_ROWS, _PIECE)),
        "num_rows": Scalar(layout.capacity),
        "num_slots": Scalar(layout.num_slots),
        "NUM_GROUPS": Constant(groups),
        "M": Constant(m),
        "N": Constant(n),
        "LEFT_STRIDE": Constant(strides[0]),
        "RIGHT_STRIDE": Constant(strides[1]),
        "LEFT_START": Constant(starts[0]),
        "RIGHT_START": Constant(starts[1]),
        "LEFT_GATHER": Constant(spec.gather[0]),
        "RIGHT_GATHER": Constant(spec.gather[1]),
        "TOP_K": Constant(layout.top_k),
        "STAGES": Constant(HOPPER_STAGES),
        "GROUP_M": Constant(_GROUP_M),
    }
    tiles = groups * -(-m // HOPPER_GRADIENT_TILE[0]) * -(-n // HOPPER_GRADIENT_TILE[1])
    grid = min(tiles, builder.target.num_sms)
    builder.launch("hopper_weight_gradient:weight_gradient", (grid,), arguments, 4, 1)
    builder.sums(f"rows of a group in order, {HOPPER_BLOCK_K} at a time, fp32, wgmma 64 x 256 x 16; no split")
