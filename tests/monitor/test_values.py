"""What a monitor writes, from counts, and to which writers."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from moe_core.errors import InvalidInput
from moe_core.monitor import LayerWindow, load_entropy, load_imbalance, model_values, writer_of


@pytest.mark.parametrize(
    ("counts", "entropy", "imbalance"),
    [
        ([5, 5, 5, 5], 1.0, 1.0), ([0, 12, 0, 0], 0.0, 4.0), ([3, 3, 0, 0], 0.5, 2.0), ([0, 0], 0.0, 0.0),
        ([7], 0.0, 1.0),
    ],
)  # fmt: skip
def test_load(counts: list[int], entropy: float, imbalance: float) -> None:
    array = np.array(counts)
    assert load_entropy(array) == pytest.approx(entropy) and load_imbalance(array) == imbalance


def test_a_model_joins_its_layers() -> None:
    one = LayerWindow(
        "a", 2, np.array([6, 2, 0, 0]), kept=6, overflow=1, losses={"z_loss": 1.0}, norms={"experts": 3.0},
        expert_norms=np.arange(4.0),
    )  # fmt: skip
    other = LayerWindow("b", 2, np.array([2, 2, 2, 2]), losses={"z_loss": 3.0}, norms={"experts": 4.0, "router": 1.0})
    values = model_values((one, other, LayerWindow("unseen", 1, np.zeros(0, int))), 0.5)
    assert {name.removeprefix("moe/"): value for name, value in values.items() if name.count("/") == 1} == {
        "load_entropy": pytest.approx((load_entropy(one.counts) + 1) / 2), "load_imbalance": 3.0, "dead_experts": 2,
        "dropped": 0.25, "overflow": 1, "z_loss": 2.0, "grad_norm_experts": 5.0, "grad_norm_router": 1.0,
        "tokens_per_second": 8.0,
    }  # fmt: skip
    assert values["moe/a/load"].tolist() == [3.0, 1.0, 0.0, 0.0] and values["moe/b/grad_norm_router"] == 1.0
    assert values["moe/a/grad_norm_of_experts"] is one.expert_norms and "moe/b/dropped" not in values
    assert not [tag for tag in model_values((one, other), 0.5, per_layer=False) if tag.count("/") > 1]
    nothing = model_values((LayerWindow("a", 2, np.zeros(4, int), kept=0),), 0.0)
    assert nothing["moe/dropped"] == nothing["moe/tokens_per_second"] == 0 and nothing["moe/dead_experts"] == 4


def test_every_kind_of_writer(monkeypatch: pytest.MonkeyPatch) -> None:
    values, seen = {"moe/x": 1.5, "moe/load": np.ones(3)}, []

    def note(kind: str) -> Any:
        return lambda *arguments, **named: seen.append((kind, *arguments, *named.values()))

    tensorboard = SimpleNamespace(add_scalar=note("s"), add_histogram=note("h"))
    flax = SimpleNamespace(scalar=note("s"), histogram=note("h"))
    for writer in (tensorboard, flax):
        seen.clear()
        writer_of(writer)(values, 7)
        assert seen == [("s", "moe/x", 1.5, 7), ("h", "moe/load", values["moe/load"], 7)]
    seen.clear()
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(Histogram=lambda array: ("histogram", len(array))))
    writer_of(SimpleNamespace(log=note("log")))(values, 7)
    monkeypatch.delitem(sys.modules, "wandb")
    writer_of(SimpleNamespace(log=note("log")))(values, 7)
    writer_of(SimpleNamespace(log_metrics=note("lightning"), log=None))(values, 7)
    writer_of(note("function"))(values, 7)
    writer_of(None)(values, 7)
    scalars = {"moe/x": 1.5}
    assert seen[0] == ("log", scalars | {"moe/load": ("histogram", 3)}, 7)
    assert seen[1:] == [("log", scalars, 7), ("lightning", scalars, 7), ("function", values, 7)]
    with pytest.raises(InvalidInput, match=r"add_scalar \(TensorBoard\).*got int"):
        writer_of(3)
