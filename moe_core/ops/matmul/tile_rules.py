"""Tile rules of several families: the reason why a configuration breaks one, or None."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from moe_core.base import Target
from moe_core.specs.tile import TileConfig, shared_limit

SMALLEST_SIDE = 16
#: Rows per expert for batch-invariant tiles of decoded weights.
INVARIANT_ROWS = 64.0


def why_not_sides(config: TileConfig, least_k: int = SMALLEST_SIDE) -> str | None:
    for name, least in (("block_m", SMALLEST_SIDE), ("block_n", SMALLEST_SIDE), ("block_k", least_k)):
        side = getattr(config, name)
        if side < least or side & (side - 1):
            return f"{name} must be a power of two of at least {least} (tensor-core tile), got {side}"
    return None


def why_not_warps(config: TileConfig, target: Target) -> str | None:
    if config.num_warps not in (4, 8, 16) and target.on_gpu:
        return f"num_warps must be 4, 8 or 16 (whole warp groups), got {config.num_warps}"
    return None


def why_not_counts(config: TileConfig) -> str | None:
    if config.num_stages < 1 or config.group_m < 1:
        return f"num_stages and group_m must be at least 1, got {config.num_stages} and {config.group_m}"
    return None


def why_no_room(config: TileConfig, stage_bytes: int, target: Target) -> str | None:
    if config.num_stages * stage_bytes > shared_limit(target.arch):
        return (
            f"{config.num_stages} stages of {stage_bytes} bytes exceed the {shared_limit(target.arch)} bytes of shared "
            f"memory of {target.architecture}"
        )
    return None


def accumulators(config: TileConfig, target: Target, buffers: int = 1) -> int:
    return config.block_m * config.block_n * buffers // (target.warp_threads * config.num_warps)


def shrunk(config: TileConfig, why_illegal: Callable[[TileConfig], str | None], least_k: int) -> TileConfig:
    """The first legal configuration with fewer stages (down to two), then shorter reduction steps (down to least_k),
    then one stage. Only shared memory may be illegal in `config`."""
    while (reason := why_illegal(config)) is not None:
        if config.num_stages > 2:
            config = dataclasses.replace(config, num_stages=config.num_stages - 1)
        elif config.block_k > least_k:
            config = dataclasses.replace(config, block_k=config.block_k // 2)
        else:
            assert config.num_stages > 1, reason
            config = dataclasses.replace(config, num_stages=1)
    return config
