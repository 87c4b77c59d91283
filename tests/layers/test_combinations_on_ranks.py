"""Features times features on two gloo ranks: DDP, FSDP2, experts and their columns on both.

Blocks of models run under `use` and with adapters of PEFT.
"""

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
#: Three together, which pairs do not hold.
ROWS += [ARRAY.plainest([("parallel", "experts"), ("compile", "on"), ("autocast", "bfloat16")])]
ROWS += [ARRAY.plainest([("parallel", "DDP"), ("compile", "on"), ("trace", "replay"), ("norms", "router")])]
_OF_GLOO = "Invalid scalar type"
#: Rows of one call: all of them would be longer than the ranks may take.
_TOGETHER = 2

#: Blocks of models: by, PEFT, parallel, and around it.
BLOCKS = {
    "mixtral": ["use none DDP", "use native DDP compile", "from_block native FSDP2 checkpointing"],
    "gpt_oss": ["use none FSDP2 checkpointing", "use native FSDP2", "from_block native DDP"],
}


def on_ranks(pool: Pool, rows: list[dict[str, str]]) -> list[tuple[list[str] | str, ...]]:
    """What each rank says of each row."""
    return [*zip(*pool.call(examine_all, [(rows,)] * 2), strict=True)]


@pytest.mark.parametrize("first", range(0, len(ROWS), _TOGETHER))
def test_rows_run_right(ranks: Pool, first: int) -> None:
    rows = ROWS[first : first + _TOGETHER]
    for row, told in zip(rows, on_ranks(ranks, rows), strict=True):
        assert told == ([], []), label(row, RANKS)


def block(family: str, told: str) -> dict[str, str]:
    by, adapters, parallel, *around = told.split()
    more = {name: "on" if name in around else "none" for name in ("checkpointing", "compile")}
    return {"family": family, "by": by, "PEFT": adapters, "parallel": parallel, **more}


@pytest.mark.parametrize("family", BLOCKS)
def test_blocks_of_models(ranks: Pool, family: str) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("peft", reason="adapters are PEFT's (pip install 'moebius[recipes]')")
    refused = [block(family, f"from_block native {kind}") for kind in ("experts", "tensor")]
    rows = [block(family, told) for told in BLOCKS[family]]
    *told, first, second = on_ranks(ranks, rows + refused)
    assert told == [([], [])] * len(rows)
    assert all("experts on several ranks take no adapters of PEFT" in one for one in (*first, *second)), (first, second)


def test_combinations_are_refused_by_name(ranks: Pool) -> None:
    """Others are refused on one rank, too. gloo's own error may come with a later message, so it is not called."""
    rules = [rule for rule in refused(RANKS) if any(name == "parallel" for name, _ in rule[0]) and rule[1] != _OF_GLOO]
    rows = [ARRAY.plainest(values) for values, _ in rules]
    for (_, text), row, told in zip(rules, rows, on_ranks(ranks, rows), strict=True):
        assert all(isinstance(one, str) and re.search(text, one) for one in told), (label(row, RANKS), told)
