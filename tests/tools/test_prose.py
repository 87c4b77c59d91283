"""The counter of bad habits of English: each is found where it is, and `make lint` fails above a limit."""

from __future__ import annotations

import collections
import pathlib

import pytest

from tools import prose

FILE = '''"""A module whose text is long; it has what it has."""

#: What a constant is.
LIMIT = 1


def function() -> None:
    """Return nothing. Whether it is called does not matter."""
'''


def test_every_habit_is_found_in_its_line(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "one.py"
    path.write_text(FILE)
    assert prose.main([str(path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.removeprefix(f"{path}:").split(":")[0] for line in lines[:-2]] == ["1", "1", "8", "3"]
    assert "docstrings: 20 words" in lines[-2] and "comments: 4 words" in lines[-1]


def test_a_rate_above_its_limit_is_a_problem() -> None:
    words = collections.Counter({"docstrings": 900, "comments": 100})
    matches = {habit: collections.Counter() for habit in prose.HABITS}
    assert prose.too_many(words, matches) == []
    matches["semicolons"]["docstrings"] = 9
    assert prose.too_many(words, matches) == [
        "semicolons: 9.0 per 1,000 words of docstrings and comments, the limit is 8"
    ]
