"""Planning of weight gradients: products ragged along the reduction, and dense ones in parts."""

from __future__ import annotations

import dataclasses
import math

from moe_core.base import INT32_LIMIT, ArraySpec, Target, dtypes, keep_plans, padded, require_spec, row_stride
from moe_core.errors import InvalidInput, Unsupported
from moe_core.ops.common.drain import must_drain
from moe_core.ops.matmul.portable import weight_gradient_kernel as kernels
from moe_core.ops.matmul.sm90.weight_gradient_plan import (
    SM90_GRADIENT_TILE,
    launch_sm90_gradient,
    why_not_sm90_gradient,
)
from moe_core.plan import LaunchPlan, PlanBuilder, declare_kernel, passed
from moe_core.specs import LayoutSpec, TileConfig, WeightGradientSpec
from moe_core.specs.operands import LAYOUT_INPUTS, WeightGradientOperands, named_arrays

WEIGHT_GRADIENT = declare_kernel(kernels.weight_gradient)
SUM_PARTS = declare_kernel(kernels.sum_parts)

#: Least row steps per part of a dense product: fewer only move work into the sum of parts.
_STEPS_PER_PART = 8
#: Warps of dense products per multiprocessor.
_WARPS_PER_SM = 16
#: For column sums only: many small blocks in flight.
_BIAS_TILE = TileConfig(64, 64, 64, num_warps=2, num_stages=4)
#: Mean rows per expert for sm90.
_SM90_ROWS = 64
_SUM_BLOCK = {"gpu": 1024, "interpreter": 65536}


def _product(left: str, right: str, allow_tf32: bool) -> str:
    """IEEE fp32 unless both sides have the same 16-bit dtype."""
    if left == right:
        return "tf32" if left == "float32" and allow_tf32 else "ieee"
    if (left, right) == ("bfloat16", "float32"):
        return "split_b"
    return "split_a" if (left, right) == ("float32", "bfloat16") else "widen_ieee"


def gradient_tile(m: int, n: int, product: str, dtype: str, target: Target, *, adds: bool = False) -> TileConfig:
    """The tile of an M x N product. adds: an array is added, which with the largest tile would not fit in registers."""
    if not target.on_gpu:
        return TileConfig(min(128, padded(m)), min(256, padded(n)), 64)
    least = 16
    if product.startswith("split"):
        # Fewer columns would make ptxas spill the three parts. Without wgmma it would spill those of larger tiles.
        has_wide = target.is_sm90 or target.is_sm100
        config, least = TileConfig(64, 64, 64 if has_wide else 32, num_warps=4, num_stages=2), 32
        if m >= 128 and n >= 128 and has_wide:
            config = TileConfig(128, 128, 64, num_warps=8, num_stages=2)
    elif product == "widen_ieee" or dtype == "float32":
        config = TileConfig(64, 64, 32, num_warps=8, num_stages=2)
    elif n > 128 and m > 64 and not adds:
        config = TileConfig(128, 256, 64, num_warps=8, num_stages=3)
    else:
        config = TileConfig(128, 128, 64, num_warps=8, num_stages=3)
    block_m, block_n = min(config.block_m, padded(m, least)), min(config.block_n, padded(n, least))
    return dataclasses.replace(config, block_m=block_m, block_n=block_n)


def _columns(name: str, array: ArraySpec, columns: tuple[int, int] | None) -> tuple[int, int]:
    first, number = (0, array.shape[1]) if columns is None else columns
    if number < 1 or first < 0 or first + number > array.shape[1]:
        raise InvalidInput(f"{name} must lie within {array.shape[1]} columns, got {columns}; correct it")
    return first, number


