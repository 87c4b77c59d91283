"""A training step: one layer with its router, its gradients in both frameworks and as fp32 arithmetic.

A step is the forward from x, router included, and the gradients of x and of every weight and bias for a given gradient
of the output: no loss is part of it. The routing follows from x and the router matrix; both are drawn, so that it is
near balanced.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import torch

import moe_jax
import moe_torch
from benchmarks.draws import SEED
from benchmarks.problem import activate, spec_of
from benchmarks.shapes import Shape
from benchmarks.weights import draw_weights
from moe_core.base.target import Target
from moe_core.ops.moe.backward import plan_moe_backward
from moe_core.ops.moe.forward import plan_moe
from moe_core.ops.moe.options import BackwardOptions, ForwardOptions
from moe_core.specs.moe import MoESpec
from moe_core.specs.operands import ExpertWeights, MoEOperands, OutputGradients, RouterWeights, named_arrays

#: Small beside the logits, whose rms is 1: a large one would unbalance the routing.
_ROUTER_BIAS = 0.01


class Arguments(NamedTuple):
    """The arrays of a `moe` call, of either framework."""

    x: Any
    experts: ExpertWeights
    routing: RouterWeights


class Step(NamedTuple):
    """What a step found: the output, the routing of its forward, and gradients by the names of their arrays."""

    output: torch.Tensor
    ids: torch.Tensor
    logits: torch.Tensor
    gradients: dict[str, torch.Tensor]


@dataclass(frozen=True)
class TrainingProblem:
    """One layer's arrays on a device by name (`x`, `experts.*`, `routing.*`), and the gradient of its output."""

    shape: Shape
    arrays: Mapping[str, torch.Tensor]
    gradient: torch.Tensor

    @property
    def tokens(self) -> int:
        return self.gradient.shape[0]

    @property
    def spec(self) -> MoESpec:
        return MoESpec(self.shape.activation, self.shape.router, self.shape.weight_layout)

    def leaves(self) -> dict[str, torch.Tensor]:
        """The arrays as tensors that ask for a gradient; no copies."""
        return {name: array.detach().requires_grad_() for name, array in self.arrays.items()}

    def jax_arrays(self) -> tuple[dict[str, Any], Any]:
        """The arrays and the gradient of the output as JAX arrays; no copies."""
        arrays = {name: moe_jax.from_dlpack(array) for name, array in self.arrays.items()}
        return arrays, moe_jax.from_dlpack(self.gradient)

    def kept_bytes_of_sonicmoe(self) -> int:
        """Bytes per token that SonicMoE's article says it keeps, 2D + 4KF; routing is not counted there."""
        return 2 * self.shape.d_model + 4 * self.shape.top_k * self.shape.d_ff

    def scratch_bytes(self, target: Target) -> tuple[int, int]:
        """Scratch of the plans of forward and backward."""
        specs = arguments({name: spec_of(array) for name, array in self.arrays.items()})
        wanted = tuple(f"d_{name}" for name in self.arrays)
        gradients = OutputGradients(spec_of(self.gradient))
        forward = plan_moe(*specs, self.spec, target, options=ForwardOptions(save=True))
        backward = plan_moe_backward(
            gradients, MoEOperands(*specs), self.spec, target, options=BackwardOptions(wanted=wanted)
        )
        return forward.scratch_bytes, backward.scratch_bytes


def arguments(arrays: Mapping[str, Any]) -> Arguments:
    """The bundles of arrays by name."""

    def bundle(kind: type, prefix: str) -> Any:
        return kind(**{name.removeprefix(prefix): one for name, one in arrays.items() if name.startswith(prefix)})

    return Arguments(arrays["x"], bundle(ExpertWeights, "experts."), bundle(RouterWeights, "routing."))


def draw_parameters(shape: Shape, device: Any, seed: int = SEED) -> dict[str, torch.Tensor]:
    """Random experts and a random router whose logits have an rms of 1; bf16, biases fp32."""
    generator = torch.Generator(device).manual_seed(seed)
    experts = draw_weights(shape, generator)
    size = (shape.d_model, shape.num_experts)
    weight = torch.randn(size, generator=generator, device=device, dtype=torch.bfloat16).mul_(shape.d_model**-0.5)
    bias = None
    if shape.biased:
        bias = _ROUTER_BIAS * torch.randn(shape.num_experts, generator=generator, device=device)
    return dict((*named_arrays(experts, "experts."), *named_arrays(RouterWeights(weight, bias), "routing.")))


def draw_training_problem(
    shape: Shape, num_tokens: int, parameters: Mapping[str, torch.Tensor], seed: int = SEED
) -> TrainingProblem:
    """Random tokens and a random gradient of the output, on the device of the parameters."""
    device = parameters["routing.weight"].device
    generator = torch.Generator(device).manual_seed(seed + num_tokens)
    size = (num_tokens, shape.d_model)
    x, gradient = (torch.randn(size, generator=generator, device=device, dtype=torch.bfloat16) for _ in range(2))
    return TrainingProblem(shape, {"x": x, **parameters}, gradient)


def torch_step(problem: TrainingProblem) -> Step:
    """One step through autograd."""
    leaves = problem.leaves()
    result = moe_torch.moe(*arguments(leaves), problem.spec)
    gradients = torch.autograd.grad(result.output, list(leaves.values()), problem.gradient)
    named = dict(zip(leaves, gradients, strict=True))
    return Step(result.output.detach(), result.ids, result.logits.detach(), named)


