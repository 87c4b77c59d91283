"""Memory of the ranks that one process plays."""

from __future__ import annotations

from collections.abc import Sequence

import torch

Tensor = torch.Tensor


def poisoned(rows: int, width: int, dtype: torch.dtype) -> Tensor:
    """NaN, or -1: what an array holds before anything is stored."""
    size = rows * width * torch.empty((), dtype=dtype).element_size()
    return torch.full((size,), 0xFF, dtype=torch.uint8).view(dtype).view(rows, width)


class Memory:
    """An array of a name at every rank, and the table of their addresses."""

    def __init__(self, empty: Tensor | Sequence[Tensor], ranks: int, device: torch.device) -> None:
        given = [empty] * ranks if isinstance(empty, Tensor) else empty
        # torch aligns memory to 64 bytes.
        self.own = [one.to(device, copy=True).contiguous() for one in given]
        self.at = torch.tensor([one.data_ptr() for one in self.own], device=device)
