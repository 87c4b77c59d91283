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
CALLS = int(os.environ.get("MOEBIUS_CALLS", "100"))


@pytest.mark.parametrize("mode", ["eager", "compile", "train", "jax"])
def test_memory_stays_flat_however_often_the_number_of_tokens_changes(mode: str) -> None:
    framework = "jax" if mode == "jax" else "torch"
    if importlib.util.find_spec(framework) is None:
        pytest.skip(f"{framework} is not installed")
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "TRITON_INTERPRET": "0"}
    command = [sys.executable, "-m", "tests.support.runtime.growth", mode, str(CALLS)]
    finished = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1200)
    assert finished.returncode == 0, finished.stderr
    found = json.loads(finished.stdout.splitlines()[-1])
    assert found["grown_mb"] < 100, found
    # Where nothing is forgotten, a plan for every number of tokens takes 25 KB and more.
    assert found["held"] < 10_000, found
