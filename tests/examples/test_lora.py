"""The LoRA examples of the modular kernel agree. That examples run is shown by tests/docs/test_docs.py."""

from __future__ import annotations

import importlib

import numpy as np
import pytest

from tests.support.paths import ROOT

EXAMPLES = ROOT / "examples"


def test_modular_kernels_train_alike_in_torch_and_jax(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same numbers in both: the first loss in all its digits, later ones but for what optimizers round."""
    pytest.importorskip("torch", reason="needs torch")
    pytest.importorskip("optax", reason="needs optax")
    from tests.support import jax as jax_support
    from tests.support import torch as torch_support

    monkeypatch.syspath_prepend(str(EXAMPLES))
    engine = "cuda" if torch_support.REAL_KERNELS == "cuda" else "reference"
    with torch_support.running_on(engine):
        ours = importlib.import_module("modular_lora_torch").train()
    with jax_support.running_on(engine):
        theirs = importlib.import_module("modular_lora_jax").train()
    assert ours[-1] < 0.5 * ours[0]
    np.testing.assert_allclose(ours[0], theirs[0], rtol=1e-6)
    np.testing.assert_allclose(ours, theirs, rtol=1e-5)
