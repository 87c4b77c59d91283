"""Planning of the grouped matmul for few rows per expert (`kernels.few_rows`)."""

from __future__ import annotations

from moe_core.formats import QuantizedTensor
from moe_core.formats.tiling import TiledBlock, block_of
from moe_core.ops.lora.tail import tail_arguments
from moe_core.ops.matmul.arguments import SCHEDULED_INPUTS, result, row_counts
from moe_core.ops.matmul.family import Family
from moe_core.ops.matmul.problem import PREPACKED, MatmulProblem
from moe_core.ops.matmul.sm90_packed.kernels import few_rows as kernels
from moe_core.ops.matmul.sm90_packed.plan import block_width, tiled_constants, why_not
from moe_core.plan import PlanBuilder, declare_kernel, passed
from moe_core.specs import MatmulSpec, TileConfig

MATMUL_FEW_ROWS = declare_kernel(kernels.matmul_few_rows, pdl="tail", prepacked_weight="weight")

FEW_ROWS_NAME = "few_rows"
#: Most mean rows per expert: up to 1.1 times as fast as mixed-input with mxfp4. At 8 that is 1.26 times as fast:
#: experts with more than 8 rows stream twice.
_MOST_ROWS = 4
_HEIGHT = 8
#: Blocks in flight along the reduction, limited by registers.
_CHUNKS = (4, 3, 2)
#: With at most two blocks of the grid for each multiprocessor, as product 2 of one token has, these may have twice the
#: registers. Product 1 gains nothing.
_LONG_CHUNKS = (8, 6)
#: Columns of one product. A sum takes every other one.
_DEPTH = 64
#: Registers per thread, so that as many blocks share a multiprocessor, or two with long chunks.
_REGISTERS, _WAVE, _LONG_REGISTERS = 128, 4, 255


class _FewRows(Family):
    name, weights, adds_tail = FEW_ROWS_NAME, PREPACKED, True

    def why_not(self, problem: MatmulProblem) -> str | None:
        return why_not(problem)

    def why_not_chosen(self, problem: MatmulProblem) -> str | None:
        if problem.batch_invariant:
            return "batch_invariant takes one kernel for every number of rows"
        if problem.rows_per_group > _MOST_ROWS:
            return f"it wins up to {_MOST_ROWS} rows per expert, got {problem.rows_per_group:.1f}"
        return None

    def tile(self, problem: MatmulProblem) -> TileConfig:
        weight, spec = problem.operands.weight, problem.spec
        config = few_rows_config(weight, spec)
        if spec.activation is None and problem.tiles(config) <= 2 * problem.most_multiprocessors:
            config = few_rows_config(weight, spec, _LONG_CHUNKS + _CHUNKS)
        return config

    def why_illegal(self, config: TileConfig, problem: MatmulProblem) -> str | None:
        return why_illegal_few_rows(config, problem.operands.weight, problem.spec)

    def launch(self, builder: PlanBuilder, problem: MatmulProblem, config: TileConfig, stage: int | None) -> None:
        weight: QuantizedTensor = problem.operands.weight
        block, (blocks, steps) = block_of(weight.format), weight.values.shape[-3:-1]
        chunk, counts = config.block_k // block.columns, row_counts(problem, config)
        span, tiles = block.columns << (chunk - 1).bit_length(), problem.num_blocks(config) * blocks
        # Where further blocks hide latency, it costs more than it gains. Integers leave no registers.
        early = tiles <= _WAVE * problem.most_multiprocessors and weight.format.has_e8m0_scales
        arguments = {
            **passed(x="x", weight="weight.values", scales="weight.scales"),
            **passed(zero_points=builder.optional("weight.zero_points")),
            **builder.pointers("bias", "row_weight", "layer_index", *SCHEDULED_INPUTS),
            **passed(y=result(builder)),
            **{name: counts[name] for name in ("num_rows", "num_slots")},
            **tiled_constants(problem),
            **passed(ALIKE=_alike(block, chunk, steps), BLOCK_M=config.block_m, CHUNK=chunk, SPAN=span),
            **passed(REGISTERS=_LONG_REGISTERS if chunk in _LONG_CHUNKS else _REGISTERS),
            **passed(EARLY=problem.tail is not None and early, PDL=None),
            **tail_arguments(builder, problem.tail, config, problem.gated),
        }
        builder.launch(MATMUL_FEW_ROWS, (tiles,), arguments, config.num_warps, 1)
        if block.columns == 2 * _DEPTH:
            parts = f"of every {block.columns} the first {_DEPTH} in one sum, the others in another"
        else:
            parts = f"of every {chunk} times {_DEPTH} those at even places in one sum, the others in another"
        builder.sums(
            f"k in blocks of 16, fp32 accumulators, mma.sync of 16 weight rows and 8 tokens: {parts}, each in order, "
            "added at the end"
        )


FEW_ROWS = _FewRows()


def why_illegal_few_rows(config: TileConfig, weight: QuantizedTensor, spec: MatmulSpec) -> str | None:
    if config.block_m != _HEIGHT:
        return f"block_m must be {_HEIGHT}, got {config.block_m}"
    if config.block_n != block_width(spec):
        return f"block_n must be {block_width(spec)}, one block of weight rows, got {config.block_n}"
    depths = [chunk * block_of(weight.format).columns for chunk in _LONG_CHUNKS + _CHUNKS]
    if config.block_k not in depths:
        return f"block_k must be one of {', '.join(map(str, depths))}, got {config.block_k}"
    if config.num_warps != 4 or config.num_stages != 2 or config.group_m < 1:
        return (
            f"num_warps must be 4, num_stages 2 and group_m at least 1, got {config.num_warps}, {config.num_stages} "
            f"and {config.group_m}"
        )
    return None


def few_rows_config(weight: QuantizedTensor, spec: MatmulSpec, chunks: tuple[int, ...] = _CHUNKS) -> TileConfig:
    """The configuration with the most blocks in flight and little zero padding after the last."""
    block, steps = block_of(weight.format), weight.values.shape[-2]
    # Steps that share scales stay together to load them once.
    alike = [chunk for chunk in chunks if _alike(block, chunk, steps) in (chunk, block.repeat)]
    chunk = next((chunk for chunk in alike if -steps % chunk <= steps // 8), chunks[-1])
    return TileConfig(_HEIGHT, block_width(spec), chunk * block.columns, 4, 2, 1, FEW_ROWS_NAME)


def _alike(block: TiledBlock, chunk: int, steps: int) -> int:
    """Steps in flight that share their scales at every load."""
    repeat = block.repeat
    if repeat is None or repeat >= steps or repeat % chunk == 0:
        return chunk
    return repeat if chunk % repeat == 0 else 1
