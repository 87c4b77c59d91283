"""Planning of the grouped matmul for Hopper whose weights are decoded in registers (`kernels.hopper_mixed`)."""

from __future__ import annotations

import dataclasses
import math

from moe_core import dtypes
from moe_core.activation import row_stride
from moe_core.arrays import ArraySpec
from moe_core.formats import QuantizedTensor
from moe_core.formats.tiling import BLOCK_ROWS, BLOCK_VALUES, SIDE_ROWS, block_of
from moe_core.matmul_operands import fused_constants
from moe_core.operands import MatmulOperands
from moe_core.plan import Argument, Constant, PlanBuilder, Pointer, Scalar, TensorMap
from moe_core.specs import INT32_LIMIT, LayoutSpec, MatmulSpec
from moe_core.target import Target
from moe_core.tuning import TileConfig, shared_limit

FAMILY = "mixed"
_ARCH = 90
#: Bytes of a line of codes, and lines of a block.
_LINE = 128
_LINES = BLOCK_VALUES // _LINE
#: Columns of x that lie together in shared memory, elements that TMA and cp.async take at a time, and tokens that one
#: part of the epilogue stores.
_DEPTH, _VECTOR, _PART = 64, 8, 32
#: Tokens of the tiles whose block has a multiprocessor for itself, of four blocks of weight rows and of two, and their
#: most columns of the reduction per stage; of the others two share one.
_LARGE, _TALL, _LARGE_DEPTH = 128, 256, 128
#: Tokens that tiles of twice as many and more multiply where they have no more rows.
_NARROW = 32
#: Rows of x that a tall tile loads together, where one of them exists, and elements that a part of its epilogue stores.
_CHUNK, _TALL_PART = 64, 1024
#: What the hardware keeps of a multiprocessor's shared memory for each block.
_RESERVED = 1024
#: Registers of a thread at launch where two blocks share a multiprocessor.
_SHARED_REGISTERS = 80
#: Stages of two blocks that are worth having: with fewer, stages have one.
_LEAST_STAGES = 3
#: Mean rows per expert above which, and up to which, tiles of mxfp4 weights are tall, of products without gate and of
#: gated ones; measured with whole forwards at means of 32, 64, 128, 256 and 512 (docs/performance.md). Integers, which
#: have not been measured, get none by themselves.
_TALL_ROWS = {False: (64, math.inf), True: (96, 192)}
#: Most mean rows per expert of a tile's tokens, and its columns of the reduction per stage, at most two blocks; above:
#: the largest tile. Room for more rows than the mean; measured with mxfp4 at means of 8, 32 and 128
#: (docs/performance.md), not in between.
_HEIGHTS = ((10, 16, 256), (24, 32, 256), (48, 64, 128))


def why_not_mixed(
    operands: MatmulOperands, n: int, layout: LayoutSpec | None, spec: MatmulSpec, target: Target
) -> str | None:
    """The reason a (valid) product with a tiled weight has no kernel, None if it has. n: output columns."""
    x, weight = operands.x, operands.weight
    activation = spec.activation
    if target.kind != "cuda" or target.arch != _ARCH:
        return f"tiled weights are read by kernels for sm_{_ARCH}, got {target}; leave them as they are"
    if layout is None:
        return "the kernels for tiled weights multiply by expert, and this product is dense; restore the weight"
    if isinstance(x, QuantizedTensor) or x.dtype != "bfloat16" or (spec.out_dtype or x.dtype) != x.dtype:
        found = x.format.name if isinstance(x, QuantizedTensor) else f"{x.dtype} to {spec.out_dtype or x.dtype}"
        return f"tiled weights are multiplied with bfloat16 rows, to bfloat16, got {found}; restore the weight"
    if x.shape[1] % _VECTOR or row_stride("x", x) % _VECTOR or n % _VECTOR:
        return (
            f"rows of x and y must start at multiples of 16 bytes, got {x.shape[1]} columns of x, {row_stride('x', x)} "
            f"elements from row to row, and {n} columns of y; restore the weight"
        )
    if activation is not None and activation.name == "gelu":
        return "gelu's erf does not fit into the kernels' registers; use gelu_tanh, or restore the weight"
    if weight.values.size // _LINE >= INT32_LIMIT:
        return f"the kernels count lines of {_LINE} bytes in 32 bits, got {weight.values.size} bytes of codes"
    return None


