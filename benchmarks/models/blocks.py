"""MoE blocks of transformers with random weights of a model's sizes, one after the other as its layers are."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

import moe_torch.transformers


@dataclass(frozen=True)
class Model:
    """One model of transformers: its folder there, its classes, how many layers it has, and its configuration."""

    name: str
    family: str
    config: str
    block: str
    layers: int
    sizes: dict[str, Any] = field(default_factory=dict)


MODELS = {
    model.name: model
    for model in (
        Model(
            "qwen3-30b-a3b", "qwen3_moe", "Qwen3MoeConfig", "Qwen3MoeSparseMoeBlock", 48,
            {"hidden_size": 2048, "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8,
             "norm_topk_prob": True},
        ),
        Model(
            "gpt-oss-120b", "gpt_oss", "GptOssConfig", "GptOssMLP", 36,
            {"hidden_size": 2880, "intermediate_size": 2880, "num_local_experts": 128, "num_experts_per_tok": 4},
        ),
    )
}  # fmt: skip


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """New parameters have this dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


class Blocks(torch.nn.Module):
    """x `[1, T, D]` -> the same: every block adds what it computes to x, as the layers of a model do.

    All blocks share one configuration, so `use` changes what computes the experts of all.
    """

    def __init__(self, model: Model, layers: int, device: Any, seed: int) -> None:
        super().__init__()
        configuration = importlib.import_module(f"transformers.models.{model.family}.configuration_{model.family}")
        modeling = importlib.import_module(f"transformers.models.{model.family}.modeling_{model.family}")
        moe_torch.transformers.register()
        self.config = getattr(configuration, model.config)(**model.sizes)
        with torch.device(device), default_dtype(torch.bfloat16):
            self.blocks = torch.nn.ModuleList(getattr(modeling, model.block)(self.config) for _ in range(layers))
        generator = torch.Generator(device).manual_seed(seed)
        for parameter in self.parameters():
            parameter.requires_grad_(False).normal_(std=parameter.shape[-1] ** -0.5, generator=generator)
        self.eval()

    def use(self, implementation: str) -> None:
        """Compute the experts by this experts implementation from now on."""
        self.config._experts_implementation = implementation

    def first(self, x: torch.Tensor) -> torch.Tensor:
        """What the first block alone computes of x."""
        return _output(self.blocks[0](x))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + _output(block(x))
        return x


def _output(result: Any) -> torch.Tensor:
    return result[0] if isinstance(result, tuple) else result
