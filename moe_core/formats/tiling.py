"""Tilings: another order in which the arrays of quantised weights may lie, that of a kernel which decodes in registers.

A weight of N outputs and D inputs (`out_in`, e2m1 codes, one e8m0 scale for 32 inputs) is cut into blocks of 64 rows x
128 columns, each of 4096 bytes of codes and 256 bytes of scales, both contiguous. Nothing is rounded or combined: a
tiling is a permutation of codes and scales, and padding.

values uint8 `[..., blocks, steps, 4096]`. A block's bytes, from the slowest index to the fastest:

    bytes 2048 side + 64 row + 16 t + 4 q + 2 b, and the next,      side 0..1, row 0..31, t 0..3, q 0..3, b 0..1

are a number of 16 bits, the lower byte first, that holds the codes of row 32 side + row of the block, columns
32 q + 8 i + 2 t + b, i = 0..3. A code's bits s, e1, e0, m (from the sign to the mantissa) are the number's bits

    i = 0: 15, 8, 7, 6      i = 1: 12, 5, 4, 3      i = 2: 9, 2, 1, 0      i = 3: 11, 10, 14, 13

A lane t of the tensor cores' quads so reads its share of all 128 columns of a row as 16 contiguous bytes, one 32-bit
word for each group of 32 columns, and shifts and masks of a word are pairs of bfloat16 numbers but for their scale.

scales uint8 `[..., blocks, steps, 256]`: byte 128 side + 4 row + q is the scale of that row's columns 32 q to
32 q + 31.

Worked example: `Tiling(5760, 2880, "interleaved")` of 32 experts: values (32, 90, 23, 4096), scales (32, 90, 23, 256).
"""

from __future__ import annotations

from dataclasses import dataclass

from moe_core.checks import require_at_least, require_choice
from moe_core.codec import plan_type
from moe_core.errors import InvalidInput
from moe_core.formats.format import Format

#: Rows and columns of a block, and the bytes of its codes and scales.
BLOCK_ROWS, BLOCK_COLUMNS = 64, 128
BLOCK_VALUES, BLOCK_SCALES = BLOCK_ROWS * BLOCK_COLUMNS // 2, BLOCK_ROWS * BLOCK_COLUMNS // 32
#: Rows of one side of a block: all gate or all up where a matrix holds both.
SIDE_ROWS = BLOCK_ROWS // 2
#: Columns that share a scale.
GROUP_COLUMNS = 32
ORDERS = ("rows", "interleaved", "halves")


@plan_type
@dataclass(frozen=True)
class Tiling:
    """How a tiled weight is cut into blocks; the module says what lies where in a block.

    rows: N, the outputs; columns: D, the inputs; both of the logical matrix. order, which rows block b has:

    - `rows`: 64b, 64b + 1, ..., 64b + 63, the matrix as it is;
    - `interleaved`, of gate and up rows by turns: 64b, 64b + 2, ..., 64b + 62 (gate), then 64b + 1, ..., 64b + 63 (up);
    - `halves`, of gate rows before up rows: 32b, ..., 32b + 31 (gate), then N/2 + 32b, ..., N/2 + 32b + 31 (up).

    Rows are padded to a multiple of 64 and columns to one of 128, codes and scales with zero bytes. D must be a
    multiple of 32, N even for `interleaved` and a multiple of 64 for `halves`. Raises InvalidInput.
    """

    rows: int
    columns: int
    order: str

    def __post_init__(self) -> None:
        require_at_least("rows", self.rows, 0)
        require_at_least("columns", self.columns, 0)
        require_choice("order", self.order, ORDERS)
        if self.columns % GROUP_COLUMNS:
            raise InvalidInput(
                f"columns must be a multiple of {GROUP_COLUMNS}, which share a scale, got {self.columns}; pad the "
                "input axis with zeros"
            )
        unit = {"rows": 1, "interleaved": 2, "halves": BLOCK_ROWS}[self.order]
        if self.rows % unit:
            what = "gate and up rows" if unit == 2 else f"{SIDE_ROWS} rows of gate, and of up, in every block"
            raise InvalidInput(
                f"rows must be a multiple of {unit} for order {self.order!r} ({what}), got {self.rows}; pad both "
                "halves, or leave the weight as it is"
            )

    @property
    def blocks(self) -> int:
        """Blocks along the rows."""
        return -(-self.rows // BLOCK_ROWS)

    @property
    def steps(self) -> int:
        """Blocks along the columns."""
        return -(-self.columns // BLOCK_COLUMNS)


def why_not_tileable(format: Format) -> str | None:
    """The reason weights in a format cannot be tiled; None where they can."""
    if format.element == "e2m1" and format.has_e8m0_scales and (format.group_rows, format.group_columns) == (1, 32):
        return None
    return "tiled are mxfp4 and mxfp4_ceil: e2m1 elements with an e8m0 scale for 32 columns of a row"
