"""The experts of transformers, under any experts implementation that it knows, on the arrays of a problem."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.libraries.weights import route
from benchmarks.problem import Problem
from benchmarks.shapes import Shape


def experts_module(problem: Problem, implementation: str) -> torch.nn.Module:
    """transformers' module of the shape's kind with the problem's own matrices, or views of them.

    silu: that of Qwen3; the clamped swiglu: that of gpt-oss. Biases are in the dtype of the matrices.
    """
    shape, experts = problem.shape, problem.experts
    gpt_oss = shape.activation.name == "swiglu_oai"
    family, name = ("gpt_oss", "GptOss") if gpt_oss else ("qwen3_moe", "Qwen3Moe")
    configuration = importlib.import_module(f"transformers.models.{family}.configuration_{family}")
    modeling = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    sizes = {"hidden_size": shape.d_model, "num_experts_per_tok": shape.top_k}
    if gpt_oss:
        sizes |= {"intermediate_size": shape.d_ff, "num_local_experts": shape.num_experts}
    else:
        sizes |= {"moe_intermediate_size": shape.d_ff, "num_experts": shape.num_experts}
    config = getattr(configuration, f"{name}Config")(**sizes)
    config._experts_implementation = implementation
    with torch.device("meta"):
        module = getattr(modeling, f"{name}Experts")(config)
    stored = "in_out" if gpt_oss else "out_in"
    arrays: dict[str, Any] = {"gate_up_proj": experts.gate_up, "down_proj": experts.down}
    if shape.weight_layout != stored:
        arrays = {key: matrix.mT for key, matrix in arrays.items()}
    if gpt_oss:
        arrays |= {"gate_up_proj_bias": experts.gate_up_bias, "down_proj_bias": experts.down_bias}
    for key, array in arrays.items():
        setattr(module, key, torch.nn.Parameter(array.to(problem.x.dtype), requires_grad=False))
    return module.eval()


def why_unsuited(shape: Shape) -> str | None:
    """Why transformers has no module of a shape's kind, or None."""
    if shape.biased == (shape.activation.name == "swiglu_oai"):
        return None
    return f"transformers has no {shape.activation.name} experts {'with' if shape.biased else 'without'} biases"


def grouped_mm(problem: Problem) -> Callable[[], torch.Tensor]:
    """From logits: top K and softmax, then the experts by `experts_implementation="grouped_mm"`."""
    module = experts_module(problem, "grouped_mm")

    def forward() -> torch.Tensor:
        routing = route(problem.logits, problem.shape.top_k)
        return module(problem.x, routing.ids.long(), routing.weights.to(problem.x.dtype))

    return forward
