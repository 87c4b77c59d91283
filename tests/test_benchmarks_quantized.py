"""The benchmark of quantised forwards, on a CPU and with a timer that only calls."""

from __future__ import annotations

import argparse
import json
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")
jax = pytest.importorskip("jax")

import moe_jax
import moe_torch
from benchmarks import quantized
from benchmarks.record import table
from benchmarks.shapes import Shape
from moe_core.specs import Activation

TINY = Shape("tiny", 128, 64, 4, 2, Activation("swiglu_oai", gate_layout="interleaved"), True)


class Calls:
    def time(self, function: Callable[[], Any]) -> float:
        function()
        return 1.0


@pytest.fixture(autouse=True)
def on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The reference; JAX arrays by copy, since it refuses a CPU address that is not aligned to 64 bytes."""
    monkeypatch.setattr(quantized, "free_memory", lambda: None)
    monkeypatch.setattr(moe_jax, "from_dlpack", lambda array: jax.dlpack.from_dlpack(array, copy=True))
    with (
        moe_torch.cpu_engine("reference"),
        moe_jax.cpu_engine("reference"),
        jax.default_device(jax.devices("cpu")[0]),
    ):
        yield


def test_a_run(tmp_path: pathlib.Path) -> None:
    cells = [quantized.Cell(TINY, name, *quantized.SCHEMES[name]) for name in quantized.SCHEMES]
    options = argparse.Namespace(cells=cells, tokens=[1, 9], published=False, output=tmp_path / "made" / "record.json")
    rows = quantized.run(options, Calls(), "cpu")
    assert json.loads(options.output.read_text())["rows"] == rows
    assert [row["scheme"] for row in rows] == [name for name in quantized.SCHEMES for _ in range(2)]
    assert all(row["bitwise_torch_jax"] and row["prepared"] == (row["scheme"] == "mxfp4") for row in rows)
    assert all(row["error_dequantized"] < 1e-2 for row in rows if row["scheme"] == "mxfp4")
    assert "bf16" in table(rows, quantized.COLUMNS)


def test_red_parity_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(quantized.TOLERANCES, True, 0.0)
    cell = quantized.Cell(TINY, "fp8_block", *quantized.SCHEMES["fp8_block"])
    with pytest.raises(SystemExit, match="parity is red for tiny fp8_block 3"):
        quantized.run(argparse.Namespace(cells=[cell], tokens=[3], published=False, output=None), None, "cpu")


def test_the_command_line() -> None:
    options = quantized.parse(["--cells", "qwen3:mxfp4", "--tokens", "1,64"])
    assert options.tokens == [1, 64] and options.cells[0].shape.name == "qwen3" and not options.cells[0].fast_accumulate
    with pytest.raises(SystemExit):
        quantized.parse(["--cells", "qwen3:int4"])
