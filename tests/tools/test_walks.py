"""The walk of a newcomer takes its commands from the README; the check of a release ends with what failed."""

from __future__ import annotations

import pathlib
import sys

import pytest

from tests.support.paths import ROOT
from tools import newcomer, release_check


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
