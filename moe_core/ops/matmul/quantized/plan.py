"""Planning of the grouped matmul with quantised weights (`kernel.matmul_quantized`)."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from moe_core.base import ArraySpec, Target, dtypes, padded, row_stride
from moe_core.formats import Format, QuantizedTensor
from moe_core.ops.lora.tail import tail_arguments
from moe_core.ops.matmul import arguments as common
from moe_core.ops.matmul import tile_rules as rules
from moe_core.ops.matmul.family import Family
from moe_core.ops.matmul.problem import MAXIMA, QUANTISED, MatmulProblem
from moe_core.ops.matmul.quantized import kernel as kernels
from moe_core.plan import Argument, PlanBuilder, Pointer, declare_kernel, passed
from moe_core.specs import MatmulOperands, TileConfig

ORDER_COLUMNS = declare_kernel(kernels.order_columns)
MATMUL_QUANTIZED = declare_kernel(kernels.matmul_quantized, pdl="tail")

#: (order, columns that hold a thread's share of decoded weights) by elements per byte.
_ORDERS = {2: ("words", 128), 1: ("bytes", 64)}
#: From this many tokens per tile a separate launch reorders x into a buffer of this name.
_ORDERED_ROWS, _ORDERED = 64, "ordered_x"
_ORDER_ROWS = 32
#: Rows of packed weights are read 16 bytes at a time.
_WORD_COLUMNS = 32
#: From this many tokens per tile they are the left operand, unless weights decode into registers.
_TOKENS_FIRST_ROWS = 64

#: Columns between additions of partial fp8 sums into the fp32 sum.
_PROMOTED = 128
#: Rows from which tiles of fp8 with one scale were measured: 256 columns and four stages take 0.92 and 0.93 of the time
#: of 128 columns at 2 and 8 rows per expert, six stages of 128 take 0.95.
_MEASURED_ROWS = 256


@dataclass(frozen=True)
class ProductMethod:
    """DOT, SCALING, least_k, the shortest reduction of one instruction, and group, columns that no block crosses."""

    dot: str
    scaling: str
    least_k: int
    group: int


def product_method(operands: MatmulOperands, target: Target) -> ProductMethod:
    weights: Format = operands.weight.format
    x = operands.x
    if not isinstance(x, QuantizedTensor):
        # Powers of two exceed float16's range, so its products are scaled in fp32.
        if weights.has_e8m0_scales and x.dtype == "float16":
            return ProductMethod("float16", "per_block", 16, _finest(weights.group_columns))
        return ProductMethod(x.dtype, "into_weight", 16, 0)
    if weights.has_e8m0_scales and x.format.has_e8m0_scales:
        return ProductMethod("bfloat16", "into_weight", 16, 0)
    whole = weights.group_columns is None and x.format.group_columns is None
    scaling = "at_end" if whole else "per_block"
    elements = {weights.element, x.format.element}
    group = _finest(weights.group_columns, x.format.group_columns)
    if elements == {"int8"}:
        return ProductMethod("int8", scaling, 32, group)
    if elements == {"e4m3"} and (not target.on_gpu or target.has_fp8):
        return ProductMethod("e4m3", scaling, 32, group)
    return ProductMethod("bfloat16", scaling, 16, group)


def _finest(*groups: int | None) -> int:
    """The largest power of two that divides every group, 0 if all are None."""
    common = math.gcd(*(group or 0 for group in groups))
    return common & -common


class _Quantized(Family):
    name, weights, finds_maxima, adds_tail = "quantized", QUANTISED, True, True

    def why_not(self, problem: MatmulProblem) -> str | None:
        method = product_method(problem.operands, problem.target)
        if method.group and method.group < method.least_k:
            return (
                f"one instruction multiplies {method.least_k} columns, and the power of two in groups of "
                f"{problem.operands.weight.format.group_columns} is {method.group}"
            )
        return None

    def tile(self, problem: MatmulProblem) -> TileConfig:
        return rules.shrunk(_heuristics(problem), lambda config: self.why_illegal(config, problem), 32)

    def why_illegal(self, config: TileConfig, problem: MatmulProblem) -> str | None:
        target, method = problem.target, product_method(problem.operands, problem.target)
        if (reason := rules.why_not_sides(config, method.least_k)) is not None:
            return reason
        if method.group % config.block_k:
            return (
                f"block_k must divide {method.group} columns, whose sums have scales of their own, got {config.block_k}"
            )
        if method.dot == "e4m3" and config.block_k > _PROMOTED and not problem.spec.fast_accumulate:
            return f"block_k must be at most {_PROMOTED} unless fast_accumulate, got {config.block_k}"
        if (reason := rules.why_not_warps(config, target) or rules.why_not_counts(config)) is not None:
            return reason
        if not target.on_gpu:
            return None
        if (reason := rules.why_no_room(config, _stage_bytes(config, problem), target)) is not None:
            return reason
        if (held := rules.accumulators(config, target, problem.buffers)) > 128:
            return f"{held} accumulator registers per thread leave too few of 255 for operands and scales"
        return None

    def launch(self, builder: PlanBuilder, problem: MatmulProblem, config: TileConfig, stage: int | None) -> None:
        method = product_method(problem.operands, builder.target)
        order = _order(config, problem.operands, method, problem.d)
        x_side = _x_arguments(problem.operands.x)
        if order is not None and config.block_m >= _ORDERED_ROWS:
            x_side = _order_columns(builder, x_side, method, order, config, problem.d)
        arguments = _arguments(builder, problem, config, x_side, order)
        builder.launch(MATMUL_QUANTIZED, (problem.tiles(config),), arguments, config.num_warps, config.num_stages)
        within = f", a block in the order {order}" if order is not None else ""
        builder.sums(
            f"k in blocks of {config.block_k}, of {method.dot} products, scales {method.scaling}{within}; no split"
        )


QUANTIZED = _Quantized()


def _stage_bytes(config: TileConfig, problem: MatmulProblem) -> int:
    x = problem.operands.x
    x_bits = x.format.bits_per_element if isinstance(x, QuantizedTensor) else 8 * dtypes.itemsize(x.dtype)
    weight_bits = problem.operands.weight.format.bits_per_element
    return config.block_k * (config.block_m * x_bits + problem.buffers * config.block_n * weight_bits) // 8


def _heuristics(problem: MatmulProblem) -> TileConfig:
    """block_n counts output columns, two weight rows each if gated."""
    rows = rules.INVARIANT_ROWS if problem.batch_invariant else problem.rows_per_group
    method = product_method(problem.operands, problem.target)
    block_k = min(128, padded(problem.d, 32), method.group or 128)
    if problem.operands.weight.layout == "in_out" and method.dot not in ("e4m3", "int8"):
        # Decoded columns in that layout are reordered one by one; shorter steps avoid spills.
        block_k = min(block_k, 32)
    if not problem.target.on_gpu:
        return TileConfig(32, min(64, padded(problem.n)), block_k, 4, 1, family=_Quantized.name)
    # 64 weight rows are the minimum of Hopper's wgmma. Gate and up have half each.
    wide = 1 if problem.gated else 2
    if method.dot == "float32":
        config = TileConfig(16, 32 * wide, 32, 4, 2) if rows <= 16 else TileConfig(32, 32 * wide, 32, 8, 2)
    elif rows <= 24:
        # Twice the mean: a second tile would decode the same weights again.
        config = TileConfig(16 if rows <= 10 else 32, 32 * wide, block_k, 4, 4)
        if (method.dot, method.scaling) == ("e4m3", "at_end") and problem.rows >= _MEASURED_ROWS:
            # More bytes of a line in flight. Sums that are promoted allow no more than 128 columns.
            block_k = min(256 if problem.spec.fast_accumulate else 128, padded(problem.d, 32))
            config = dataclasses.replace(config, block_k=block_k, num_stages=4 if block_k > 128 else 6)
    elif rows <= 100:
        config = TileConfig(64, 32 * wide, block_k, 4, 4)
    else:
        config = TileConfig(128, 64 * wide, block_k, 8, 3, 4)
    block_n = min(config.block_n, padded(problem.n))
    return dataclasses.replace(config, block_n=block_n, block_k=min(config.block_k, block_k), family=_Quantized.name)


def _order(config: TileConfig, operands: MatmulOperands, method: ProductMethod, d: int) -> str | None:
    weights: Format = operands.weight.format
    if method.dot in ("e4m3", "int8") or operands.weight.layout != "out_in":
        return None
    name, unit = _ORDERS[weights.own_element.per_byte]
    if config.block_k % unit:
        return None
    if name == "words":
        group = weights.group_columns or config.block_k
        one_scale_a_word = group % config.block_k == 0 or (group % 8 == 0 and config.block_k % group == 0)
        if d % _WORD_COLUMNS or not one_scale_a_word:
            return None
    return name


def _is_uniform(problem: MatmulProblem, config: TileConfig, method: ProductMethod) -> bool:
    """True if every tile's weight rows share scales, gate and up separately."""
    group_rows, gate_layout = problem.operands.weight.format.group_rows, problem.gate_layout
    if method.scaling == "into_weight":
        return False
    if group_rows is None:
        return True
    if gate_layout == "halves" and problem.n % group_rows:
        return False
    return group_rows % (2 * config.block_n if gate_layout == "interleaved" else config.block_n) == 0


