"""The matrices of docs/user/combinations.md, made from what the rows prove."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from pathlib import Path

from tools.combinations.features import APART, MODELS, RANKS, REFUSED, apart, factors, refused

PAGE = Path(__file__).parents[2] / "docs" / "user" / "combinations.md"
BEGIN, END = "<!-- begin: python -m tools.combinations --write -->", "<!-- end -->"
RUNS, SOME, NONE, APART_CELL = "+", "(+)", "no", "/"
TITLES = {
    "torch": "PyTorch",
    RANKS: "PyTorch on two ranks",
    MODELS: "Blocks of transformers' models",
    "jax": "JAX and Flax",
}


#: Features all of whose values count: none is plain.
_NEVER_PLAIN = ("family", "by")


def render(frameworks: Iterable[str] = TITLES) -> str:
    """The generated part of the page."""
    sections = [f"## In both frameworks\n\n{reasons('')}"]
    sections += [f"## {TITLES[name]}\n\n{matrix(name)}\n\n{reasons(name)}" for name in frameworks]
    return "\n\n".join(sections)


def _shown(framework: str) -> dict[str, tuple[str, ...]]:
    every = factors(framework)
    return {name: values[name not in _NEVER_PLAIN :] for name, values in every.items()}


def matrix(framework: str) -> str:
    """A line for each feature, with a cell for each one before it."""
    shown = _shown(framework)
    names = list(shown)
    lines = [_line(["", "feature", "values", *(str(number) for number in range(1, len(names)))])]
    lines.append("|" + " --- |" * (len(names) + 2))
    for place, name in enumerate(names):
        cells = [cell(framework, name, other) for other in names[:place]]
        cells += [""] * (len(names) - 1 - len(cells))
        lines.append(_line([str(place + 1), name, ", ".join(shown[name]), *cells]))
    return "\n".join(lines)


def cell(framework: str, first: str, second: str) -> str:
    """How the values of two features combine, plain ones aside."""
    shown = _shown(framework)
    pairs = set(itertools.product(*([(name, value) for value in shown[name]] for name in (first, second))))
    not_there = {pair for pair in pairs for values, _ in apart(framework) if set(values) == set(pair)}
    lost = {pair for pair in pairs for values, _ in refused(framework) if set(values) <= set(pair)}
    if not_there == pairs:
        return APART_CELL
    if lost | not_there == pairs:
        return NONE
    touched = any({first, second} <= {name for name, _ in values} for values, _ in refused(framework))
    return SOME if lost or touched or not_there else RUNS


def reasons(framework: str) -> str:
    """What a framework, or both, refuse, and what has no meaning."""
    lines = [_line(["together", "why"]), "| --- | --- |"]
    for table, begin in ((REFUSED, "refused: "), (APART, "")):
        lines += [_line([_words(text), begin + _plain(reason)]) for text, reason in table.get(framework, ())]
    return "\n".join(lines)


def _words(text: str) -> str:
    """A rule as the table says it."""
    parts = [part.partition("=") for part in text.split(", ")]
    return ", ".join(name if value in ("*", "on", "some") else f"{name} = {value}" for name, _, value in parts)


def _plain(pattern: str) -> str:
    return pattern.replace("\\", "").replace(".*", " ... ").replace("|", "\\|")


def _line(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def write() -> None:
    before, _, rest = PAGE.read_text("utf-8").partition(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n\n{render()}\n\n{END}{rest.partition(END)[2]}", "utf-8")


def published() -> str:
    """The generated part as the page has it."""
    return PAGE.read_text("utf-8").partition(BEGIN)[2].partition(END)[0].strip()