def _validate(
    operands: WeightGradientOperands, layout: LayoutSpec | None, spec: WeightGradientSpec
) -> tuple[tuple[int, int], tuple[int, int]]:
    rows: dict[str, int | str] = {"row": "num_rows"}
    if layout is not None:
        rows = {"row": layout.capacity, "slot": layout.num_slots, "token": layout.num_tokens}
    elif spec.gather != ("row", "row"):
        raise InvalidInput(f"gather must be ('row', 'row') without a layout, got {spec.gather}; pass a layout")
    for name, gather in zip(("left", "right"), spec.gather, strict=True):
        shape, array = (rows[gather], name), getattr(operands, name)
        row_stride(name, require_spec(name, array, shape, dtypes.MATMUL_DTYPES, contiguous=False))
    left = _columns("left_columns", operands.left, spec.left_columns)
    right = _columns("right_columns", operands.right, spec.right_columns)
    if left[1] * right[1] >= INT32_LIMIT:
        raise Unsupported(
            f"one weight must have fewer than 2**31 elements, got {left[1]} x {right[1]}; split the weight"
        )
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
    if operands.layer_index is not None:
        require_spec("layer_index", operands.layer_index, (1,), "int32")
    elif spec.num_layers != 1:
        raise InvalidInput(f"num_layers must be 1 without layer_index, got {spec.num_layers}; pass layer_index")
    return left, right


@keep_plans
def plan_weight_gradient(
    operands: WeightGradientOperands,
    layout: LayoutSpec | None,
    spec: WeightGradientSpec,
    target: Target,
    *,
    trusted: bool = True,
) -> LaunchPlan:
    """d_weight `[E, M, N]` = cast(into + left_rows^T . right_rows) over every expert's rows, d_bias `[E, M or N]`.

    layout None: dense, d_weight `[M, N]`, in fp32 partial sums over the rows if one sum would leave most of the device
    idle. With operands.layer_index every result has a leading layer axis, zeros (or into) in other layers. Experts
    without rows are exact zeros. trusted: the layout has no padding inside a group. Otherwise padding is skipped.

    Inputs: the operands, group_sizes `[E]`, group_start `[E + 1]`, slot_of_row `[capacity]`. Outputs: d_weight (unless
    out_dtype is None), d_bias (with bias_side). Compiled targets only. Raises InvalidInput, Unsupported.
    """
    if not target.compiled:
        raise Unsupported(f"a gradient of weights is planned for compiled targets, got {target}; plan a whole backward")
    starts, (m, n) = zip(*_validate(operands, layout, spec), strict=True)
    builder = PlanBuilder("weight_gradient", target)
    builder.inputs(dict(named_arrays(operands)))
    groups = 1 if layout is None else layout.num_experts
    builder.layout_inputs(layout)
    lead = (spec.num_layers,) * (operands.layer_index is not None) + (groups,) * (layout is not None)
    if spec.out_dtype is not None:
        builder.output("d_weight", ArraySpec((*lead, m, n), spec.out_dtype))
        if operands.into is not None:
            require_spec("into", operands.into, (*lead, m, n), "float32")
    if spec.bias_side is not None:
        builder.output("d_bias", ArraySpec((*lead, n if spec.bias_side == "right" else m), spec.bias_dtype))

    reason = why_not_sm90_gradient(operands, layout, spec, (m, n), target)
    if not trusted and "row" in spec.gather:
        reason = reason or "rows of the layout may be padding, which only masked loads leave out"
    if reason and spec.family == "sm90":
        raise Unsupported(f"the sm90 family cannot run this gradient: {reason}; leave family out")
    product = _product(operands.left.dtype, operands.right.dtype, spec.allow_tf32)
    tile = gradient_tile(m, n, product, operands.left.dtype, target, adds=operands.into is not None)
    if layout is not None and not reason and (spec.family or _faster_family(layout, spec, (m, n), tile)) == "sm90":
        with_bias = not launch_sm90_gradient(builder, layout, spec, starts, (m, n))
        with_weight = False
    else:
        with_weight, with_bias = spec.out_dtype is not None, True
    if with_weight or (with_bias and spec.bias_side is not None):
        _launch_portable(builder, operands, layout, spec, (*starts, m, n), tile, trusted, with_weight)
    return builder.build()


