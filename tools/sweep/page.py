"""The table of families in docs/user/families.md, made from the sweep and read back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from tools.sweep.measure import PARTS, Row

PAGE = Path(__file__).parents[2] / "docs" / "user" / "families.md"
#: What stands around the generated part of the page.
BEGIN, END = "<!-- begin: python -m tools.sweep --write -->", "<!-- end -->"
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
    before, _, rest = PAGE.read_text("utf-8").partition(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n{render(rows, version)}\n{END}{rest.partition(END)[2]}", "utf-8")


def published() -> tuple[str, Mapping[str, tuple[str, ...]], list[tuple[str, ...]]]:
    """(version of transformers, family -> its cells, the reasons) on the page."""
    text = PAGE.read_text("utf-8").partition(BEGIN)[2].partition(END)[0]
    lines = [
        tuple(cell.strip() for cell in line.strip("| ").replace("\\|", "\0").split("|"))
        for line in text.splitlines()
        if line.startswith("|") and "---" not in line
    ]
    lines = [tuple(cell.replace("\0", "\\|") for cell in line) for line in lines]
    middle = lines.index(_REASONS)
    table = {line[0]: line for line in lines[1:middle]}
    return text.split()[1].strip(","), table, lines[middle + 1 :]


def _line(texts: Iterable[str]) -> str:
    return "| " + " | ".join(texts) + " |"
