"""Links of pages: where files of the repository lie in the site."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
#: Page of the repository -> page of the site, where the path is another one.
PLACES = {"README.md": "readme.md", "docs/README.md": "contents.md"}
PAGES = ("CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "benchmarks/README.md")
_FENCE = re.compile(r"^(```.*?^```)$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(\]\()([^)\s]+)(\))")
_ATTRIBUTE = re.compile(r'(\b(?:src|srcset|href)=")([^"\s]+)(")')


def place_of(path: str) -> str:
    """Where a file of the repository lies in the site; of pages, the path of their Markdown."""
    if path in PLACES:
        return PLACES[path]
    if path.startswith("docs/"):
        return re.sub(r"\.ipynb$", ".md", path.removeprefix("docs/"))
    if re.fullmatch(r"examples(/\w+\.py)?/?", path):
        return f"{path.removesuffix('.py')}.md" if path.endswith(".py") else "examples/index.md"
    if (ROOT / path).is_dir() and (ROOT / path / "README.md").exists():
        path = posixpath.join(path, "README.md")
    elif (ROOT / path).is_dir():
        path = posixpath.join(path, "index.md")
    return f"repository/{path}"


def linked_files(page: str, text: str) -> set[str]:
    """The files of the repository, apart from pages, that a page of it links to."""
    found = set()
    for part in _FENCE.split(text)[::2]:
        for pattern in (_LINK, _ATTRIBUTE):
            for match in pattern.finditer(part):
                path = posixpath.normpath(posixpath.join(posixpath.dirname(page), match[2].partition("#")[0]))
                if "://" not in match[2] and (ROOT / path).exists() and place_of(path).startswith("repository/"):
                    found.add(path)
    return found


def rewritten(page: str, text: str, place: str, exists: Callable[[str], bool]) -> tuple[str, list[str]]:
    """(the text of a page of the repository with the links of its place in the site, links that lead nowhere).

    exists: whether the site has a place.
    """
    broken = []

    def one(match: re.Match[str], html: bool = False) -> str:
        link, _, anchor = match[2].partition("#")
        if "://" in link or link.startswith("mailto:") or not link:
            return match[0]
        path = posixpath.normpath(posixpath.join(posixpath.dirname(page), link))
        target = place_of(path)
        if not (ROOT / path).exists() or not exists(target):
            broken.append(match[2])
        target = posixpath.relpath(target, posixpath.dirname(place) or ".")
        target = re.sub(r"\.md$", ".html", target) if html else target
        return f"{match[1]}{target}{'#' + anchor if anchor else ''}{match[3]}"

    parts = _FENCE.split(text)
    for number in range(0, len(parts), 2):
        parts[number] = _ATTRIBUTE.sub(lambda match: one(match, True), _LINK.sub(one, parts[number]))
    return "".join(parts), broken
