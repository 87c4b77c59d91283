"""A plain MoE in torch, token by token and slot by slot, for autograd.

Any float dtype, no rounding in between, nothing shared with the reference but the ids it chose. What the forward does
not read (masked tokens, ids of -1, experts without tokens, other layers) no operation touches.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from moe_core.ops.routing.reference import layout as make_layout
from moe_core.specs import Activation, MoESpec, RouterSpec
from moe_core.specs.operands import (
    ExpertWeights,
    OutputGradients,
    RouterLogits,
    RouterWeights,
    SharedExpert,
    TopK,
    named_arrays,
)
from tests.support.exact import draw_experts, transposed
from tests.support.strategies import RoutingCase, draw_array

#: Operands that have no gradient.
CONSTANTS = ("experts.layer_index", "routing.ids", "routing.correction_bias")
Leaves = dict[str, torch.Tensor]


@dataclass(frozen=True, eq=False)
class Problem:
    """The arguments of one forward and what flows back into it."""

    x: np.ndarray
    experts: ExpertWeights
    routing: RouterWeights | RouterLogits | TopK
    spec: MoESpec
    gradients: OutputGradients
    token_mask: np.ndarray | None = None
    expert_map: np.ndarray | None = None
    shared: SharedExpert | None = None

    def arguments(self) -> tuple[tuple, dict[str, Any]]:
        options = {"token_mask": self.token_mask, "expert_map": self.expert_map, "shared": self.shared}
        return (self.x, self.experts, self.routing, self.spec), options

    def arrays(self) -> dict[str, np.ndarray]:
        """Every operand with a gradient by the name of that gradient without its `d_`."""
        found = {"x": self.x} | dict(named_arrays(self.experts, "experts."))
        found |= dict(named_arrays(self.routing, "routing."))
        found |= {} if self.shared is None else dict(named_arrays(self.shared, "shared."))
        return {name: array for name, array in found.items() if name not in CONSTANTS}

    def leaves(self, dtype: torch.dtype) -> Leaves:
        return {name: torch.tensor(array.astype(np.float64)).to(dtype) for name, array in self.arrays().items()}

    def replace(self, **changes: Any) -> Problem:
        return dataclasses.replace(self, **changes)


def activate(gate: torch.Tensor, up: torch.Tensor | None, spec: Activation) -> torch.Tensor:
    if spec.name == "softcapped_silu":
        assert up is not None and spec.alpha is not None
        capped = spec.alpha * torch.tanh(gate / spec.alpha) * torch.sigmoid(gate)
        return capped * (up if spec.limit is None else spec.limit * torch.tanh(up / spec.limit))
    if spec.limit is not None:
        assert up is not None
        up = up.clamp(-spec.limit, spec.limit)
        if spec.name == "clamped_silu":
            return torch.nn.functional.silu(gate).clamp(max=spec.limit) * up
        gate = gate.clamp(max=spec.limit)
    if spec.name == "swiglu_oai":
        assert up is not None
        return gate * torch.sigmoid(spec.alpha * gate) * (up + 1)
    if spec.name == "silu":
        value = torch.nn.functional.silu(gate)
    elif spec.name == "gelu":
        value = torch.nn.functional.gelu(gate)
    elif spec.name == "gelu_tanh":
        value = torch.nn.functional.gelu(gate, approximate="tanh")
    else:
        value = torch.relu(gate).square()
    return value if up is None else value * up


def activated(pre: torch.Tensor, second: torch.Tensor | None, spec: Activation) -> torch.Tensor:
    """The activation of one row `[2F]` or `[F]`; second: the up part of gate_layout `separate`."""
    if not spec.gated or second is not None:
        return activate(pre, second, spec)
    if spec.gate_layout == "interleaved":
        return activate(pre[0::2], pre[1::2], spec)
    half = len(pre) // 2
    return activate(pre[:half], pre[half:], spec)


def scores_of(logits: torch.Tensor, scoring: str) -> torch.Tensor:
    if scoring == "softmax":
        return torch.softmax(logits, -1)
    if scoring == "sigmoid":
        return torch.sigmoid(logits)
    return torch.logaddexp(logits, torch.zeros_like(logits)).sqrt()


def weights_of(logits: torch.Tensor, ids: np.ndarray, spec: RouterSpec) -> torch.Tensor:
    """The weights `[K]` of one token's logits `[E]` for the ids that were chosen."""
    chosen = torch.from_numpy(ids.astype(np.int64))
    last = spec.order == "topk_then_softmax"
    weights = torch.softmax(logits[chosen], -1) if last else scores_of(logits, spec.scoring)[chosen]
    if spec.renormalize:
        weights = weights / weights.sum()
    return weights * spec.scale


