"""A model with one of our layers, and rules of Qwix."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import qwix
from flax import nnx as flax_nnx

from moe_jax import nnx

D, F, E, K = 64, 64, 4, 2


class Model(flax_nnx.Module):
    def __init__(self, rngs: flax_nnx.Rngs, **options: Any) -> None:
        self.inner = flax_nnx.Linear(D, D, rngs=rngs)
        self.moe = nnx.MoE(D, F, E, K, rngs=rngs, **options)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.moe(self.inner(x))


def rule(**options: Any) -> Any:
    return qwix.QuantizationRule(**options)


def quantized(model: Any, *rules: Any) -> Any:
    return qwix.quantize_model(model, qwix.PtqProvider(rules), tokens())


def tokens() -> jax.Array:
    return jnp.asarray(np.random.default_rng(0).standard_normal((6, D)), jnp.float32)
