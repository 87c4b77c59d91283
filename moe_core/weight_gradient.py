"""Planning of the weights' gradients: products ragged along the reduction, and dense ones in parts."""

from __future__ import annotations

import dataclasses
import functools
import math
from dataclasses import dataclass
from typing import Any

from moe_core import dtypes
from moe_core.activation import row_stride
from moe_core.arrays import ArraySpec, require_spec
from moe_core.checks import require_choice
from moe_core.codec import plan_type
from moe_core.errors import InvalidInput, Unsupported
from moe_core.layout import optional, padded
from moe_core.operands import named_arrays
from moe_core.plan import Argument, Constant, LaunchPlan, PlanBuilder, Pointer, Scalar
from moe_core.specs import INT32_LIMIT, LayoutSpec
from moe_core.target import Target
from moe_core.tuning import FAMILIES, TileConfig
from moe_core.weight_gradient_hopper import HOPPER_GRADIENT_TILE, launch_hopper_gradient, why_not_hopper_gradient

_GATHERS = ("row", "slot", "token")
#: Steps along the rows that a part of a dense product has at least: fewer would only move work into the sum of parts.
_STEPS_PER_PART = 8
#: Warps of dense products that a multiprocessor is given: it holds several small tiles at once.
_WARPS_PER_SM = 16
#: Of column sums alone, but for block_k: many small blocks in flight.
_BIAS_TILE = TileConfig(64, 64, 64, num_warps=2, num_stages=4)
#: Mean rows of an expert from which the hopper family is taken.
_HOPPER_ROWS = 64
_SUM_BLOCK = {"cuda": 1024, "interpreter": 65536}


@dataclass(frozen=True)
class WeightGradientOperands:
    """What one gradient of weights reads; R rows.

    left `[*, M]`, right `[*, N]`: for `in_out` weights the product's input and the gradient of its output, for `out_in`
    the other way round; rows may be strided. row_weight fp32 `[T * K]` or `[T, K]` by slot: of the column sums only.
    row_mask bool `[R]` (dense): rows to read. layer int32 `[1]`: the result then has a leading layer axis. into fp32,
    of the result's shape: added to the product.
    """

    left: Any
    right: Any
    row_weight: Any = None
    row_mask: Any = None
    layer: Any = None
    into: Any = None


@plan_type
@dataclass(frozen=True)
class WeightGradientSpec:
    """Options of one gradient of weights.

    gather: how left and right are indexed: by layout `row`, `slot` or `token`. left_columns, right_columns: (first,
    number) of the columns taken, None = all. out_dtype: of d_weight, None = none is wanted. bias_side: `left` or
    `right`, whose column sums make d_bias in bias_dtype; None = none. num_layers: of the result, where layer is given.
    family: of the kernels, `portable` or `hopper` (sm_90), None = the faster one of those that can run it.
    """

    out_dtype: str | None
    gather: tuple[str, str] = ("row", "row")
    left_columns: tuple[int, int] | None = None
    right_columns: tuple[int, int] | None = None
    bias_side: str | None = None
    bias_dtype: str = "float32"
    num_layers: int = 1
    allow_tf32: bool = False
    family: str | None = None

    def __post_init__(self) -> None:
        if self.family is not None:
            require_choice("family", self.family, FAMILIES)
        for side in self.gather:
            require_choice("gather", side, _GATHERS)
        if self.bias_side is not None:
            require_choice("bias_side", self.bias_side, ("left", "right"))
        elif self.out_dtype is None:
            raise InvalidInput("out_dtype must be a dtype where bias_side is None, got None; ask for one of the two")
        for name in ("out_dtype", "bias_dtype"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, dtypes.canonical(getattr(self, name)))
                require_choice(name, getattr(self, name), dtypes.MATMUL_DTYPES)


def _product(left: str, right: str, allow_tf32: bool) -> str:
    """How the kernel multiplies: fp32's IEEE products unless both sides are of one 16-bit dtype."""
    if left == right:
        return "tf32" if left == "float32" and allow_tf32 else "ieee"
    if (left, right) == ("bfloat16", "float32"):
        return "split_b"
    return "split_a" if (left, right) == ("float32", "bfloat16") else "widen_ieee"


