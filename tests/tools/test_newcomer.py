"""The walk of a newcomer takes its commands from the README, and a step that says nothing for long is found."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import pytest

from tests.support.paths import ROOT
from tools import newcomer


def test_the_readme_names_what_is_installed() -> None:
    commands = newcomer.installs((ROOT / "README.md").read_text())
    assert commands[0].startswith("pip install torch --index-url https://") and "#" not in commands[0]
    assert commands[1:] == ["pip install '.[torch]'"]
    assert newcomer.CPU_TORCH.startswith("torch==") and newcomer.PARITY == "torch,jax,checkpoint"


def test_steps_are_timed_and_failures_are_told(tmp_path: pathlib.Path, capfd: pytest.CaptureFixture[str]) -> None:
    script = "import time\ntime.sleep(0.2)\nprint('first', flush=True)\ntime.sleep(0.2)\nprint('last')"
    step = newcomer.run("talk", [sys.executable, "-c", script], tmp_path, dict(os.environ))
    assert step.first is not None and 0.2 <= step.first <= step.seconds - 0.2
    assert newcomer.run("silent", [sys.executable, "-c", ""], tmp_path, dict(os.environ)).first is None
    with pytest.raises(subprocess.CalledProcessError):
        newcomer.run("fail", [sys.executable, "-c", "raise SystemExit('the reason')"], tmp_path, dict(os.environ))
    assert "the reason" in capfd.readouterr().err