def why_illegal_mixed(config: TileConfig, weight: QuantizedTensor, spec: MatmulSpec, target: Target) -> str | None:
    """The reason a configuration of the family cannot run a product with a tiled weight, or None."""
    width, columns = block_width(spec), block_of(weight.format).columns
    heights = [height for _, height, _ in _HEIGHTS]
    if config.block_m not in (*heights, _LARGE, _TALL):
        return f"block_m must be one of {', '.join(map(str, (*heights, _LARGE, _TALL)))}, got {config.block_m}"
    blocks = _blocks_of(config.block_m)
    if config.block_n != blocks * width:
        return f"block_n must be {blocks * width}, {blocks} blocks of weight rows, got {config.block_n}"
    depths = [depth for depth in (columns, 2 * columns) if config.block_m < _LARGE or depth <= _LARGE_DEPTH]
    if config.block_k not in depths:
        return f"block_k must be {' or '.join(map(str, depths))}, got {config.block_k}"
    if config.num_warps != 4 or config.group_m < 1 or config.num_stages < 1:
        return (
            f"num_warps must be 4, those of a consumer, num_stages and group_m at least 1, got {config.num_warps}, "
            f"{config.num_stages} and {config.group_m}"
        )
    if config.block_m == _TALL and config.num_stages < 2:
        return f"num_stages must be at least 2: tiles of {_TALL} rows decode a stage ahead, got {config.num_stages}"
    if (most := _most_stages(config, weight, spec, target)) < config.num_stages:
        return f"num_stages must be at most {most} for shared memory, got {config.num_stages}"
    return None


def mixed_config(rows: float, weight: QuantizedTensor, spec: MatmulSpec, target: Target) -> TileConfig:
    """The configuration for so many mean rows per expert, with as many stages as there is room for."""
    found = ((height, depth) for most, height, depth in _HEIGHTS if rows <= most)
    above, most = _TALL_ROWS[spec.activation is not None and spec.activation.gated]
    tall = weight.format.has_e8m0_scales and above < rows <= most
    height, depth = next(found, (_TALL if tall else _LARGE, _LARGE_DEPTH))
    columns = block_of(weight.format).columns
    config = TileConfig(height, _blocks_of(height) * block_width(spec), min(depth, 2 * columns), 4, 1, 8, FAMILY)
    if _most_stages(config, weight, spec, target) < _LEAST_STAGES:
        config = dataclasses.replace(config, block_k=columns)
    return dataclasses.replace(config, num_stages=_most_stages(config, weight, spec, target))


def block_width(spec: MatmulSpec) -> int:
    """Output columns of a block of weight rows."""
    return SIDE_ROWS if spec.activation is not None and spec.activation.gated else BLOCK_ROWS


def _blocks_of(block_m: int) -> int:
    """Blocks of weight rows of a tile."""
    return 4 if block_m == _LARGE else 2


def _blocks(config: TileConfig, spec: MatmulSpec) -> int:
    return config.block_n // block_width(spec)


def _most_stages(config: TileConfig, weight: QuantizedTensor, spec: MatmulSpec, target: Target) -> int:
    """Stages of a pipeline in the shared memory that a block of the grid has."""
    limit = shared_limit(target.arch)
    if config.block_m < _LARGE:
        limit = (limit + _RESERVED) // 2 - _RESERVED
    arrays = [array for array in (weight.scales, weight.zero_points) if array is not None]
    # Of a block: its codes, and a record of each other array.
    held = BLOCK_VALUES + sum(array.shape[-1] * dtypes.itemsize(array.dtype) for array in arrays)
    steps = config.block_k // block_of(weight.format).columns
    stage = steps * _blocks(config, spec) * held + config.block_m * config.block_k * 2
    # Two announced tiles with slots and weights, both consumers' results, and barriers.
    part = _TALL_PART if config.block_m == _TALL else min(config.block_m, _PART) * block_width(spec)
    rest = 2 * 8 * config.block_m + 2 * part * 2 + 512
    return (limit - rest) // stage