def losses(logits: torch.Tensor, ids: np.ndarray, spec: RouterSpec) -> tuple[torch.Tensor, torch.Tensor]:
    """(load balance, z) of logits `[N, E]` of the unmasked tokens and their ids `[N, K]`."""
    if not len(logits):
        return logits.sum(), logits.sum()
    counts = np.bincount(ids.ravel(), minlength=logits.shape[1])
    share = torch.from_numpy(counts / ids.size).to(logits.dtype)
    scores = scores_of(logits, spec.scoring)
    mean = (scores / scores.sum(-1, keepdim=True)).mean(0)
    return logits.shape[1] * (share * mean).sum(), torch.logsumexp(logits, -1).square().mean()


def _scalar(given: np.ndarray | None) -> float:
    return 0.0 if given is None else float(given[0])


class Loop:
    """The scalar that the gradients of a problem are gradients of, as a function of its leaves."""

    def __init__(self, problem: Problem, ids: np.ndarray) -> None:
        self.problem, self.ids = problem, ids
        self.kept = np.ones(len(ids), bool) if problem.token_mask is None else problem.token_mask

    def expert_of(self, token: int, k: int) -> int:
        """Local expert of a slot, -1 = none."""
        problem, expert = self.problem, int(self.ids[token, k])
        stacked = problem.experts.layer_index is not None
        known = problem.experts.down.shape[1 if stacked else 0]
        known = known if problem.expert_map is None else len(problem.expert_map)
        if not self.kept[token] or not 0 <= expert < known:
            return -1
        return expert if problem.expert_map is None else int(problem.expert_map[expert])

    def _matrix(self, leaves: Leaves, name: str, index: tuple[int, ...]) -> torch.Tensor:
        matrix = leaves[name][index]
        return matrix if self.problem.spec.weight_layout == "in_out" else matrix.T

    def mlp(self, leaves: Leaves, x: torch.Tensor, bundle: str, index: tuple[int, ...]) -> torch.Tensor:
        """One row through one expert (bundle `experts.` or `shared.`)."""

        def product(row: torch.Tensor, name: str) -> torch.Tensor:
            result = row @ self._matrix(leaves, bundle + name, index)
            bias = leaves.get(f"{bundle}{name}_bias")
            return result if bias is None else result + bias[index]

        second = product(x, "up") if f"{bundle}up" in leaves else None
        spec = self.problem.spec if bundle == "experts." else self.problem.spec.of_shared()
        hidden = activated(product(x, "gate_up"), second, spec.activation)
        return product(hidden, "down")

    def routed(self, leaves: Leaves) -> tuple[dict[int, torch.Tensor], dict[int, torch.Tensor]]:
        """(weights `[K]`, logits `[E]`) by token; without logits where ids are given."""
        problem, spec = self.problem, self.problem.spec
        if isinstance(problem.routing, TopK):
            return {token: leaves["routing.weights"][token] for token in range(len(self.ids))}, {}
        weights, logits = {}, {}
        for token in np.flatnonzero(self.kept):
            if isinstance(problem.routing, RouterLogits):
                row = leaves["routing.logits"][token]
            else:
                matrix = leaves["routing.weight"]
                row = leaves["x"][token] @ (matrix if spec.router_weight_layout == "in_out" else matrix.T)
                row = row + leaves["routing.bias"] if "routing.bias" in leaves else row
            assert spec.router is not None
            logits[int(token)], weights[int(token)] = row, weights_of(row, self.ids[token], spec.router)
        return weights, logits

    def output(self, leaves: Leaves, weights: dict[int, torch.Tensor], token: int) -> torch.Tensor | None:
        """One row of the output, None where nothing contributes."""
        problem, x = self.problem, leaves["x"]
        layer = problem.experts.layer_index
        prefix = () if layer is None else (int(layer[0]),)
        total = None
        for k in range(self.ids.shape[1]):
            expert = self.expert_of(token, k)
            if expert < 0:
                continue
            weight = weights[token][k]
            if problem.spec.apply_router_weight_on_input:
                row = self.mlp(leaves, x[token] * weight, "experts.", (*prefix, expert))
            else:
                row = self.mlp(leaves, x[token], "experts.", (*prefix, expert)) * weight
            total = row if total is None else total + row
        shared = problem.shared
        if shared is not None:
            row = self.mlp(leaves, x[token], "shared.", prefix if shared.gate_up.ndim == 3 else ())
            if shared.gate is not None:
                gate = leaves["shared.gate"]
                row = row * torch.sigmoid(x[token] @ (gate if problem.spec.weight_layout == "in_out" else gate.T))
            total = row if total is None else total + row
        return total

    def value(self, leaves: Leaves) -> torch.Tensor:
        given, dtype = self.problem.gradients, leaves["x"].dtype
        weights, logits = self.routed(leaves)
        total = torch.zeros((), dtype=dtype)

        def inner(row: torch.Tensor, gradient: np.ndarray) -> torch.Tensor:
            return (row * torch.tensor(gradient.astype(np.float64)).to(dtype)).sum()

        for token in range(len(self.ids)):
            row = self.output(leaves, weights, token)
            if row is not None:
                total = total + inner(row, given.output[token])
        for gradient, rows in ((given.weights, weights), (given.logits, logits)):
            if gradient is not None:
                for token, row in rows.items():
                    total = total + inner(row, gradient[token])
        if given.load_balance is not None or given.z is not None:
            assert self.problem.spec.router is not None
            width = self.problem.experts.down.shape[0]
            rows = torch.stack(list(logits.values())) if logits else torch.zeros((0, width), dtype=dtype)
            balance, z = losses(rows, self.ids[self.kept], self.problem.spec.router)
            total = total + _scalar(given.load_balance) * balance + _scalar(given.z) * z
        return total

    def autograd(self, dtype: torch.dtype) -> dict[str, np.ndarray]:
        """Gradients by name, in float64; zeros where the value does not depend on a leaf."""
        leaves = {name: leaf.requires_grad_() for name, leaf in self.problem.leaves(dtype).items()}
        value = self.value(leaves)
        if not value.requires_grad:
            return {name: np.zeros(leaf.shape) for name, leaf in leaves.items()}
        found = torch.autograd.grad(value, list(leaves.values()), allow_unused=True, materialize_grads=True)
        return {name: gradient.double().numpy() for name, gradient in zip(leaves, found, strict=True)}


