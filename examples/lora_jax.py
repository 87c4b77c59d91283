"""LoRA on a frozen Mixture-of-Experts layer in Flax: trained, then served beside another adapter in one batch.

The frozen weights may be quantised (QLoRA): they stay codes, and gradients go through them.

    python examples/lora_jax.py                          # plain weights, then mxfp4
    python examples/lora_jax.py --schemes int4_w4a16
"""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from moe_jax import LoRA, Scheme, scheme_named
from moe_jax.nnx import MoE

BATCH, D, F, E, K, RANK, ALPHA = 64, 128, 128, 4, 2, 4, 8.0


def train(scheme: Scheme | None) -> None:
    """Teach a frozen layer what another one does to the same tokens. scheme: of the frozen weights, None = plain."""
    layer, teacher = (MoE(D, F, E, K, rngs=nnx.Rngs(seed)) for seed in (0, 1))
    if scheme is not None:
        layer.quantize_experts(scheme)
    x = jax.random.normal(jax.random.key(2), (BATCH, D))
    target, base = teacher(x), layer(x)
    before = jax.tree.map(np.array, nnx.state(layer))
    # The slots of a server hold several adapters. Slot 0 is trained.
    lora = layer.add_lora(LoRA(RANK, alpha=ALPHA, slots=2), rngs=nnx.Rngs(3))
    lora.reset(0, rngs=nnx.Rngs(4))
    first = jnp.zeros(BATCH, jnp.int32)
    np.testing.assert_array_equal(layer(x, adapter_ids=first), base, err_msg="a new adapter changes nothing")

    optimizer = nnx.Optimizer(layer, optax.adam(1e-2), wrt=nnx.LoRAParam)

    @nnx.jit
    def step(layer: MoE, optimizer: Any) -> jax.Array:
        def loss(layer: MoE) -> jax.Array:
            return jnp.square(layer(x, adapter_ids=first) - target).mean()

        value, gradients = nnx.value_and_grad(loss, argnums=nnx.DiffState(0, nnx.LoRAParam))(layer)
        optimizer.update(layer, gradients)
        return value

    trained = sum(array.size for array in jax.tree.leaves(nnx.state(layer, nnx.LoRAParam)))
    size = sum(array.nbytes for array in jax.tree.leaves(before))
    print(f"{scheme or 'plain'}: {trained} numbers are in slots, {size} bytes are frozen")
    losses = []
    for number in range(20):
        losses.append(float(step(layer, optimizer)))
        if number % 5 == 0:
            print(f"step {number:2}: loss {losses[-1]:.4f}")
    print(f"step {number:2}: loss {losses[-1]:.4f}")
    assert losses[-1] < 0.7 * losses[0], "the loss falls"
    after = nnx.state(layer)
    del after["lora"]
    assert jax.tree.all(jax.tree.map(np.array_equal, before, after)), "frozen"
    print("the frozen weights are bitwise what they were")

    # Serve: a copy of the adapter at half strength in slot 1, and tokens of both and of none in one batch.
    adapter = lora.export(0)
    lora.load(1, dataclasses.replace(adapter, scale=adapter.scale / 2))
    serve = jax.jit(lambda layer, ids: layer(x, adapter_ids=ids))
    ids = jnp.arange(BATCH, dtype=jnp.int32) % 3 - 1
    mixed = serve(layer, ids)
    for slot in (-1, 0, 1):
        rows, alone = ids == slot, serve(layer, jnp.full_like(ids, slot))
        np.testing.assert_allclose(mixed[rows], alone[rows], rtol=1e-4, atol=1e-5)
    print("one batch serves both adapters and tokens without one")


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
