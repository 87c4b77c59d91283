"""Sections of parameters and errors, out of docstrings as this project writes them.

Docstrings say `name: meaning. other, another: meaning.` in prose, or have a section `Args:`. The first kind gets the
sections of the second, so that the API reference shows a table of parameters. Only names of the signature begin a
parameter; all other text stays where it is.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

_SECTION = re.compile(r"^(Args|Attributes|Returns|Raises):$", re.MULTILINE)
#: An item of a section that names several parameters, with the lines that continue it.
_JOINT = re.compile(r"^( +)(\w+(?:, \w+)+): (.*(?:\n\1 +.*)*)", re.MULTILINE)
_RAISES = re.compile(r"(?<![\w.])Raises ((?:InvalidInput|Unsupported)[^.]*(?:\.(?![ \n]|$)[^.]*)*)\.?\s*$")


#: A docstring that leaves to the other front-end's function what is equal.
LIKE = re.compile(r"\bas `(moe_torch(?:\.\w+)+)`")


def parameters_of(text: str, names: Sequence[str]) -> tuple[str, list[tuple[str, str]]]:
    """(the text without its parameters, (names, meaning) of each) of a docstring's prose."""
    known = "|".join(sorted(map(re.escape, names), key=len, reverse=True))
    if not known:
        return text, []
    # Behind the beginning, a sentence or a line's end: one name, or several with commas, and a colon.
    begin = re.compile(rf"(?:(?<=^)|(?<=[.;]\s)|(?<=\n))((?:{known})(?:(?:, | and )(?:{known}))*): ")
    rest, found = [], []
    for paragraph in text.split("\n\n"):
        listed = re.match(r"\s*(?:[-|*]|\d+\.|```| {4})", paragraph) is not None
        marks = [] if listed else list(begin.finditer(paragraph))
        if not marks:
            rest.append(paragraph)
            continue
        before = paragraph[: marks[0].start()].strip()
        if before:
            rest.append(before)
        ends = [mark.start() for mark in marks[1:]] + [len(paragraph)]
        for mark, end in zip(marks, ends, strict=True):
            found.append((mark[1], " ".join(paragraph[mark.end() : end].split()).rstrip(";")))
    return "\n\n".join(rest), found


def with_sections(text: str, names: Sequence[str], title: str) -> str:
    """The docstring with a section of its parameters and one of its errors, each parameter on its own line."""
    if _SECTION.search(text):
        return _JOINT.sub(lambda item: "\n".join(f"{item[1]}{name}: {item[3]}" for name in item[2].split(", ")), text)
    raises = _RAISES.search(text)
    if raises is not None:
        text = text[: raises.start()].rstrip()
    rest, found = parameters_of(text, names)
    parts = [rest.strip()]
    if found:
        lines = [f"    {name}: {meaning}" for names_, meaning in found for name in re.split(r", | and ", names_)]
        parts.append("\n".join([f"{title}:", *lines]))
    if raises is not None:
        reasons = " ".join(raises[1].split())
        parts.append(f"**Raises** {reasons}.")
    return "\n\n".join(part for part in parts if part)


def completed(text: str, full: str) -> str:
    """A docstring with sections, with what only `full` says: paragraphs, parameters, results and errors."""
    (prose, *own), (paragraphs, *others) = _SECTION.split(text.strip()), _SECTION.split(full.strip())
    sections, mine = dict(zip(others[::2], others[1::2], strict=True)), dict(zip(own[::2], own[1::2], strict=True))
    if "Args" in mine and "Args" in sections:
        items, known = _items(mine["Args"]), _items(sections["Args"])
        mine["Args"] = "\n" + "".join(items.pop(name, item) for name, item in known.items()) + "".join(items.values())
    sections |= mine
    summary, *more = prose.strip().split("\n\n")
    parts = [summary, *paragraphs.strip().split("\n\n")[1:], *more]
    parts += [f"{title}:\n{body.strip(chr(10)).rstrip()}" for title, body in sections.items()]
    return "\n\n".join(parts)


def _items(section: str) -> dict[str, str]:
    """Name -> the lines of each item of a section."""
    items = re.split(r"^    (?=\w+: )", section.strip("\n").rstrip() + "\n", flags=re.MULTILINE)[1:]
    return {item.partition(":")[0]: f"    {item}" for item in items}
