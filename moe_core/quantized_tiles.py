"""How a product with quantised weights is computed, and with which tiles: pure functions of sizes and formats."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from moe_core import dtypes
from moe_core.errors import InvalidInput
from moe_core.formats import Format, QuantizedTensor
from moe_core.matmul_hopper_fp8 import hopper_fp8_config, why_illegal_hopper_fp8, why_not_hopper_fp8
from moe_core.matmul_mixed import FAMILY as MIXED
from moe_core.matmul_mixed import mixed_config, why_illegal_mixed, why_not_mixed
from moe_core.matmul_stream import FAMILY as STREAM
from moe_core.matmul_stream import stream_config, why_illegal_stream
from moe_core.operands import MatmulOperands
from moe_core.specs import LayoutSpec, MatmulSpec, MatmulTuning
from moe_core.target import Target
from moe_core.tile_choice import TileChoice
from moe_core.tuning import TileConfig, shared_limit

FAMILY = "quantized"
#: Columns after which partial sums of fp8 products are added up in fp32.
_PROMOTED = 128
#: Mean rows per expert from which the hopper family multiplies fp8 with fp8: that of 16-bit products. Measured from 64
#: on, where it is 1.2 times as fast as the portable kernel.
_HOPPER_ROWS = 48
#: Mean rows per expert up to which weights stream into registers: measured with mxfp4 up to 4, where it is up to 1.1
#: times as fast as the mixed family, and at 8, where that one is 1.26 times as fast: experts with more than 8 rows
#: stream twice.
_STREAM_ROWS = 4
#: Rows per expert that one configuration for every batch is chosen for.
_INVARIANT_ROWS = 64.0


@dataclass(frozen=True)
class ProductMethod:
    """How a product is computed: what the kernel's DOT and SCALING say, and what blocks along the reduction must be.

    least_k: the shortest reduction of one instruction; group: columns a block must not cross (0: any block is fine).
    """

    dot: str
    scaling: str
    least_k: int
    group: int


@dataclass(frozen=True)
class ProductSizes:
    """d: reduction length; n: output columns; rows, groups: of the layout; buffers: 2 where gate and up are fused."""

    d: int
    n: int
    rows: int
    groups: int
    buffers: int

    @property
    def rows_per_group(self) -> float:
        return self.rows / max(1, min(self.groups, self.rows))


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
    if elements == {"e4m3"} and (target.kind != "cuda" or target.has_fp8):
        return ProductMethod("e4m3", scaling, 32, group)
    return ProductMethod("bfloat16", scaling, 16, group)


def _finest(*groups: int | None) -> int:
    """The largest power of two that divides every group of columns; 0 where all are whole axes."""
    found = math.gcd(*(group or 0 for group in groups))
    return found & -found


def product_sizes(operands: MatmulOperands, layout: LayoutSpec | None, spec: MatmulSpec) -> ProductSizes:
    """The sizes of a product of valid operands."""
    weight: QuantizedTensor = operands.weight
    outputs, d = weight.shape[-2:] if spec.weight_layout == "out_in" else weight.shape[:-3:-1]
    activation = spec.activation
    gated = activation is not None and activation.gated
    one_buffer = gated and operands.up is None
    rows = operands.x.shape[0] if layout is None else layout.num_slots
    groups = 1 if layout is None else layout.num_experts
    return ProductSizes(d, outputs // 2 if one_buffer else outputs, rows, groups, 2 if gated else 1)


def why_not_quantized(
    operands: MatmulOperands, layout: LayoutSpec | None, spec: MatmulSpec, target: Target
) -> str | None:
    """The reason the kernel cannot compute a product of these (valid) operands on a compiled target, None if it can."""
    if not isinstance(operands.weight, QuantizedTensor):
        return "its weight must be quantised, and only the rows are; quantise the weight too"
    if operands.weight.spec.tiling is not None:
        return why_not_mixed(operands, product_sizes(operands, layout, spec).n, layout, spec, target)
    method = product_method(operands, target)
    if method.group and method.group < method.least_k:
        return (
            f"one instruction multiplies {method.least_k} columns, and the power of two in groups of "
            f"{operands.weight.format.group_columns} is {method.group}"
        )
    return None


def why_illegal(
    config: TileConfig, operands: MatmulOperands, layout: LayoutSpec | None, spec: MatmulSpec, target: Target
) -> str | None:
    """The reason a configuration cannot run a product on the target, or None."""
    if operands.weight.spec.tiling is not None:
        if config.family == STREAM:
            return why_illegal_stream(config, operands.weight, spec)
        if config.family != MIXED:
            return f"family must be {STREAM!r} or {MIXED!r} for tiled weights, got {config.family!r}"
        return why_illegal_mixed(config, operands.weight, spec, target)
    method = product_method(operands, target)
    if config.family == "hopper":
        reason = why_not_hopper_fp8(operands, product_sizes(operands, layout, spec).n, layout, spec, target)
        if reason:
            return f"the hopper family cannot run this product: {reason}"
        return why_illegal_hopper_fp8(config, spec)
    if config.family != FAMILY:
        return f"family must be {FAMILY!r} for quantised weights, got {config.family!r}"
    for name, least in (("block_m", 16), ("block_n", 16), ("block_k", method.least_k)):
        side = getattr(config, name)
        if side < least or side & (side - 1):
            return f"{name} must be a power of two of at least {least} (tensor-core tile), got {side}"
    if method.group % config.block_k:
        return f"block_k must divide {method.group} columns, whose sums have scales of their own, got {config.block_k}"
    if method.dot == "e4m3" and config.block_k > _PROMOTED and not spec.fast_accumulate:
        return f"block_k must be at most {_PROMOTED} unless fast_accumulate, got {config.block_k}"
    if config.num_warps not in (4, 8, 16) and target.kind == "cuda":
        return f"num_warps must be 4, 8 or 16 (whole warp groups), got {config.num_warps}"
    if config.num_stages < 1 or config.group_m < 1:
        return f"num_stages and group_m must be at least 1, got {config.num_stages} and {config.group_m}"
    if target.kind != "cuda":
        return None
    buffers = 2 if spec.activation is not None and spec.activation.gated else 1
    tile = _stage_bytes(config, operands, buffers)
    if tile * config.num_stages > shared_limit(target.arch):
        return (
            f"{config.num_stages} stages of {tile} bytes exceed the {shared_limit(target.arch)} bytes of shared memory "
            f"of sm_{target.arch}"
        )
    accumulators = config.block_m * config.block_n * buffers // (32 * config.num_warps)
    if accumulators > 128:
        return f"{accumulators} accumulator registers per thread leave too few of 255 for operands and scales"
    return None


def _stage_bytes(config: TileConfig, operands: MatmulOperands, buffers: int) -> int:
    """Shared memory of one pipeline stage: the codes of a weight tile and the rows of x as they are stored."""
    x = operands.x
    x_bits = x.format.bits_per_element if isinstance(x, QuantizedTensor) else 8 * dtypes.itemsize(x.dtype)
    weight_bits = operands.weight.format.bits_per_element
    return config.block_k * (config.block_m * x_bits + buffers * config.block_n * weight_bits) // 8


def choose_quantized_tile(
    operands: MatmulOperands,
    layout: LayoutSpec | None,
    spec: MatmulSpec,
    target: Target,
    name: str = "tuning.config",
) -> TileChoice:
    """The configuration of a product: spec.tuning's, else that of the heuristics, which under batch_invariant do not
    look at the number of rows. Measured tables hold unquantised products and are not looked at.

    name: of the override in spec.tuning, for messages. Raises InvalidInput where it is illegal.
    """
    tuning = spec.tuning or MatmulTuning()
    if tuning.config is not None:
        reason = why_illegal(tuning.config, operands, layout, spec, target)
        if reason is not None:
            raise InvalidInput(
                f"{name} must be legal on {target}, got {tuning.config}: {reason}; give another, or None for one that "
                "is chosen"
            )
        return TileChoice(tuning.config, "given for this call")
    sizes = product_sizes(operands, layout, spec)
    rows = _INVARIANT_ROWS if tuning.batch_invariant else sizes.rows_per_group
    config = _heuristics(operands, spec, sizes, rows, target)
    fits_hopper = sizes.rows_per_group >= _HOPPER_ROWS and not tuning.batch_invariant
    if fits_hopper and not why_not_hopper_fp8(operands, sizes.n, layout, spec, target):
        config = hopper_fp8_config(spec)
    while (reason := why_illegal(config, operands, layout, spec, target)) is not None:
        # Only the pipeline's depth and the length of its steps can be too much for shared memory.
        assert config.num_stages > 1 or config.block_k > 32, reason
        if config.num_stages > 2:
            config = dataclasses.replace(config, num_stages=config.num_stages - 1)
        elif config.block_k > 32:
            config = dataclasses.replace(config, block_k=config.block_k // 2)
        else:
            config = dataclasses.replace(config, num_stages=1)
    source = "batch invariant: the same for every number of rows" if tuning.batch_invariant else None
    return TileChoice(config, source or f"heuristics: {rows:.1f} rows per expert, {operands.weight.format} weights")


def _heuristics(
    operands: MatmulOperands, spec: MatmulSpec, sizes: ProductSizes, rows: float, target: Target
) -> TileConfig:
    """By rows per expert and what is multiplied; block_n counts output columns, of which gated products have two."""
    if operands.weight.spec.tiling is not None:
        if rows <= _STREAM_ROWS:
            return stream_config(operands.weight, spec)
        return mixed_config(rows, operands.weight, spec, target)
    method = product_method(operands, target)
    block_k = min(128, _round_up_to_power_of_two(sizes.d, 32), method.group or 128)
    if operands.weight.layout == "in_out" and method.dot not in ("e4m3", "int8"):
        # Decoded columns of that layout are put into the tensor cores' order one by one: shorter steps need no spills.
        block_k = min(block_k, 32)
    if target.kind != "cuda":
        return TileConfig(32, min(64, _round_up_to_power_of_two(sizes.n, 16)), block_k, 4, 1, family=FAMILY)
    # Weight rows of a tile: 64, the least that Hopper's fast instruction takes, of which gate and up have half each.
    wide = 1 if sizes.buffers == 2 else 2
    if method.dot == "float32":
        config = TileConfig(16, 32 * wide, 32, 4, 2) if rows <= 16 else TileConfig(32, 32 * wide, 32, 8, 2)
    elif rows <= 24:
        # Twice the mean, so that few experts have rows for a second tile, which decodes the same weights again.
        config = TileConfig(16 if rows <= 10 else 32, 32 * wide, block_k, 4, 4)
    elif rows <= 100:
        config = TileConfig(64, 32 * wide, block_k, 4, 4)
    else:
        config = TileConfig(128, 64 * wide, block_k, 8, 3, 4)
    block_n = min(config.block_n, _round_up_to_power_of_two(sizes.n, 16))
    return dataclasses.replace(config, block_n=block_n, block_k=min(config.block_k, block_k), family=FAMILY)


def _round_up_to_power_of_two(value: int, least: int) -> int:
    return max(least, 1 << (max(value, 1) - 1).bit_length())
