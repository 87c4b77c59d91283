"""Checks of exchanges at peers' addresses, and tiles of copies."""

from __future__ import annotations

from moe_core.base import ArraySpec, Target, dtypes, require_at_least, require_spec
from moe_core.base.sizes import INT32_LIMIT, elementwise_tile, padded
from moe_core.errors import InvalidInput

_MOST_AT_ONCE = 8
_COLUMNS = (2048, 1024)
#: Threads of a warp, bytes of one instruction of a thread.
_WARP, _VECTOR = 32, 16
_LIMITED_WARPS, _WARPS = 16, 4
_RESIDENT = 16
_BLOCK = {"gpu": 1024, "interpreter": 64}


def require_table(name: str, table: ArraySpec, num_ranks: int | None = None) -> int:
    require_spec(name, table, ("num_ranks" if num_ranks is None else num_ranks,), "int64")
    require_at_least(f"num_ranks of {name}", table.shape[0], 1)
    return table.shape[0]


def require_places(owners: ArraySpec, rows: ArraySpec, tokens: int | str = "num_tokens") -> tuple[int, int]:
    require_spec("places.rows", rows, (tokens, "top_k"), "int32")
    require_spec("places.owners", owners, rows.shape, "int32")
    require_at_least("top_k of places.rows", rows.shape[1], 1)
    if rows.size >= INT32_LIMIT:
        raise InvalidInput(f"places.rows must have less than 2**31 entries, got {rows.shape}; split the batch")
    return rows.shape[0], rows.shape[1]


def require_width(name: str, width: int, dtype: str) -> None:
    """Raise InvalidInput unless rows move in pieces of 16 bytes."""
    size = width * dtypes.itemsize(dtype)
    if width < 1 or size % _VECTOR:
        each = _VECTOR // dtypes.itemsize(dtype)
        raise InvalidInput(
            f"rows of {name} must be a multiple of {_VECTOR} bytes, got {size} bytes of {width} {dtype}; pad d_model "
            f"to a multiple of {each}"
        )


def require_programs(programs: int | None) -> None:
    if programs is not None:
        require_at_least("programs", programs, 1)


def at_once(top_k: int) -> int:
    return -(-top_k // -(-top_k // _MOST_AT_ONCE))


def copy_tile(
    rows: int, width: int, itemsize: int, programs: int | None, target: Target, *, each: int = 1
) -> tuple[int, int, int]:
    """Return (rows, columns, warps) of a copy's tile. A thread moves 64 bytes.

    A link needs 680 KB on their way: 340 GB/s times the 2 us of a load from a peer. So a limited number of programs
    have 16 warps and 32 KB each. Few rows are spread over many programs. each: elements that a thread holds for one
    that it stores.
    """
    if target.interpreted:
        return *elementwise_tile(width, target), 4
    columns = min(_COLUMNS, key=lambda size: -(-width // size) * size)
    if programs is None and rows * -(-width // columns) < 2 * target.num_sms:
        return 1, _WARP * _VECTOR // itemsize, 1
    warps = _WARPS if programs is None else _LIMITED_WARPS
    elements = warps * _WARP * max(_VECTOR, 4 * _VECTOR // padded(each, 1)) // itemsize
    columns = min(columns, padded(width), elements)
    return elements // columns, columns, warps


def copy_grid(rows: int, blocks: int, block_rows: int, programs: int | None) -> tuple[int]:
    tiles = -(-rows // block_rows) * blocks
    return (tiles if programs is None else min(tiles, programs),)


def most_programs(programs: int | None, target: Target) -> int:
    """`programs`, or all that a device holds, for rows counted there, mostly far fewer than possible."""
    return _RESIDENT * max(1, target.num_sms) if programs is None else programs


def slots_block(target: Target) -> int:
    return _BLOCK[target.engine]
