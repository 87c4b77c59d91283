"""A training step of one layer in torch and in Flax."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import numpy as np

from moe_core.layers import HUGGING_FACE, LayerWeights, MoELayerSpec, convert_weights
from moe_jax import nnx
from moe_torch import MoE
from tests.support.jax import running_on as jax_running_on
from tests.support.layers import masked_rows
from tests.support.torch import running_on, to_numpy, to_torch


class Trained(NamedTuple):
    """The output, the gradient of x, and the gradients of parameters by torch's names."""

    y: np.ndarray
    d_x: np.ndarray
    gradients: dict[str, np.ndarray]


def train_both(spec: MoELayerSpec, weights: LayerWeights, engine: str) -> tuple[Trained, Trained]:
    """The step of `masked_rows` with drawn gradients of the output: torch's and Flax's."""
    x, mask = masked_rows(spec.d_model)
    d_y = np.random.default_rng(4).standard_normal(x.shape).astype(np.float32)
    with running_on(engine) as device:
        layer: Any = MoE.from_spec(spec, device=device)
        layer.load_weights(weights)
        leaf = to_torch(x, device).requires_grad_()
        y = layer(leaf, to_torch(mask, device))
        y.backward(to_torch(d_y, device))
        ours = {name: to_numpy(one.grad) for name, one in layer.named_parameters() if one.grad is not None}
    with jax_running_on(engine):
        other = nnx.MoE.from_spec(spec.stored_as(HUGGING_FACE), rngs=nnx.nnx.Rngs(0))
        other.load_weights(weights)
        graph, state = nnx.nnx.split(other)

        def loss(state: Any, x: Any) -> tuple[Any, Any]:
            y = nnx.nnx.merge(graph, state)(x, token_mask=mask)
            return (y * d_y).sum(), y

        (found, d_x), by_jax = jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))(state, x)
        exported: Any = nnx.nnx.merge(graph, found).export_weights()
        theirs = convert_weights(exported, spec.storage(HUGGING_FACE)).named()
    return Trained(to_numpy(y), to_numpy(leaf.grad), ours), Trained(np.asarray(by_jax), np.asarray(d_x), theirs)
