"""Tokens per second of the model of train_flax.py that writes with a cache, in one program: a `lax.while_loop`.

    python examples/generate_flax.py --d-model 1024 --d-ff 512 --experts 32 --top-k 4 --layers 8 --length 512 --batch 1

Its experts are on all GPUs, or on four devices of the CPU, also for a batch smaller than the mesh: in the mode
`all_gather` each device takes every token to its experts. The cache is donated, so XLA updates it in place, and weights
are read where they are. The text equals what one device writes without a cache.
"""

from __future__ import annotations

import argparse
import functools
import math
import time
from typing import Any

import jax
import jax.numpy as jnp
import language_model
import numpy as np
from jax.sharding import AxisType, Mesh
from language_model import Settings
from train_flax import Block, LanguageModel, einsum, matmul
from train_flax_parallel import DEVICES, parallel_model

from moe_jax.parallel import ExchangeSpec, ExpertAxis


def attend(block: Block, x: jax.Array, cache: jax.Array, place: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Attention of one token x `[B, D]` to keys and values `[2, B, L, heads, D / heads]`, and these with its own."""
    attention, (batch, width) = block.attention, x.shape
    parts = matmul(x, attention.qkv[...]).reshape(batch, 3, 1, attention.heads, width // attention.heads)
    cache = jax.lax.dynamic_update_slice_in_dim(cache, parts[:, 1:].swapaxes(0, 1), place, 2)
    scores = einsum("bhd,bkhd->bhk", parts[:, 0, 0], cache[0]) / math.sqrt(width // attention.heads)
    past = jnp.arange(cache.shape[2]) <= place
    probabilities = jax.nn.softmax(jnp.where(past, scores, -jnp.inf), -1)
    return matmul(einsum("bhk,bkhd->bhd", probabilities, cache[1]).reshape(x.shape), attention.out[...]), cache


@functools.partial(jax.jit, donate_argnums=(1, 2), static_argnums=3)
def write(model: LanguageModel, tokens: jax.Array, caches: list[jax.Array], prompt: int) -> Any:
    """Fill tokens int32 `[B, L]` behind the first `prompt` ones with the likeliest ones."""

    def step(state: Any) -> Any:
        place, tokens, caches = state
        now = jax.lax.dynamic_index_in_dim(tokens, place, 1, keepdims=False)
        x, new = model.embedding[...][now] + model.positions[...][place], []
        for block, cache in zip(model.blocks, caches, strict=True):
            seen, cache = attend(block, block.attention_norm(x), cache, place)
            x, new = x + seen, [*new, cache]
            x = x + block.moe(block.moe_norm(x)).astype(x.dtype)
        likeliest = matmul(model.norm(x), model.embedding[...].T).argmax(-1).astype(tokens.dtype)
        given = jax.lax.dynamic_index_in_dim(tokens, place + 1, 1, keepdims=False)
        chosen = jnp.where(place + 1 < prompt, given, likeliest)
        return place + 1, jax.lax.dynamic_update_index_in_dim(tokens, chosen, place + 1, 1), new

    state = jnp.int32(0), tokens, caches
    return jax.lax.while_loop(lambda state: state[0] < tokens.shape[1] - 1, step, state)[1:]


def generate(settings: Settings, prompt: int, mesh: Mesh) -> np.ndarray:
    """Tokens `[B, L]` written on all devices; prints their number per second."""
    model = parallel_model(settings, mesh)
    for block in model.blocks:
        block.moe.expert_axis = ExpertAxis("ep", ExchangeSpec("all_gather"))
    texts = np.tile(settings.tokens()[: settings.length], (settings.batch, 1))
    texts[:, prompt:] = 0
    shape = (2, settings.batch, settings.length, settings.heads, settings.d_model // settings.heads)
    with jax.set_mesh(mesh):
        tokens, caches = jnp.asarray(texts), [jnp.zeros(shape) for _ in model.blocks]
        tokens, caches = jax.block_until_ready(write(model, tokens, caches, prompt))  # compiles
        began, earlier = time.perf_counter(), caches[0]
        tokens, caches = jax.block_until_ready(write(model, tokens, caches, prompt))
        seconds = time.perf_counter() - began
    assert earlier.is_deleted(), "the cache was updated in place"
    speed = settings.batch * (settings.length - 1) / seconds
    print(f"{mesh.size} devices, batch {settings.batch}: {speed:.0f} tokens/s")
    return np.asarray(tokens)


def main() -> None:
    """Generate, and compare with one device."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    language_model.add_options(parser)
    parser.set_defaults(batch=1)
    settings = language_model.settings_from(parser.parse_args())
    # A CPU counts as one device unless told otherwise, before the first use of JAX.
    jax.config.update("jax_num_cpu_devices", DEVICES)
    mesh = jax.make_mesh((jax.device_count(),), ("ep",), axis_types=(AxisType.Auto,))
    prompt = settings.length - settings.sample
    written = generate(settings, prompt, mesh)
    print(f"it writes: {bytes(written[0, prompt:].astype(np.uint8)).decode('latin-1')!r}")
    with jax.default_device(jax.local_devices()[0]):
        logits = jax.jit(lambda model, tokens: model.logits(tokens))
        model, texts = LanguageModel(settings), written.copy()
        for place in range(prompt, settings.length):
            texts[:, place] = np.asarray(logits(model, jnp.asarray(texts)))[:, place - 1].argmax(-1)
    assert np.array_equal(written, texts), "one device writes the same without a cache"


if __name__ == "__main__":
    main()