def _x_arguments(x: ArraySpec | QuantizedTensor) -> dict[str, Argument]:
    if not isinstance(x, QuantizedTensor):
        return passed(x="x", x_scales=None, ELEMENT=None, STRIDE=row_stride("x", x), SCALE_STRIDE=0, GROUP=0)
    scale_stride, group = x.scales.shape[1] if x.format.group_rows else 0, x.format.group_columns or 0
    arrays = passed(x="x.values", x_scales="x.scales", ELEMENT=x.format.element, STRIDE=row_stride("x", x.values))
    return arrays | passed(SCALE_STRIDE=scale_stride, GROUP=group)


def _order_columns(
    builder: PlanBuilder, x_side: dict[str, Argument], method: ProductMethod, order: str, config: TileConfig, d: int
) -> dict[str, Argument]:
    x = x_side["x"]
    assert isinstance(x, Pointer)
    rows, width = builder.spec(x.buffer).shape[0], -(-d // config.block_k) * config.block_k
    into_weight = method.scaling == "into_weight"
    builder.scratch(_ORDERED, ArraySpec((rows, width), method.dot))
    arguments = {
        **passed(x=x, x_scales=x_side["x_scales"] if into_weight else None, ordered_x=_ORDERED, num_rows=rows, D=d),
        **{name: x_side[name] for name in ("ELEMENT", "STRIDE", "SCALE_STRIDE", "GROUP")},
        **passed(SCALING=method.scaling, ORDER=order, WIDTH=width, BLOCK_M=_ORDER_ROWS, BLOCK_K=config.block_k),
    }
    grid = (-(-rows // _ORDER_ROWS), width // config.block_k)
    builder.launch(ORDER_COLUMNS, grid, arguments, 4, 1)
    scales_go = passed(x_scales=None) if into_weight else {}
    return x_side | passed(x=_ORDERED, ELEMENT=None, STRIDE=width) | scales_go


def _arguments(
    builder: PlanBuilder, problem: MatmulProblem, config: TileConfig, x_side: dict[str, Argument], order: str | None
) -> dict[str, Argument]:
    weight: QuantizedTensor = problem.operands.weight
    spec, method = problem.spec, product_method(problem.operands, builder.target)
    ordered = x_side["x"] == Pointer(_ORDERED)
    columns = builder.spec(_ORDERED).shape[1] if ordered else problem.d
    codes = method.dot in ("e4m3", "int8")
    tokens_first = codes and config.block_m >= _TOKENS_FIRST_ROWS
    drained = builder.target.is_sm90 and not codes and method.scaling != "per_block"
    return {
        **(passed(x=x_side["x"], x_scales=x_side["x_scales"]) | common.quantized_pointers(builder)),
        **builder.pointers("bias", "up_bias", "row_weight", "layer_index", *common.SCHEDULED_INPUTS, "y", "pre"),
        **(passed(y=common.result(builder)) | builder.pointers("maxima")),
        **(common.row_counts(problem, config) | common.size_constants(problem)),
        **passed(X_ELEMENT=x_side["ELEMENT"], X_COLUMNS=columns, X_STRIDE=x_side["STRIDE"]),
        **passed(X_SCALE_STRIDE=x_side["SCALE_STRIDE"], X_GROUP=x_side["GROUP"], X_ORDER=None if ordered else order),
        **(common.format_constants(weight) | common.quantized_strides(weight)),
        **(common.bias_strides(problem.operands) | common.fused_constants(problem)),
        **passed(DOT=method.dot, SCALING=method.scaling, UNIFORM=_is_uniform(problem, config, method)),
        **passed(ORDER=order, INPUT_PRECISION="tf32" if spec.allow_tf32 and method.dot == "float32" else "ieee"),
        **passed(FAST_ACCUMULATE=spec.fast_accumulate, TOKENS_FIRST=tokens_first, DRAINED=drained),
        **passed(MAXIMA=MAXIMA if problem.finds_maxima else 0),
        **(common.block_constants(config) | passed(PDL=None)),
        # Of 64 ranks a step takes longer than two of 32 (docs/notebook/forward-matmul.md).
        **tail_arguments(builder, problem.tail, config, problem.gated, most=32),
    }
