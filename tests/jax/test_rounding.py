"""A JAX layer trains with token rounding; tests/frontends has what torch shares."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

import moe_jax
from moe_jax import RouterSpec, TokenRounding
from tests.support.jax import on_engines, running_on

T, K, E = 48, 2, 6
RULE, ROUNDING = RouterSpec(K, renormalize=True), TokenRounding(16)
LOGITS = np.random.default_rng(0).standard_normal((T, E), np.float32)


@on_engines
def test_a_layer_with_rounded_routing_trains(engine: str) -> None:
    random = np.random.default_rng(1)
    x, gate_up, down = (
        jnp.asarray(random.standard_normal(shape, np.float32) / 4) for shape in ((T, 8), (E, 8, 12), (E, 6, 8))
    )
    spec = moe_jax.MoESpec(moe_jax.Activation("silu"), row_limit=ROUNDING.row_limit(K))

    def loss(logits: jax.Array) -> jax.Array:
        routed = moe_jax.route_rounded(logits, RULE, ROUNDING)
        routing = moe_jax.TopK(routed.ids, routed.weights)
        return jnp.square(moe_jax.moe(x, moe_jax.ExpertWeights(gate_up, down), routing, spec).output).sum()

    with running_on(engine):
        logits = jnp.asarray(LOGITS)
        value, gradient = jax.jit(jax.value_and_grad(loss))(logits)
        lower = loss(logits - 3e-3 * gradient / jnp.linalg.norm(gradient))
        assert lower < value and np.isfinite(np.asarray(gradient)).all()