def gradient_tile(m: int, n: int, product: str, dtype: str, target: Target, *, adds: bool = False) -> TileConfig:
    """The tile of a product of M x N: large where the tensor cores take 16-bit numbers as they are.

    adds: the result is added to an array; the largest tile's accumulators and what they are added to do not fit into
    the registers together.
    """
    if target.kind != "cuda":
        return TileConfig(min(128, padded(m)), min(256, padded(n)), 64)
    least = 16
    if product.startswith("split"):
        # With fewer columns on one side ptxas aims at too few registers for the three parts and spills.
        config, least = TileConfig(64, 64, 64, num_warps=4, num_stages=2), 32
        if m >= 128 and n >= 128:
            config = TileConfig(128, 128, 64, num_warps=8, num_stages=2)
    elif product == "widen_ieee" or dtype == "float32":
        config = TileConfig(64, 64, 32, num_warps=8, num_stages=2)
    elif n > 128 and m > 64 and not adds:
        config = TileConfig(128, 256, 64, num_warps=8, num_stages=3)
    else:
        config = TileConfig(128, 128, 64, num_warps=8, num_stages=3)
    return TileConfig(
        min(config.block_m, padded(m, least)),
        min(config.block_n, padded(n, least)),
        config.block_k,
        config.num_warps,
        config.num_stages,
    )


def _columns(name: str, array: ArraySpec, columns: tuple[int, int] | None) -> tuple[int, int]:
    first, number = (0, array.shape[1]) if columns is None else columns
    if number < 1 or first < 0 or first + number > array.shape[1]:
        raise InvalidInput(f"{name} must lie within {array.shape[1]} columns, got {columns}; correct it")
    return first, number


def _validate(
    operands: WeightGradientOperands, layout: LayoutSpec | None, spec: WeightGradientSpec
) -> tuple[tuple[int, int], tuple[int, int]]:
    """The columns taken of left and of right."""
    rows: dict[str, int | str] = {"row": "num_rows"}
    if layout is not None:
        rows = {"row": layout.capacity, "slot": layout.num_slots, "token": layout.num_tokens}
    elif spec.gather != ("row", "row"):
        raise InvalidInput(f"gather must be ('row', 'row') without a layout, got {spec.gather}; pass a layout")
    for name, gather in (("left", spec.gather[0]), ("right", spec.gather[1])):
        array = require_spec(
            name, getattr(operands, name), (rows[gather], name), dtypes.MATMUL_DTYPES, contiguous=False
        )
        row_stride(name, array)
    left = _columns("left_columns", operands.left, spec.left_columns)
    right = _columns("right_columns", operands.right, spec.right_columns)
    if left[1] * right[1] >= INT32_LIMIT:
        raise Unsupported(f"one weight must have fewer than 2**31 elements, got {left[1]} x {right[1]}")
    if operands.row_weight is not None:
        weight: ArraySpec = operands.row_weight
        if layout is None or spec.bias_side is None:
            raise InvalidInput("row_weight must be None without a layout and a bias, got an array; leave it out")
        by_token = (layout.num_tokens, layout.top_k)
        require_spec("row_weight", weight, by_token if weight.rank == 2 else (layout.num_slots,), "float32")
    if layout is None:
        require_spec("right", operands.right, (operands.left.shape[0], "right"), operands.right.dtype, contiguous=False)
    if operands.row_mask is not None:
        if layout is not None:
            raise InvalidInput("row_mask must be None with a layout, got an array; mask the layout instead")
        require_spec("row_mask", operands.row_mask, (operands.left.shape[0],), "bool")
    if operands.layer is not None:
        require_spec("layer", operands.layer, (1,), "int32")
    elif spec.num_layers != 1:
        raise InvalidInput(f"num_layers must be 1 without layer, got {spec.num_layers}; pass layer")
    return left, right


