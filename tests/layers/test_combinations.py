"""Features times features: every pair of values runs right, or is refused by name, as docs/user/combinations.md says.

MOEBIUS_COMBINATIONS=all runs every pair alone, and the covering arrays of more seeds.
"""

from __future__ import annotations

import itertools
import os
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("jax")
pytest.importorskip("flax")
pytest.importorskip("peft", reason="adapters are PEFT's (pip install 'moebius[recipes]')")
pytest.importorskip("qwix", reason="rules are qwix' (pip install 'moebius[recipes]')")
pytest.importorskip("transformers")

from moe_core.errors import InvalidInput, Unsupported
from moe_torch import trace
from tests.support.families import IS_EARLIER
from tools.combinations import __main__ as command
from tools.combinations import page, torch_ways
from tools.combinations.cover import Cover, Row
from tools.combinations.features import MODELS, WAYS, cover, factors, label, refused, rows

EVERY = os.environ.get("MOEBIUS_COMBINATIONS") == "all"
#: Blocks of earlier transformers may differ.
ARRAYS = {framework: cover(framework) for framework in WAYS if framework != MODELS or not IS_EARLIER}
#: torch refuses PEFT's parametrisations, and its compiler passes errors on.
_ERRORS = (InvalidInput, Unsupported, KeyError, RuntimeError)
#: qwix and PEFT use names that others deprecate.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")


def rows_of(framework: str) -> list[tuple[Row, int]]:
    array = ARRAYS[framework]
    found = [(row, seed) for seed in range(4 if EVERY else 1) for row in rows(framework, seed)]
    if EVERY:
        plain = {(name, values[0]) for name, values in factors(framework).items()}
        pairs = ([array.values[a], array.values[b]] for a, b in array.pairs())
        found += [(array.plainest(pair), 0) for pair in pairs if not plain & set(pair)]
    return found


ROWS = [(framework, *row) for framework in ARRAYS for row in rows_of(framework)]
RULES = [
    (framework, array.plainest(values), text)
    for framework, array in ARRAYS.items()
    for values, text in refused(framework)
]


def named(*parts: Any) -> str:
    return " ".join(label(part, parts[0]) if isinstance(part, dict) else str(part) for part in parts[:2])


@pytest.mark.parametrize(("framework", "row", "seed"), ROWS, ids=[f"{f} {n}" for n, (f, *_) in enumerate(ROWS)])
def test_a_row_runs_right(framework: str, row: Row, seed: int) -> None:
    assert not command.complaints(framework, row, seed=seed), label(row, framework)


@pytest.mark.parametrize(("framework", "row", "text"), RULES, ids=[named(*rule) for rule in RULES])
def test_a_combination_is_refused_by_name(framework: str, row: Row, text: str) -> None:
    with pytest.raises(_ERRORS, match=text):
        command.complaints(framework, row)


@pytest.mark.skipif(MODELS not in ARRAYS, reason="blocks of earlier transformers may differ")
@pytest.mark.parametrize(
    "values",
    [
        {"family": "deepseek_v3", "by": "from_block", "dtype": "float64"},
        {"family": "deepseek_v3", "by": "from_block", "dtype": "float16", "autocast": "bfloat16"},
        {"family": "gemma4", "by": "use", "dtype": "float64", "autocast": "float16"},
        {"by": "use", "option of use": "main_grad", "compile": "on"},
    ],
    ids=str,
)
def test_three_together_that_were_wrong(values: dict[str, str]) -> None:
    """Pairs alone do not hold them."""
    assert not command.complaints(MODELS, ARRAYS[MODELS].plainest(values.items()))


@pytest.mark.parametrize("framework", ARRAYS)
def test_rows_hold_every_pair(framework: str) -> None:
    array = ARRAYS[framework]
    every = rows(framework)
    held = {frozenset(pair) for row in every for pair in itertools.combinations(row.items(), 2)}
    wanted = {frozenset((array.values[a], array.values[b])) for a, b in array.pairs()}
    assert held >= wanted and len(wanted) > (700 if framework == MODELS else 3000)
    assert not [row for row in every for values, _ in refused(framework) if set(values) <= set(row.items())]


def test_a_pair_that_no_row_can_hold_is_an_error() -> None:
    """Neither is refused, but each refuses one of the only values of a third factor."""
    factors = {"a": ("0", "1"), "b": ("0", "1"), "c": ("0", "1")}
    with pytest.raises(LookupError, match="what refuses them"):
        Cover(factors, [[("a", "1"), ("c", "0")], [("b", "1"), ("c", "1")]]).rows()


def test_the_page_says_what_the_rows_prove() -> None:
    assert page.published() == page.render(), "run python -m tools.combinations --write"


def test_a_planted_fault_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replay that forgets the token mask."""
    row = ARRAYS["torch"].plainest([("mask", "some"), ("trace", "replay"), ("capacity", "1.0")])
    assert not torch_ways.examine(row)
    monkeypatch.setattr(trace, "_masked", lambda array, mask: array)
    assert any("output" in text for text in torch_ways.examine(row))
