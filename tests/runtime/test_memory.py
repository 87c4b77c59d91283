"""Memory of processes whose calls have ever other numbers of tokens: caches are bounded."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys

import pytest

from tests.support.paths import ROOT

#: Calls of a loop; .ci/daily asks for 20,000, which takes minutes per mode.
CALLS = int(os.environ.get("MOEBIUS_CALLS", "40"))
MODES = (
    [("eager",), ("compile",), ("train",), ("jax",), ("jax plain",)] if CALLS > 1000 else [("eager", "train", "jax")]
)


@pytest.mark.parametrize("modes", MODES)
def test_memory_stays_flat_however_often_the_number_of_tokens_changes(modes: tuple[str, ...]) -> None:
    for framework in ("torch", "jax"):
        if importlib.util.find_spec(framework) is None:
            modes = tuple(mode for mode in modes if mode.startswith("jax") != (framework == "jax"))
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "TRITON_INTERPRET": "0"}
    command = [sys.executable, "-m", "tests.support.runtime.growth", str(CALLS), *modes]
    finished = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=3000)
    assert finished.returncode == 0, finished.stderr
    for mode, found in json.loads(finished.stdout.splitlines()[-1]).items():
        assert found["grown_mb"] < 100, (mode, found)
        # Where nothing is forgotten, a plan for every number of tokens takes 25 KB and more.
        assert found.get("held_per_call", 0) < 10_000, (mode, found)
