"""What the house's tools say of names and prose."""

from __future__ import annotations

import collections
import pathlib
import sys

import pytest

from tests.support.paths import ROOT
from tools import newcomer, prose, release_check

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
        "semicolons: 9.0 per 1,000 words of docstrings and comments, the limit is 3.2"
    ]


def test_the_readme_names_what_is_installed() -> None:
    commands = newcomer.installs((ROOT / "README.md").read_text())
    assert commands[0].startswith("pip install torch --index-url https://") and "#" not in commands[0]
    assert commands[1:] == ["pip install '.[torch]'"]


def test_the_first_step_that_fails_ends_the_check(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: pathlib.Path
) -> None:
    def build(folder: pathlib.Path) -> None:
        release_check.step("build", sys.executable, "-c", "", cwd=tmp_path)
        release_check.step("twine check", sys.executable, "-c", "raise SystemExit(3)", cwd=tmp_path)

    monkeypatch.setattr(release_check, "_done", [])
    monkeypatch.setattr(release_check, "build", build)
    assert release_check.main() == 1
    assert "release-check: twine check failed; its output is above" in capsys.readouterr().out
