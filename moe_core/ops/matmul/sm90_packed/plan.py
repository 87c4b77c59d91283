"""Planning of Hopper's grouped matmul that decodes weights in registers (`kernels.matmul`)."""

from __future__ import annotations

import dataclasses
import math

from moe_core.base import INT32_LIMIT, ArraySpec, Target, dtypes, row_stride
from moe_core.formats import QuantizedTensor
from moe_core.formats.tiling import BLOCK_ROWS, BLOCK_VALUES, SIDE_ROWS, block_of
from moe_core.ops.lora.tail import tail_arguments
from moe_core.ops.matmul.arguments import SCHEDULED_INPUTS, bias_strides, fused_constants, result, row_counts
from moe_core.ops.matmul.family import Family
from moe_core.ops.matmul.problem import PREPACKED, MatmulProblem
from moe_core.ops.matmul.sm90_packed.kernels import matmul as kernels
from moe_core.ops.matmul.tile_rules import INVARIANT_ROWS
from moe_core.plan import Argument, PlanBuilder, TensorMap, declare_kernel, passed
from moe_core.specs import MatmulSpec
from moe_core.specs.tile import TileConfig, shared_limit

MATMUL_MIXED_INPUT = declare_kernel(kernels.matmul_mixed_input, pdl="start", prepacked_weight="weight_map")

#: Adjacent columns of x in shared memory.
_DEPTH = 64
#: Tiles of at least twice these tokens multiply only this number if they have no more rows.
_NARROW = 32
#: Rows of x that a tall tile loads together if one of them exists.
_CHUNK = 64
#: Registers per thread at launch if two blocks share a multiprocessor.
_SHARED_REGISTERS = 80

MIXED_INPUT_NAME = "mixed_input"
#: Bytes per line of codes, and lines per block.
LINE, _LINES = 128, BLOCK_VALUES // 128
#: Elements that TMA and cp.async move at a time, and tokens per part of the epilogue.
_VECTOR, _PART = 8, 32
#: Tokens of tiles with four (large) or two (tall) blocks of weight rows, one per multiprocessor (others: two), and
#: their most reduction columns per stage.
LARGE, TALL, _LARGE_DEPTH = 128, 256, 128
_TALL_PART = 1024
#: Shared memory that the hardware reserves per block.
_RESERVED = 1024
#: With fewer stages of two blocks, stages have one block.
_LEAST_STAGES = 3
#: Mean rows per expert (above, up to) with tall tiles for mxfp4, without and with a gate. Measured at means of 32 to
#: 512 (docs/notebook/quantised.md). Integer weights were not measured.
_TALL_ROWS = {False: (64, math.inf), True: (96, 192)}
#: (most mean rows per expert, tokens of a tile, most reduction columns per stage); above, the largest tile. Measured
#: with mxfp4 at 8, 32 and 128 only (docs/notebook/quantised.md).
_HEIGHTS = ((10, 16, 256), (24, 32, 256), (48, 64, 128))


def why_not(problem: MatmulProblem) -> str | None:
    x, weight, n, spec = problem.operands.x, problem.operands.weight, problem.n, problem.spec
    target = problem.target
    if not target.is_sm90:
        return f"prepacked weights are read by kernels for sm_90, got {target}; leave them as they are"
    if problem.layout is None:
        return "the kernels for prepacked weights multiply by expert, and this product is dense; restore the weight"
    if isinstance(x, QuantizedTensor) or x.dtype != "bfloat16" or (spec.out_dtype or x.dtype) != x.dtype:
        got = x.format.name if isinstance(x, QuantizedTensor) else f"{x.dtype} to {spec.out_dtype or x.dtype}"
        return f"prepacked weights are multiplied with bfloat16 rows, to bfloat16, got {got}; restore the weight"
    if x.shape[1] % _VECTOR or row_stride("x", x) % _VECTOR or n % _VECTOR:
        return (
            f"rows of x and y must start at multiples of 16 bytes, got {x.shape[1]} columns of x, {row_stride('x', x)} "
            f"elements from row to row, and {n} columns of y; restore the weight"
        )
    if spec.activation is not None and spec.activation.name == "gelu":
        return "gelu's erf does not fit into the kernels' registers; use gelu_tanh, or restore the weight"
    if problem.tail is not None and problem.tail.adapters.dropout.mask:
        return "dropout masks what a tail of adapters adds, which would take a second sum; restore the weight"
    if weight.values.size // LINE >= INT32_LIMIT:
        return f"the kernels count lines of {LINE} bytes in 32 bits, got {weight.values.size} bytes of codes"
    return None


