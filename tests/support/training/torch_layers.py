"""Torch layers in training: problems, gradients, and comparisons of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from moe_core.layers import MoELayerSpec
from moe_core.specs.operands import OutputGradients
from moe_torch import MoE, trace
from tests.support.layers import E, draw_weights
from tests.support.training.loop import Problem

#: Names of the operator's arrays -> those of the layer's parameters.
PARTS = {"routing.": "router.", "shared.": "shared_experts."}


def trainable(spec: MoELayerSpec, device: Any = "cpu", seed: int = 0, dtype: str = "float32") -> MoE:
    return MoE.from_weights(draw_weights(spec, seed, dtype), device=device)


def objective(layer: Any, x: Any, mask: Any = None) -> Any:
    """A value of the output and of both losses."""
    y, aux = layer(x, mask, return_aux=True)
    return y.float().square().sum() + 0.7 * aux.load_balance_loss - 0.3 * aux.z_loss


def gradients(layer: Any, x: Any, mask: Any = None) -> dict[str, Any]:
    """By name, of x and of every parameter."""
    x = x.detach().clone().requires_grad_()
    leaves = {"x": x, **dict(layer.named_parameters())}
    return dict(zip(leaves, torch.autograd.grad(objective(layer, x, mask), list(leaves.values())), strict=True))


def problem_of(spec: MoELayerSpec, x: np.ndarray, output: np.ndarray) -> Problem:
    weights = draw_weights(spec)
    losses = (np.array([value], np.float32) for value in (0.7, -0.3))
    given = OutputGradients(output, None, None, *losses)
    return Problem(x, weights.experts, weights.router, weights.spec, given, shared=weights.shared)


def layer_name(name: str) -> str:
    for prefix, own in PARTS.items():
        name = name.replace(prefix, own)
    return name


def other_routing(num_tokens: int, top_k: int) -> trace.LayerRouting:
    """Experts that no router chose, a slot without one, and weights of any size."""
    random = np.random.default_rng(5)
    ids = np.stack([random.permutation(E)[:top_k] for _ in range(num_tokens)]).astype(np.int32)
    ids[1, 0] = -1
    return trace.LayerRouting(ids, random.random((num_tokens, top_k), dtype=np.float32), E)
