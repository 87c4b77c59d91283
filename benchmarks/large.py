"""One forward whose tokens, activations, slots and output each hold more than 2**31 elements, compared in full.

Offsets that are computed in 32 bits show here and nowhere else. Torch and JAX must agree bitwise, and every token with
the fp32 arithmetic. Takes about 60 GB of the device's memory.
"""

from __future__ import annotations

import sys
from typing import Any

import jax
import torch

import moe_jax
import moe_torch
from benchmarks.problem import Problem, expected, relative_error
from benchmarks.shapes import Shape
from benchmarks.weights import draw_weights
from moe_core.specs.matmul import Activation
from moe_core.specs.operands import ExpertWeights, RouterLogits

#: T * D = T * K * F = 2.7e9, T * K * D = 5.4e9 elements.
LARGE_SHAPE = Shape("large", 640, 320, 8, 2, Activation("silu"), False)
LARGE_TOKENS = 2**22
_CHUNK = 2**18
TOLERANCE = 1e-2


def elements(shape: Shape, tokens: int) -> dict[str, int]:
    """Elements of the arrays that grow with the tokens."""
    slots = tokens * shape.top_k
    return {"x": tokens * shape.d_model, "activations": slots * shape.d_ff, "slots": slots * shape.d_model}


def run_large(
    device: Any = "cuda", shape: Shape = LARGE_SHAPE, tokens: int = LARGE_TOKENS, seed: int = 0
) -> dict[str, Any]:
    """Run once with each framework and compare; raises SystemExit where they differ. Returns the record's entry."""
    generator = torch.Generator(device).manual_seed(seed)
    experts = draw_weights(shape, generator)
    x = torch.randn(tokens, shape.d_model, generator=generator, device=device, dtype=torch.bfloat16)
    logits = torch.randn(tokens, shape.num_experts, generator=generator, device=device)
    problem = Problem(shape, "balanced", x, logits, experts)
    output = problem.torch_forward().output
    error = max(
        relative_error(output[chunk], expected(problem, chunk))
        for chunk in (slice(start, start + _CHUNK) for start in range(0, tokens, _CHUNK))
    )

    @jax.jit
    def jax_forward(x: Any, logits: Any, experts: ExpertWeights) -> Any:
        return moe_jax.moe(x, experts, RouterLogits(logits), problem.spec).output

    bitwise = torch.equal(output, moe_torch.from_dlpack(jax_forward(*problem.jax_arrays)))
    if not bitwise or not error < TOLERANCE:
        sys.exit(f"parity is red for {elements(shape, tokens)} elements: bitwise {bitwise}, error {error}")
    return {
        "tokens": tokens,
        "d_model": shape.d_model,
        "d_ff": shape.d_ff,
        "num_experts": shape.num_experts,
        "top_k": shape.top_k,
        "elements": elements(shape, tokens),
        "bitwise_torch_jax": bitwise,
        "worst_chunk_error_fp32": error,
    }