@functools.lru_cache(maxsize=4096)
def plan_weight_gradient(
    operands: WeightGradientOperands,
    layout: LayoutSpec | None,
    spec: WeightGradientSpec,
    target: Target,
    *,
    trusted: bool = True,
) -> LaunchPlan:
    """d_weight `[E, M, N]` = cast(into + left_rows^T . right_rows) of every expert's rows, d_bias `[E, M or N]`.

    operands: a bundle of ArraySpecs. layout None: dense, d_weight `[M, N]`, with fp32 sums of parts of the rows where
    one sum would leave most of the device idle. With operands.layer every result has a leading layer axis, zeros (or
    into) but for one. An expert without rows: exact zeros. trusted: the layout is one of ours, without padding inside a
    group; otherwise rows without a slot are left out, whatever stands there.

    Inputs: the operands given, then group_sizes `[E]`, group_start `[E + 1]`, slot_of_row `[capacity]`. Outputs:
    d_weight (unless out_dtype is None), d_bias (where bias_side is given). Compiled targets only: the reference engine
    runs whole backwards (`moe_core.reference.backward_plan`). Raises InvalidInput, Unsupported.
    """
    if not target.compiled:
        raise Unsupported(f"a gradient of weights is planned for compiled targets, got {target}; plan a whole backward")
    starts, (m, n) = zip(*_validate(operands, layout, spec), strict=True)
    builder = PlanBuilder("weight_gradient", target)
    for name, array in named_arrays(operands):
        builder.input(name, array)
    groups = 1 if layout is None else layout.num_experts
    if layout is not None:
        shapes = {"group_sizes": groups, "group_start": groups + 1, "slot_of_row": layout.capacity}
        for name, size in shapes.items():
            builder.input(name, ArraySpec((size,), "int32"))
    lead = (spec.num_layers,) * (operands.layer is not None) + (groups,) * (layout is not None)
    if spec.out_dtype is not None:
        builder.output("d_weight", ArraySpec((*lead, m, n), spec.out_dtype))
        if operands.into is not None:
            require_spec("into", operands.into, (*lead, m, n), "float32")
    if spec.bias_side is not None:
        builder.output("d_bias", ArraySpec((*lead, n if spec.bias_side == "right" else m), spec.bias_dtype))

    reason = why_not_hopper_gradient(operands, layout, spec, (m, n), target)
    if not trusted and "row" in spec.gather:
        reason = reason or "rows of the layout may be padding, which only masked loads leave out"
    if reason and spec.family == "hopper":
        raise Unsupported(f"the hopper family cannot run this gradient: {reason}; leave family out")
    product = _product(operands.left.dtype, operands.right.dtype, spec.allow_tf32)
    tile = gradient_tile(m, n, product, operands.left.dtype, target, adds=operands.into is not None)
    if layout is not None and not reason and (spec.family or _faster_family(layout, (m, n), tile)) == "hopper":
        launch_hopper_gradient(builder, layout, spec, starts, (m, n))
        if spec.bias_side is not None:
            _launch_portable(builder, operands, layout, spec, starts, (m, n), trusted, with_weight=False)
    else:
        _launch_portable(builder, operands, layout, spec, starts, (m, n), trusted)
    return builder.build()


