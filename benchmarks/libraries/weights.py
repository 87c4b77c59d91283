"""The experts of a problem as other libraries store them; every function copies, ahead of what is timed."""

from __future__ import annotations

from typing import NamedTuple

import torch

from benchmarks.problem import Problem
from benchmarks.shapes import Shape
from moe_core.specs.operands import ExpertWeights


class Routing(NamedTuple):
    """Experts int32 and weights fp32 of every token, both `[T, K]`."""

    ids: torch.Tensor
    weights: torch.Tensor


def route(logits: torch.Tensor, top_k: int) -> Routing:
    """The top K of the logits and the softmax over them, by torch's own operations."""
    values, ids = logits.topk(top_k, dim=1)
    return Routing(ids.int(), values.softmax(dim=1))


def why_not_plain_silu(shape: Shape, library: str) -> str | None:
    """Why a library that has the gated silu and no biases cannot compute a shape, or None where it can."""
    if shape.activation.name == "silu" and not shape.biased:
        return None
    return f"{library} is timed with silu and without biases; add gptoss120bsilu to --shapes"


def out_in(experts: ExpertWeights, layout: str) -> tuple[torch.Tensor, torch.Tensor]:
    """gate_up `[E, 2F, D]` and down `[E, D, F]`, contiguous."""
    matrices = (experts.gate_up, experts.down)
    return tuple((matrix if layout == "out_in" else matrix.mT).contiguous() for matrix in matrices)  # pyright: ignore[reportReturnType]


def alternate(gate_up: torch.Tensor, rows: int, *, up_first: bool = False) -> torch.Tensor:
    """`[E, 2F, D]` with all gates before all ups, as blocks of so many rows of either by turns."""
    parts = list(gate_up.unflatten(1, (2, -1, rows)).unbind(1))
    return torch.stack(parts[::-1] if up_first else parts, dim=2).flatten(1, 3)


def in_halves(alternating: torch.Tensor) -> torch.Tensor:
    """`[E, 2F, D]` whose rows are a gate and an up by turns, as all gates before all ups."""
    return alternating.unflatten(1, (-1, 2)).transpose(1, 2).flatten(1, 2)


def alternating_weights(problem: Problem, rows: int, *, up_first: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """The problem's gate_up `[E, 2F, D]` in blocks by turns, and its down `[E, D, F]`."""
    gate_up, down = out_in(problem.experts, problem.shape.weight_layout)
    return alternate(gate_up, rows, up_first=up_first), down
