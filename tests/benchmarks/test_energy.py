"""The benchmark of energy on a CPU, with a counter that is moved by hand."""

from __future__ import annotations

import argparse
import pathlib
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("jax")

import moe_torch
from benchmarks import energy
from benchmarks.energy import Cell, parse_cells, run_cell
from tests.support.benchmarks import TINY

README = pathlib.Path(energy.__file__).parent / "README.md"


class Meter:
    """Every call of what is replayed uses 3 joules of ours or 4 of another's."""

    def __init__(self) -> None:
        self.used = 0.0

    def joules(self) -> float:
        return self.used


def test_energy_of_a_call_by_turns() -> None:
    meter, order = Meter(), []

    def call(name: str, joules: float) -> Any:
        def run() -> None:
            meter.used += joules
            order.append(name)

        return run

    found = energy.energy({"a": call("a", 3), "b": call("b", 4)}, meter.joules, lambda: None, 0.0)
    assert found["a"]["joules"] == 3 and found["b"]["joules"] == 4
    assert found["a"]["watts"] == pytest.approx(3 / found["a"]["us"] * 1e6, rel=1e-6)
    assert "".join(order) == "a" * 10 + "b" * 20 + "a" * 10


@pytest.mark.parametrize("what", ["forward", "step"])
def test_a_cell(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(energy, "_REPLAYS", 1)
    meter = Meter()

    def capture(call: Any) -> Any:
        call()

        def replay() -> None:
            meter.used += 3.0

        return replay

    with moe_torch.cpu_engine("reference"):
        rows = run_cell(Cell(TINY["qwen3"], what, 6), capture, meter, 0.0, ("cpu", 0))
    timed = {row["implementation"]: row for row in rows if "us" in row}
    assert timed["moebius"]["mj_per_token"] == 500 and timed["grouped_mm"]["over"] == 1
    text = README.read_text()
    assert not [name for row in rows for name in row if f"`{name}`" not in text]
    assert "| qwen3 |" in energy.show(rows)


def test_cells(capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    assert [cell.what for cell in parse_cells(parser, energy.CELLS)] == ["forward"] * 4 + ["step"]
    for wrong in ("qwen3:forward", "llama:step:4", "qwen3:backward:4", "qwen3:step:0"):
        with pytest.raises(SystemExit):
            parse_cells(parser, wrong)
        assert f"got {wrong!r}" in capsys.readouterr().err