def draw_problem(
    case: RoutingCase,
    spec: MoESpec,
    *,
    seed: int = 0,
    d_model: int = 6,
    d_ff: int = 5,
    dtype: str = "float32",
    with_shared: bool = False,
    poison: bool = True,
) -> Problem:
    """A problem with given ids and weights; every row and expert that nothing may read holds NaN or infinities."""
    rng = np.random.default_rng(seed)
    experts = draw_experts(rng, case.num_experts, d_model, d_ff, spec.activation, dtype)
    x, d_out = (draw_array(rng, (case.num_tokens, d_model), dtype) for _ in range(2))
    shared = draw_shared(rng, d_model, d_ff + 2, spec.activation, dtype) if with_shared else None
    sizes, _, _, row_of_slot, _ = make_layout(case.ids, case.expert_map, case.token_mask, layout=case.layout())
    weights = case.weights.copy()
    if poison:
        absent = row_of_slot.reshape(case.ids.shape) < 0
        weights[absent] = np.nan
        if not with_shared:
            x[absent.all(axis=1)] = np.nan
            d_out[absent.all(axis=1)] = np.inf
        for _, array in named_arrays(experts):
            array[sizes == 0] = np.nan
    if spec.weight_layout == "out_in":
        experts, shared = transposed(experts), None if shared is None else transposed(shared)
    given = OutputGradients(d_out)
    return Problem(x, experts, TopK(case.ids, weights), spec, given, case.token_mask, case.expert_map, shared)


def draw_shared(rng: np.random.Generator, d_model: int, d_ff: int, activation: Activation, dtype: str) -> SharedExpert:
    drawn = draw_experts(rng, 1, d_model, d_ff, activation, dtype)
    up = None if drawn.up is None else drawn.up[0]
    return SharedExpert(drawn.gate_up[0], drawn.down[0], up, draw_array(rng, (d_model, 1), dtype))


def routed(
    problem: Problem, router: RouterSpec, num_experts: int, *, seed: int = 0, from_logits: bool = False
) -> Problem:
    """The problem with a router in place of given ids, and gradients of weights, logits and losses too."""
    rng = np.random.default_rng(seed)
    num_tokens, d_model = problem.x.shape
    layout = problem.spec.router_weight_layout
    correction = draw_array(rng, (num_experts,), rms=0.1)
    if from_logits:
        routing = RouterLogits(draw_array(rng, (num_tokens, num_experts)), correction)
    else:
        weight = draw_array(rng, (d_model, num_experts), problem.x.dtype.name)
        weight = weight if layout == "in_out" else np.ascontiguousarray(weight.T)
        routing = RouterWeights(weight, draw_array(rng, (num_experts,), problem.x.dtype.name), correction)
    given = OutputGradients(
        problem.gradients.output,
        draw_array(rng, (num_tokens, router.require_top_k())),
        draw_array(rng, (num_tokens, num_experts), rms=0.1),
        np.array([0.7], np.float32),
        np.array([-0.3], np.float32),
    )
    return problem.replace(routing=routing, spec=dataclasses.replace(problem.spec, router=router), gradients=given)


ROUTERS = [
    RouterSpec(2),
    RouterSpec(2, renormalize=True, scale=2.5),
    RouterSpec(2, order="topk_then_softmax", scale=0.5),
    RouterSpec(2, order="topk_then_softmax", renormalize=True),
    RouterSpec(2, "sigmoid", scale=1.5),
    RouterSpec(2, "sigmoid", renormalize=True, num_groups=2, slot_order="expert"),
    RouterSpec(2, "sqrt_softplus", slot_order="expert"),
    RouterSpec(2, "sqrt_softplus", renormalize=True, scale=2.0),
]
