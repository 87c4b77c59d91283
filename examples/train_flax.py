"""A small language model with Mixture-of-Experts layers, trained in Flax NNX with optax; train_torch.py trains the same
in PyTorch.

    python examples/train_flax.py --d-model 512 --d-ff 512 --experts 16 --layers 4 --length 256 --steps 200

The default sizes take seconds on a CPU. Text, batches and first weights: language_model.py.
"""

from __future__ import annotations

import argparse
import functools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import language_model
import numpy as np
import optax
from flax import nnx
from language_model import Settings

from moe_core.layers import HUGGING_FACE, convert_weights
from moe_jax.nnx import MoE

Weights = Mapping[str, np.ndarray]
# GPUs would otherwise round the factors of float32 products to 10 bits, which torch does not do by default.
matmul = functools.partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST)
einsum = functools.partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)


class RMSNorm(nnx.Module):
    """x over the root of its mean square, times a scale `[D]`."""

    def __init__(self, scale: np.ndarray) -> None:
        self.scale = nnx.Param(jnp.asarray(scale))

    def __call__(self, x: jax.Array) -> jax.Array:
        return x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + language_model.EPSILON) * self.scale[...]


class Attention(nnx.Module):
    """Causal attention of x `[B, L, D]`."""

    def __init__(self, settings: Settings, qkv: np.ndarray, out: np.ndarray) -> None:
        self.heads = settings.heads
        self.qkv, self.out = nnx.Param(jnp.asarray(qkv)), nnx.Param(jnp.asarray(out))

    def __call__(self, x: jax.Array) -> jax.Array:
        batch, length, width = x.shape
        parts = matmul(x, self.qkv[...]).reshape(batch, length, 3, self.heads, width // self.heads)
        q, k, v = parts[:, :, 0], parts[:, :, 1], parts[:, :, 2]
        scores = einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(width // self.heads)
        past = jnp.tri(length, dtype=bool)
        probabilities = jax.nn.softmax(jnp.where(past, scores, -jnp.inf), -1)
        return matmul(einsum("bhqk,bkhd->bqhd", probabilities, v).reshape(x.shape), self.out[...])


class Block(nnx.Module):
    """Attention, then the Mixture-of-Experts layer, which keeps float32 weights and computes in settings.dtype."""

    def __init__(self, settings: Settings, weights: Weights, block: int) -> None:
        own = {name: weights[f"blocks.{block}.{name}"] for name in self.named()}
        self.attention_norm, self.moe_norm = RMSNorm(own["attention_norm.scale"]), RMSNorm(own["moe_norm.scale"])
        self.attention = Attention(settings, own["attention.qkv"], own["attention.out"])
        self.moe = MoE.from_weights(
            language_model.layer_weights(weights, block, settings), dtype=jnp.dtype(settings.dtype)
        )

    @staticmethod
    def named() -> tuple[str, ...]:
        """The weights beside those of the Mixture-of-Experts layer."""
        return "attention_norm.scale", "attention.qkv", "attention.out", "moe_norm.scale"

    def experts(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """y, and the routing losses times their factors."""
        y, aux = self.moe(x, return_aux=True)
        losses = language_model.BALANCE * aux.load_balance_loss + language_model.Z * aux.z_loss
        return y.astype(x.dtype), losses

    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        x = x + self.attention(self.attention_norm(x))
        y, losses = self.experts(self.moe_norm(x))
        return x + y, losses

    def weights(self) -> dict[str, np.ndarray]:
        """Every weight by its name in the torch model."""
        weights = {f"moe.{name}": array for name, array in as_in_torch(self.moe).items()}
        for name in self.named():
            part, _, field = name.partition(".")
            weights[name] = np.asarray(getattr(getattr(self, part), field)[...])
        return weights


def as_in_torch(layer: MoE) -> dict[str, np.ndarray]:
    """The layer's weights (or gradients, in the place of weights) by torch's names and in its storage."""
    exported: Any = layer.export_weights()
    return convert_weights(exported, layer.spec.storage(HUGGING_FACE)).named()


class LanguageModel(nnx.Module):
    """`loss = model(inputs, targets)` of tokens `[B, L]`. weights: by torch's names. None: the first ones."""

    def __init__(self, settings: Settings, weights: Weights | None = None) -> None:
        weights = language_model.initial_weights(settings) if weights is None else weights
        self.embedding = nnx.Param(jnp.asarray(weights["embedding"]))
        self.positions = nnx.Param(jnp.asarray(weights["positions"]))
        self.blocks = nnx.List([Block(settings, weights, block) for block in range(settings.layers)])
        self.norm = RMSNorm(weights["norm.scale"])

    def embed(self, tokens: jax.Array) -> jax.Array:
        return self.embedding[...][tokens] + self.positions[...]

    def logits(self, tokens: jax.Array) -> jax.Array:
        x = self.embed(tokens)
        for block in self.blocks:
            x, _ = block(x)
        return matmul(self.norm(x), self.embedding[...].T)

    def cross_entropy(self, x: jax.Array, targets: jax.Array) -> jax.Array:
        logits = matmul(x, self.embedding[...].T)
        return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()

    def __call__(self, inputs: jax.Array, targets: jax.Array) -> jax.Array:
        x, penalty = self.embed(inputs), 0.0
        for block in self.blocks:
            x, losses = block(x)
            penalty = penalty + losses
        return self.cross_entropy(self.norm(x), targets) + penalty

    def weights(self) -> dict[str, np.ndarray]:
        """Every weight by the name it has in `language_model.initial_weights`."""
        weights = {"embedding": self.embedding, "positions": self.positions, "norm.scale": self.norm.scale}
        named = {name: np.asarray(variable[...]) for name, variable in weights.items()}
        for index, block in enumerate(self.blocks):
            named |= {f"blocks.{index}.{name}": array for name, array in block.weights().items()}
        return named


def steps(
    settings: Settings, model: LanguageModel, place: Callable[[np.ndarray], Any] = jnp.asarray
) -> Iterator[jax.Array]:
    """Train the model, and give the loss of every step as soon as the step is under way.

    place: puts the tokens of a batch where the model takes them. The model has its new weights after the last step.
    """
    graph, parameters = nnx.split(model)
    first, second = language_model.DECAYS
    optimizer = optax.adam(settings.learning_rate, first, second, language_model.ADAM_EPSILON)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(parameters: Any, moments: Any, inputs: jax.Array, targets: jax.Array) -> tuple[Any, Any, jax.Array]:
        def loss(parameters: Any) -> jax.Array:
            return nnx.merge(graph, parameters)(inputs, targets)

        value, gradients = jax.value_and_grad(loss)(parameters)
        updates, moments = optimizer.update(gradients, moments, parameters)
        return optax.apply_updates(parameters, updates), moments, value

    # Moments lie where their parameters do.
    moments = jax.jit(optimizer.init)(parameters)
    for inputs, targets in language_model.batches(settings):
        parameters, moments, loss = step(parameters, moments, place(inputs), place(targets))
        yield loss
    nnx.update(model, parameters)


def train(settings: Settings) -> tuple[list[float], dict[str, np.ndarray]]:
    """The loss of every step, printed on the way, and the weights after the last one."""
    model = LanguageModel(settings)
    losses = language_model.timed(steps(settings, model), settings)
    logits = jax.jit(lambda model, tokens: model.logits(tokens))
    print(f"it writes: {language_model.sample(lambda tokens: logits(model, tokens), settings)!r}")
    return [float(loss) for loss in losses], model.weights()


def main() -> None:
    """Train; the loss must fall."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    language_model.add_options(parser)
    losses, _ = train(language_model.settings_from(parser.parse_args()))
    assert losses[-1] < losses[0], "the loss falls"


if __name__ == "__main__":
    main()
