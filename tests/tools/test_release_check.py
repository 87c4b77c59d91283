"""The check of a release ends with every step that it ran, and with the first that failed."""

from __future__ import annotations

import pathlib
import sys

import pytest

from tools import release_check


def test_the_summary_names_what_was_done_and_what_failed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: pathlib.Path
) -> None:
    monkeypatch.setattr(release_check, "_done", [])

    def build(folder: pathlib.Path) -> None:
        release_check.step("build", sys.executable, "-c", "", cwd=tmp_path)
        release_check.step("twine check", sys.executable, "-c", "raise SystemExit(3)", cwd=tmp_path)

    monkeypatch.setattr(release_check, "build", build)
    assert release_check.main() == 1
    *_, first, second, blank, last = capsys.readouterr().out.splitlines()
    assert first.split()[:2] == ["ok", "build"] and second.split()[:3] == ["FAILED", "twine", "check"]
    assert not blank and last == "release-check: twine check failed; its output is above"

    def incomplete(folder: pathlib.Path) -> None:
        raise SystemExit("the source distribution must hold README.md")

    monkeypatch.setattr(release_check, "build", incomplete)
    assert release_check.main() == 1
    assert capsys.readouterr().out.endswith("\nrelease-check: the source distribution must hold README.md\n")
    monkeypatch.setattr(release_check, "check", lambda: (0, "moebius 1.0 could be released: here"))
    assert release_check.main() == 0
