"""Features times features on two gloo ranks: DDP, FSDP2, experts and their columns on both."""

from __future__ import annotations

import re

import pytest

pytest.importorskip("torch")

from tests.support.parallel.pool import Pool, ranks
from tools.combinations.features import RANKS, cover, label, refused, rows
from tools.combinations.rank_ways import examine_all

__all__ = ["ranks"]

ARRAY = cover(RANKS)
ROWS = rows(RANKS)
_OF_GLOO = "Invalid scalar type"
#: Rows of one call: all of them would be longer than the ranks may take.
_TOGETHER = 4


def on_ranks(pool: Pool, rows: list[dict[str, str]]) -> list[tuple[list[str] | str, ...]]:
    """What each rank says of each row."""
    return [*zip(*pool.call(examine_all, [(rows,)] * 2), strict=True)]


@pytest.mark.parametrize("first", range(0, len(ROWS), _TOGETHER))
def test_rows_run_right(ranks: Pool, first: int) -> None:
    rows = ROWS[first : first + _TOGETHER]
    for row, told in zip(rows, on_ranks(ranks, rows), strict=True):
        assert told == ([], []), label(row, RANKS)


def test_combinations_are_refused_by_name(ranks: Pool) -> None:
    """Others are refused on one rank, too. gloo's own error may come with a later message, so it is not called."""
    rules = [rule for rule in refused(RANKS) if any(name == "parallel" for name, _ in rule[0]) and rule[1] != _OF_GLOO]
    rows = [ARRAY.plainest(values) for values, _ in rules]
    for (_, text), row, told in zip(rules, rows, on_ranks(ranks, rows), strict=True):
        assert all(isinstance(one, str) and re.search(text, one) for one in told), (label(row, RANKS), told)