def why_illegal_mixed_input(
    config: TileConfig, weight: QuantizedTensor, spec: MatmulSpec, target: Target
) -> str | None:
    width, columns = block_width(spec), block_of(weight.format).columns
    heights = [height for _, height, _ in _HEIGHTS]
    if config.block_m not in (*heights, LARGE, TALL):
        return f"block_m must be one of {', '.join(map(str, (*heights, LARGE, TALL)))}, got {config.block_m}"
    blocks = _blocks_of(config.block_m)
    if config.block_n != blocks * width:
        return f"block_n must be {blocks * width}, {blocks} blocks of weight rows, got {config.block_n}"
    depths = [depth for depth in (columns, 2 * columns) if config.block_m < LARGE or depth <= _LARGE_DEPTH]
    if config.block_k not in depths:
        return f"block_k must be {' or '.join(map(str, depths))}, got {config.block_k}"
    if config.num_warps != 4 or config.group_m < 1 or config.num_stages < 1:
        return (
            f"num_warps must be 4, those of a consumer, num_stages and group_m at least 1, got {config.num_warps}, "
            f"{config.num_stages} and {config.group_m}"
        )
    if config.block_m == TALL and config.num_stages < 2:
        return f"num_stages must be at least 2: tiles of {TALL} rows decode a stage ahead, got {config.num_stages}"
    if (most := _most_stages(config, weight, spec, target)) < config.num_stages:
        return f"num_stages must be at most {most} for shared memory, got {config.num_stages}"
    return None


def mixed_input_config(rows: float, weight: QuantizedTensor, spec: MatmulSpec, target: Target) -> TileConfig:
    choices = ((height, depth) for most, height, depth in _HEIGHTS if rows <= most)
    above, most = _TALL_ROWS[spec.activation is not None and spec.activation.gated]
    tall = weight.format.has_e8m0_scales and above < rows <= most
    height, depth = next(choices, (TALL if tall else LARGE, _LARGE_DEPTH))
    columns = block_of(weight.format).columns
    config = TileConfig(
        height, _blocks_of(height) * block_width(spec), min(depth, 2 * columns), 4, 1, 8, MIXED_INPUT_NAME
    )
    if _most_stages(config, weight, spec, target) < _LEAST_STAGES:
        config = dataclasses.replace(config, block_k=columns)
    return dataclasses.replace(config, num_stages=_most_stages(config, weight, spec, target))


def block_width(spec: MatmulSpec) -> int:
    """Output columns of a block of weight rows."""
    return SIDE_ROWS if spec.activation is not None and spec.activation.gated else BLOCK_ROWS


def _blocks_of(block_m: int) -> int:
    return 4 if block_m == LARGE else 2


def blocks_of(config: TileConfig, spec: MatmulSpec) -> int:
    return config.block_n // block_width(spec)


def _most_stages(config: TileConfig, weight: QuantizedTensor, spec: MatmulSpec, target: Target) -> int:
    limit = shared_limit(target.arch)
    if config.block_m < LARGE:
        limit = (limit + _RESERVED) // 2 - _RESERVED
    arrays = [array for array in (weight.scales, weight.zero_points) if array is not None]
    # Codes of a block and one record of each other array.
    held = BLOCK_VALUES + sum(array.shape[-1] * dtypes.itemsize(array.dtype) for array in arrays)
    steps = config.block_k // block_of(weight.format).columns
    stage = steps * blocks_of(config, spec) * held + config.block_m * config.block_k * 2
    # Two announced tiles with slots and weights, both consumers' results, and barriers.
    part = _TALL_PART if config.block_m == TALL else min(config.block_m, _PART) * block_width(spec)
    rest = 2 * 8 * config.block_m + 2 * part * 2 + 512
    return (limit - rest) // stage


