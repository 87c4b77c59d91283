"""Tile configurations of the grouped matmul: arithmetic heuristics, and why a configuration is illegal.

Pure functions of sizes, dtype and architecture; nothing is timed here and nothing is remembered. `moe_core.tile_choice`
adds what a caller may ask for and what was measured.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from moe_core import dtypes
from moe_core.codec import plan_type
from moe_core.errors import InvalidInput
from moe_core.target import Target

#: Shared memory a block may use, by compute capability (CUDA programming guide, table of technical specifications).
_SHARED_BYTES = {80: 163 * 1024, 86: 99 * 1024, 87: 163 * 1024, 88: 99 * 1024, 89: 99 * 1024}
_SHARED_BYTES |= dict.fromkeys((120, 121), 99 * 1024)
_SHARED_BYTES_DEFAULT = 227 * 1024
#: Smallest tile side the tensor cores take.
_SMALLEST_SIDE = 16
FAMILIES = ("portable", "hopper")
#: What the hopper family's kernel is written for: rows, accumulator columns, reduction elements of a stage, stages.
HOPPER_BLOCK_M, HOPPER_WIDTH, HOPPER_BLOCK_K, HOPPER_STAGES = 128, 256, 64, 4
#: The same of its tall row blocks, whose stages are larger: rows, stages.
HOPPER_TALL_BLOCK_M, HOPPER_TALL_STAGES = 192, 3
#: Mean rows per expert from which the hopper family wins (measured; with fewer, weights stream faster without it).
_HOPPER_ROWS = 48
#: Mean rows per expert, from and to, where tall blocks win: most experts then have more than 128 rows and at most 192.
#: Measured at means of 128 and 160, 3 to 14 % faster; at 64, 96, 192, 256 and 512 mostly 1 to 4 % slower.
_TALL_ROWS = (120, 180)


@plan_type
@dataclass(frozen=True)
class TileConfig:
    """One configuration: tile sides in elements (block_n counts output columns), warps, pipeline stages, and how many
    row blocks share a column tile before the next (group_m).

    family: `portable` runs everywhere; `hopper` is warp-specialised with TMA for sm_90: block_m 128 or 192, block_k 64,
    block_n 256 accumulator columns (128 of a gated product), num_warps those of one consumer. With quantised weights
    `quantized` takes the place of `portable`; `mixed`, and `stream` with few rows, are for tiled ones on sm_90.
    """

    block_m: int
    block_n: int
    block_k: int
    num_warps: int = 4
    num_stages: int = 3
    group_m: int = 8
    family: str = "portable"

    @property
    def counts_tiles(self) -> bool:
        """Whether blocks of its kernel take their tiles from a counter, which has to be 0 before."""
        return self.family in ("hopper", "mixed")


@plan_type
@dataclass(frozen=True)
class MatmulProblem:
    """What decides a configuration: static sizes, never values. rows: layout rows; groups: experts; n: output columns;
    buffers: weight tiles per step (2 for fused gate and up); weight_layout: `in_out` or `out_in`. not_hopper: why the
    `hopper` family cannot run it, empty if it can."""

    rows: int
    groups: int
    d: int
    n: int
    dtype: str
    buffers: int = 1
    weight_layout: str = "in_out"
    not_hopper: str = "the product was described without its operands"

    @property
    def rows_per_group(self) -> float:
        """Mean rows of a group that has any, were all groups used."""
        return self.rows / max(1, min(self.groups, self.rows))

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights that are read, were the rows spread over as many groups as they can be."""
        return min(self.groups, self.rows) * self.d * self.n * self.buffers * dtypes.itemsize(self.dtype)

    def waves(self, config: TileConfig, num_sms: int) -> float:
        """Output tiles per multiprocessor, were the rows spread evenly."""
        per_group = -(-math.ceil(self.rows_per_group) // config.block_m) * -(-self.n // config.block_n)
        return min(self.groups, self.rows) * per_group / max(1, num_sms)


def shared_limit(arch: int) -> int:
    """Bytes of shared memory one block may use on an architecture."""
    return _SHARED_BYTES.get(arch, _SHARED_BYTES_DEFAULT)


def _is_power_of_two(value: int) -> bool:
    return value > 0 and value & (value - 1) == 0


def why_illegal(config: TileConfig, problem: MatmulProblem, target: Target) -> str | None:
    """The reason a configuration cannot run the problem on the target, or None."""
    if config.family == "hopper":
        return _why_not_hopper(config, problem, target)
    if config.family != "portable":
        return f"family must be one of {', '.join(FAMILIES)}, got {config.family!r}"
    for name in ("block_m", "block_n", "block_k"):
        side = getattr(config, name)
        if not _is_power_of_two(side) or side < _SMALLEST_SIDE:
            return f"{name} must be a power of two of at least {_SMALLEST_SIDE} (tensor-core tile), got {side}"
    if config.num_warps not in (4, 8, 16) and target.kind == "cuda":
        return f"num_warps must be 4, 8 or 16 (whole warp groups), got {config.num_warps}"
    if config.num_stages < 1:
        return f"num_stages must be at least 1, got {config.num_stages}"
    if config.group_m < 1:
        return f"group_m must be at least 1, got {config.group_m}"
    if target.kind != "cuda":
        return None
    width = dtypes.itemsize(problem.dtype)
    tile = config.block_k * (config.block_m + problem.buffers * config.block_n) * width
    if tile * config.num_stages > shared_limit(target.arch):
        return (
            f"{config.num_stages} stages of {tile} bytes exceed the {shared_limit(target.arch)} bytes of shared memory "
            f"of sm_{target.arch}"
        )
    accumulators = config.block_m * config.block_n * problem.buffers // (32 * config.num_warps)
    if accumulators > 160:
        return f"{accumulators} accumulator registers per thread leave too few of 255 for operands and addresses"
    return None


def hopper_config(
    problem: MatmulProblem, num_stages: int = HOPPER_STAGES, group_m: int = 8, block_m: int = HOPPER_BLOCK_M
) -> TileConfig:
    """The hopper family's configuration of a problem."""
    block_n = HOPPER_WIDTH // problem.buffers
    return TileConfig(block_m, block_n, HOPPER_BLOCK_K, 4, num_stages, group_m, "hopper")


def _why_not_hopper(config: TileConfig, problem: MatmulProblem, target: Target) -> str | None:
    if target.kind != "cuda" or target.arch != 90:
        return f"the hopper family needs sm_90, its wgmma and TMA instructions, got {target}"
    if problem.not_hopper:
        return f"the hopper family cannot run this product: {problem.not_hopper}"
    only = hopper_config(problem, config.num_stages, config.group_m)
    tall = config.block_m == HOPPER_TALL_BLOCK_M
    if config != only and config != dataclasses.replace(only, block_m=HOPPER_TALL_BLOCK_M):
        return f"the hopper family's tiles are {only}, or the same with block_m {HOPPER_TALL_BLOCK_M}, got {config}"
    most = HOPPER_TALL_STAGES if tall else HOPPER_STAGES
    if not 2 <= config.num_stages <= most:
        return f"num_stages must be 2 to {most} (shared memory), got {config.num_stages}"
    if config.group_m < 1:
        return f"group_m must be at least 1, got {config.group_m}"
    return None


def choose_config(problem: MatmulProblem, target: Target) -> TileConfig:
    """The configuration of a problem on a target: a pure function of sizes, dtype and architecture."""
    if target.kind != "cuda":
        return _fit(TileConfig(32, 64, 64, 4, 1), problem)
    if problem.dtype == "float32":
        block_m = 16 if problem.rows_per_group <= 16 else 32
        return _shrink(_fit(TileConfig(block_m, 64, 32, 4, 2), problem), problem, target)
    rows, gated = problem.rows_per_group, problem.buffers == 2
    if rows >= _HOPPER_ROWS and target.arch == 90 and not problem.not_hopper:
        if _TALL_ROWS[0] <= rows <= _TALL_ROWS[1]:
            return hopper_config(problem, HOPPER_TALL_STAGES, 4, HOPPER_TALL_BLOCK_M)
        # Blocks that read the same weights drift apart over a long reduction; a shorter queue keeps them together.
        together = problem.d >= 4096 and rows <= 2 * HOPPER_BLOCK_M
        return hopper_config(problem, HOPPER_STAGES - 1 if together else HOPPER_STAGES, 4)
    if rows <= 10:
        # Weights stream once: wide tiles, unless so few exist that narrower ones fill the chip better.
        tiles = min(problem.groups, problem.rows) * -(-problem.n // 128)
        config = TileConfig(16, 128, 64, 4, 4) if tiles >= target.num_sms else TileConfig(16, 64, 64, 4, 6)
    elif rows <= 24:
        config = TileConfig(32, 128, 64, 4, 4)
    elif rows <= 100:
        config = TileConfig(64, 64, 64, 4, 4) if gated else TileConfig(64, 128, 64, 4, 3)
    else:
        config = TileConfig(128, 128, 32, 8, 5, 4) if gated else TileConfig(128, 256, 64, 8, 3, 4)
    return _shrink(_fit(config, problem), problem, target)


def batch_invariant_config(problem: MatmulProblem, target: Target) -> TileConfig:
    """The configuration that every number of rows gets under `batch_invariant`: rows are not looked at.

    16-bit tiles are 64 rows high, the lowest that Hopper's wgmma takes: few rows waste arithmetic, not weight bytes,
    and many rows keep the fast instruction.
    """
    if target.kind != "cuda":
        return _fit(TileConfig(32, 64, 64, 4, 1), problem)
    if problem.dtype == "float32":
        config = TileConfig(32, 64, 32, 4, 2)
    else:
        config = TileConfig(64, 64, 64, 4, 4) if problem.buffers == 2 else TileConfig(64, 128, 64, 4, 3)
    return _shrink(_fit(config, problem), problem, target)


def _shrink(config: TileConfig, problem: MatmulProblem, target: Target) -> TileConfig:
    """Fewer stages, then shallower steps, until the tiles fit into the architecture's shared memory."""
    while why_illegal(config, problem, target) is not None:
        if config.num_stages > 2:
            config = dataclasses.replace(config, num_stages=config.num_stages - 1)
        elif config.block_k > 2 * _SMALLEST_SIDE:
            config = dataclasses.replace(config, block_k=config.block_k // 2)
        else:
            break
    return config


def _fit(config: TileConfig, problem: MatmulProblem) -> TileConfig:
    """Shrink tile sides that exceed the problem."""
    return dataclasses.replace(
        config,
        block_n=min(config.block_n, _round_up_to_power_of_two(problem.n)),
        block_k=min(config.block_k, _round_up_to_power_of_two(problem.d)),
    )


def _round_up_to_power_of_two(value: int) -> int:
    return max(_SMALLEST_SIDE, 1 << (max(value, 1) - 1).bit_length())


def require_legal(
    config: TileConfig, problem: MatmulProblem, target: Target, name: str = "config", fix: str = "choose another"
) -> TileConfig:
    """Return the configuration, or raise InvalidInput with the reason it is illegal. name: where it comes from."""
    reason = why_illegal(config, problem, target)
    if reason is not None:
        raise InvalidInput(f"{name} must be legal on {target}, got {config}: {reason}; {fix}")
    return config
