"""A small language model with Mixture-of-Experts layers, trained in PyTorch; train_flax.py trains the same in Flax.

    python examples/train_torch.py --d-model 512 --d-ff 512 --experts 16 --layers 4 --length 256 --steps 200

The default sizes take seconds on a CPU. Text, batches and first weights: language_model.py.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator

import language_model
import numpy as np
import torch
from language_model import Settings

from moe_torch import MoE


class RMSNorm(torch.nn.Module):
    """x over the root of its mean square, times a scale `[D]`."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.empty(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + language_model.EPSILON) * self.scale


class Attention(torch.nn.Module):
    """Causal attention of x `[B, L, D]`."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        width = settings.d_model
        self.heads = settings.heads
        self.qkv = torch.nn.Parameter(torch.empty(width, 3 * width))
        self.out = torch.nn.Parameter(torch.empty(width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = (x @ self.qkv).view(batch, length, 3, self.heads, width // self.heads).unbind(2)
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(width // self.heads)
        past = torch.ones(length, length, dtype=torch.bool, device=x.device).tril()
        probabilities = torch.softmax(torch.where(past, scores, -torch.inf), -1)
        return torch.einsum("bhqk,bkhd->bqhd", probabilities, v).reshape(x.shape) @ self.out


class Block(torch.nn.Module):
    """Attention, then the Mixture-of-Experts layer."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.attention_norm, self.moe_norm = RMSNorm(settings.d_model), RMSNorm(settings.d_model)
        self.attention = Attention(settings)
        self.moe = MoE.from_spec(settings.layer_spec())
        self.dtype = getattr(torch, settings.dtype)

    def experts(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """y, and the routing losses times their factors. The experts' float32 weights are cast to the dtype that they
        compute in; the gradient flows back through the cast."""
        used = {
            name: parameter.to(self.dtype) if name.startswith("experts.") else parameter
            for name, parameter in self.moe.named_parameters()
        }
        y, aux = torch.func.functional_call(self.moe, used, (x.to(self.dtype),), {"return_aux": True})
        losses = language_model.BALANCE * aux.load_balance_loss + language_model.Z * aux.z_loss
        return y.to(x.dtype), losses

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = x + self.attention(self.attention_norm(x))
        y, losses = self.experts(self.moe_norm(x))
        return x + y, losses


class LanguageModel(torch.nn.Module):
    """`loss = model(inputs, targets)` of tokens `[B, L]`."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.embedding = torch.nn.Parameter(torch.empty(language_model.VOCABULARY, settings.d_model))
        self.positions = torch.nn.Parameter(torch.empty(settings.length, settings.d_model))
        self.blocks = torch.nn.ModuleList(Block(settings) for _ in range(settings.layers))
        self.norm = RMSNorm(settings.d_model)
        weights = language_model.initial_weights(settings)
        self.load_state_dict({name: torch.from_numpy(array) for name, array in weights.items()})

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.embedding[tokens] + self.positions

    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x, _ = block(x)
        return self.norm(x) @ self.embedding.T

    def cross_entropy(self, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy((x @ self.embedding.T).flatten(0, 1), targets.flatten())

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x, penalty = self.embed(inputs), 0.0
        for block in self.blocks:
            x, losses = block(x)
            penalty = penalty + losses
        return self.cross_entropy(self.norm(x), targets) + penalty

    def weights(self) -> dict[str, np.ndarray]:
        """Every weight by the name it has in `language_model.initial_weights`."""
        return {name: tensor.detach().cpu().numpy() for name, tensor in self.state_dict().items()}


def device() -> torch.device:
    """The GPU where there is one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def on_device(tokens: np.ndarray) -> torch.Tensor:
    """Tokens as the model takes them."""
    return torch.from_numpy(tokens).long().to(device())


def train(settings: Settings) -> tuple[list[float], dict[str, np.ndarray]]:
    """The loss of every step, printed on the way, and the weights after the last one."""
    model = LanguageModel(settings).to(device())
    optimizer = torch.optim.Adam(
        model.parameters(), settings.learning_rate, language_model.DECAYS, language_model.ADAM_EPSILON
    )

    def steps() -> Iterator[torch.Tensor]:
        for inputs, targets in language_model.batches(settings):
            loss = model(on_device(inputs), on_device(targets))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            yield loss.detach()

    losses = language_model.timed(steps(), settings)
    with torch.no_grad():
        text = language_model.sample(lambda tokens: model.logits(on_device(tokens)).cpu(), settings)
    print(f"it writes: {text!r}")
    return torch.stack(losses).tolist(), model.weights()


def main() -> None:
    """Train; the loss must fall."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    language_model.add_options(parser)
    losses, _ = train(language_model.settings_from(parser.parse_args()))
    assert losses[-1] < losses[0], "the loss falls"


if __name__ == "__main__":
    main()
