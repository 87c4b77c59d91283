"""Planning of the grouped matmul for every compiled target (`kernel.matmul_ogs`)."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Mapping

from moe_core.base import ArraySpec, dtypes, padded, row_stride
from moe_core.ops.lora.tail import tail_arguments
from moe_core.ops.matmul import arguments as common
from moe_core.ops.matmul import tile_rules as rules
from moe_core.ops.matmul.family import Family
from moe_core.ops.matmul.portable import kernel as kernels
from moe_core.ops.matmul.problem import PLAIN, MatmulProblem
from moe_core.plan import Argument, PlanBuilder, declare_kernel, passed
from moe_core.specs import TileConfig

MATMUL_OGS = declare_kernel(kernels.matmul_ogs, pdl="tail")

#: Values worth measuring, in order: a step goes to a neighbour.
CHOICES: Mapping[str, tuple[int, ...]] = {
    "block_m": (16, 32, 64, 128),
    "block_n": (32, 64, 128, 256),
    "block_k": (32, 64, 128, 256),
    "num_warps": (4, 8),
    "num_stages": (2, 3, 4, 5, 6, 7),
    "group_m": (1, 4, 8, 16),
}
#: Further starting points: tiles of these rows.
_ROWS = tuple(4**exponent for exponent in range(11))
#: Up to this mean tiles have 16 or 32 rows, and out_in weights use `_long_rows`.
_FEW_ROWS = 24


class _Portable(Family):
    name, weights, shares_launches, adds_tail = "portable", PLAIN, True, True

    def why_not(self, problem: MatmulProblem) -> str | None:
        return None

    def tile(self, problem: MatmulProblem) -> TileConfig:
        config = _fixed(problem) if problem.batch_invariant or not problem.target.on_gpu else _by_rows(problem)
        if problem.tail is not None and not problem.gated and config.block_m * config.block_n >= 128 * 256:
            # A tail takes registers beside the sums.
            config = dataclasses.replace(config, block_n=config.block_n // 2)
        block_n, block_k = min(config.block_n, padded(problem.n)), min(config.block_k, padded(problem.d))
        config = dataclasses.replace(config, block_n=block_n, block_k=block_k)
        return rules.shrunk(config, lambda config: self.why_illegal(config, problem), 2 * rules.SMALLEST_SIDE)

    def why_illegal(self, config: TileConfig, problem: MatmulProblem) -> str | None:
        target = problem.target
        if (reason := rules.why_not_sides(config) or rules.why_not_warps(config, target)) is not None:
            return reason
        for name in ("num_stages", "group_m"):
            if getattr(config, name) < 1:
                return f"{name} must be at least 1, got {getattr(config, name)}"
        if not target.on_gpu:
            return None
        width = dtypes.itemsize(problem.dtype)
        stage = config.block_k * (config.block_m + problem.buffers * config.block_n) * width
        if (reason := rules.why_no_room(config, stage, target)) is not None:
            return reason
        if (held := rules.accumulators(config, target, problem.buffers)) > 160:
            return f"{held} accumulator registers per thread leave too few of 255 for operands and addresses"
        return None

    def candidates(self, problem: MatmulProblem) -> Iterable[TileConfig]:
        """Tiles for this and other numbers of rows, then neighbours, at most twice the problem's sides."""
        start = self.tile(problem)
        seeds = [self.tile(dataclasses.replace(problem, expected_rows=rows)) for rows in _ROWS]
        for config in (start, *seeds, *_around(start)):
            if config.block_n < 2 * max(16, problem.n) and config.block_k < 2 * max(16, problem.d):
                yield config

    def launch(self, builder: PlanBuilder, problem: MatmulProblem, config: TileConfig, stage: int | None) -> None:
        arguments = _arguments(builder, problem, config)
        builder.launch(MATMUL_OGS, (problem.tiles(config),), arguments, config.num_warps, config.num_stages)
        builder.sums(f"k in blocks of {config.block_k}, in order, fp32 accumulator, one dot per block; no split")


PORTABLE = _Portable()


def _fixed(problem: MatmulProblem) -> TileConfig:
    """64 rows, the minimum of Hopper's wgmma: few rows waste arithmetic but no weight bytes."""
    if not problem.target.on_gpu:
        return TileConfig(32, 64, 64, 4, 1)
    if problem.dtype == "float32":
        return TileConfig(32, 64, 32, 4, 2)
    return TileConfig(64, 64, 64, 4, 4) if problem.gated else TileConfig(64, 128, 64, 4, 3)


