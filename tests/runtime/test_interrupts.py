"""Ctrl-C and forks at any moment leave nothing behind: the next call's result is that of a fresh process."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.support.paths import ROOT

#: How many times as many trials as by default; .ci/daily asks for more.
DEPTH = int(os.environ.get("MOEBIUS_DEPTH", "1"))


def _trials(module: str, *arguments: object, timeout: float = 120) -> str:
    """Run trials in a process of their own and return what it printed; its failure fails the test."""
    finished = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", f"tests.support.runtime.{module}", *map(str, arguments)],
        env={**os.environ, "TRITON_INTERPRET": "1", "JAX_PLATFORMS": "cpu"},
        cwd=ROOT, capture_output=True, text=True, timeout=timeout * DEPTH,
    )  # fmt: skip
    assert finished.returncode == 0, finished.stdout + finished.stderr
    return finished.stdout.splitlines()[-1]


def test_an_interrupted_launch_leaves_the_interpreter_free() -> None:
    pytest.importorskip("triton")
    trials = 200 * DEPTH
    assert int(_trials("interrupted", "launches", trials)) > trials // 3


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_process_forked_during_a_launch_can_launch() -> None:
    pytest.importorskip("triton")
    trials = 20 * DEPTH
    assert int(_trials("interrupted", "forks", trials)) > trials // 3
