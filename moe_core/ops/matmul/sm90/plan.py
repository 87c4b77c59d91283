"""Planning of Hopper's warp-specialised grouped matmuls (`kernels.matmul`, `kernels.tall`, `kernels.swapped`)."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Mapping

from moe_core.base import INT32_LIMIT, Target, row_stride
from moe_core.errors import InvalidInput, Unsupported
from moe_core.ops.lora.tail import tail_arguments
from moe_core.ops.matmul import arguments as common
from moe_core.ops.matmul.family import Family
from moe_core.ops.matmul.problem import PLAIN, MatmulProblem
from moe_core.ops.matmul.sm90.kernels import matmul as matmul_kernels
from moe_core.ops.matmul.sm90.kernels import swapped as swapped_kernels
from moe_core.ops.matmul.sm90.kernels import tall as tall_kernels
from moe_core.plan import Argument, PlanBuilder, TensorMap, declare_kernel, passed
from moe_core.specs import TileConfig

SM90_MATMUL_OGS = declare_kernel(matmul_kernels.matmul_ogs, pdl="start", whole_multiprocessor=True)
#: PDL at any number of tokens gains nothing for swapped operands, and was not measured for tall blocks.
SM90_TALL_MATMUL_OGS = declare_kernel(tall_kernels.matmul_ogs, pdl="start")
SM90_SWAPPED_MATMUL_OGS = declare_kernel(swapped_kernels.matmul_ogs, pdl="start")

_CONSUMER_ROWS, _PIECE, _PANEL = 64, 128, 64

#: Rows, accumulator columns, reduction elements per stage, stages.
SM90_BLOCK_M, SM90_WIDTH, SM90_BLOCK_K, SM90_STAGES = 128, 256, 64, 4
#: Rows and stages of tall row blocks.
SM90_TALL_BLOCK_M, SM90_TALL_STAGES = 192, 3
#: Most rows of row blocks with swapped operands, and rows of their boxes.
SM90_SWAPPED_BLOCK_M, _SWAPPED_ROWS = 160, 32
_KERNELS = {
    SM90_BLOCK_M: SM90_MATMUL_OGS,
    SM90_TALL_BLOCK_M: SM90_TALL_MATMUL_OGS,
    SM90_SWAPPED_BLOCK_M: SM90_SWAPPED_MATMUL_OGS,
}
_PRODUCTS = {
    SM90_BLOCK_M: "wgmma 64 x 256 x 16",
    SM90_TALL_BLOCK_M: "wgmma 64 x 256 x 16 and 64 x 128 x 16",
    SM90_SWAPPED_BLOCK_M: "wgmma 64 x (8 to 160) x 16 of swapped operands",
}
#: Mean rows per expert from which these kernels beat the portable ones. 16-bit operands were measured on both sides,
#: fp8 from 64 on: 1.2 times as fast.
_LEAST_ROWS = 48
#: Mean rows where tall blocks win. Measured at means of 128 and 160: 3 to 14 % faster; at 64, 96, 192, 256 and 512
#: mostly 1 to 4 % slower.
_TALL_ROWS = (120, 180)
#: Reductions over which blocks that read the same weights drift apart.
_LONG = 4096
#: Longest reduction that swapped operands were measured at.
_SWAPPED_LONGEST = 7168
#: Mean rows where swapped operands win, by the layout of gate and up. One block of at most 160 holds most groups of the
#: first range, two those of the second. Measured at means of 64 to 512: at 128 rows 0 to 12 % faster than the best
#: other blocks, at 256 with gate and up apart 5 to 9 %. Outside the ranges up to 26 % slower.
_SWAPPED_MEANS = {None: ((104, 140),), "apart": ((104, 140), (232, 272)), "interleaved": ((104, 140),)}
#: Mean rows and weight columns from which writing rows in layout order takes less than gathering them for each tile.
#: Measured with 512 rows and 5760 and 12800 columns: forwards 2 % faster. At 128 rows, swapped, 2 % slower.
_ORDERED_ROWS, _ORDERED_COLUMNS = 400, 5120
_VECTOR = 8
#: Adapters that a producer looks at.
_MOST_SLOTS = 128
CHOICES: Mapping[str, tuple[int, ...]] = {"num_stages": (3, 4, 2), "group_m": (4, 8, 2), "block_m": (128, 160, 192)}


def why_not_target(target: Target) -> str | None:
    if not target.is_sm90:
        return f"it needs sm_90, its wgmma and TMA instructions, got {target}"
    return None


def why_not_operands(problem: MatmulProblem) -> str | None:
    x, n, spec = problem.operands.x, problem.n, problem.spec
    if problem.joined:
        return "its reduction goes over two weights"
    if problem.layout is None:
        return "it is dense, and only ragged layouts have the kernel's schedule"
    if x.dtype not in ("bfloat16", "float16"):
        return f"it multiplies bfloat16 and float16, got {x.dtype}"
    if (spec.out_dtype or x.dtype) != x.dtype:
        return f"it writes what it reads, {x.dtype}, got out_dtype {spec.out_dtype}"
    if problem.d % SM90_BLOCK_K:
        return f"its steps take {SM90_BLOCK_K} of the reduction, which must divide d, got {problem.d}"
    if n % _VECTOR:
        return f"rows of weights and y must be multiples of 16 bytes, got {n} columns"
    if row_stride("x", x) % _VECTOR:
        return f"rows of x must start at multiples of 16 bytes, got {row_stride('x', x)} elements between them"
    return why_not_activation(problem) or why_not_tail(problem)


def why_not_tail(problem: MatmulProblem) -> str | None:
    tail = problem.tail
    if tail is None:
        return None
    if tail.adapters.dropout.mask:
        return "dropout masks what its tail of adapters adds, which would take a second sum"
    if tail.adapters.slots > _MOST_SLOTS:
        return f"its tail has at most {_MOST_SLOTS} slots of adapters, got {tail.adapters.slots}"
    return None


def why_not_activation(problem: MatmulProblem) -> str | None:
    if problem.spec.activation is not None and problem.spec.activation.name == "gelu":
        return "gelu's erf does not fit into its registers"
    return None


def sm90_config(
    problem: MatmulProblem, num_stages: int = SM90_STAGES, group_m: int = 8, block_m: int = SM90_BLOCK_M
) -> TileConfig:
    return TileConfig(block_m, SM90_WIDTH // problem.buffers, SM90_BLOCK_K, 4, num_stages, group_m, Sm90Family.name)


def _most_stages(block_m: int, problem: MatmulProblem) -> int:
    # Beside four stages of swapped operands there is room for lists of rows of x or for row weights.
    both = problem.spec.gather != "row" and problem.operands.row_weight is not None
    full = both if block_m == SM90_SWAPPED_BLOCK_M else block_m == SM90_TALL_BLOCK_M
    return SM90_TALL_STAGES if full else SM90_STAGES


def why_not_stages(config: TileConfig, most: int) -> str | None:
    if not 2 <= config.num_stages <= most:
        return f"num_stages must be 2 to {most} (shared memory), got {config.num_stages}"
    if config.group_m < 1:
        return f"group_m must be at least 1, got {config.group_m}"
    return None


class Sm90Family(Family):
    name, counts_tiles, stores_rows = "sm90", True, True

    def why_not_chosen(self, problem: MatmulProblem) -> str | None:
        if problem.batch_invariant:
            return "batch_invariant takes one kernel for every number of rows"
        if problem.rows_per_group < _LEAST_ROWS:
            return f"it wins from {_LEAST_ROWS} rows per expert, got {problem.rows_per_group:.1f}"
        return None


class _Sm90(Sm90Family):
    weights, adds_tail = PLAIN, True

    def why_not(self, problem: MatmulProblem) -> str | None:
        return why_not_target(problem.target) or why_not_operands(problem)

    def tile(self, problem: MatmulProblem) -> TileConfig:
        rows, gate_layout = problem.rows_per_group, problem.gate_layout
        ranges = _SWAPPED_MEANS["apart" if gate_layout in ("halves", "separate") else gate_layout]
        # Rows in multiples of a tile fill other blocks without a rest.
        loose = problem.layout is None or problem.layout.limit is None
        if problem.tail is not None:
            return sm90_config(problem, SM90_STAGES, 4)
        if loose and problem.d <= _SWAPPED_LONGEST and any(low <= rows <= high for low, high in ranges):
            return sm90_config(problem, _most_stages(SM90_SWAPPED_BLOCK_M, problem), 4, SM90_SWAPPED_BLOCK_M)
        if _TALL_ROWS[0] <= rows <= _TALL_ROWS[1]:
            return sm90_config(problem, SM90_TALL_STAGES, 4, SM90_TALL_BLOCK_M)
        # A shorter queue keeps blocks together.
        together = problem.d >= _LONG and rows <= 2 * SM90_BLOCK_M
        return sm90_config(problem, SM90_STAGES - 1 if together else SM90_STAGES, 4)

    def why_illegal(self, config: TileConfig, problem: MatmulProblem) -> str | None:
        only = sm90_config(problem, config.num_stages, config.group_m)
        if config.block_m not in _KERNELS or dataclasses.replace(config, block_m=SM90_BLOCK_M) != only:
            return f"the sm90 family's tiles are {only}, or the same with block_m 160 or 192, got {config}"
        if problem.tail is not None and config.block_m != SM90_BLOCK_M:
            return f"a tail of adapters takes block_m {SM90_BLOCK_M}, got {config}"
        return why_not_stages(config, _most_stages(config.block_m, problem))

    def storing(self, config: TileConfig, problem: MatmulProblem) -> TileConfig:
        # The tall kernel does not store the pre-activation. Bits are the same.
        tall = config.block_m == SM90_TALL_BLOCK_M
        return dataclasses.replace(config, block_m=SM90_BLOCK_M) if tall and problem.outputs != ("y",) else config

    def orders_rows(self, problem: MatmulProblem, config: TileConfig) -> bool:
        if problem.tail is not None or problem.multiprocessors is not None or config.block_m == SM90_SWAPPED_BLOCK_M:
            return False
        return problem.rows_per_group >= _ORDERED_ROWS and problem.n * problem.buffers >= _ORDERED_COLUMNS

    def candidates(self, problem: MatmulProblem) -> Iterable[TileConfig]:
        return (sm90_config(problem, *chosen) for chosen in itertools.product(*CHOICES.values()))

    def launch(self, builder: PlanBuilder, problem: MatmulProblem, config: TileConfig, stage: int | None) -> None:
        arguments = sm90_arguments(builder, problem, config, stage)
        grid = min(problem.tiles(config), problem.most_multiprocessors)
        builder.launch(_KERNELS[config.block_m], (grid,), arguments, config.num_warps, 1)
        products = _PRODUCTS[config.block_m]
        builder.sums(f"k in blocks of {config.block_k}, in order, fp32 accumulator, {products}; no split")


SM90 = _Sm90()


def sm90_arguments(
    builder: PlanBuilder, problem: MatmulProblem, config: TileConfig, stage: int | None
) -> dict[str, Argument]:
    """A stage trusts its layout: whole tiles are stored."""
    operands, spec, sizes, layout = problem.operands, problem.spec, problem.sizes, problem.layout
    assert layout is not None and (stage is not None or not builder.has("pre")), "pre is stored by whole tiles"
    x, weight, in_out = operands.x, operands.weight, spec.weight_layout == "in_out"
    d, n, weight_n = sizes.d, sizes.n, sizes.weight_n
    tall = config.block_m == SM90_TALL_BLOCK_M
    tail = tail_arguments(builder, problem.tail) if config.block_m == SM90_BLOCK_M else {}
    if tall and builder.has("pre"):
        raise InvalidInput(
            f"config must have block_m {SM90_BLOCK_M} where the pre-activation is stored, as training does, got "
            f"{config}, whose kernel stores only the result; give one of {SM90_BLOCK_M}, or None"
        )
    matrices = weight.size // (d * weight_n)
    if matrices * max(d, weight_n) >= INT32_LIMIT:
        raise Unsupported(
            f"weight must have fewer than 2**31 rows over all layers and experts for the sm90 family, got "
            f"{matrices} matrices of {d} x {weight_n}; give a portable configuration"
        )
    two_tiles = problem.gate_layout in ("halves", "separate")
    columns = (_PANEL if tall else _PIECE) if two_tiles else SM90_WIDTH
    rows, box = _CONSUMER_ROWS, _PANEL if tall and problem.gated else _PIECE
    if config.block_m == SM90_SWAPPED_BLOCK_M:
        rows, box = _SWAPPED_ROWS, _PANEL

    def weight_map(name: str) -> TensorMap:
        if in_out:
            return TensorMap(name, (matrices * d, weight_n), weight_n, (SM90_BLOCK_K, columns))
        return TensorMap(name, (matrices * weight_n, d), d, (columns, SM90_BLOCK_K))

    def output_map(name: str, columns: int | None = None) -> TensorMap | None:
        if not builder.has(name):
            return None
        length, width = builder.spec(name).shape
        return TensorMap(name, (length, columns or width), width, (rows, box))

    gate_map = output_map("pre", n) if two_tiles else None
    pre = builder.pointers("pre") | passed(pre_map=output_map("pre"), gate_map=gate_map)
    stride = row_stride("x", x)
    x_map = TensorMap("x", (x.shape[0], d), stride, (rows, SM90_BLOCK_K))
    up_map = weight_map("up") if operands.up is not None else None
    return {
        **passed(x="x", x_map=x_map if spec.gather == "row" else None, weight_map=weight_map("weight"), up_map=up_map),
        **builder.pointers("bias", "up_bias", "row_weight", "layer_index", *common.SCHEDULED_INPUTS),
        **passed(counters="tile_counters", y=common.result(builder), y_map=output_map("y")),
        **(({} if tall else pre) | common.row_counts(problem, config) | common.size_constants(problem)),
        **(passed(X_STRIDE=stride) | common.bias_strides(operands) | common.fused_constants(problem)),
        **passed(IN_OUT=in_out, TRUSTED=stage is not None, COUNTER=stage or 0, STAGES=config.num_stages),
        **(passed(GROUP_M=config.group_m, PDL=None) | tail),
    }