def _by_rows(problem: MatmulProblem) -> TileConfig:
    rows = problem.rows_per_group
    if problem.dtype == "float32":
        return TileConfig(16 if rows <= 16 else 32, 64, 32, 4, 2)
    if rows <= _FEW_ROWS and (config := _long_rows(problem)) is not None:
        return config
    if rows <= 10:
        # Weights stream once. Wide tiles, unless they are too few to fill the chip.
        tiles = problem.used_groups * -(-problem.n // 128)
        return TileConfig(16, 128, 64, 4, 4) if tiles >= problem.target.num_sms else TileConfig(16, 64, 64, 4, 6)
    if rows <= _FEW_ROWS:
        return TileConfig(32, 128, 64, 4, 4)
    if rows <= 100:
        return TileConfig(64, 64, 64, 4, 4) if problem.gated else TileConfig(64, 128, 64, 4, 3)
    return TileConfig(128, 128, 32, 8, 5, 4) if problem.gated else TileConfig(128, 256, 64, 8, 3, 4)


def _long_rows(problem: MatmulProblem) -> TileConfig | None:
    """For few rows with out_in weights, which stream at full bandwidth only if a step reads 256 bytes of each weight
    row. None for dense products, which would spill. Halved if the tiles would fill less than half the chip."""
    if problem.layout is None or problem.spec.weight_layout == "in_out" or problem.d % 128 != 0:
        return None
    block_n, sms = 128 // problem.buffers, problem.target.num_sms
    if problem.rows_per_group > 10:
        return TileConfig(32, block_n, 128, 4, 3)
    if 2 * problem.used_groups * -(-problem.n // block_n) <= sms:
        return TileConfig(16, block_n // 2, 128, 4, 6)
    return TileConfig(16, block_n, 128, 4, 4)


def _around(start: TileConfig) -> Iterable[TileConfig]:
    values = {name: sorted({*choices, getattr(start, name)}) for name, choices in CHOICES.items()}

    def steps(config: TileConfig) -> list[int]:
        return [
            abs(ordered.index(getattr(config, name)) - ordered.index(getattr(start, name)))
            for name, ordered in values.items()
        ]

    every = [
        dataclasses.replace(start, **dict(zip(values, chosen, strict=True)))
        for chosen in itertools.product(*values.values())
    ]
    return sorted(every, key=lambda config: (sum(steps(config)), [-step for step in steps(config)]))


def _arguments(builder: PlanBuilder, problem: MatmulProblem, config: TileConfig) -> dict[str, Argument]:
    operands, spec, sizes = problem.operands, problem.spec, problem.sizes
    weight: ArraySpec = operands.weight
    k_axis, n_axis = (-2, -1) if spec.weight_layout == "in_out" else (-1, -2)
    stacked, ragged = operands.layer_index is not None, problem.layout is not None
    joined = passed(GATE_LAYOUT="joined") if problem.joined else {}
    tf32 = spec.allow_tf32 and operands.x.dtype == "float32"
    layer_stride, expert_stride = weight.stride[0] if stacked else 0, weight.stride[-3] if ragged else 0
    names = ("x", "weight", "up", "bias", "up_bias", "row_weight", "layer_index", *common.SCHEDULED_INPUTS, "y", "pre")
    return {
        **(builder.pointers(*names) | passed(y=common.result(builder)) | common.row_counts(problem, config)),
        **passed(D=sizes.d, N=sizes.n, WEIGHT_N=sizes.weight_n, NUM_LAYERS=sizes.num_layers),
        **passed(X_STRIDE=row_stride("x", operands.x), LAYER_STRIDE=layer_stride, EXPERT_STRIDE=expert_stride),
        **passed(K_STRIDE=weight.stride[k_axis], N_STRIDE=weight.stride[n_axis]),
        **(common.bias_strides(operands) | common.fused_constants(problem) | joined),
        **(passed(INPUT_PRECISION="tf32" if tf32 else "ieee") | common.block_constants(config) | passed(PDL=None)),
        **tail_arguments(builder, problem.tail, config, problem.gated),
    }