def _faster_family(layout: LayoutSpec, spec: WeightGradientSpec, shape: tuple[int, int], tile: TileConfig) -> str:
    tokens = layout.num_tokens if spec.expected_tokens is None else spec.expected_tokens
    if tokens * layout.top_k < _SM90_ROWS * (spec.expected_experts or layout.num_experts):
        return "portable"
    portable, sm90 = (
        math.prod(-(-size // block) * block for size, block in zip(shape, blocks, strict=True))
        for blocks in ((tile.block_m, tile.block_n), SM90_GRADIENT_TILE)
    )
    return "sm90" if sm90 < 2 * portable else "portable"


def _launch_portable(
    builder: PlanBuilder,
    operands: WeightGradientOperands,
    layout: LayoutSpec | None,
    spec: WeightGradientSpec,
    columns: tuple[int, ...],
    tile: TileConfig,
    trusted: bool,
    with_weight: bool,
) -> None:
    """columns: first ones of left and right, M, N."""
    target, (left_start, right_start, m, n) = builder.target, columns
    groups = 1 if layout is None else layout.num_experts
    left, right = operands.left, operands.right
    product = _product(left.dtype, right.dtype, spec.allow_tf32)
    tiles_m, tiles_n = -(-m // tile.block_m), -(-n // tile.block_n)
    rows = left.shape[0] if layout is None else layout.capacity
    parts = 1
    if layout is None:
        steps = -(-rows // tile.block_k)
        programs = target.num_sms * max(1, _WARPS_PER_SM // tile.num_warps) if target.on_gpu else 2
        parts = max(1, min(programs // (tiles_m * tiles_n), steps // _STEPS_PER_PART))
    part_rows = -(-rows // parts)
    parts = max(1, -(-rows // max(1, part_rows)))
    if not with_weight:
        # Keep the parts and steps, and so the order of sums.
        if target.on_gpu:
            tile = dataclasses.replace(_BIAS_TILE, block_k=tile.block_k)
        tiles_m, tiles_n = (-(-m // tile.block_m), 1) if spec.bias_side == "left" else (1, -(-n // tile.block_n))
    in_parts, results = parts > 1, {name: name for name in ("d_weight", "d_bias") if builder.has(name)}
    if in_parts:
        sizes = {"d_weight": (m, n), "d_bias": (n if spec.bias_side == "right" else m,)}
        for name in results:
            results[name] = builder.scratch(f"{name}_parts", ArraySpec((parts, *sizes[name]), "float32"))
    by_slot = layout is not None and (spec.gather != ("row", "row") or operands.row_weight is not None or not trusted)
    layer_index, into = (None if in_parts else builder.optional(name) for name in ("layer_index", "into"))
    arguments = {
        **builder.pointers("left", "right", "row_weight", "row_mask"),
        **(passed(layer_index=layer_index) | builder.pointers(*LAYOUT_INPUTS) | passed(into=into)),
        **passed(d_weight=results["d_weight"] if with_weight else None, d_bias=results.get("d_bias")),
        **passed(num_rows=rows, num_slots=rows if layout is None else layout.num_slots, part_rows=part_rows),
        **passed(M=m, N=n, LEFT_STRIDE=row_stride("left", left), RIGHT_STRIDE=row_stride("right", right)),
        **passed(LEFT_START=left_start, RIGHT_START=right_start),
        **passed(LEFT_GATHER=spec.gather[0], RIGHT_GATHER=spec.gather[1]),
        **passed(TOP_K=1 if layout is None else layout.top_k, BY_SLOT=by_slot),
        **passed(BIAS_SIDE=spec.bias_side, PRODUCT=product, DRAINED=must_drain(product, target)),
        **passed(BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, BLOCK_K=tile.block_k),
    }
    grid = (tiles_m * tiles_n, parts if layout is None else groups, 1 if in_parts else spec.num_layers)
    builder.launch(WEIGHT_GRADIENT, grid, arguments, tile.num_warps, tile.num_stages)
    builder.sums(f"rows of a group in order, {tile.block_k} at a time, fp32, {product} products, in {parts} parts")
    if in_parts:
        for name, buffer in results.items():
            _sum_parts(builder, spec, name, buffer, parts)


def _sum_parts(builder: PlanBuilder, spec: WeightGradientSpec, name: str, parts: str, number: int) -> None:
    size = builder.spec(parts).size // number
    block = min(_SUM_BLOCK[builder.target.engine], padded(size))
    into = builder.optional("into") if name == "d_weight" else None
    arguments = passed(parts=parts, layer_index=builder.optional("layer_index"), into=into, result=name)
    arguments |= passed(num_parts=number, SIZE=size, BLOCK=block)
    builder.launch(SUM_PARTS, (-(-size // block), spec.num_layers), arguments)
    builder.sums(f"{name}: {number} parts in order, fp32")
