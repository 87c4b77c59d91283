"""The tables of docs/user/combinations.md, made from what the rows prove."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from tools.combinations.features import APART, FIELDS, MODELS, RANKS, REFUSED, factors

PAGE = Path(__file__).parents[2] / "docs" / "user" / "combinations.md"
BEGIN, END = "<!-- begin: python -m tools.combinations --write -->", "<!-- end -->"
TITLES = {
    "torch": "PyTorch",
    RANKS: "PyTorch on two ranks",
    MODELS: "Blocks of transformers' models",
    "jax": "JAX and Flax",
}


#: Features all of whose values count: none is plain.
_NEVER_PLAIN = ("family", "by")
_HEADINGS = ((REFUSED, "feature", "refused with", "the error says"), (APART, "feature", "never with", "because"))


def render(frameworks: Iterable[str] = TITLES) -> str:
    """The generated part of the page."""
    sections = [f"## In both frameworks\n\n{values(FIELDS)}\n\n{reasons('')}"]
    for name in frameworks:
        new = {feature: every for feature, every in factors(name).items() if name == MODELS or feature not in FIELDS}
        sections.append(f"## {TITLES[name]}\n\n{values(new)}\n\n{reasons(name)}")
    return "\n\n".join(sections)


def values(features: Mapping[str, Iterable[str]]) -> str:
    """A line for each feature with its values but the plain one."""
    lines = [_line(["feature", "values"]), "| --- | --- |"]
    return "\n".join(lines + [_line([n, ", ".join([*v][n not in _NEVER_PLAIN :])]) for n, v in features.items()])


def reasons(framework: str) -> str:
    """What a framework, or both, refuse, and what has no meaning: rules of one reason in one line."""
    tables = []
    for rules, *headings in _HEADINGS:
        grouped = dict[str, list[list[str]]]()
        for text, reason in rules.get(framework, ()):
            grouped.setdefault(reason, []).append(_words(text))
        lines = [_line([*cells, _plain(reason)]) for reason, every in grouped.items() for cells in _together(every)]
        tables.append("\n".join([_line(headings), "| --- | --- | --- |", *lines]))
    return "\n\n".join(tables)


def _together(rules: list[list[str]]) -> list[tuple[str, str]]:
    """(what the rules of one reason share, the rest of each), or a pair for each rule where they share nothing."""
    common = [part for part in rules[0] if all(part in rule for rule in rules)]
    if len(rules) == 1 or not common:
        return [(rule[0], ", ".join(rule[1:])) for rule in rules]
    return [(", ".join(common), "; ".join(", ".join(part for part in rule if part not in common) for rule in rules))]


def _words(text: str) -> list[str]:
    """The parts of a rule as the table says them."""
    parts = [part.partition("=") for part in text.split(", ")]
    return [name if value in ("*", "on", "some") else f"{name} = {value}" for name, _, value in parts]


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
