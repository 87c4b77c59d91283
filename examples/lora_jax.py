"""LoRA on a frozen Mixture-of-Experts layer in JAX: every expert has adapters on both of its products.

    pre = x W1 + s (x A1) B1        hidden = activation(pre)        y = hidden W2 + s (hidden A2) B2

Built of stage ops over one layout: a product of adapters is a grouped matmul as the frozen one is. JAX differentiates
by the adapters alone, so that the gradients of frozen weights are not computed. The layer is one of Flax and the
optimizer one of optax; the ops need neither. The frozen weights may be quantised (QLoRA): gradients go through them to
the adapters of the first product.

    python examples/lora_jax.py                          # plain weights, then mxfp4
    python examples/lora_jax.py --schemes int4_w4a16
"""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from moe_core.ops.quantize.reference import quantize
from moe_jax import (
    MatmulOperands,
    MatmulSpec,
    QuantizedSpec,
    QuantizedTensor,
    Scheme,
    activation,
    make_layout,
    matmul_ogs,
    reduce,
    route,
    router,
    scheme_named,
)
from moe_jax.nnx import ExpertsSpec, MoE

BATCH, D, F, E, K, RANK, SCALE = 64, 128, 128, 4, 2, 4, 2.0
LAYOUT = "in_out"


class Adapters(NamedTuple):
    """Of both products of every expert: `[E, D, r]`, `[E, r, 2F]`, `[E, F, r]`, `[E, r, D]`."""

    gate_up_a: jax.Array
    gate_up_b: jax.Array
    down_a: jax.Array
    down_b: jax.Array


def quantized(layer: MoE, scheme: Scheme) -> MoE:
    """The layer with the matrices of its experts in the format of a scheme."""
    weights: Any = layer.export_weights()
    matrices = {"gate_up": weights.experts.gate_up, "down": weights.experts.down}
    packed = {name: quantize(matrix, scheme.weights, layout=LAYOUT) for name, matrix in matrices.items()}
    experts = dataclasses.replace(weights.experts, **packed)
    return MoE.from_weights(dataclasses.replace(weights, experts=experts))


def matrix(part: Any, scheme: Scheme | None) -> Any:
    """A matrix of the layer as the ops take it: an array, or a bundle of those that a format stores."""
    if scheme is None:
        return part[...]
    zero_points = part.zero_points[...] if scheme.weights.zero_points else None
    return QuantizedTensor(QuantizedSpec(scheme.weights, LAYOUT), part.values[...], part.scales[...], zero_points)


def refuse_what_is_left_out(layer: MoE) -> None:
    """Raise ValueError for a layer that has more than `forward` computes: a bias, shared experts, ..."""
    spec, computed = layer.spec, ("d_model", "d_ff", "num_experts", "top_k", "router", "experts")
    others = [field for field in dataclasses.fields(spec) if field.name not in computed]
    found = [field.name for field in others if getattr(spec, field.name) != field.default]
    found += [name for name in ("dtype", "num_layers") if getattr(layer, name) is not None]
    found += ["experts.bias"] if spec.experts.bias else []
    found += ["experts.gate_layout"] if spec.gated and spec.experts.gate_layout != "halves" else []
    found += ["experts.weight_layout"] if spec.experts.weight_layout not in (None, LAYOUT) else []
    scheme = spec.experts.scheme
    found += ["experts.scheme.activations"] if scheme is not None and scheme.activations is not None else []
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
    gate_up, down = (matrix(part, spec.experts.scheme) for part in (layer.wi, layer.wo))

    # From tokens to rows of experts. x A1 stays in rows, which is where B1 takes it from.
    low = matmul_ogs(MatmulOperands(x, adapters.gate_up_a), layout, MatmulSpec(LAYOUT, gather="token"))
    change = matmul_ogs(MatmulOperands(low, adapters.gate_up_b), layout, MatmulSpec(LAYOUT))
    pre = matmul_ogs(MatmulOperands(x, gate_up), layout, MatmulSpec(LAYOUT, gather="token"))
    hidden = activation(pre + SCALE * change, spec.experts.activation)

    # From rows back to slots, times the router's weight of each.
    low = matmul_ogs(MatmulOperands(hidden, adapters.down_a), layout, MatmulSpec(LAYOUT))
    to_slots = MatmulSpec(LAYOUT, scatter="slot")
    change = matmul_ogs(MatmulOperands(low, adapters.down_b, row_weight=weights), layout, to_slots)
    y = matmul_ogs(MatmulOperands(hidden, down, row_weight=weights), layout, to_slots)
    return reduce(y + SCALE * change, layout)


def train(scheme: Scheme | None) -> None:
    """Teach a frozen layer what another one does to the same tokens. scheme: of the frozen weights, None = plain."""
    stored = ExpertsSpec(gate_layout="halves")  # gate and up in one matrix, `wi`
    layer, teacher = (MoE(D, F, E, K, experts=stored, rngs=nnx.Rngs(seed)) for seed in (0, 1))
    layer = layer if scheme is None else quantized(layer, scheme)
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

    trained = sum(array.size for array in adapters)
    size = sum(array.nbytes for array in jax.tree.leaves(before))
    print(f"{scheme or 'plain'}: {trained} numbers are trained, {size} bytes are frozen")
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--schemes",
        nargs="+",
        default=["plain", "mxfp4_w4a16"],
        help="of the frozen weights, one after the other: plain, mxfp4_w4a16, int4_w4a16, int8_w8a16, ...",
    )
    for name in parser.parse_args().schemes:
        train(None if name == "plain" else scheme_named(name))


if __name__ == "__main__":
    main()
