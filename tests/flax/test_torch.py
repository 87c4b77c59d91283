"""One set of weights in a torch layer and in a Flax layer: equal bits."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from moe_core.layers import LayerWeights, MoELayerSpec
from moe_torch import layers as torch_layers
from moe_torch.layers.weights import from_numpy, to_numpy
from tests.support.flax import draw_tokens, draw_weights, nnx_layer, preset
from tests.support.jax import REAL_KERNELS, running_on


def outputs(
    weights: LayerWeights, spec: MoELayerSpec, x: np.ndarray, mask: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """(y of torch, y of Flax, ids of torch, ids of Flax), each framework in its own default storage."""
    device = "cuda" if REAL_KERNELS == "cuda" else "cpu"
    torch_layer = torch_layers.MoE.from_spec(spec, dtype=getattr(torch, weights.dtype), device=device)
    torch_layer.load_weights(weights)
    with torch.no_grad():
        tokens, kept = from_numpy(x).to(device), from_numpy(mask).to(device)
        y, aux = torch_layer(tokens, kept, return_aux=True)
    with running_on(REAL_KERNELS):
        layer = nnx_layer(weights, spec, param_dtype=weights.dtype)
        run = jax.jit(lambda layer, x, mask: layer(x, token_mask=mask, return_aux=True))
        y_flax, aux_flax = run(layer, jnp.asarray(x), jnp.asarray(mask))
    return to_numpy(y), np.asarray(y_flax), to_numpy(aux.ids), np.asarray(aux_flax.ids)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3", "qwen2_moe"])
def test_torch_and_flax_layers_agree_bitwise(family: str, dtype: str) -> None:
    spec = preset(family)
    if family == "mixtral":
        spec = dataclasses.replace(spec, capacity_factor=0.75)
    x, mask = draw_tokens(spec, dtype, 2, 5), np.arange(10).reshape(2, 5) != 3
    y, y_flax, ids, ids_flax = outputs(draw_weights(spec, dtype), spec, x, mask)
    np.testing.assert_array_equal(ids, ids_flax)
    np.testing.assert_array_equal(y.view(np.uint8), y_flax.view(np.uint8))
    assert y.any()
