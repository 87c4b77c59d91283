"""Random experts of a shape, in torch."""

from __future__ import annotations

import torch

from benchmarks.shapes import Shape
from moe_core.specs.operands import ExpertWeights


def draw_weights(shape: Shape, generator: torch.Generator) -> ExpertWeights:
    """Random bf16 experts on the generator's device, whose activations keep an rms of about 1."""

    def matrix(inside: int, outside: int) -> torch.Tensor:
        size = (shape.num_experts, inside, outside)
        values = torch.randn(size, generator=generator, device=generator.device, dtype=torch.bfloat16)
        return values.mul_(inside**-0.5)

    def bias(width: int) -> torch.Tensor | None:
        if not shape.biased:
            return None
        return 0.1 * torch.randn(shape.num_experts, width, generator=generator, device=generator.device)

    return ExpertWeights(
        matrix(shape.d_model, 2 * shape.d_ff),
        matrix(shape.d_ff, shape.d_model),
        gate_up_bias=bias(2 * shape.d_ff),
        down_bias=bias(shape.d_model),
    )