def tiled_constants(operands: MatmulOperands, n: int, layout: LayoutSpec, spec: MatmulSpec) -> dict[str, Constant]:
    """What the kernels for tiled weights are compiled for, whatever their tiles. n: output columns."""
    x, weight, bias = operands.x, operands.weight, operands.bias
    blocks, steps = weight.values.shape[-3:-1]
    block, stacked = block_of(weight.format), operands.layer is not None
    return {
        "D": Constant(x.shape[1]),
        "N": Constant(n),
        "WEIGHT_N": Constant(weight.shape[-2]),
        "STEPS": Constant(steps),
        "BLOCKS": Constant(blocks),
        "NUM_EXPERTS": Constant(layout.num_experts),
        "NUM_LAYERS": Constant(weight.shape[0] if stacked else 1),
        "X_STRIDE": Constant(row_stride("x", x)),
        "BIAS_LAYER_STRIDE": Constant(bias.stride[0] if bias is not None and stacked else 0),
        "TOP_K": Constant(layout.top_k),
        **fused_constants(spec),
        # Signed codes of 8 bits are tiled as unsigned ones with the zero point 128.
        "ELEMENT": Constant("uint8" if weight.format.element == "int8" else weight.format.element),
        "COLUMNS": Constant(block.columns),
        "GROUPS": Constant(block.groups),
        "REPEAT": Constant(max(1, steps) if block.repeat is None else block.repeat),
    }


def launch_mixed(
    builder: PlanBuilder, operands: MatmulOperands, n: int, layout: LayoutSpec, spec: MatmulSpec, config: TileConfig,
    *, counter: int,
) -> None:  # fmt: skip
    """Add the launch that computes y, n columns. Buffers by the names of `plan_matmul_ogs`, and `tile_counters`, whose
    `counter` must be 0 then."""
    x, weight = builder.spec("x"), operands.weight
    d, stride = x.shape[1], row_stride("x", x)
    values: ArraySpec = weight.values
    blocks = _blocks(config, spec)
    large, gathered = config.block_m >= _LARGE, spec.gather != "row"
    num_blocks = layout.max_blocks(config.block_m)
    tiles = num_blocks * -(-n // config.block_n)
    most = builder.target.num_sms * (1 if large else 2)

    def optional(name: str) -> Pointer | Constant:
        return Pointer(name) if builder.has(name) else Constant(None)

    many = config.block_m == _LARGE or (gathered and config.block_m > 16)
    box = _CHUNK if config.block_m == _TALL else config.block_m
    x_map = TensorMap("x", (x.shape[0], d), stride, (box, _DEPTH))
    deep = config.block_k // block_of(weight.format).columns
    arguments: dict[str, Argument] = {
        "x": Pointer("x"),
        "x_map": Constant(None) if gathered else x_map,
        "weight_map": TensorMap("weight.values", (values.size // _LINE, _LINE), _LINE, (deep * _LINES, _LINE)),
        "scales": Pointer("weight.scales"),
        "zero_points": optional("weight.zero_points"),
        **{name: optional(name) for name in ("bias", "row_weight", "layer")},
        **{name: Pointer(name) for name in ("group_sizes", "group_start", "slot_of_row", "schedule")},
        # Blocks that have one tile each need not ask for it.
        "counters": Pointer("tile_counters") if tiles > most else Constant(None),
        "y": Pointer("y"),
        "num_blocks": Scalar(num_blocks),
        "num_rows": Scalar(layout.capacity),
        "num_slots": Scalar(layout.num_slots),
        **tiled_constants(operands, n, layout, spec),
        "COUNTER": Constant(counter if tiles > most else None),
        "STAGES": Constant(config.num_stages),
        "BLOCK_M": Constant(config.block_m),
        "PAIRS": Constant(blocks),
        "DEEP": Constant(deep),
        # One warp issues what little a small tile or TMA asks for soonest; gathering many rows takes more threads.
        "PRODUCER_WARPS": Constant(4 if many else 1),
        "REGISTERS": Constant(None if large else _SHARED_REGISTERS),
        "GROUP_M": Constant(config.group_m),
        "OVERLAP": Constant(None),
    }
    builder.launch("hopper_mixed:matmul_mixed", (min(tiles, most),), arguments, config.num_warps, 1)
    tokens = f"{config.block_m}"
    if config.block_m >= 2 * _NARROW:
        tokens = f"{_NARROW} {'to' if config.block_m == _TALL else 'or'} {tokens}"
    builder.sums(
        f"k in blocks of 16, in order, fp32 accumulator, wgmma of 64 weight rows and {tokens} tokens; no split"
    )
