"""Scales of whole tensors."""

from __future__ import annotations

from dataclasses import dataclass

import torch

MAX_FINITE_FLOAT8E5 = 57344.0
MAX_FINITE_FLOAT8E4NV = 448.0
MAX_FINITE_FLOAT8E4B8 = 240.0


@dataclass(frozen=True, eq=False)
class BaseFlexData:
    """dtype: how bytes are read. None: as they are."""

    dtype: torch.dtype | None = None

    def view(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.dtype is None else x.view(self.dtype)

    def reinterpret(self, x: torch.Tensor) -> torch.Tensor:
        """View x as dtype if its elements are bytes."""
        return x if self.dtype is None or x.dtype.itemsize > 1 else x.view(self.dtype)


@dataclass(frozen=True, eq=False)
class InFlexData(BaseFlexData):
    """scale fp32 `[1]` or, of weights, `[E]`: multiplies values that are read. None: 1."""

    scale: torch.Tensor | None = None

    @property
    def is_per_batch(self) -> bool:
        return self.scale is not None and len(self.scale) > 1


@dataclass(frozen=True, eq=False)
class OutFlexData(BaseFlexData):
    """Scales of fp8 results, fp32 `[1]` or one per matrix. Products of Triton 3.5 have no fp8 results here."""

    expected_scale: torch.Tensor | None = None
    actual_scale: torch.Tensor | None = None
    checksum_scale: torch.Tensor | None = None

    @property
    def is_per_batch(self) -> bool:
        return self.expected_scale is not None and len(self.expected_scale) > 1

    def __iter__(self):
        return iter((self.expected_scale, self.actual_scale, self.checksum_scale))


PLAIN_INPUT, PLAIN_OUTPUT = InFlexData(), OutFlexData()


def why_not_plain_output(data: OutFlexData, saturate_inf: bool) -> str | None:
    """The reason why a result cannot have these options, or None."""
    names = [name for name in data.__match_args__ if getattr(data, name) is not None]
    if names:
        return f"results are bf16, fp16 or fp32 and have no scale, so {names[0]} of the output's flex data must be None"
    if saturate_inf:
        return "results are never saturated, which is about fp8 ones"
    return None
