"""SonicMoE on its QuACK kernels, from logits, from given routing, and as a training step.

Its public layer multiplies x and the router's matrix in bf16, and so would choose other experts than ours; its own
functions behind that layer take logits. Its kernels tune themselves at the first call of every size.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable

import torch

from benchmarks.libraries.weights import Routing, alternate, alternating_weights, in_halves, why_not_plain_silu
from benchmarks.problem import Problem
from benchmarks.shapes import Shape
from benchmarks.training_problem import TrainingProblem


def why_unsuited(shape: Shape) -> str | None:
    """Why it has no such layer, or None."""
    return why_not_plain_silu(shape, "SonicMoE")


def route(logits: torch.Tensor, top_k: int) -> Routing:
    """Its own kernel: top K, then softmax."""
    router = importlib.import_module("sonicmoe.functional").TC_Softmax_Topk_Router_Function
    scores, ids = router.apply(logits, logits.shape[1], top_k, True, False)
    return Routing(ids, scores)


def experts(x: torch.Tensor, routing: Routing, gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    """`[T, D]`; gate_up `[E, 2F, D]` with rows of gate and up by turns, down `[E, D, F]`. Sorting is part of it."""
    functional = importlib.import_module("sonicmoe.functional")
    swiglu = importlib.import_module("sonicmoe.enums").ActivationType.SWIGLU
    tokens, top_k = routing.ids.shape
    num_experts, slots = down.shape[0], tokens * top_k

    def indices(size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.int32, device=x.device)

    counts, ends = indices(num_experts), indices(num_experts + 1)
    gather, scatter, back = indices(slots), indices(slots), indices(slots)
    functional.TC_topk_router_metadata_triton(routing.ids, num_experts, counts, ends, gather, scatter, back)
    order = (gather, scatter, back, None, False)
    # Without gradients it does not store what the backward would read.
    inference = not torch.is_grad_enabled()
    first = (x, gate_up.permute(1, 2, 0), None, ends, slots, top_k, *order, swiglu, inference, False)
    activations, pre_activations = functional._UpProjection.apply(*first)
    second = (activations, pre_activations, down.permute(1, 2, 0), None, routing.weights, ends, tokens, top_k)
    return functional._DownProjection.apply(*second, *order, swiglu)


def forward(problem: Problem) -> Callable[[], torch.Tensor]:
    """From logits."""
    weights, top_k = alternating_weights(problem, 1), problem.shape.top_k
    return lambda: experts(problem.x, route(problem.logits, top_k), *weights)


def experts_forward(problem: Problem) -> Callable[[], torch.Tensor]:
    """From given experts and weights of every token."""
    weights, routing = alternating_weights(problem, 1), Routing(*problem.top_k)
    return lambda: experts(problem.x, routing, *weights)


def why_no_step(shape: Shape) -> str | None:
    """Why a training step is not timed with a shape, or None."""
    if shape.weight_layout == "in_out":
        return "SonicMoE's step is timed with weights stored out_in, as its gradients are; take a shape of that layout"
    return why_unsuited(shape)


def step(problem: TrainingProblem) -> Callable[[], dict[str, torch.Tensor]]:
    """Gradients by name of x, of the experts as SonicMoE stores them, and of the router's matrix.

    The router's product is computed in fp32, as ours is: SonicMoE's layer has it in bf16.
    """
    arrays = dict(problem.arrays)
    arrays["experts.gate_up"] = alternate(arrays["experts.gate_up"], 1)
    top_k = problem.shape.top_k

    def run() -> dict[str, torch.Tensor]:
        leaves = {name: array.detach().requires_grad_() for name, array in arrays.items()}
        logits = leaves["x"].float() @ leaves["routing.weight"].float()
        weights = leaves["experts.gate_up"], leaves["experts.down"]
        output = experts(leaves["x"], route(logits, top_k), *weights)
        return dict(zip(leaves, torch.autograd.grad(output, list(leaves.values()), problem.gradient), strict=True))

    return run


def as_ours(name: str, gradient: torch.Tensor) -> torch.Tensor:
    """A gradient of `step` in the order of our rows."""
    return in_halves(gradient) if name == "experts.gate_up" else gradient
