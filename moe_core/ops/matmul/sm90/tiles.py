"""Tiles of the sm90 family for 16-bit operands, and what its kernel cannot multiply."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Mapping

from moe_core.base.arrays import row_stride
from moe_core.base.target import Target
from moe_core.ops.matmul.family import Family
from moe_core.ops.matmul.problem import PLAIN, MatmulProblem
from moe_core.specs.tile import TileConfig

#: What the kernel is written for: rows, accumulator columns, reduction elements of a stage, stages.
SM90_BLOCK_M, SM90_WIDTH, SM90_BLOCK_K, SM90_STAGES = 128, 256, 64, 4
#: The same of its tall row blocks, whose stages are larger: rows, stages.
SM90_TALL_BLOCK_M, SM90_TALL_STAGES = 192, 3
#: Mean rows per expert from which these kernels beat those that run everywhere. Of 16-bit operands measured below
#: and above (with fewer rows, weights stream faster without them); of fp8 with fp8 from 64 on, where they are 1.2 times
#: as fast.
_LEAST_ROWS = 48
#: Mean rows per expert, from and to, where tall blocks win: most experts then have more than 128 rows and at most 192.
#: Measured at means of 128 and 160, 3 to 14 % faster; at 64, 96, 192, 256 and 512 mostly 1 to 4 % slower.
_TALL_ROWS = (120, 180)
#: Elements of 16 bits in the 16 bytes that TMA and cp.async take at a time.
_VECTOR = 8
#: Values worth measuring, in order: all of a tile but its height is fixed.
CHOICES: Mapping[str, tuple[int, ...]] = {"num_stages": (3, 4, 2), "group_m": (4, 8, 2), "block_m": (128, 192)}


def why_not_target(target: Target) -> str | None:
    """The reason a target has none of the family's kernels."""
    if not target.is_sm90:
        return f"it needs sm_90, its wgmma and TMA instructions, got {target}"
    return None


def why_not_operands(problem: MatmulProblem) -> str | None:
    """The reason the kernel cannot multiply plain operands, on whatever target."""
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
    return why_not_activation(problem)


def why_not_activation(problem: MatmulProblem) -> str | None:
    """The reason the family's kernels cannot fuse an activation."""
    if problem.spec.activation is not None and problem.spec.activation.name == "gelu":
        return "gelu's erf does not fit into its registers"
    return None


def sm90_config(
    problem: MatmulProblem, num_stages: int = SM90_STAGES, group_m: int = 8, block_m: int = SM90_BLOCK_M
) -> TileConfig:
    """The tile of a problem."""
    return TileConfig(block_m, SM90_WIDTH // problem.buffers, SM90_BLOCK_K, 4, num_stages, group_m, Sm90Family.name)


def why_not_stages(config: TileConfig, most: int) -> str | None:
    """The reason a configuration's stages or groups are wrong, or None."""
    if not 2 <= config.num_stages <= most:
        return f"num_stages must be 2 to {most} (shared memory), got {config.num_stages}"
    if config.group_m < 1:
        return f"group_m must be at least 1, got {config.group_m}"
    return None


class Sm90Family(Family):
    """What the family's kernels have in common, whatever they multiply."""

    name, counts_tiles, stores_rows = "sm90", True, True

    def why_not_chosen(self, problem: MatmulProblem) -> str | None:
        if problem.batch_invariant:
            return "batch_invariant takes one kernel for every number of rows"
        if problem.rows_per_group < _LEAST_ROWS:
            return f"it wins from {_LEAST_ROWS} rows per expert, got {problem.rows_per_group:.1f}"
        return None


class Sm90Tiles(Sm90Family):
    """bf16 and fp16 on sm_90, with row blocks of 128, or tall ones of 192."""

    weights = PLAIN

    def why_not(self, problem: MatmulProblem) -> str | None:
        return why_not_target(problem.target) or why_not_operands(problem)

    def tile(self, problem: MatmulProblem) -> TileConfig:
        rows = problem.rows_per_group
        if _TALL_ROWS[0] <= rows <= _TALL_ROWS[1]:
            return sm90_config(problem, SM90_TALL_STAGES, 4, SM90_TALL_BLOCK_M)
        # Blocks that read the same weights drift apart over a long reduction; a shorter queue keeps them together.
        together = problem.d >= 4096 and rows <= 2 * SM90_BLOCK_M
        return sm90_config(problem, SM90_STAGES - 1 if together else SM90_STAGES, 4)

    def why_illegal(self, config: TileConfig, problem: MatmulProblem) -> str | None:
        only = sm90_config(problem, config.num_stages, config.group_m)
        tall = config.block_m == SM90_TALL_BLOCK_M
        if config != only and config != dataclasses.replace(only, block_m=SM90_TALL_BLOCK_M):
            return f"the sm90 family's tiles are {only}, or the same with block_m {SM90_TALL_BLOCK_M}, got {config}"
        return why_not_stages(config, SM90_TALL_STAGES if tall else SM90_STAGES)

    def storing(self, config: TileConfig, problem: MatmulProblem) -> TileConfig:
        # The kernel of tall blocks does not store the pre-activation; results are the same, to the bit.
        return config if problem.outputs == ("y",) else dataclasses.replace(config, block_m=SM90_BLOCK_M)

    def candidates(self, problem: MatmulProblem) -> Iterable[TileConfig]:
        return (sm90_config(problem, *chosen) for chosen in itertools.product(*CHOICES.values()))
