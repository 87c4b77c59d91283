"""A gpt-oss layer fine-tuned with LoRA in Flax, on frozen mxfp4 experts, and its adapter saved in PEFT's packing.

    python examples/lora_gpt_oss_jax.py                          # a tiny layer, in seconds on a CPU
    python examples/lora_gpt_oss_jax.py --real --tokens 4096     # gpt-oss-20b's sizes, for a GPU

lora_gpt_oss.py does this in PyTorch. Weights are random. `open_checkpoint(path).layer(n)` and `MoE.from_weights` take
those of a checkpoint, which keep their codes.
"""

from __future__ import annotations

import argparse
import pathlib
import tempfile
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from moe_core.checkpoint import Adapter, ExpertAdapter, LoRAPair, read_adapter, write_adapter
from moe_jax import LoRA, scheme_named
from moe_jax.layers import layer_spec_from_config
from moe_jax.nnx import MoE


def saved(lora: Any, config: dict[str, Any], folder: pathlib.Path) -> None:
    """Write the adapter as PEFT does, and read it back."""
    factors = jax.tree.map(np.asarray, lora.export(0))
    pairs = [
        LoRAPair(a, b, factors.scale, factors.ranks) for a, b in ((factors.a1, factors.b1), (factors.a2, factors.b2))
    ]
    # wi_0 and wi_1 are apart in Flax, gate before up. The file has the order of the model.
    layers = {"model.layers.0.mlp.experts": ExpertAdapter(*pairs, gate_layout="halves")}
    write_adapter(folder, Adapter(config, layers))
    before, after = lora.export(0), read_adapter(folder, config).layer(0)
    lora.load(0, after)
    assert jax.tree.all(jax.tree.map(np.array_equal, before, lora.export(0))), "the file holds the adapter"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--real", action="store_true", help="2880 wide, 32 experts, bf16")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--output", type=pathlib.Path, help="folder of the adapter")
    options = parser.parse_args()
    width, experts, dtype = (2880, 32, jnp.bfloat16) if options.real else (64, 8, jnp.float32)
    config: dict[str, Any] = {"model_type": "gpt_oss", "num_hidden_layers": 1, "swiglu_limit": 7.0}
    config |= {"hidden_size": width, "intermediate_size": width, "num_local_experts": experts, "num_experts_per_tok": 4}

    layer = MoE.from_spec(layer_spec_from_config(config), rngs=nnx.Rngs(0), param_dtype=dtype)
    layer.quantize_experts(scheme_named("mxfp4_w4a16"))
    before = jax.tree.map(np.array, nnx.state(layer))
    x = jax.random.normal(jax.random.key(1), (options.tokens, width), dtype)
    target = layer(x) + 0.5 * jax.random.normal(jax.random.key(2), (1, width), dtype)  # a shift to learn
    lora = layer.add_lora(LoRA(options.rank, alpha=2 * options.rank), rngs=nnx.Rngs(3))
    optimizer = nnx.Optimizer(layer, optax.adam(1e-2 if not options.real else 1e-3), wrt=nnx.LoRAParam)

    @nnx.jit
    def step(layer: MoE, optimizer: Any) -> jax.Array:
        def loss(layer: MoE) -> jax.Array:
            return jnp.square((layer(x) - target).astype(jnp.float32)).mean()

        value, gradients = nnx.value_and_grad(loss, argnums=nnx.DiffState(0, nnx.LoRAParam))(layer)
        optimizer.update(layer, gradients)
        return value

    losses, began = [], 0.0
    for number in range(options.steps):
        if number == 1:  # the program was compiled in the first step
            began = time.perf_counter()
        losses.append(float(step(layer, optimizer)))
        print(f"step {number:2}: loss {losses[-1]:.5f}", flush=True)
    seconds = (time.perf_counter() - began) / max(1, options.steps - 1)
    print(f"{options.tokens / seconds:.0f} tokens/s on {jax.default_backend()}")
    assert losses[-1] < losses[0], "the loss falls"
    after = nnx.state(layer)
    del after["lora"]
    assert jax.tree.all(jax.tree.map(np.array_equal, before, after)), "frozen"
    folder = options.output or pathlib.Path(tempfile.mkdtemp()) / "adapter"
    saved(lora, config, folder)
    print(f"the frozen weights are bitwise what they were, and the adapter is in {folder}")


if __name__ == "__main__":
    main()
