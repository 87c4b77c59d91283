"""Slices, an activation and comparisons for tests of the interface of Triton 3.8's triton_kernels."""

from __future__ import annotations

from dataclasses import replace

import torch

from moe_torch.compat.triton_kernels import swiglu
from moe_torch.compat.triton_kernels_38 import tensor
from moe_torch.compat.triton_kernels_38.matmul import FnSpecs, FusedActivation
from tests.support.triton_kernels import ALPHA, LIMIT

SWIGLU = FusedActivation(FnSpecs("swiglu", swiglu.swiglu_fn, ("alpha", "limit"), reduction_n=2), (ALPHA, LIMIT))
SIZES = torch.tensor([5, 0, 3, 1, 4, 2], dtype=torch.int32)
M = 18
ORDER = torch.randperm(M, generator=torch.Generator().manual_seed(1)).int()
ORDER[[0, 7]] = -1


def near(found: torch.Tensor, expected: torch.Tensor, tolerance: float = 2e-5) -> None:
    assert found.shape == expected.shape, (found.shape, expected.shape)
    torch.testing.assert_close(found.double(), expected.double(), rtol=tolerance, atol=tolerance)


def slices(padded: bool = False) -> tensor.RaggedTensorMetadata:
    """Three rows of 18 belong to no slice. padded: every slice starts at a multiple of 8."""
    metadata = tensor.make_ragged_tensor_metadata(SIZES, M)
    if not padded:
        return metadata
    starts = torch.nn.functional.pad((-(-SIZES // 8) * 8).cumsum(0).int(), (1, 0))
    return replace(metadata, slice_offs=starts, slice_sizes_divisibility=8)


def activated(rows: torch.Tensor) -> torch.Tensor:
    gate, up = rows[..., ::2].clamp(max=LIMIT), rows[..., 1::2].clamp(-LIMIT, LIMIT)
    return gate * torch.sigmoid(ALPHA * gate) * (up + 1)
