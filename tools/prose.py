"""Count habits of bad English in docstrings and comments, and the words of each kind of text.

`python -m tools.prose` checks the three packages against `LIMITS` and exits 1 where a rate is above its limit.
`python -m tools.prose FILE ...` counts only these files or folders and prints every line that matches.
"""

from __future__ import annotations

import ast
import collections
import pathlib
import re
import sys
from collections.abc import Iterator

ROOT = pathlib.Path(__file__).parent.parent
PACKAGES = ("moe_core", "moe_torch", "moe_jax")
HABITS = {
    "of which, whose, those of": re.compile(r"\b(of which|in which|to which|for which|whose|those of)\b"),
    "opens with What, Whether, Where": re.compile(r"(^|[.:;] )(What|Whether|Where)\b", re.MULTILINE),
    "semicolons": re.compile(r";"),
}
#: Matches per 1,000 words that docstrings and comments of the packages may have.
LIMITS = {"of which, whose, those of": 0.75, "opens with What, Whether, Where": 0.2, "semicolons": 3.2}
DEFINITIONS = ast.Module | ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def python_texts(path: pathlib.Path) -> Iterator[tuple[str, int, str]]:
    """("docstrings" or "comments", line, text) of each docstring and comment line of a Python file."""
    source = path.read_text()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, DEFINITIONS) and (text := ast.get_docstring(node)):
            yield "docstrings", node.body[0].lineno, text
    for number, line in enumerate(source.splitlines(), 1):
        if match := re.match(r"\s*#:? (.*)", line):
            yield "comments", number, match[1]


def page_text(path: pathlib.Path) -> str:
    """The text of a Markdown page without its code blocks."""
    return re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL)


def texts(root: pathlib.Path) -> Iterator[tuple[str, str]]:
    """(kind, text) of all docstrings, comments and pages of the project."""
    for package in PACKAGES:
        for path in sorted((root / package).rglob("*.py")):
            yield from ((kind, text) for kind, _, text in python_texts(path))
    pages = {"user pages": "docs/user/*.md", "developer pages": "docs/developer/*.md", "notebook": "docs/notebook/*.md"}
    for kind, pattern in pages.items():
        yield from ((kind, page_text(path)) for path in sorted(root.glob(pattern)))


def too_many(words: collections.Counter[str], matches: dict[str, collections.Counter[str]]) -> list[str]:
    """One line for each habit that is above its limit in docstrings and comments together."""
    total = words["docstrings"] + words["comments"]
    rates = {
        habit: 1000 * (matches[habit]["docstrings"] + matches[habit]["comments"]) / max(total, 1) for habit in HABITS
    }
    return [
        f"{habit}: {rate:.1f} per 1,000 words of docstrings and comments, the limit is {LIMITS[habit]:g}"
        for habit, rate in rates.items()
        if rate > LIMITS[habit]
    ]


def show(paths: list[pathlib.Path]) -> None:
    """Print each match in some Python files, and the rates of these files."""
    words, matches = collections.Counter[str](), {habit: collections.Counter[str]() for habit in HABITS}
    for path in paths:
        for kind, start, text in python_texts(path):
            words[kind] += len(text.split())
            for habit, pattern in HABITS.items():
                for match in pattern.finditer(text):
                    matches[habit][kind] += 1
                    line = start + text[: match.start()].count("\n")
                    print(f"{path}:{line}: {habit}: {text.splitlines()[line - start].strip()}")
    report(words, matches)


def report(words: collections.Counter[str], matches: dict[str, collections.Counter[str]]) -> None:
    """Print words, and matches per 1,000 words, of each kind of text."""
    for kind, count in words.items():
        rates = ", ".join(f"{habit} {1000 * matches[habit][kind] / max(count, 1):.1f}" for habit in HABITS)
        print(f"{kind}: {count} words, per 1,000: {rates}")


def main(arguments: list[str]) -> int:
    """Print counts; return 1 where the packages are above a limit."""
    if arguments:
        named = [pathlib.Path(argument) for argument in arguments]
        show([file for path in named for file in (sorted(path.rglob("*.py")) if path.is_dir() else [path])])
        return 0
    words, matches = collections.Counter[str](), {habit: collections.Counter[str]() for habit in HABITS}
    for kind, text in texts(ROOT):
        words[kind] += len(text.split())
        for habit, pattern in HABITS.items():
            matches[habit][kind] += len(pattern.findall(text))
    report(words, matches)
    problems = too_many(words, matches)
    print("\n".join(problems), file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
