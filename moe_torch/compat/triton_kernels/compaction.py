"""Drop choices that a bitmatrix does not have."""

from __future__ import annotations

import torch

from moe_core.errors import InvalidInput
from moe_torch.compat.triton_kernels.tensor import Tensor, bits_of


def compaction(
    yv: torch.Tensor, yi: torch.Tensor, bitmask: Tensor | torch.Tensor, sentinel: int = -1
) -> tuple[torch.Tensor, torch.Tensor]:
    """Move values yv and columns yi `[T, K]` with a set bit ahead, in their order, and fill up with the sentinel.

    bitmask: int32 or uint32 `[T, W]`, bit `e % 32` of word `e // 32`. Columns outside [0, 32 W) have no bit.
    """
    words = bitmask.data if isinstance(bitmask, Tensor) else bitmask
    if yv.shape != yi.shape or yi.ndim != 2 or words.ndim != 2 or words.shape[0] != yi.shape[0]:
        raise InvalidInput(
            f"yv and yi must be [T, K] and bitmask [T, W], got {list(yv.shape)}, {list(yi.shape)} and "
            f"{list(words.shape)}; pass one row per token"
        )
    kept = bits_of(words, yi)
    order = (~kept).to(torch.int32).argsort(dim=1, stable=True)
    kept = kept.gather(1, order)
    return torch.where(kept, yv.gather(1, order), sentinel), torch.where(kept, yi.gather(1, order), sentinel)


compaction_torch = compaction