def jax_gradients(arrays: dict[str, Any], gradient: Any, spec: MoESpec) -> tuple[Any, dict[str, Any]]:
    """(result of the forward, gradients by name), to be traced into a program."""

    def forward(arrays: dict[str, Any]) -> tuple[Any, Any]:
        result = moe_jax.moe(*arguments(arrays), spec)
        return result.output, result

    _, pull, result = jax.vjp(forward, arrays, has_aux=True)
    (gradients,) = pull(gradient)
    return result, gradients


def jax_step(problem: TrainingProblem) -> Step:
    """One jitted step, its results as torch tensors."""
    arrays, gradient = problem.jax_arrays()
    program = jax.jit(lambda arrays, gradient: jax_gradients(arrays, gradient, problem.spec))
    result, gradients = jax.block_until_ready(program(arrays, gradient))
    named = {name: moe_torch.from_dlpack(one) for name, one in gradients.items()}
    output, ids, logits = (moe_torch.from_dlpack(getattr(result, name)) for name in ("output", "ids", "logits"))
    return Step(output, ids, logits, named)


def differing(ours: Step, theirs: Step) -> list[str]:
    """The names of what has not the same bits in both."""
    pairs = {name: (getattr(ours, name), getattr(theirs, name)) for name in ("output", "ids", "logits")}
    pairs |= {f"d_{name}": (one, theirs.gradients[name]) for name, one in ours.gradients.items()}
    return [name for name, (one, other) in pairs.items() if not _same_bits(one, other)]


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    # As integers: zeros of different signs differ, equal NaNs do not. In parts: comparing takes memory of its own.
    bits = torch.int16 if one.itemsize == 2 else torch.int32
    parts = zip(one.view(bits).split(16), other.view(bits).split(16), strict=True)
    return all(torch.equal(part, of_other) for part, of_other in parts)


class _Error:
    """Squared norms of a difference and of what is wanted, added up over parts; they stay on the device."""

    def __init__(self) -> None:
        self._difference: Any = 0
        self._wanted: Any = 0

    def add(self, found: torch.Tensor, wanted: torch.Tensor) -> None:
        self._difference = self._difference + (found.float() - wanted).square().sum(dtype=torch.float64)
        self._wanted = self._wanted + wanted.square().sum(dtype=torch.float64)

    def value(self) -> float:
        return float((self._difference / self._wanted).sqrt())


def errors_fp32(problem: TrainingProblem, found: Step) -> dict[str, float]:
    """Relative Frobenius errors of a step by name (`output`, `logits`, `d_*`) to fp32 arithmetic.

    That is torch's autograd in fp32, an expert after the other, nothing rounded between, everything compared. The
    experts chosen are those of the step; raises ValueError where its ids are not the top K of its logits.
    """
    x, experts, routing = arguments(problem.arrays)
    ids, top_k = found.ids.long(), problem.shape.top_k
    if not torch.equal(found.logits.gather(1, ids), found.logits.topk(top_k, dim=1).values):
        raise ValueError(f"the ids are not the top {top_k} of the logits")
    wide_x, router = x.float(), routing.weight.float()
    logits = wide_x @ router if routing.bias is None else wide_x @ router + routing.bias
    logits.requires_grad_()
    weights = logits.gather(1, ids).softmax(dim=1)
    d_weights, d_x, output = torch.zeros_like(weights), torch.zeros_like(wide_x), torch.zeros_like(wide_x)
    errors = {f"d_{name}": _Error() for name in problem.arrays} | {"output": _Error(), "logits": _Error()}
    parts = dict(named_arrays(experts, "experts."))
    for expert in range(problem.shape.num_experts):
        token, choice = (ids == expert).nonzero(as_tuple=True)
        own = {name: part[expert].float().requires_grad_() for name, part in parts.items()}
        rows = wide_x[token].requires_grad_()
        weight = weights.detach()[token, choice].requires_grad_()
        y = weight[:, None] * _one_expert(rows, own, problem)
        gradients = torch.autograd.grad(y, [rows, weight, *own.values()], problem.gradient[token].float())
        output.index_add_(0, token, y.detach())
        d_x.index_add_(0, token, gradients[0])
        d_weights[token, choice] = gradients[1]
        for name, wanted in zip(own, gradients[2:], strict=True):
            errors[f"d_{name}"].add(found.gradients[name][expert], wanted)
    (d_logits,) = torch.autograd.grad(weights, logits, d_weights)
    wanted = {
        "routing.weight": wide_x.T @ d_logits,
        "routing.bias": d_logits.sum(dim=0),
        "x": d_x + d_logits @ router.T,
    }
    for name in ("x", "routing.weight", "routing.bias"):
        if name in found.gradients:
            errors[f"d_{name}"].add(found.gradients[name], wanted[name])
    errors["output"].add(found.output, output)
    errors["logits"].add(found.logits, logits.detach())
    return {name: error.value() for name, error in errors.items()}


def _one_expert(rows: torch.Tensor, own: dict[str, torch.Tensor], problem: TrainingProblem) -> torch.Tensor:
    """fp32 `[R, D]` of fp32 rows, by the matrices and biases of one expert."""
    turned = problem.shape.weight_layout == "out_in"
    gate_up, down = (own[name].T if turned else own[name] for name in ("experts.gate_up", "experts.down"))
    wide = rows @ gate_up
    if "experts.gate_up_bias" in own:
        wide = wide + own["experts.gate_up_bias"]
    out = activate(wide, problem.shape.activation) @ down
    return out + own["experts.down_bias"] if "experts.down_bias" in own else out
