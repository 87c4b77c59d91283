"""What the tests of the torch layer share."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from moe_core.layers import LayerWeights
from moe_core.ops.moe.reference.forward import moe_stages
from moe_torch import MoE
from tests.support.torch import to_torch


def make(weights: LayerWeights, device: Any = "cpu", **changes: Any) -> MoE:
    """A layer with these weights that asks for no gradient; changes: fields of its spec."""
    layer = MoE.from_weights(weights, device=device)
    if changes:
        spec = dataclasses.replace(layer.spec, **changes)
        layer = MoE.from_spec(spec, device=device, dtype=layer.experts.down.dtype)
        layer.load_weights(weights)
    return layer.requires_grad_(False)


def tensor(array: np.ndarray | None, device: Any = "cpu") -> Any:
    """`to_torch` that keeps arrays without axes as they are."""
    return None if array is None else to_torch(array, device).view(array.shape)


def stages(weights: LayerWeights, x: np.ndarray, mask: np.ndarray | None = None) -> dict[str, np.ndarray]:
    """The reference's forward of flattened x."""
    rows = x.reshape(-1, x.shape[-1])
    mask = None if mask is None else mask.reshape(-1)
    return moe_stages(rows, weights.experts, weights.router, weights.spec, shared=weights.shared, token_mask=mask)
