"""How a product with quantised weights is multiplied, and with which tiles: pure functions of sizes and formats."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from moe_core.base import dtypes
from moe_core.base.sizes import padded
from moe_core.base.target import Target
from moe_core.formats import Format, QuantizedTensor
from moe_core.ops.matmul import tile_rules as rules
from moe_core.ops.matmul.family import Family
from moe_core.ops.matmul.problem import QUANTISED, MatmulProblem
from moe_core.specs.operands import MatmulOperands
from moe_core.specs.tile import TileConfig

#: Columns after which partial sums of fp8 products are added up in fp32.
_PROMOTED = 128


@dataclass(frozen=True)
class ProductMethod:
    """How a product is computed: what the kernel's DOT and SCALING say, and what blocks along the reduction must be.

    least_k: the shortest reduction of one instruction; group: columns a block must not cross (0: any block is fine).
    """

    dot: str
    scaling: str
    least_k: int
    group: int


def product_method(operands: MatmulOperands, target: Target) -> ProductMethod:
    """How a product of valid operands is computed on a compiled target."""
    weights: Format = operands.weight.format
    x = operands.x
    if not isinstance(x, QuantizedTensor):
        # Powers of two leave float16's range, so its products are scaled in fp32.
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
    """The largest power of two that divides every group of columns; 0 where all are whole axes."""
    found = math.gcd(*(group or 0 for group in groups))
    return found & -found


class QuantizedTiles(Family):
    """Quantised weights, and rows where asked, on every compiled target."""

    name, weights = "quantized", QUANTISED

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


def _stage_bytes(config: TileConfig, problem: MatmulProblem) -> int:
    """Shared memory of one pipeline stage: the codes of a weight tile and the rows of x as they are stored."""
    x = problem.operands.x
    x_bits = x.format.bits_per_element if isinstance(x, QuantizedTensor) else 8 * dtypes.itemsize(x.dtype)
    weight_bits = problem.operands.weight.format.bits_per_element
    return config.block_k * (config.block_m * x_bits + problem.buffers * config.block_n * weight_bits) // 8


def _heuristics(problem: MatmulProblem) -> TileConfig:
    """By rows per expert and what is multiplied; block_n counts output columns, of which gated products have two."""
    rows = rules.INVARIANT_ROWS if problem.batch_invariant else problem.rows_per_group
    method = product_method(problem.operands, problem.target)
    block_k = min(128, padded(problem.d, 32), method.group or 128)
    if problem.operands.weight.layout == "in_out" and method.dot not in ("e4m3", "int8"):
        # Decoded columns of that layout are put into the tensor cores' order one by one: shorter steps need no spills.
        block_k = min(block_k, 32)
    if not problem.target.on_gpu:
        return TileConfig(32, min(64, padded(problem.n)), block_k, 4, 1, family=QuantizedTiles.name)
    # Weight rows of a tile: 64, the least that Hopper's fast instruction takes, of which gate and up have half each.
    wide = 1 if problem.gated else 2
    if method.dot == "float32":
        config = TileConfig(16, 32 * wide, 32, 4, 2) if rows <= 16 else TileConfig(32, 32 * wide, 32, 8, 2)
    elif rows <= 24:
        # Twice the mean, so that few experts have rows for a second tile, which decodes the same weights again.
        config = TileConfig(16 if rows <= 10 else 32, 32 * wide, block_k, 4, 4)
    elif rows <= 100:
        config = TileConfig(64, 32 * wide, block_k, 4, 4)
    else:
        config = TileConfig(128, 64 * wide, block_k, 8, 3, 4)
    block_n = min(config.block_n, padded(problem.n))
    return dataclasses.replace(
        config, block_n=block_n, block_k=min(config.block_k, block_k), family=QuantizedTiles.name
    )
