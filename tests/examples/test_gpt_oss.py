"""LoRA on gpt-oss experts is what merged weights give; that the example runs is shown by tests/docs/test_docs.py."""

from __future__ import annotations

import dataclasses
import importlib

import numpy as np
import pytest

from moe_core.ops.quantize.reference import dequantize
from tests.support.paths import ROOT


def test_adapters_are_a_change_of_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch", reason="needs torch")
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    example = importlib.import_module("lora_gpt_oss")
    torch.manual_seed(0)
    layer = example.frozen_layer(32, 32, 4, torch.float32, "cpu")
    with torch.no_grad():
        for parameter in (layer.router.bias, layer.experts.gate_up_bias, layer.experts.down_bias):
            parameter.normal_()
    model = example.LoRA(layer, 4)
    with torch.no_grad():
        model.gate_up_b.normal_(std=0.1)
        model.down_b.normal_(std=0.1)
        x = torch.randn(16, 32)
        y = model(x)

        weights = layer.export_weights()
        changes = {"gate_up": (model.gate_up_a, model.gate_up_b), "down": (model.down_a, model.down_b)}
        merged = {}
        for name, (a, b) in changes.items():
            plain = np.asarray(dequantize(getattr(weights.experts, name)), np.float32)  # [E, outputs, inputs]
            merged[name] = plain + example.SCALE * (a @ b).mT.numpy()
        experts = dataclasses.replace(weights.experts, **merged)
        spec = dataclasses.replace(weights.spec, weight_layout="out_in")
        wanted = type(layer).from_weights(dataclasses.replace(weights, experts=experts, spec=spec))(x)
    torch.testing.assert_close(y, wanted, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(y, layer(x), rtol=1e-2, atol=1e-2)
