"""LoRA on a frozen Mixture-of-Experts layer in JAX: every expert has adapters on both of its products.

    pre = x W1 + s (x A1) B1        hidden = activation(pre)        y = hidden W2 + s (hidden A2) B2

Built of stage ops over one layout: a product of adapters is a grouped matmul as the frozen one is. JAX differentiates
by the adapters alone, so that the gradients of frozen weights are not computed. The layer is one of Flax and the
optimizer one of optax; the ops need neither.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from moe_jax import MatmulOperands, MatmulSpec, activation, make_layout, matmul_ogs, reduce, route, router
from moe_jax.nnx import ExpertsSpec, MoE

BATCH, D, F, E, K, RANK, SCALE = 96, 64, 48, 8, 2, 4, 2.0


class Adapters(NamedTuple):
    """Of both products of every expert: `[E, D, r]`, `[E, r, 2F]`, `[E, F, r]`, `[E, r, D]`."""

    gate_up_a: jax.Array
    gate_up_b: jax.Array
    down_a: jax.Array
    down_b: jax.Array


def refuse_what_is_left_out(layer: MoE) -> None:
    """Raise ValueError for a layer that has more than `forward` computes: a bias, shared experts, ..."""
    spec, computed = layer.spec, ("d_model", "d_ff", "num_experts", "top_k", "router", "experts")
    others = [field for field in dataclasses.fields(spec) if field.name not in computed]
    found = [field.name for field in others if getattr(spec, field.name) != field.default]
    found += [name for name in ("dtype", "num_layers") if getattr(layer, name) is not None]
    found += ["experts.bias"] if spec.experts.bias else []
    found += ["experts.gate_layout"] if spec.gated and spec.experts.gate_layout != "halves" else []
    found += ["experts.weight_layout"] if spec.experts.weight_layout not in (None, "in_out") else []
    if found:
        raise ValueError(f"LoRA would ignore the layer's {', '.join(found)}; pass a layer without, or extend forward")


def make_adapters(key: jax.Array, rank: int) -> Adapters:
    """Adapters that change nothing at first."""
    first, second = jax.random.split(key)
    return Adapters(
        jax.random.normal(first, (E, D, rank)) * D**-0.5,
        jnp.zeros((E, rank, 2 * F)),
        jax.random.normal(second, (E, F, rank)) * F**-0.5,
        jnp.zeros((E, rank, D)),
    )


def forward(adapters: Adapters, layer: MoE, x: jax.Array) -> jax.Array:
    """y `[T, D]` of x `[T, D]`: the layer with its adapters."""
    refuse_what_is_left_out(layer)
    spec = layer.spec
    ids, weights = route(router(x, layer.gate.kernel[...]), spec.router)
    layout, weights = make_layout(ids, spec.num_experts), weights.flatten()

    # From tokens to rows of experts. x A1 stays in rows, which is where B1 takes it from.
    low = matmul_ogs(MatmulOperands(x, adapters.gate_up_a), layout, MatmulSpec("in_out", gather="token"))
    change = matmul_ogs(MatmulOperands(low, adapters.gate_up_b), layout, MatmulSpec("in_out"))
    pre = matmul_ogs(MatmulOperands(x, layer.wi[...]), layout, MatmulSpec("in_out", gather="token"))
    hidden = activation(pre + SCALE * change, spec.experts.activation)

    # From rows back to slots, times the router's weight of each.
    low = matmul_ogs(MatmulOperands(hidden, adapters.down_a), layout, MatmulSpec("in_out"))
    to_slots = MatmulSpec("in_out", scatter="slot")
    change = matmul_ogs(MatmulOperands(low, adapters.down_b, row_weight=weights), layout, to_slots)
    y = matmul_ogs(MatmulOperands(hidden, layer.wo[...], row_weight=weights), layout, to_slots)
    return reduce(y + SCALE * change, layout)


def main() -> None:
    """Teach a frozen layer what another one does to the same tokens."""
    stored = ExpertsSpec(gate_layout="halves")  # gate and up in one matrix, `wi`
    layer, teacher = (MoE(D, F, E, K, experts=stored, rngs=nnx.Rngs(seed)) for seed in (0, 1))
    x = jax.random.normal(jax.random.key(2), (BATCH, D))
    run = jax.jit(lambda layer, x: layer(x))
    target = run(teacher, x)
    adapters = make_adapters(jax.random.key(3), RANK)
    before = jax.tree.map(np.array, nnx.state(layer))
    np.testing.assert_allclose(jax.jit(forward)(adapters, layer, x), run(layer, x), rtol=1e-4, atol=1e-5)

    optimizer = optax.adam(1e-2)

    @jax.jit
    def step(adapters: Adapters, moments: Any, layer: MoE, x: jax.Array) -> tuple[Any, Any, jax.Array]:
        def loss(adapters: Adapters) -> jax.Array:
            return jnp.square(forward(adapters, layer, x) - target).mean()

        value, gradients = jax.value_and_grad(loss)(adapters)
        updates, moments = optimizer.update(gradients, moments)
        return optax.apply_updates(adapters, updates), moments, value

    trained, frozen = (sum(array.size for array in jax.tree.leaves(tree)) for tree in (adapters, nnx.state(layer)))
    print(f"{trained} of {trained + frozen} numbers are trained")
    moments, losses = optimizer.init(adapters), []
    for number in range(20):
        adapters, moments, loss = step(adapters, moments, layer, x)
        losses.append(float(loss))
        if number % 5 == 0:
            print(f"step {number:2}: loss {losses[-1]:.4f}")
    print(f"step {number:2}: loss {losses[-1]:.4f}")
    assert losses[-1] < 0.7 * losses[0], "the loss falls"
    assert jax.tree.all(jax.tree.map(np.array_equal, before, nnx.state(layer))), "frozen"
    print("the frozen weights are bitwise what they were")


if __name__ == "__main__":
    main()
