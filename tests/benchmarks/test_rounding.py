"""The benchmark of token rounding: what it checks before it times, on a small layer."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("jax")

from benchmarks import rounding as benchmark
from benchmarks.shapes import Shape
from benchmarks.training_problem import draw_parameters, draw_training_problem
from moe_core.specs import TokenRounding
from moe_core.specs.matmul import Activation


def test_a_cell_is_checked() -> None:
    shape, row = Shape("small", 16, 24, 6, 2, Activation("silu"), True), dict[str, Any]()
    problem = draw_training_problem(shape, 96, draw_parameters(shape, torch.device("cpu")))
    assert benchmark.check(problem, TokenRounding(16), row)
    assert row["padded"]["with"]["64"] > 0 and row["changed_pairs"] > 0 and row["differing_bits"] == []
    assert row["rows"]["with"] % 16 == 0 and row["rows"]["without"] == 192


def test_padding() -> None:
    assert benchmark.padded(torch.tensor([128, 0, 1]), 128) == 1 - 129 / 256


def test_red_parity_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    shape, row = Shape("small", 16, 24, 6, 2, Activation("silu"), False), dict[str, Any]()
    problem = draw_training_problem(shape, 96, draw_parameters(shape, torch.device("cpu")))
    true = benchmark.staged_step

    def wrong(*arguments: Any, limited: bool = True) -> Any:
        output, ids, gradients = true(*arguments, limited=limited)
        return output * (1.1 if limited else 1.0), ids, gradients

    monkeypatch.setattr(benchmark, "staged_step", wrong)
    assert not benchmark.check(problem, TokenRounding(16), row) and "output 0.1" in row["refused"]
