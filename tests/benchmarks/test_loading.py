"""Loading a layer from a checkpoint holds its weights once."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec

import pytest

from benchmarks import loading

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="peak memory is read as Linux tells it")


@pytest.mark.skipif(any(find_spec(name) is None for name in ("torch", "flax")), reason="needs both front-ends")
def test_weights_are_in_memory_once(tmp_path, capsys, monkeypatch):
    # Where there is a GPU, the memory of Flax's arrays would be its memory.
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    record = tmp_path / "record.json"
    sizes = ["--experts", "16", "--width", "1024"]
    assert loading.main(["--storages", "bf16", *sizes, "--output", str(record)]) == 0
    assert "| bf16 | flax |" in capsys.readouterr().out
    found = json.loads(record.read_text())
    assert [row["front_end"] for row in found["rows"]] == ["torch", "flax"]
    for row in found["rows"]:
        assert row["weights_gib"] > 0.09 and 0.9 < row["peak_over_weights"] < loading.ALLOWED, row
    assert found["sizes"] == {"experts": 16, "d_model": 1024, "d_ff": 1024} and found["provenance"]["cores"]


@pytest.mark.parametrize("front_end", ["torch", "flax"])
def test_codes_are_loaded_as_they_are(tmp_path, front_end):
    pytest.importorskip(front_end)
    loading.write_layer(tmp_path, "mxfp4", 4, 64)
    assert loading.measure(front_end, str(tmp_path))["weights_gib"] > 0


def test_a_peak_above_the_limit_fails(monkeypatch, capsys):
    done = subprocess.CompletedProcess([], 0, json.dumps({"peak_over_weights": 2 * loading.ALLOWED}))
    monkeypatch.setattr(loading.subprocess, "run", lambda *_, **__: done)
    assert loading.main(["--storages", "mxfp4", "--experts", "1", "--width", "64"]) == 1
    assert "| mxfp4 | torch |" in capsys.readouterr().out
