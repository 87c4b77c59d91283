"""Tile configurations of the grouped matmul: which one a problem gets, and why another is illegal."""

from __future__ import annotations

import dataclasses
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


@plan_type
@dataclass(frozen=True)
class TileConfig:
    """One configuration: tile sides in elements (block_n counts output columns), warps, pipeline stages, and how many
    row blocks share a column tile before the next (group_m)."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int = 4
    num_stages: int = 3
    group_m: int = 8


@dataclass(frozen=True)
class MatmulProblem:
    """What decides a configuration: static sizes, never values. rows: layout rows; groups: experts; n: output columns;
    buffers: weight tiles per step (2 for fused gate and up)."""

    rows: int
    groups: int
    d: int
    n: int
    dtype: str
    buffers: int = 1

    @property
    def rows_per_group(self) -> float:
        """Mean rows of a group that has any, were all groups used."""
        return self.rows / max(1, min(self.groups, self.rows))


def shared_limit(arch: int) -> int:
    """Bytes of shared memory one block may use on an architecture."""
    return _SHARED_BYTES.get(arch, _SHARED_BYTES_DEFAULT)


def _is_power_of_two(value: int) -> bool:
    return value > 0 and value & (value - 1) == 0


def why_illegal(config: TileConfig, problem: MatmulProblem, target: Target) -> str | None:
    """The reason a configuration cannot run the problem on the target, or None."""
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


def choose_config(problem: MatmulProblem, target: Target) -> TileConfig:
    """The configuration of a problem on a target: a pure function of sizes, dtype and architecture."""
    if target.kind != "cuda":
        return _fit(TileConfig(32, 64, 64, 4, 1), problem)
    if problem.dtype == "float32":
        block_m = 16 if problem.rows_per_group <= 16 else 32
        return _shrink(_fit(TileConfig(block_m, 64, 32, 4, 2), problem), problem, target)
    rows, gated = problem.rows_per_group, problem.buffers == 2
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
    return TileConfig(
        config.block_m,
        min(config.block_n, _round_up_to_power_of_two(problem.n)),
        min(config.block_k, _round_up_to_power_of_two(problem.d)),
        config.num_warps,
        config.num_stages,
        config.group_m,
    )


def _round_up_to_power_of_two(value: int) -> int:
    return max(_SMALLEST_SIDE, 1 << (max(value, 1) - 1).bit_length())


def require_legal(config: TileConfig, problem: MatmulProblem, target: Target) -> TileConfig:
    """Return the configuration, or raise InvalidInput with the reason it is illegal."""
    reason = why_illegal(config, problem, target)
    if reason is not None:
        raise InvalidInput(f"config must be legal on {target}, got {config}: {reason}; choose another")
    return config
