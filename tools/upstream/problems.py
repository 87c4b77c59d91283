"""Small layers to run, and the answer of the NumPy reference."""

from __future__ import annotations

from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import torch

from moe_core.formats import MXFP4, Format, QuantizedTensor
from moe_core.modular.activations import activation_of
from moe_core.ops.activation import reference
from moe_core.ops.moe.reference.forward import moe_stages
from moe_core.ops.quantize.reference import dequantize, quantize
from moe_core.parity.tolerance import measure
from moe_core.specs.moe import MoESpec
from moe_core.specs.operands import ExpertWeights, TopK

#: Tokens, experts, hidden columns, columns after the activation, choices of a token.
M, E, K, F, TOPK = 19, 6, 64, 96, 2
#: Relative Frobenius errors of bf16 results, computed and rounded several times; a wrong row gives more than 0.1.
BOUND = 0.02
#: Of results with the same roundings on a CPU, where a rare sum between two numbers may fall the other way, and a GPU.
SAME_ROUNDINGS = {"cpu": 1e-4, "cuda": 2e-3}


class Problem(NamedTuple):
    """A layer with gated experts in NumPy: w1 `[E, 2F, K]` and w2 `[E, K, F]`, fp32 or quantised; biases fp32.

    ids hold -1 where a slot has no expert. expert_map: None, or of the experts of one rank; w1 and w2 are theirs.
    """

    x: np.ndarray
    w1: Any
    w2: Any
    b1: np.ndarray
    b2: np.ndarray
    weights: np.ndarray
    ids: np.ndarray
    expert_map: np.ndarray | None = None

    def expected(self, activation: str, *, biases: bool = True, activations: Format | None = None) -> np.ndarray:
        """The reference's output fp32 `[M, K]`."""
        spec = MoESpec(activation_of(activation), weight_layout="out_in", activations=activations)
        given = (self.b1, self.b2) if biases else (None, None)
        experts = ExpertWeights(self.w1, self.w2, gate_up_bias=given[0], down_bias=given[1])
        routing = TopK(self.ids, self.weights)
        return moe_stages(self.x, experts, routing, spec, expert_map=self.expert_map)["output"]

    def rounded(
        self, activation: str, *, before: bool = False, weights: bool = False, scales: tuple[float, float] | None = None
    ) -> np.ndarray:
        """`expected` with more roundings to bf16, which experts of others have: of weighted rows. before: also of the
        first product, ahead of the activation. weights: also of the router's weights. scales: both products read e4m3
        with these static scales."""
        w1, w2 = (_wide(weight) for weight in (self.w1, self.w2))
        ids = self.ids if self.expert_map is None else np.where(self.ids < 0, -1, self.expert_map[self.ids])
        gates = _bf16(self.weights) if weights else self.weights
        output, x = np.zeros_like(self.x), self.x if scales is None else _e4m3(self.x, scales[0])
        for token, choice in np.argwhere(ids >= 0):
            expert = ids[token, choice]
            hidden = (w1[expert] @ x[token] + self.b1[expert]).astype(np.float32)
            hidden = _bf16(hidden) if before else hidden
            row = reference.activation(hidden[None], activation=activation_of(activation), out_dtype="bfloat16")[0]
            row = row if scales is None else _e4m3(row.astype(np.float32), scales[1])
            output[token] += _bf16(gates[token, choice] * (w2[expert] @ row.astype(np.float64) + self.b2[expert]))
        return _bf16(output)

    def without_biases(self) -> Problem:
        return self._replace(b1=self.b1 * 0, b2=self.b2 * 0)

    def on_rank(self, ranks: int = 2, rank: int = 1, adjacent: bool = False) -> Problem:
        """The part of one rank: its experts alone, adjacent or dealt out in turn, and the map of all."""
        experts = np.arange(len(self.b1))
        mine = (experts // (len(experts) // ranks) if adjacent else experts % ranks) == rank
        expert_map = np.where(mine, np.cumsum(mine) - 1, -1).astype(np.int32)
        parts = (_chosen(self.w1, mine), _chosen(self.w2, mine), self.b1[mine], self.b2[mine])
        return Problem(self.x, *parts, self.weights, self.ids, expert_map)


def _bf16(array: np.ndarray) -> np.ndarray:
    return np.asarray(array, np.float32).astype(ml_dtypes.bfloat16).astype(np.float32)


def _e4m3(array: np.ndarray, scale: float) -> np.ndarray:
    factor = np.float32(scale)
    return np.clip(array / factor, -448, 448).astype(ml_dtypes.float8_e4m3fn).astype(np.float32) * factor


def _wide(weight: Any) -> np.ndarray:
    return (dequantize(weight) if isinstance(weight, QuantizedTensor) else weight).astype(np.float64)


def _chosen(weight: Any, experts: np.ndarray) -> Any:
    if isinstance(weight, QuantizedTensor):
        return QuantizedTensor(weight.spec, weight.values[experts], weight.scales[experts])
    return weight[experts]


def draw(
    format: Format | None = None, *, hidden: int = K, width: int = F, missing: bool = True, top_k: int = TOPK
) -> Problem:
    """A problem whose numbers are exact in bf16. format: of the weights. missing: some ids are -1."""
    random = np.random.default_rng(0)

    def normal(*shape: int, scale: float = 1.0) -> np.ndarray:
        drawn = random.standard_normal(shape) * scale
        return drawn.astype(np.float32).astype(ml_dtypes.bfloat16).astype(np.float32)

    x = normal(M, hidden)
    w1, w2 = normal(E, 2 * width, hidden, scale=hidden**-0.5), normal(E, hidden, width, scale=width**-0.5)
    b1, b2 = normal(E, 2 * width), normal(E, hidden)
    ids = np.stack([random.permutation(E)[:top_k] for _ in range(M)]).astype(np.int32)
    if missing:
        ids[random.random(ids.shape) < 0.15] = -1
    weights = (random.random((M, top_k)) + 0.1).astype(np.float32)
    # vLLM's gpt-oss experts round them to bf16.
    weights = weights.astype(ml_dtypes.bfloat16).astype(np.float32)
    if format is not None:
        w1, w2 = quantize(w1, format), quantize(w2, format)
    return Problem(x, w1, w2, b1, b2, weights, ids)


def draw_mxfp4(**options: Any) -> Problem:
    return draw(MXFP4, **options)


class Tensors(NamedTuple):
    """A problem on a device; hidden states bf16, weights bf16 or codes, and the scales of codes."""

    x: torch.Tensor
    w1: torch.Tensor
    w2: torch.Tensor
    b1: torch.Tensor
    b2: torch.Tensor
    weights: torch.Tensor
    ids: torch.Tensor
    expert_map: torch.Tensor | None
    scales: tuple[torch.Tensor | None, torch.Tensor | None]


def tensors(problem: Problem, device: str) -> Tensors:
    """The tensors that serving systems pass: matrices `[E, N, K]` and `[E, K, F]`, as in a checkpoint."""

    def tensor(array: np.ndarray) -> torch.Tensor:
        if array.dtype.name == "float8_e4m3fn":
            return torch.tensor(array.view(np.uint8), device=device).view(torch.float8_e4m3fn)
        return torch.tensor(array, device=device)

    def matrix(weight: Any) -> torch.Tensor:
        return tensor(weight.values) if isinstance(weight, QuantizedTensor) else tensor(weight).to(torch.bfloat16)

    scales = [tensor(w.scales) if isinstance(w, QuantizedTensor) else None for w in (problem.w1, problem.w2)]
    expert_map = None if problem.expert_map is None else tensor(problem.expert_map)
    x, b1, b2 = tensor(problem.x).to(torch.bfloat16), tensor(problem.b1), tensor(problem.b2)
    w1, w2, weights, ids = matrix(problem.w1), matrix(problem.w2), tensor(problem.weights), tensor(problem.ids)
    return Tensors(x, w1, w2, b1, b2, weights, ids, expert_map, (scales[0], scales[1]))


def complaint(actual: torch.Tensor, expected: np.ndarray, bound: float = BOUND) -> str | None:
    """What is wrong with a result; None if it agrees."""
    if tuple(actual.shape) != expected.shape:
        return f"shape {tuple(actual.shape)}, expected {expected.shape}"
    found = measure(actual.detach().float().cpu().numpy(), expected.astype(np.float32))
    error = found.relative_frobenius
    return None if error <= bound else f"relative Frobenius error {error:.3g}, bound {bound}"
