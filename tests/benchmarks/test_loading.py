"""Loading a layer from a checkpoint holds its weights once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec

import pytest

from benchmarks import loading
from tests.support.paths import ROOT

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="peak memory is read as Linux tells it")


@pytest.mark.parametrize(("front_end", "needs"), [("torch", "torch"), ("flax", "flax")])
def test_weights_are_in_memory_once(tmp_path, front_end, needs):
    if find_spec(needs) is None:
        pytest.skip(f"needs {needs}")
    loading.write_layer(tmp_path, "bf16", 16, 1024)
    command = [sys.executable, "-m", "benchmarks.loading", "--measure", front_end, str(tmp_path)]
    # Where there is a GPU, the memory of Flax's arrays would be its memory.
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["weights_gib"] > 0.09 and 0.9 < found["peak_over_weights"] < loading.ALLOWED, found


@pytest.mark.skipif(any(find_spec(name) is None for name in ("torch", "flax")), reason="needs both front-ends")
def test_a_record(tmp_path, capsys):
    record = tmp_path / "record.json"
    loading.main(["--storages", "mxfp4", "--experts", "4", "--width", "64", "--output", str(record)])
    assert "| mxfp4 | flax |" in capsys.readouterr().out
    found = json.loads(record.read_text())
    assert [row["front_end"] for row in found["rows"]] == ["torch", "flax"]
    assert found["sizes"] == {"experts": 4, "d_model": 64, "d_ff": 64} and found["provenance"]["cores"]