def _faster_family(layout: LayoutSpec, shape: tuple[int, int], tile: TileConfig) -> str:
    """`hopper` where experts have rows enough and its large tiles, multiplied twice as fast, are not mostly padding.

    shape: (M, N); tile: the portable kernel's.
    """
    if layout.num_slots < _HOPPER_ROWS * layout.num_experts:
        return "portable"
    portable, hopper = (
        math.prod(-(-size // block) * block for size, block in zip(shape, blocks, strict=True))
        for blocks in ((tile.block_m, tile.block_n), HOPPER_GRADIENT_TILE)
    )
    return "hopper" if hopper < 2 * portable else "portable"


def _launch_portable(
    builder: PlanBuilder,
    operands: WeightGradientOperands,
    layout: LayoutSpec | None,
    spec: WeightGradientSpec,
    starts: tuple[int, int],
    shape: tuple[int, int],
    trusted: bool,
    *,
    with_weight: bool = True,
) -> None:
    """Add the launches of the kernel that runs everywhere. starts: first columns; shape: (M, N).

    with_weight: False leaves d_weight to another launch. trusted: as in `plan_weight_gradient`.
    """
    target, (m, n) = builder.target, shape
    with_weight = with_weight and spec.out_dtype is not None
    groups = 1 if layout is None else layout.num_experts
    bias_width = n if spec.bias_side == "right" else m
    left, right = operands.left, operands.right
    product = _product(left.dtype, right.dtype, spec.allow_tf32)
    tile = gradient_tile(m, n, product, left.dtype, target, adds=operands.into is not None)
    tiles_m, tiles_n = -(-m // tile.block_m), -(-n // tile.block_n)
    rows = left.shape[0] if layout is None else layout.capacity
    parts = 1
    if layout is None:
        steps = -(-rows // tile.block_k)
        programs = target.num_sms * max(1, _WARPS_PER_SM // tile.num_warps) if target.kind == "cuda" else 2
        parts = max(1, min(programs // (tiles_m * tiles_n), steps // _STEPS_PER_PART))
    part_rows = -(-rows // parts)
    parts = max(1, -(-rows // max(1, part_rows)))
    if not with_weight:
        # Parts and steps stay those of the product, so that the order of the sums does too.
        if target.kind == "cuda":
            tile = dataclasses.replace(_BIAS_TILE, block_k=tile.block_k)
        tiles_m, tiles_n = (-(-m // tile.block_m), 1) if spec.bias_side == "left" else (1, -(-n // tile.block_n))
    results = {"d_weight": "d_weight", "d_bias": "d_bias"}
    if parts > 1:
        for name, size in (("d_weight", (m, n)), ("d_bias", (bias_width,))):
            if builder.has(name):
                results[name] = builder.scratch(f"{name}_parts", ArraySpec((parts, *size), "float32"))

    def pointer(name: str, given: object) -> Argument:
        return Pointer(name) if given else Constant(None)

    in_parts = parts > 1
    by_slot = layout is not None and (spec.gather != ("row", "row") or operands.row_weight is not None or not trusted)
    arguments: dict[str, Argument] = {
        "left": Pointer("left"),
        "right": Pointer("right"),
        "row_weight": optional("row_weight", operands.row_weight),
        "row_mask": optional("row_mask", operands.row_mask),
        "layer": pointer("layer", operands.layer is not None and not in_parts),
        **{name: pointer(name, layout is not None) for name in ("group_sizes", "group_start", "slot_of_row")},
        "into": pointer("into", operands.into is not None and not in_parts),
        "d_weight": pointer(results["d_weight"], with_weight),
        "d_bias": pointer(results["d_bias"], builder.has("d_bias")),
        "num_rows": Scalar(rows),
        "num_slots": Scalar(rows if layout is None else layout.num_slots),
        "part_rows": Scalar(part_rows),
        "M": Constant(m),
        "N": Constant(n),
        "LEFT_STRIDE": Constant(row_stride("left", left)),
        "RIGHT_STRIDE": Constant(row_stride("right", right)),
        "LEFT_START": Constant(starts[0]),
        "RIGHT_START": Constant(starts[1]),
        "LEFT_GATHER": Constant(spec.gather[0]),
        "RIGHT_GATHER": Constant(spec.gather[1]),
        "TOP_K": Constant(1 if layout is None else layout.top_k),
        "BY_SLOT": Constant(by_slot),
        "BIAS_SIDE": Constant(spec.bias_side),
        "PRODUCT": Constant(product),
        "BLOCK_M": Constant(tile.block_m),
        "BLOCK_N": Constant(tile.block_n),
        "BLOCK_K": Constant(tile.block_k),
    }
    grid = (tiles_m * tiles_n, parts if layout is None else groups, 1 if in_parts else spec.num_layers)
    builder.launch("weight_gradient:weight_gradient", grid, arguments, tile.num_warps, tile.num_stages)
    builder.sums(f"rows of a group in order, {tile.block_k} at a time, fp32, {product} products, in {parts} parts")
    if in_parts:
        for name in ("d_weight", "d_bias"):
            if builder.has(name):
                _sum_parts(builder, operands, spec, name, results[name], parts)


def _sum_parts(
    builder: PlanBuilder, operands: WeightGradientOperands, spec: WeightGradientSpec, name: str, parts: str, number: int
) -> None:
    """Add the launch that makes a result of its parts."""
    size = builder.spec(parts).size // number
    block = min(_SUM_BLOCK[builder.target.kind], padded(size))
    builder.launch(
        "weight_gradient:sum_parts",
        (-(-size // block), spec.num_layers),
        {
            "parts": Pointer(parts),
            "layer": optional("layer", operands.layer),
            "into": optional("into", operands.into if name == "d_weight" else None),
            "result": Pointer(name),
            "num_parts": Scalar(number),
            "SIZE": Constant(size),
            "BLOCK": Constant(block),
        },
    )
    builder.sums(f"{name}: {number} parts in order, fp32")
