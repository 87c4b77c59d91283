"""The table of model families in the docs is what the sweep finds."""

from __future__ import annotations

import importlib.metadata

import pytest

pytest.importorskip("transformers", reason="the families are those of transformers")

from tests.support.torch import running_on
from tools.sweep.measure import TOLERANCE, Row, measure
from tools.sweep.models import families, quiet
from tools.sweep.page import cells, published, reasons, render

VERSION, TABLE, REASONS = published()
#: Other machines round otherwise.
_ROUNDING = 10
of_this_version = pytest.mark.skipif(
    importlib.metadata.version("transformers") != VERSION, reason=f"the table is that of transformers {VERSION}"
)


@of_this_version
def test_the_table_has_every_family() -> None:
    assert tuple(TABLE) == families(), "run python -m tools.sweep --write"


@of_this_version
@pytest.mark.parametrize("family", families())
def test_a_family_is_as_the_table_says(family: str) -> None:
    quiet()
    with running_on("reference"):  # as the sweep itself does
        row = measure(family)
    found, wanted = cells(row), TABLE[family]
    told = [reason for reason in REASONS if reason[0] == family]
    assert (found[0], found[3]) == (wanted[0], wanted[3]), f"{row}: run python -m tools.sweep --write"
    assert reasons(row) == told, "run python -m tools.sweep --write"
    for error, text in ((row.logits, wanted[1]), (row.gradients, wanted[2])):
        assert (error is None) == (not text)
        assert error is None or error <= min(TOLERANCE, _ROUNDING * float(text))


def test_a_page_is_read_as_it_was_written(tmp_path, monkeypatch) -> None:
    from tools.sweep import page

    rows = [
        Row("one", 1e-7, 2e-6),
        Row("two", reasons={"experts": "a | b", "preset": "c", "block": "needs the preset"}),
        Row("three", reasons={"experts": "d"}),
    ]
    monkeypatch.setattr(page, "PAGE", tmp_path / "families.md")
    page.PAGE.write_text(f"# Title\n\n{page.BEGIN}\nold\n{page.END}\nend\n")
    page.write(rows, "9.9")
    version, table, told = page.published()
    assert (version, list(table.values())) == ("9.9", [cells(row) for row in rows])
    own = "transformers' own experts"
    wanted = [("two", "experts", r"a \| b", own), ("two", "preset", "c", own)]
    assert told == [*wanted, ("three", "experts", "d", "`MoE.from_block`")]
    assert page.PAGE.read_text() == f"# Title\n\n{page.BEGIN}\n{render(rows, '9.9')}\n{page.END}\nend\n"
