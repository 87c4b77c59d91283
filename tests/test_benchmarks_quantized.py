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
from benchmarks.record import STREAMING_BYTES_PER_US, table
from benchmarks.shapes import Shape
from benchmarks.timing import KernelSpan
from moe_core.specs import Activation

TINY = Shape("tiny", 128, 128, 4, 2, Activation("swiglu_oai", gate_layout="interleaved"), True)
#: With weights that are prepared, and in the published layout alone.
RUN = ("mxfp4", "fp8_block", "fp8_tensor", "int4_g32", "int4_g128_zp", "int8_channel")
PREPARED = ("mxfp4", "int4_g32", "int4_g128_zp", "int8_channel")


class Calls:
    def time(self, function: Callable[[], Any]) -> float:
        function()
        return 1.0

    def kernels(self, function: Callable[[], Any]) -> list[list[KernelSpan]]:
        function()
        return [[KernelSpan("route", 0, 1), KernelSpan("matmul_a", 1, 5), KernelSpan("matmul_b", 4, 7)]]


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
    cells = [quantized.Cell(TINY, name, *quantized.SCHEMES[name]) for name in RUN]
    options = argparse.Namespace(cells=cells, tokens=[1, 9], published=False, output=tmp_path / "made" / "record.json")
    rows = quantized.run(options, Calls(), "cpu")
    assert json.loads(options.output.read_text())["rows"] == rows
    assert [row["scheme"] for row in rows] == [name for name in RUN for _ in range(2)]
    assert all(row["bitwise_torch_jax"] and row["prepared"] == (row["scheme"] in PREPARED) for row in rows)
    assert all(row["error_dequantized"] < 1e-2 for row in rows if row["scheme"] in PREPARED)
    assert "bf16" in table(rows, quantized.COLUMNS)
    found = {row["scheme"]: row for row in rows if row["tokens"] == 9}
    # Codes, and scales of 8 bits for 32 columns, or of 16 and zero points of 4 for 128.
    for name, bits, scale_dtype in (("mxfp4", 4.25, "uint8"), ("int4_g128_zp", 4 + 20 / 128, "bfloat16")):
        row = found[name]
        size = row["active_experts"] * 3 * 128 * 128 * bits / 8
        assert row["bound_streaming_us"] == pytest.approx(size / STREAMING_BYTES_PER_US)
        # The second product begins where the first one ends.
        assert (row["matmul1_us"], row["matmul2_us"], row["scale_dtype"]) == (4, 2, scale_dtype)
        assert row["matmul1_of_bound"] == pytest.approx(size * 2 / 3 / STREAMING_BYTES_PER_US / 4)


def test_red_parity_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(quantized.TOLERANCES, True, 0.0)
    cell = quantized.Cell(TINY, "fp8_block", *quantized.SCHEMES["fp8_block"])
    with pytest.raises(SystemExit, match="parity is red for tiny fp8_block 3"):
        quantized.run(argparse.Namespace(cells=[cell], tokens=[3], published=False, output=None), None, "cpu")


def test_the_command_line() -> None:
    options = quantized.parse(["--cells", "qwen3:mxfp4", "--tokens", "1,64"])
    assert options.tokens == [1, 64] and options.cells[0].shape.name == "qwen3" and not options.cells[0].fast_accumulate
    assert quantized.parse(["--scales", "float32"]).cells[-1].scale_dtype == "float32"
    with pytest.raises(SystemExit):
        quantized.parse(["--cells", "qwen3:int4"])


@pytest.mark.parametrize("name", quantized.INTEGERS)
def test_drawn_integers_have_the_rms_of_weights(name: str) -> None:
    cell = quantized.Cell(TINY, name, *quantized.SCHEMES[name])
    weight = quantized.draw_matrix(cell, (2, 128, 256), torch.Generator().manual_seed(0))
    assert weight.format == cell.scheme.weights
    assert moe_torch.dequantize(weight).square().mean().sqrt().item() == pytest.approx(1 / 16, rel=0.1)
