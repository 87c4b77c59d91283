"""Functions of tensors for adapters of a router and a shared expert."""

from __future__ import annotations

import sys
from typing import Any

import torch

from moe_core.ops.lora.adapters import Dropout
from moe_core.ops.lora.beyond import dropout_mask
from moe_core.ops.lora.beyond import run_beyond_experts as run_beyond_experts


class Arrays:
    """Torch's part of `moe_core.ops.lora.beyond`."""

    where, sigmoid = staticmethod(torch.where), staticmethod(torch.sigmoid)

    @property
    def ops(self) -> Any:
        return sys.modules["moe_torch.ops"]

    def like(self, array: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return array.to(other.dtype).contiguous()

    def index(self, ids: torch.Tensor) -> torch.Tensor:
        return ids.long()

    def arange(self, count: int, like: torch.Tensor) -> torch.Tensor:
        return torch.arange(count, device=like.device)

    def kept(self, shape: tuple[int, int], seed: torch.Tensor, dropout: Dropout) -> torch.Tensor:
        rows, columns = (self.arange(count, seed) for count in shape)
        return dropout_mask(rows, columns, seed.long() & 0xFFFFFFFF, dropout)

    def rounded(self, logits: torch.Tensor, dtype: str) -> torch.Tensor:
        """Rounded to the dtype named, with the gradient as it comes."""
        change = (logits.to(getattr(torch, dtype)).to(logits.dtype) - logits).detach()
        return logits if dtype == "float32" else logits + change.nan_to_num(0.0, float("inf"), -float("inf"))


ARRAYS = Arrays()
