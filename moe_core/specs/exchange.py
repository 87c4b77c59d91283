"""Sizes of an exchange's tables."""

from __future__ import annotations

from dataclasses import dataclass

from moe_core.base import INT32_LIMIT, plan_type, require_choice, set_integer
from moe_core.base.arrays import ALIGNMENT
from moe_core.base.dtypes import itemsize
from moe_core.errors import InvalidInput


@plan_type
@dataclass(frozen=True)
class TableSpec:
    """The kind and sizes of an exchange: num_ranks W, per_rank L places, num_experts E.

    rows: `tokens` or `slots` travel. block: the most rows that a rank sends to another; None with `all_to_all`, ignored
    with `all_gather`, which sends all tokens. back: the most results that return, None with `all_to_all`. own_first: a
    rank's own results lie before those that come home, with `all_to_all` and rows of tokens alone.
    """

    mode: str
    rows: str
    num_ranks: int
    per_rank: int
    num_experts: int
    block: int | None = None
    back: int | None = None
    own_first: bool = False

    def __post_init__(self) -> None:
        require_choice("mode", self.mode, ("all_to_all", "padded", "all_gather"))
        require_choice("rows", self.rows, ("tokens", "slots"))
        for name in ("num_ranks", "per_rank", "num_experts"):
            set_integer(self, name, 1, INT32_LIMIT)
        if self.mode == "all_gather" and self.rows != "tokens":
            raise InvalidInput(f"rows must be 'tokens' with mode='all_gather', got {self.rows!r}; pass 'tokens'")
        if self.own_first and (self.mode, self.rows) != ("all_to_all", "tokens"):
            raise InvalidInput(f"own_first must be False with mode={self.mode!r} and rows={self.rows!r}; leave it out")
        for name in ("block", "back"):
            value = getattr(self, name)
            if (value is None) != (self.mode == "all_to_all"):
                raise InvalidInput(
                    f"{name} must be given with modes 'padded' and 'all_gather' alone, got {value} with "
                    f"mode={self.mode!r}; correct it"
                )
            if value is not None:
                set_integer(self, name, 0, INT32_LIMIT)

    @property
    def by_slot(self) -> bool:
        return self.rows == "slots"

    @property
    def num_places(self) -> int:
        return self.num_ranks * self.per_rank

    @property
    def block_rows(self) -> int:
        """Rows of a block's memory, at least one: no array is empty."""
        return max(1, self.block or 0)

    @property
    def back_rows(self) -> int:
        return max(1, self.back or 0)

    def width(self, top_k: int) -> int:
        """Numbers that travel with a row: places, unless counts imply them, and weights as bits."""
        if not self.by_slot:
            return 2 * top_k
        return 1 if self.mode == "all_to_all" else 2

    @property
    def counts(self) -> int:
        """Counts for an owner behind the header of `all_to_all`: slots by place, or tokens and slots."""
        return self.per_rank if self.by_slot else 2


def packed_row(columns: int, dtype: str, numbers: int) -> tuple[int, int]:
    """A row of a message: columns of dtype, then int32 numbers, each at a multiple of 16 bytes.

    Returns (elements of a row, its first number in int32). Example: 8 columns of bfloat16 and 2 numbers: (16, 4).
    """
    begin, size = padded_bytes(columns * itemsize(dtype)), padded_bytes(4 * numbers)
    return (begin + size) // itemsize(dtype), begin // 4


def padded_bytes(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
