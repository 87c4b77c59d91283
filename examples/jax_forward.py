"""Stacked MoE layers in JAX: `jax.lax.scan` over a layer index, so that no layer's weights are ever copied."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from moe_jax import Activation, ExpertWeights, MoESpec, RouterSpec, RouterWeights, moe

LAYERS, T, D, F, E, K = 3, 96, 128, 64, 16, 4
SPEC = MoESpec(Activation("silu"), RouterSpec(top_k=K, renormalize=True))


@jax.jit
def forward(x: jax.Array, routers: jax.Array, gate_up: jax.Array, down: jax.Array) -> tuple[jax.Array, jax.Array]:
    """x `[T, D]` through LAYERS residual MoE layers; also the tokens per expert of each, `[LAYERS, E]`."""

    def layer(x: jax.Array, step: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        index, router = step
        # The weights of all layers are one operand; the index picks a layer on the device.
        result = moe(x, ExpertWeights(gate_up, down, layer_index=index), RouterWeights(router), SPEC)
        return x + result.output, result.tokens_per_expert

    indices = jnp.arange(LAYERS, dtype=jnp.int32)[:, None]
    return jax.lax.scan(layer, x, (indices, routers))


def main() -> None:
    """Run the layers and print where the tokens went."""
    keys = jax.random.split(jax.random.key(0), 4)
    x = jax.random.normal(keys[0], (T, D), jnp.bfloat16)
    routers = jax.random.normal(keys[1], (LAYERS, D, E), jnp.bfloat16) / D**0.5
    gate_up = jax.random.normal(keys[2], (LAYERS, E, D, 2 * F), jnp.bfloat16) / D**0.5
    down = jax.random.normal(keys[3], (LAYERS, E, F, D), jnp.bfloat16) / F**0.5
    output, tokens_per_expert = forward(x, routers, gate_up, down)
    assert output.shape == x.shape and bool(jnp.isfinite(output).all())
    assert tokens_per_expert.sum(axis=1).tolist() == [T * K] * LAYERS
    print(f"output {output.shape} {output.dtype}")
    print(tokens_per_expert)


if __name__ == "__main__":
    main()
