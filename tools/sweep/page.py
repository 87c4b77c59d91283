"""The table of families in docs/user/families.md, made from the sweep and read back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from tools.sweep.measure import PARTS, Row
from tools.sweep.recipes import DTYPES, FAMILIES, RECIPES, WAYS, Case

PAGE = Path(__file__).parents[2] / "docs" / "user" / "families.md"
#: What stands around the generated part of the page.
BEGIN, END = "<!-- begin: python -m tools.sweep --write -->", "<!-- end -->"
BEGIN_RECIPES = "<!-- begin: python -m tools.sweep --recipes --write -->"
_REFUSED = ("family", "on", "recipes", "reason")
_HEADINGS = ("family", "logits", "gradients", "runs")
#: How the page names each of PARTS.
_NAMES = ("experts", "preset", "from_block", "read", "written")
_REASONS = ("family", "what does not run", "reason", "instead")
#: A part that does not run for want of another one needs no reason of its own.
_FOLLOWS = "needs the "


def render(rows: Iterable[Row], version: str) -> str:
    """The generated part of the page. version: of transformers."""
    rows = list(rows)
    counts = {part: sum(part not in row.reasons for row in rows) for part in PARTS}
    lines = [
        f"transformers {version}, {len(rows)} families: {counts['experts']} run with our experts, "
        f"{counts['preset']} have a preset, {counts['block']} `from_block`, {counts['reader']} are read and "
        f"{counts['writer']} written.",
        "",
        _line(_HEADINGS),
        "|" + " --- |" * len(_HEADINGS),
        *(_line(cells(row)) for row in rows),
        "",
        _line(_REASONS),
        "|" + " --- |" * len(_REASONS),
        *(_line(reason) for row in rows for reason in reasons(row)),
    ]
    return "\n".join(lines)


def cells(row: Row) -> tuple[str, ...]:
    """The cells of a family, in the order of the headings."""
    runs = [name for part, name in zip(PARTS, _NAMES, strict=True) if part not in row.reasons]
    errors = ("" if error is None else f"{error:.0e}" for error in (row.logits, row.gradients))
    return (row.family, *errors, "all" if len(runs) == len(PARTS) else ", ".join(runs) or "nothing")


def reasons(row: Row) -> list[tuple[str, ...]]:
    """(family, parts, reason, what to do instead), parts that do not run for one reason together."""
    found: dict[str, list[str]] = {}
    for part, reason in row.reasons.items():
        if not reason.startswith(_FOLLOWS):
            found.setdefault(reason.replace("|", "\\|"), []).append(part)
    instead = "transformers' own experts"
    if "experts" not in row.reasons:
        instead = "`moe_torch.transformers.use`"
    elif "block" not in row.reasons:
        instead = "`MoE.from_block`"
    return [(row.family, ", ".join(parts), reason, instead) for reason, parts in found.items()]


def write(rows: Iterable[Row], version: str) -> None:
    _write(BEGIN, render(rows, version))


def _write(begin: str, text: str) -> None:
    before, _, rest = PAGE.read_text("utf-8").partition(begin)
    PAGE.write_text(f"{before}{begin}\n{text}\n{END}{rest.partition(END)[2]}", "utf-8")


def published() -> tuple[str, Mapping[str, tuple[str, ...]], list[tuple[str, ...]]]:
    """(version of transformers, family -> its cells, the reasons) on the page."""
    text, lines = _published(BEGIN)
    middle = lines.index(_REASONS)
    table = {line[0]: line for line in lines[1:middle]}
    return text.split()[1].strip(","), table, lines[middle + 1 :]


def _published(begin: str) -> tuple[str, list[tuple[str, ...]]]:
    """(a generated part of the page, the rows of its tables with their headings)."""
    text = PAGE.read_text("utf-8").partition(begin)[2].partition(END)[0]
    lines = [
        tuple(cell.strip() for cell in line.strip("| ").replace("\\|", "\0").split("|"))
        for line in text.splitlines()
        if line.startswith("|") and "---" not in line
    ]
    return text, [tuple(cell.replace("\0", "\\|") for cell in line) for line in lines]


def write_recipes(reasons: Mapping[Case, str]) -> None:
    """reasons: why a case does not run, or nothing, for all cases."""
    lines = [_line(("family", *RECIPES)), "|" + " --- |" * (1 + len(RECIPES))]
    lines += [_line((family, *(_ways(reasons, family, one) for one in RECIPES))) for family in FAMILIES]
    refused: dict[tuple[str, str, str], dict[str, None]] = {}
    for case, reason in reasons.items():
        if reason:
            refused.setdefault((case.family, case.way, reason.replace("|", "\\|")), {})[case.recipe] = None
    lines += ["", _line(_REFUSED), "|" + " --- |" * len(_REFUSED)]
    for (family, way, reason), recipes in refused.items():
        lines.append(_line((family, way, "all" if len(recipes) == len(RECIPES) else ", ".join(recipes), reason)))
    _write(BEGIN_RECIPES, "\n".join(lines))


def _ways(reasons: Mapping[Case, str], family: str, recipe: str) -> str:
    ran = {way: [one for one in DTYPES if not reasons[Case(family, recipe, way, one)]] for way in WAYS}
    if all(len(dtypes) == len(DTYPES) for dtypes in ran.values()):
        return "both"
    texts = {
        way: way if len(dtypes) == len(DTYPES) else f"{way} in {dtypes[0]}" for way, dtypes in ran.items() if dtypes
    }
    return ", ".join(texts.values()) or "none"


def published_recipes() -> dict[Case, str]:
    """The argument of `write_recipes`, from the page."""
    _, lines = _published(BEGIN_RECIPES)
    middle, found = lines.index(_REFUSED), dict[Case, str]()
    told = {
        (family, way, recipe): reason.replace("\\|", "|")
        for family, way, recipes, reason in lines[middle + 1 :]
        for recipe in (RECIPES if recipes == "all" else recipes.split(", "))
    }
    for family, *cells in lines[1:middle]:
        for recipe, cell in zip(RECIPES, cells, strict=True):
            for way in WAYS:
                for dtype in DTYPES:
                    runs = cell == "both" or bool({way, f"{way} in {dtype}"} & set(cell.split(", ")))
                    found[Case(family, recipe, way, dtype)] = "" if runs else told[family, way, recipe]
    return found


def _line(texts: Iterable[str]) -> str:
    return "| " + " | ".join(texts) + " |"
