"""Random experts of a shape, in torch."""

from __future__ import annotations

import torch

from benchmarks.shapes import Shape
from moe_core.specs.operands import ExpertWeights


def draw_weights(shape: Shape, generator: torch.Generator, dtype: torch.dtype = torch.bfloat16) -> ExpertWeights:
    """Random experts of the shape's layout on the generator's device, whose activations keep an rms of about 1."""
    gate_up, down = shape.matrices()

    def matrix(size: tuple[int, ...], inside: int) -> torch.Tensor:
        values = torch.randn(size, generator=generator, device=generator.device, dtype=dtype)
        return values.mul_(inside**-0.5)

    def bias(width: int) -> torch.Tensor | None:
        if not shape.biased:
            return None
        return 0.1 * torch.randn(shape.num_experts, width, generator=generator, device=generator.device)

    return ExpertWeights(
        matrix(gate_up, shape.d_model),
        matrix(down, shape.d_ff),
        gate_up_bias=bias(2 * shape.d_ff),
        down_bias=bias(shape.d_model),
    )
