"""Sizes of tiles, in powers of two."""

from __future__ import annotations

from moe_core.base.target import Target


def elementwise_tile(width: int, target: Target) -> tuple[int, int]:
    """(rows, columns) of an elementwise kernel's tile, for rows of `width` elements."""
    columns = min(1024, 1 << (max(width, 16) - 1).bit_length())
    elements = 2048 if target.on_gpu else 16384
    return elements // columns, columns


def padded(size: int, least: int = 16) -> int:
    return max(least, 1 << max(size - 1, 0).bit_length())


def first_holding(sizes: tuple[int, ...], count: int) -> int:
    """The first of ascending sizes that holds count, else the last."""
    return next((size for size in sizes if size >= count), sizes[-1])


INT32_LIMIT = 2**31
