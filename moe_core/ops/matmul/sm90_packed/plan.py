"""Planning of the grouped matmul for Hopper whose weights are decoded in registers (`kernels.matmul`)."""

from __future__ import annotations

from moe_core.base.arrays import ArraySpec, row_stride
from moe_core.formats import QuantizedTensor
from moe_core.formats.tiling import BLOCK_VALUES, block_of
from moe_core.ops.matmul.arguments import SCHEDULED_INPUTS, bias_strides, fused_constants, row_counts
from moe_core.ops.matmul.family import Family
from moe_core.ops.matmul.problem import PREPACKED, MatmulProblem
from moe_core.ops.matmul.sm90_packed import tiles
from moe_core.ops.matmul.sm90_packed.tiles import LARGE, LINE, MIXED_INPUT_NAME, TALL
from moe_core.ops.matmul.tile_rules import INVARIANT_ROWS
from moe_core.plan.builder import PlanBuilder
from moe_core.plan.steps import Argument, Kernel, TensorMap, passed
from moe_core.specs.tile import TileConfig

MATMUL_MIXED_INPUT = Kernel(
    "matmul.sm90_packed.kernels.matmul:matmul_mixed_input", pdl="start", prepacked_weight="weight_map"
)

#: Lines of a block of codes.
_LINES = BLOCK_VALUES // LINE
#: Columns of x that lie together in shared memory.
_DEPTH = 64
#: Tokens that tiles of twice as many and more multiply where they have no more rows.
_NARROW = 32
#: Rows of x that a tall tile loads together, where one of them exists.
_CHUNK = 64
#: Registers of a thread at launch where two blocks share a multiprocessor.
_SHARED_REGISTERS = 80


class _MixedInput(Family):
    """bf16 rows with prepacked weights on sm_90."""

    name, weights, counts_tiles = MIXED_INPUT_NAME, PREPACKED, True

    def why_not(self, problem: MatmulProblem) -> str | None:
        return tiles.why_not(problem)

    def tile(self, problem: MatmulProblem) -> TileConfig:
        rows = INVARIANT_ROWS if problem.batch_invariant else problem.rows_per_group
        return tiles.mixed_input_config(rows, problem.operands.weight, problem.spec, problem.target)

    def why_illegal(self, config: TileConfig, problem: MatmulProblem) -> str | None:
        return tiles.why_illegal_mixed_input(config, problem.operands.weight, problem.spec, problem.target)

    def launch(self, builder: PlanBuilder, problem: MatmulProblem, config: TileConfig, stage: int | None) -> None:
        most = builder.target.num_sms * (1 if config.block_m >= LARGE else 2)
        count = problem.tiles(config)
        # Blocks that have one tile each need not ask for it.
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
    """What the kernels for prepacked weights are compiled for, whatever their tiles."""
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
        # Signed codes of 8 bits are tiled as unsigned ones with the zero point 128.
        **passed(ELEMENT="uint8" if weight.format.element == "int8" else weight.format.element),
        **passed(COLUMNS=block.columns, GROUPS=block.groups, REPEAT=repeat),
    }


def _arguments(
    builder: PlanBuilder, problem: MatmulProblem, config: TileConfig, counter: int | None
) -> dict[str, Argument]:
    """Every kernel parameter in order. counter: the one of `tile_counters` that blocks take tiles from, None = none."""
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
        **passed(counters=None if counter is None else "tile_counters", y="y"),
        **(row_counts(problem, config) | tiled_constants(problem)),
        **passed(COUNTER=counter, STAGES=config.num_stages, BLOCK_M=config.block_m),
        **passed(PAIRS=tiles.blocks_of(config, problem.spec), DEEP=deep),
        # One warp issues what little a small tile or TMA asks for soonest; gathering many rows takes more threads.
        **passed(PRODUCER_WARPS=4 if many else 1, REGISTERS=None if large else _SHARED_REGISTERS),
        **passed(GROUP_M=config.group_m, PDL=None),
    }
