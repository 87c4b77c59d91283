"""A small language model on the bytes of a text: what its training in torch and in Flax have in common, in NumPy.

Text, batches and first weights depend on the settings alone, so train_torch.py and train_flax.py start from the same
bits and see the same tokens. The model: embedding plus positions; blocks of causal attention and a Mixture-of-Experts
layer, each behind an RMSNorm and added to what it came from; an RMSNorm; the product with the embedding's transpose.
The loss is the mean cross entropy, plus each layer's two routing losses times small factors.
"""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from moe_core.layers import HUGGING_FACE, ExpertsSpec, LayerWeights, MoELayerSpec
from moe_core.specs.routing import RouterSpec

#: 11 kB of English that every checkout has.
LICENSE = pathlib.Path(__file__).resolve().parent.parent / "LICENSE"
VOCABULARY = 256
EPSILON = 1e-5
#: Factors of the load-balancing loss and of the z-loss.
BALANCE, Z = 0.01, 0.001
#: Adam's decay rates and epsilon.
DECAYS, ADAM_EPSILON = (0.9, 0.95), 1e-8


@dataclass(frozen=True)
class Settings:
    """Sizes of the model and of its training; each is an option of the command line.

    d_ff: width of one expert. dtype: what the experts compute in; weights and all else are float32.
    sample: bytes that the trained model writes. text: a file.
    """

    d_model: int = 32
    d_ff: int = 32
    experts: int = 4
    top_k: int = 2
    layers: int = 1
    heads: int = 2
    length: int = 32
    batch: int = 8
    steps: int = 12
    learning_rate: float = 1e-2
    dtype: str = "float32"
    seed: int = 0
    sample: int = 24
    text: pathlib.Path = LICENSE

    def layer_spec(self) -> MoELayerSpec:
        """The Mixture-of-Experts layer of a block. Both frameworks store its experts alike, which equal bits need."""
        experts = ExpertsSpec(weight_layout="in_out", gate_layout="halves")
        return MoELayerSpec(self.d_model, self.d_ff, self.experts, self.top_k, RouterSpec(renormalize=True), experts)

    def tokens(self) -> np.ndarray:
        """The text's bytes, int32."""
        return np.frombuffer(self.text.read_bytes(), np.uint8).astype(np.int32)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Every field of Settings as an option: `--d-model 512`."""
    for field in dataclasses.fields(Settings):
        name = f"--{field.name.replace('_', '-')}"
        kind = pathlib.Path if field.name == "text" else type(field.default)
        parser.add_argument(name, type=kind, default=field.default, help=f"default: {field.default}")


def settings_from(options: argparse.Namespace) -> Settings:
    """The settings among parsed options."""
    return Settings(**{field.name: getattr(options, field.name) for field in dataclasses.fields(Settings)})


def batches(settings: Settings) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """(inputs, targets) of every step, int32 `[batch, length]`: pieces of the text, and the same one byte later."""
    tokens, random = settings.tokens(), np.random.default_rng([settings.seed, 1])
    for _ in range(settings.steps):
        starts = random.integers(len(tokens) - settings.length, size=(settings.batch, 1))
        places = starts + np.arange(settings.length)
        yield tokens[places], tokens[places + 1]


def initial_weights(settings: Settings) -> dict[str, np.ndarray]:
    """Every weight in float32, by the name it has in the torch model's state_dict."""
    random, width = np.random.default_rng([settings.seed, 0]), settings.d_model

    def normal(*shape: int, fan_in: int) -> np.ndarray:
        return (random.standard_normal(shape) * fan_in**-0.5).astype(np.float32)

    weights = {
        "embedding": normal(VOCABULARY, width, fan_in=width),
        "positions": normal(settings.length, width, fan_in=width),
        "norm.scale": np.ones(width, np.float32),
    }
    for block in range(settings.layers):
        arrays = {
            "attention_norm.scale": np.ones(width, np.float32),
            "attention.qkv": normal(width, 3 * width, fan_in=width),
            "attention.out": normal(width, width, fan_in=width),
            "moe_norm.scale": np.ones(width, np.float32),
        }
        for parameter in settings.layer_spec().parameters(HUGGING_FACE):
            arrays[f"moe.{parameter.name}"] = normal(*parameter.shape, fan_in=parameter.fan_in)
        weights |= {f"blocks.{block}.{name}": array for name, array in arrays.items()}
    return weights


def layer_weights(weights: Mapping[str, np.ndarray], block: int, settings: Settings) -> LayerWeights:
    """The weights of one block's Mixture-of-Experts layer, as layers of either framework take them."""
    prefix = f"blocks.{block}.moe."
    arrays = {name.removeprefix(prefix): array for name, array in weights.items() if name.startswith(prefix)}
    return LayerWeights.from_named(arrays, settings.layer_spec(), HUGGING_FACE)


def show(step: int, loss: Any, settings: Settings) -> None:
    """Print a step's loss as soon as it is there: at most twenty steps of a training, evenly spaced, and its last one.

    Only then is the loss, a number or an array of any framework, waited for.
    """
    if step % -(-settings.steps // 20) == 0 or step == settings.steps - 1:
        print(f"step {step:4}: loss {float(loss):.6f}", flush=True)


def timed(losses: Iterable[Any], settings: Settings) -> list[Any]:
    """The losses of a training that are shown as they come, and then its tokens per second, but for the first step's,
    which compiles."""
    found, began = [], 0.0
    for step, loss in enumerate(losses):
        found.append(loss)
        show(step, loss, settings)
        if step == 0:
            float(loss)
            began = time.perf_counter()
    float(found[-1])
    seconds = time.perf_counter() - began
    if len(found) > 1:
        print(f"{(len(found) - 1) * settings.batch * settings.length / seconds:.0f} tokens/s")
    return found


def sample(logits_of: Callable[[np.ndarray], Any], settings: Settings) -> str:
    """Text that the model writes behind the first `length` bytes of its own: the likeliest byte each time.

    logits_of: the logits `[1, L, VOCABULARY]` of tokens int32 `[1, L]`.
    """
    tokens = list(settings.tokens()[: settings.length])
    for _ in range(settings.sample):
        logits = np.asarray(logits_of(np.array([tokens[-settings.length :]], np.int32)))
        tokens.append(int(logits[0, -1].argmax()))
    return bytes(tokens[settings.length :]).decode("latin-1")


def main() -> None:
    """Print what there is to learn and to train."""
    settings = Settings()
    inputs, targets = next(batches(settings))
    print(f"{len(settings.tokens())} bytes of {settings.text.name}; the first batch:")
    for row in inputs:
        print(repr(bytes(row.astype(np.uint8)).decode("latin-1")))
    assert np.array_equal(inputs[:, 1:], targets[:, :-1])
    for name, array in initial_weights(settings).items():
        print(f"{name:30} {list(array.shape)}")


if __name__ == "__main__":
    main()
