"""Chains of calls around models of the families that people run most: results, and the table in the docs.

MOEBIUS_ROUTES=all takes every recipe of every family, on experts and on layers, in both dtypes.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

pytest.importorskip("peft", reason="needs peft (pip install 'moebius[recipes]')")
pytest.importorskip("accelerate", reason="transformers loads fp8 and mxfp4 with accelerate")

from tests.support.families import IS_EARLIER, JUDGE
from tools.sweep import page
from tools.sweep.recipes import DTYPES, FAMILIES, RECIPES, WAYS, Case, every_case, run

PUBLISHED = page.published_recipes()
EVERY = os.environ.get("MOEBIUS_ROUTES") == "all"
pytestmark = [
    pytest.mark.skipif(IS_EARLIER, reason=f"blocks of transformers before {JUDGE} may differ"),
    pytest.mark.filterwarnings("ignore"),
]


def cases_of(family: str) -> list[Case]:
    """Two of each family, so that each recipe runs on five or six families, in both ways and dtypes."""
    if EVERY:
        return every_case(family)
    number, recipes = FAMILIES.index(family), list(RECIPES)
    turns = (number, number // 2), (number + 3, number // 2 + 1)
    return [Case(family, recipes[one % len(recipes)], WAYS[way % 2], DTYPES[(one + way) % 2]) for one, way in turns]


def test_the_slice_has_every_recipe_in_both_ways_and_dtypes() -> None:
    found = {case[1:] for family in FAMILIES for case in cases_of(family) if not PUBLISHED[case]}
    assert {(recipe, way) for recipe, way, _ in found} == {(recipe, way) for recipe in RECIPES for way in WAYS}
    assert {(recipe, dtype) for recipe, _, dtype in found} == {
        (recipe, dtype) for recipe in RECIPES for dtype in DTYPES
    }


def test_the_table_has_every_case_and_is_read_as_it_was_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert list(PUBLISHED) == [case for family in FAMILIES for case in every_case(family)]
    text = page.PAGE.read_text()
    monkeypatch.setattr(page, "PAGE", tmp_path / "families.md")
    page.PAGE.write_text(text)
    page.write_recipes(PUBLISHED)
    assert page.PAGE.read_text() == text


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_runs_as_the_table_says(family: str) -> None:
    for case in cases_of(family):
        assert run(case) == PUBLISHED[case], f"{case}: run python -m tools.sweep --recipes --write"