class _MixedInput(Family):
    name, weights, counts_tiles, adds_tail = MIXED_INPUT_NAME, PREPACKED, True, True

    def why_not(self, problem: MatmulProblem) -> str | None:
        return why_not(problem)

    def tile(self, problem: MatmulProblem) -> TileConfig:
        rows = INVARIANT_ROWS if problem.batch_invariant else problem.rows_per_group
        return mixed_input_config(rows, problem.operands.weight, problem.spec, problem.target)

    def why_illegal(self, config: TileConfig, problem: MatmulProblem) -> str | None:
        return why_illegal_mixed_input(config, problem.operands.weight, problem.spec, problem.target)

    def launch(self, builder: PlanBuilder, problem: MatmulProblem, config: TileConfig, stage: int | None) -> None:
        most = problem.most_multiprocessors * (1 if config.block_m >= LARGE else 2)
        count = problem.tiles(config)
        # Blocks with one tile need no counter.
        arguments = _arguments(builder, problem, config, (stage or 0) if count > most else None)
        builder.launch(MATMUL_MIXED_INPUT, (min(count, most),), arguments, config.num_warps, 1)
        tokens = f"{config.block_m}"
        if config.block_m >= 2 * _NARROW:
            tokens = f"{_NARROW} {'to' if config.block_m == TALL else 'or'} {tokens}"
        builder.sums(
            f"k in blocks of 16, in order, fp32 accumulator, wgmma of 64 weight rows and {tokens} tokens; no split"
        )


MIXED_INPUT = _MixedInput()


def tiled_constants(problem: MatmulProblem) -> dict[str, Argument]:
    """Constants of all kernels for prepacked weights."""
    weight: QuantizedTensor = problem.operands.weight
    blocks, steps = weight.values.shape[-3:-1]
    block = block_of(weight.format)
    repeat = max(1, steps) if block.repeat is None else block.repeat
    return {
        **passed(D=problem.d, N=problem.n, WEIGHT_N=weight.shape[-2], STEPS=steps, BLOCKS=blocks),
        **passed(NUM_EXPERTS=problem.groups, NUM_LAYERS=problem.sizes.num_layers),
        **passed(X_STRIDE=row_stride("x", problem.operands.x)),
        **passed(BIAS_LAYER_STRIDE=bias_strides(problem.operands)["BIAS_LAYER_STRIDE"]),
        **fused_constants(problem),
        # Signed 8-bit codes are tiled as unsigned ones with zero point 128.
        **passed(ELEMENT="uint8" if weight.format.element == "int8" else weight.format.element),
        **passed(COLUMNS=block.columns, GROUPS=block.groups, REPEAT=repeat),
    }


def _arguments(
    builder: PlanBuilder, problem: MatmulProblem, config: TileConfig, counter: int | None
) -> dict[str, Argument]:
    """counter: the index in `tile_counters` that blocks take tiles from."""
    x, weight = problem.operands.x, problem.operands.weight
    values: ArraySpec = weight.values
    large, gathered = config.block_m >= LARGE, problem.spec.gather != "row"
    many = config.block_m == LARGE or (gathered and config.block_m > 16)
    box = _CHUNK if config.block_m == TALL else config.block_m
    x_map = TensorMap("x", (x.shape[0], problem.d), row_stride("x", x), (box, _DEPTH))
    deep = config.block_k // block_of(weight.format).columns
    weight_map = TensorMap("weight.values", (values.size // LINE, LINE), LINE, (deep * _LINES, LINE))
    return {
        **passed(x="x", x_map=None if gathered else x_map, weight_map=weight_map, scales="weight.scales"),
        **passed(zero_points=builder.optional("weight.zero_points")),
        **builder.pointers("bias", "row_weight", "layer_index", *SCHEDULED_INPUTS),
        **passed(counters=None if counter is None else "tile_counters", y=result(builder)),
        **(row_counts(problem, config) | tiled_constants(problem)),
        **passed(COUNTER=counter, STAGES=config.num_stages, BLOCK_M=config.block_m),
        **passed(PAIRS=blocks_of(config, problem.spec), DEEP=deep),
        # One warp issues a small tile's loads soonest. Gathering many rows takes more threads.
        **passed(PRODUCER_WARPS=4 if many else 1, REGISTERS=None if large else _SHARED_REGISTERS),
        **passed(GROUP_M=config.group_m, PDL=None),
        **tail_arguments(builder, problem.tail, config, problem.gated, most=32),
    }
