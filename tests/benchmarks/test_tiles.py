"""The benchmark of tile heights: what it compares, and that changed bits are not timed. Its timing needs a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("jax")

import moe_torch
from benchmarks import tiles
from benchmarks.problem import Problem, draw_problem
from benchmarks.shapes import SHAPES, Shape
from benchmarks.weights import draw_weights
from moe_core.base.target import Target
from moe_core.specs.matmul import Activation
from moe_core.specs.tuning import Tuning
from tests.support.benchmarks import RisingTimer
from tests.support.harness import H200

TINY = Shape("tiny", 32, 16, 4, 2, Activation("silu"), False)
ALL = ("128, 128", "128, 192", "192, 128", "192, 192")


@pytest.fixture(autouse=True)
def on_a_cpu() -> Iterator[None]:
    with moe_torch.cpu_engine("reference"):
        yield


def tiny_problem() -> Problem:
    return draw_problem(TINY, "balanced", 5, draw_weights(TINY, torch.Generator("cpu").manual_seed(0)))


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("tokens", [1024, 4096, 16384])
def test_every_combination_of_heights(name: str, tokens: int) -> None:
    """One of them is the built-in choice where that is of the sm90 family."""
    built_in, found = tiles.choices(SHAPES[name], tokens, H200)
    assert tuple(found) == ALL
    for heights, tuning in found.items():
        configs = (tuning.matmul_1, tuning.matmul_2)
        assert all(config is not None and config.family == "sm90" for config in configs)
        assert ", ".join(str(config.block_m) for config in configs if config is not None) == heights
    if all(config.family == "sm90" for config in built_in):
        assert Tuning(*built_in) in found.values()
    assert built_in == tuple(tiles.built_in(problem) for problem in tiles.products(SHAPES[name], tokens, H200))


def test_other_chips_have_no_other_heights() -> None:
    assert not tiles.choices(SHAPES["qwen3"], 4096, Target("cuda", 100, 148))[1]


def test_a_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    built_in = tiles.choices(TINY, 4096, H200)[0]
    monkeypatch.setattr(tiles, "choices", lambda *_: (built_in, dict.fromkeys(ALL[:2], Tuning())))
    row = tiles.measure(tiny_problem(), Target("reference"), RisingTimer(), 1.0)
    assert row["us"] == {"built in": 1.0, "128, 128": 2.0, "128, 192": 3.0}
    assert row["over_built_in"]["128, 192"] == 3.0 and row["rows_per_expert"] == 2.5
    assert "| tiny 5 (2.5) | 1.00 | 2.00 | 3.00 |" in tiles.show([row])


def test_changed_bits_are_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    problem, real = tiny_problem(), Problem.torch_forward
    other = Tuning(batch_invariant=True)
    built_in = tiles.choices(TINY, 4096, H200)[0]
    monkeypatch.setattr(tiles, "choices", lambda *_: (built_in, {"192, 128": other}))

    def wrong(self: Problem, spec: Any = None, tokens: int | None = None) -> Any:
        found = real(self, spec, tokens)
        if spec is not None and spec.tuning == other:
            found.output[0] += 1
        return found

    monkeypatch.setattr(Problem, "torch_forward", wrong)
    with pytest.raises(SystemExit, match="parity is red for tiny 5: 192, 128 rows change bits; nothing was timed"):
        tiles.measure(problem, Target("reference"), RisingTimer(), 1.0)
