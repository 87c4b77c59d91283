"""Tilings: the order of quantised weights for kernels that decode in registers.

A weight of N outputs and D inputs (`out_in`) is cut into blocks of 64 rows x 4096 bytes of codes: 128 columns of four
bits, 64 of eight. Codes, scales and zero points of a block are contiguous, each in an array of its own. Nothing is
rounded or combined: a tiling is a permutation, and padding.

values `[..., blocks, steps, 4096]`, in the dtype of the format. A block's bytes, from the slowest index to the fastest:

    bytes 2048 side + 64 row + 16 t + 4 q, and the three next,      side 0..1, row 0..31, t 0..3, q 0..3

are a word that holds codes of row 32 side + row of the block. A lane t of the tensor cores' quads so reads its share of
a row of the block as 16 contiguous bytes.

Four bits: a word's halves b = 0, 1 (of 16 bits, the lower bytes first) hold columns 32 q + 8 i + 2 t + b, i = 0..3.

- e2m1: code i's bits s, e1, e0, m (from the sign to the mantissa) are the half's bits

      i = 0: 15, 8, 7, 6      i = 1: 12, 5, 4, 3      i = 2: 9, 2, 1, 0      i = 3: 11, 10, 14, 13

  so that shifts and masks of a word are pairs of bfloat16 numbers but for their scale.
- uint4: code i is the half's bits 4 i .. 4 i + 3.

Eight bits: a word's byte 2 p + b holds column 16 q + 8 p + 2 t + b, p and b = 0, 1. Signed codes are stored as
code + 128, like unsigned ones with the zero point 128.

scales `[..., blocks, records, 64 groups]`: a row has `groups` groups in the columns of a block, or 1 if a group has
more columns than a block. Then `repeat` consecutive blocks share a record. Element `groups (32 side + row) + g` is the
scale of that row's group g. zero_points: uint8 of the same shape, one per byte.

Worked examples: `Tiling(5760, 2880, "interleaved")` of 32 experts in mxfp4: values (32, 90, 23, 4096), scales
(32, 90, 23, 256). `Tiling(1536, 2048, "halves")` of 128 experts: int4_g64_zp: values (128, 24, 16, 4096), scales and
zero points (128, 24, 16, 128). int8_g128: values (128, 24, 32, 4096), scales (128, 24, 16, 64).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from moe_core.base import plan_type, require_at_least, require_choice
from moe_core.errors import InvalidInput
from moe_core.formats.format import Format

#: Rows of a block, bytes of its codes and of a row.
BLOCK_ROWS, BLOCK_VALUES = 64, 4096
ROW_BYTES = BLOCK_VALUES // BLOCK_ROWS
#: All gate or all up.
SIDE_ROWS = BLOCK_ROWS // 2
LEAST_COLUMNS = 32
ORDERS = ("rows", "interleaved", "halves")


@plan_type
@dataclass(frozen=True)
class Tiling:
    """How a prepacked weight is cut into blocks. The module describes a block.

    rows: N, the outputs of the logical matrix. columns: D, its inputs. order: the rows of block b:

    - `rows`: 64b, ..., 64b + 63, the matrix as it is;
    - `interleaved`, for alternating gate and up rows: 64b, 64b + 2, ..., 64b + 62 (gate), then 64b + 1, ..., 64b + 63
      (up);
    - `halves`, for gate rows before up rows: 32b, ..., 32b + 31 (gate), then N/2 + 32b, ..., N/2 + 32b + 31 (up).

    Zeros pad rows to a multiple of 64 and columns to a block's multiple, in every array. D must be a multiple of 32, N
    even for `interleaved` and a multiple of 64 for `halves`. Raises InvalidInput.
    """

    rows: int
    columns: int
    order: str

    def __post_init__(self) -> None:
        require_at_least("rows", self.rows, 0)
        require_at_least("columns", self.columns, 0)
        require_choice("order", self.order, ORDERS)
        if self.columns % LEAST_COLUMNS:
            raise InvalidInput(
                f"columns must be a multiple of {LEAST_COLUMNS}, the least that share a scale, got {self.columns}; pad "
                "the input axis with zeros"
            )
        unit = {"rows": 1, "interleaved": 2, "halves": BLOCK_ROWS}[self.order]
        if self.rows % unit:
            rule = "gate and up rows" if unit == 2 else f"{SIDE_ROWS} rows of gate, and of up, in every block"
            raise InvalidInput(
                f"rows must be a multiple of {unit} for order {self.order!r} ({rule}), got {self.rows}; pad both "
                "halves, or leave the weight as it is"
            )

    @property
    def blocks(self) -> int:
        return -(-self.rows // BLOCK_ROWS)


class TiledBlock(NamedTuple):
    """A block of prepacked weights, 64 rows x columns. groups: scales of a row. repeat: blocks that share them."""

    columns: int
    groups: int
    repeat: int | None

    def steps(self, columns: int) -> int:
        return -(-columns // self.columns)

    def records(self, columns: int) -> int:
        return 1 if self.repeat is None else -(-self.steps(columns) // self.repeat)


def block_of(format: Format) -> TiledBlock:
    columns, group = 8 * ROW_BYTES // format.bits_per_element, format.group_columns
    if group is None:
        return TiledBlock(columns, 1, None)
    return TiledBlock(columns, max(1, columns // group), max(1, group // columns))


def why_not_tileable(format: Format) -> str | None:
    """The reason a format cannot be tiled, or None."""
    group = format.group_columns
    if format.element == "e2m1" and format.has_e8m0_scales and (format.group_rows, group) == (1, LEAST_COLUMNS):
        return None
    whole_groups = group is None or (group >= LEAST_COLUMNS and group & (group - 1) == 0)
    if format.element in ("uint4", "uint8", "int8") and format.group_rows == 1 and whole_groups:
        return None
    return (
        "tiled are mxfp4 and mxfp4_ceil, and integers of 4 and 8 bits with a scale for each row, or for 32, 64, 128, "
        "... columns of it"
    )
