"""What is benchmarked: one layer's arrays on a device, and its forward as plain fp32 arithmetic to check against."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

import moe_jax
import moe_torch
from benchmarks.draws import SEED, draw_logits
from benchmarks.shapes import Shape
from benchmarks.traces import is_trace, traced_logits
from moe_core.base.arrays import ArraySpec
from moe_core.base.target import Target
from moe_core.ops.moe.forward import plan_moe
from moe_core.plan.steps import LaunchPlan
from moe_core.specs.matmul import Activation
from moe_core.specs.moe import MoESpec
from moe_core.specs.operands import ExpertWeights, RouterLogits, TopK, map_arrays
from moe_core.specs.tuning import Tuning

#: Tokens of a problem that are compared with the fp32 arithmetic.
CHECKED_TOKENS = 48
#: What a plan's scratch may take beside its rows of activations and of results.
_SCRATCH_ALLOWANCE = 2 * 10**6


@dataclass(frozen=True)
class Problem:
    """One layer's arrays on a device, seen by both frameworks without a copy. experts: in the shape's weight layout.
    routing: the name of the draw, or `trace:FILE`."""

    shape: Shape
    routing: str
    x: torch.Tensor
    logits: torch.Tensor
    experts: ExpertWeights

    @property
    def tokens(self) -> int:
        return self.x.shape[0]

    @property
    def dtype(self) -> str:
        return str(self.x.dtype).removeprefix("torch.")

    @property
    def spec(self) -> MoESpec:
        return MoESpec(self.shape.activation, self.shape.router, self.shape.weight_layout)

    @property
    def batch_invariant_spec(self) -> MoESpec:
        """The same with one summation order for every number of tokens."""
        return dataclasses.replace(self.spec, tuning=Tuning(batch_invariant=True))

    @property
    def jax_arrays(self) -> tuple[Any, Any, ExpertWeights]:
        """x, logits and experts as JAX arrays."""
        x, logits = moe_jax.from_dlpack(self.x), moe_jax.from_dlpack(self.logits)
        return x, logits, map_arrays(self.experts, moe_jax.from_dlpack)

    @property
    def in_out(self) -> ExpertWeights:
        """The experts as `[E, D, 2F]` and `[E, F, D]`; views of them where they are stored the other way around."""
        if self.shape.weight_layout == "in_out":
            return self.experts
        return dataclasses.replace(self.experts, gate_up=self.experts.gate_up.mT, down=self.experts.down.mT)

    @property
    def top_k(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Experts int32 and weights fp32 of every token, both `[T, K]`."""
        values, ids = self.logits.topk(self.shape.top_k, dim=1)
        return ids.int(), values.softmax(dim=1)

    def experts_forward(self) -> Callable[[], Any]:
        """Ours from given experts and weights of every token, which are found here."""
        routing, spec = TopK(*self.top_k), dataclasses.replace(self.spec, router=None)
        return lambda: moe_torch.moe(self.x, self.experts, routing, spec)

    def torch_forward(self, spec: MoESpec | None = None, tokens: int | None = None) -> Any:
        """Ours, from logits. spec: None = the problem's; tokens: of so many first tokens alone, None = of all."""
        logits = RouterLogits(self.logits[:tokens])
        return moe_torch.moe(self.x[:tokens], self.experts, logits, spec or self.spec)

    def plan(self, target: Target) -> LaunchPlan:
        """What torch_forward runs on a target."""
        logits = RouterLogits(spec_of(self.logits))
        return plan_moe(spec_of(self.x), map_arrays(self.experts, spec_of), logits, self.spec, target)

    def allowed_scratch(self) -> int:
        """Bytes a plan's scratch may take: T * K rows of F activations and of D results, and 2 MB."""
        shape = self.shape
        return self.tokens * shape.top_k * (shape.d_ff + shape.d_model) * self.x.itemsize + _SCRATCH_ALLOWANCE


def spec_of(array: torch.Tensor) -> ArraySpec:
    """Shape and dtype of a tensor."""
    return ArraySpec(tuple(array.shape), str(array.dtype).removeprefix("torch."))


def draw_problem(shape: Shape, routing: str, num_tokens: int, experts: ExpertWeights, seed: int = SEED) -> Problem:
    """Random tokens routed by a named draw or a trace, on the device of the experts and in their dtype."""
    device = experts.gate_up.device
    generator = torch.Generator(device).manual_seed(seed + num_tokens)
    x = torch.randn(num_tokens, shape.d_model, generator=generator, device=device, dtype=experts.gate_up.dtype)
    if is_trace(routing):
        logits = traced_logits(routing, num_tokens, shape.num_experts, shape.top_k)
    else:
        logits = draw_logits(routing, num_tokens, shape.num_experts, seed)
    return Problem(shape, routing, x, torch.from_numpy(logits).to(device), experts)


def activate(wide: torch.Tensor, activation: Activation) -> torch.Tensor:
    """`[R, F]` from gate and up `[R, 2F]` by torch's own operations, in the dtype of `wide`."""
    gate, up = (wide[:, ::2], wide[:, 1::2]) if activation.gate_layout == "interleaved" else wide.chunk(2, dim=1)
    if activation.name == "silu":
        return torch.nn.functional.silu(gate) * up
    limit = activation.limit
    assert activation.alpha is not None
    gate, up = gate.clamp(max=limit), up.clamp(None if limit is None else -limit, limit)
    return gate * torch.sigmoid(activation.alpha * gate) * (up + 1)


def checked_tokens(num_tokens: int) -> torch.Tensor:
    """The tokens that are compared: CHECKED_TOKENS of them, the first and the last included."""
    return torch.linspace(0, num_tokens - 1, min(num_tokens, CHECKED_TOKENS)).round().long()


def expected(
    problem: Problem,
    tokens: torch.Tensor | slice,
    activation: Activation | None = None,
    change: Callable[[int, torch.Tensor, int, torch.Tensor], torch.Tensor] | None = None,
) -> torch.Tensor:
    """The forward of some tokens in fp32, an expert at a time, by torch's own operations; fp32 `[tokens, D]`.

    activation: None = the shape's own. The activations are rounded to the dtype of x, as every implementation does.
    change: what adapters add to product 1 or 2 of rows and an expert; its last argument indexes `tokens`.
    """
    experts, top_k = problem.in_out, problem.shape.top_k
    x, logits = problem.x[tokens], problem.logits[tokens]
    values, ids = logits.topk(top_k, dim=1)
    weights = values.softmax(dim=1)
    result = torch.zeros(x.shape, device=x.device)
    for expert in ids.unique().tolist():
        token, choice = (ids == expert).nonzero(as_tuple=True)
        wide = x[token].float() @ experts.gate_up[expert].float()
        if experts.gate_up_bias is not None:
            wide += experts.gate_up_bias[expert]
        if change is not None:
            wide += change(1, x[token], expert, token)
        hidden = activate(wide, activation or problem.shape.activation).to(x.dtype)
        out = hidden.float() @ experts.down[expert].float()
        if experts.down_bias is not None:
            out += experts.down_bias[expert]
        if change is not None:
            out += change(2, hidden, expert, token)
        result.index_add_(0, token, weights[token, choice, None] * out)
    return result


def relative_error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """The Frobenius norm of the difference over that of `wanted`; not a number where either is not one."""
    return float((found.float() - wanted).norm() / wanted.norm())
