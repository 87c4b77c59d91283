"""FlashInfer's fused MoE for Hopper in CuTe-DSL, tuned by its own tuner for the number of tokens.

It takes experts and weights of every token: from logits, torch's top K and softmax are part of what is timed.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.libraries.weights import Routing, alternating_weights, route, why_not_plain_silu
from benchmarks.problem import Problem
from benchmarks.shapes import Shape

#: Rows of up and of gate that its first product takes by turns.
_BLOCK = 32


def why_unsuited(shape: Shape) -> str | None:
    """Why it has no such layer, or None."""
    if shape.d_ff % _BLOCK:
        return f"FlashInfer needs F to be a multiple of {_BLOCK}, got {shape.d_ff}"
    return why_not_plain_silu(shape, "FlashInfer")


def _tuned(problem: Problem, routing: Routing) -> Callable[[Routing], torch.Tensor]:
    """The forward of given routing, after every tile that it offers was timed for this number of tokens."""
    fused: Any = importlib.import_module("flashinfer.fused_moe").cute_dsl_fused_moe_bf16
    autotune = importlib.import_module("flashinfer").autotune
    gate_up, down = alternating_weights(problem, _BLOCK, up_first=True)
    shape, output = problem.shape, torch.empty_like(problem.x)

    def forward(routing: Routing) -> torch.Tensor:
        sizes = {"num_experts": shape.num_experts, "top_k": shape.top_k, "moe_output": output}
        return fused(problem.x, routing.ids, routing.weights, gate_up, down, **sizes)

    with autotune(True, tuning_buckets=(problem.tokens,)):
        forward(routing)
    return forward


def forward(problem: Problem) -> Callable[[], torch.Tensor]:
    """From logits."""
    tuned = _tuned(problem, Routing(*problem.top_k))
    return lambda: tuned(route(problem.logits, problem.shape.top_k))


def experts_forward(problem: Problem) -> Callable[[], torch.Tensor]:
    """From given experts and weights of every token."""
    routing = Routing(*problem.top_k)
    tuned = _tuned(problem, routing)
    return lambda: tuned(routing)
