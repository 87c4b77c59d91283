"""What the training examples share is the same wherever they run, and their comparison refuses what is not alike.

That they run, and that the frameworks then are alike, is shown by running them: tests/docs/test_docs.py.
"""

from __future__ import annotations

import dataclasses
import importlib
from typing import Any

import numpy as np
import pytest

from tests.support.paths import ROOT

EXAMPLES = ROOT / "examples"


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Imports an example by name, as examples import each other."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module


def test_equal_settings_give_equal_bits(example: Any) -> None:
    language_model = example("language_model")
    settings = language_model.Settings(steps=3)
    for (inputs, targets), other in zip(
        language_model.batches(settings), language_model.batches(language_model.Settings(steps=3)), strict=True
    ):
        assert inputs.tobytes() == other[0].tobytes() and inputs.dtype == targets.dtype == np.int32
        assert np.array_equal(inputs[:, 1:], targets[:, :-1])
    first, second = (language_model.initial_weights(settings) for _ in range(2))
    assert all(array.tobytes() == second[name].tobytes() for name, array in first.items())
    other = language_model.initial_weights(dataclasses.replace(settings, seed=1))
    assert not np.array_equal(first["embedding"], other["embedding"])


@pytest.mark.parametrize(
    ("experts", "losses", "message"),
    [
        ((0.0, 0.0, 0.0), ([2.0, 1.0], [2.0, 1.0]), None),
        ((1e-7, 0.0, 0.0), ([2.0, 1.0], [2.0, 1.0]), None),
        ((0.0, 1e-7, 0.0), ([2.0, 1.0], [2.0, 1.0]), "block 0"),
        ((0.0, 0.0, 1e-7), ([2.0, 1.0], [2.0, 1.0]), "block 0"),
        ((0.0, 0.0, 0.0), ([2.0, 2.5], [2.0, 2.5]), "did not fall"),
        ((0.0, 0.0, 0.0), ([2.0, 1.0], [2.0, 1.1]), "step 1"),
        ((0.0, 0.0, 0.0), ([2.0, float("nan"), 1.0], [2.0, float("nan"), 1.0]), "step 1"),
    ],
)
def test_the_comparison_refuses(example: Any, experts: Any, losses: Any, message: str | None) -> None:
    pytest.importorskip("torch", reason="needs both frameworks")
    pytest.importorskip("flax", reason="needs both frameworks")
    compare = example("compare_training")
    rows = [compare.Difference(f"block 0: {compare.EXPERTS}", *experts)]
    if message is None:
        compare.require_alike(rows, *losses, 1e-3)
        return
    with pytest.raises(AssertionError, match=message):
        compare.require_alike(rows, *losses, 1e-3)


def test_other_bits_are_a_difference(example: Any) -> None:
    pytest.importorskip("torch", reason="needs both frameworks")
    pytest.importorskip("flax", reason="needs both frameworks")
    distance = example("compare_training").distance
    one = np.float32([1.0, 0.0, np.nan])
    assert distance(one, one.copy()) == 0.0
    assert distance(one, np.float32([1.0, -0.0, np.nan])) > 0.0
    assert distance(np.float32([1.0]), np.float32([np.nan])) > 1e30
