"""Layers of torch with quantised experts."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

import moe_torch
from moe_core.formats import scheme_named
from moe_core.specs.operands import map_arrays
from moe_torch import ExpertsSpec, LayerWeights, MoE, MoELayerSpec
from moe_torch.layers.weights import to_numpy

D_MODEL, D_FF = 128, 128


def layer_spec(scheme: str | None, d_ff: int = D_FF, top_k: int = 2, **options: Any) -> MoELayerSpec:
    experts = ExpertsSpec(bias=True, scheme=None if scheme is None else scheme_named(scheme))
    return MoELayerSpec(D_MODEL, d_ff, 4, top_k, experts=experts, **options)


def quantized_weights(scheme: str, **options: Any) -> tuple[LayerWeights, MoE]:
    """Canonical weights in a scheme, and the plain bf16 layer they were made of."""
    torch.manual_seed(0)
    plain, chosen = MoE.from_spec(layer_spec(None, **options), dtype=torch.bfloat16), scheme_named(scheme)
    weights = plain.export_weights()
    packed = {
        name: map_arrays(moe_torch.quantize(getattr(plain.experts, name), chosen.weights), to_numpy)
        for name in ("gate_up", "down")
    }
    spec = dataclasses.replace(weights.spec, activations=chosen.activations)
    return dataclasses.replace(weights, spec=spec, experts=dataclasses.replace(weights.experts, **packed)), plain
