"""The benchmark of the modular kernel: what it compares, and that red parity is not timed. Its timing needs a GPU."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("jax")

import moe_torch
from benchmarks import modular
from benchmarks.record import table
from benchmarks.shapes import Shape
from benchmarks.weights import draw_weights
from moe_core.specs.matmul import Activation

TINY = Shape("tiny", 32, 16, 4, 2, Activation("silu"), False)


def test_a_cell() -> None:
    with moe_torch.cpu_engine("reference"):
        weights = draw_weights(TINY, torch.Generator("cpu").manual_seed(0))
        row = modular.measure(TINY, weights, 5, lambda one, two: ([2.0, 4.0, 2.0], [2.0, 5.0, 3.0]))
    assert row["composed_us"] == 2.0 and row["modular_us"] == 3.0 and row["ratio"] == 1.25
    assert "ratio" in table([row], modular.COLUMNS)


def test_red_parity_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modular, "draw_calls", lambda *_: (lambda: torch.zeros(2), lambda: torch.ones(2)))
    with moe_torch.cpu_engine("reference"), pytest.raises(SystemExit, match="parity is red for tiny 5"):
        modular.measure(TINY, draw_weights(TINY, torch.Generator("cpu").manual_seed(0)), 5, lambda one, two: ([], []))
