"""DeepGEMM's grouped bf16 products over rows that are padded to its block, with torch's operations around them."""

from __future__ import annotations

import importlib
from collections.abc import Callable

import torch

from benchmarks.libraries.weights import out_in, route, why_not_plain_silu
from benchmarks.problem import Problem, activate
from benchmarks.shapes import Shape


def why_unsuited(shape: Shape) -> str | None:
    """Why it is not timed with a shape, or None."""
    return why_not_plain_silu(shape, "DeepGEMM")


def forward(problem: Problem) -> Callable[[], torch.Tensor]:
    """From logits. An expert's rows begin at a multiple of its block, and the number of rows is the most there can be,
    so that nothing waits for the device."""
    library = importlib.import_module("deep_gemm")
    block = importlib.import_module("deep_gemm.utils.layout").get_mk_alignment_for_contiguous_layout()
    gate_up, down = out_in(problem.experts, problem.shape.weight_layout)
    x, shape, tokens = problem.x, problem.shape, problem.tokens
    slots = tokens * shape.top_k
    padded = -(-(slots + min(slots, shape.num_experts) * (block - 1)) // block) * block

    def product(rows: torch.Tensor, matrices: torch.Tensor, owner: torch.Tensor) -> torch.Tensor:
        result = rows.new_empty(padded, matrices.shape[1])
        library.m_grouped_bf16_gemm_nt_contiguous(rows, matrices, result, owner)
        return result

    def run() -> torch.Tensor:
        routing = route(problem.logits, shape.top_k)
        expert, slot = routing.ids.flatten().sort(stable=True)
        numbers = torch.arange(shape.num_experts + 1, device=x.device, dtype=expert.dtype)
        starts = torch.searchsorted(expert, numbers)
        room = (starts.diff() + block - 1) // block * block
        at = torch.arange(slots, device=x.device) + (room.cumsum(0) - room - starts[:-1])[expert]
        owner = torch.full((padded,), -1, dtype=torch.int32, device=x.device)
        owner[at] = expert
        rows = x.new_zeros(padded, shape.d_model)
        rows[at] = x[slot // shape.top_k]
        hidden = activate(product(rows, gate_up, owner), shape.activation)
        result = torch.empty(slots, shape.d_model, dtype=x.dtype, device=x.device)
        result[slot] = product(hidden, down, owner)[at]
        weights = routing.weights.to(x.dtype)[:, :, None]
        return (result.view(tokens, shape.top_k, -1) * weights).sum(dim=1)

    return run
