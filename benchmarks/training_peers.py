"""Training steps as users of each framework write them around its grouped product, and dense products of equal FLOPs.

The router's product is computed in fp32 (TF32 in torch and JAX alike, which holds every product of bf16 numbers), as
models that care about their routing do: with logits in bf16 a peer would choose other experts than ours.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import torch

import moe_torch
from benchmarks import plain
from benchmarks.libraries import sonicmoe
from benchmarks.peers import ParityIsRed
from benchmarks.problem import relative_error
from benchmarks.shapes import Shape
from benchmarks.timing import medians, paired_ratio, paired_spread, peak_bytes
from benchmarks.training_problem import TrainingProblem, arguments, torch_step

#: Peers round to bf16 between every two operations, there and back.
TOLERANCE = 3e-2
#: Their experts' biases are in bf16, and so is the sum over an expert's rows that is the gradient of one.
BIAS_TOLERANCE = 1e-1
_CHECKED_EXPERTS = 4
_BIASES = ("experts.gate_up_bias", "experts.down_bias")
#: Some tenths of a second at the speed of dense products, and tens of gigabytes of copies.
_MOST_FLOPS = 2e14


@dataclass(frozen=True)
class TrainingPeer:
    """build(problem) -> the gradients by name of a function without arguments (torch: timed by graph replay), or of
    (arrays by name, gradient of the output) (JAX: timed on the device). every_expert: it multiplies every row by every
    expert, and is timed where that is at most `_MOST_FLOPS`. unsuited(shape): why it cannot compute a shape, or None.
    as_ours(name, gradient): what is compared with our gradient of that name. Peers of torch are timed once more, replay
    by replay beside ours.
    """

    name: str
    build: Callable[[TrainingProblem], Callable[..., dict[str, Any]]]
    framework: str = "torch"
    every_expert: bool = False
    unsuited: Callable[[Shape], str | None] = lambda shape: None
    as_ours: Callable[[str, torch.Tensor], torch.Tensor] = lambda name, gradient: gradient

    def why_left_out(self, shape: Shape, num_tokens: int) -> str | None:
        """Why it is not timed at a number of tokens unless everything is, or None."""
        rows = num_tokens * shape.top_k * shape.num_experts
        flops = 3 * 2 * rows * 3 * shape.d_model * shape.d_ff  # forward and twice that backward; gate, up and down
        if not self.every_expert or flops <= _MOST_FLOPS:
            return None
        return f"takes {flops:.2g} FLOPs, every row times every expert; timed up to {_MOST_FLOPS:.2g}"


def _in_one_dtype(arrays: Mapping[str, Any], dtype: Any) -> dict[str, Any]:
    """The experts' biases in the dtype of their matrices, as models are loaded; the router's stays fp32."""
    return {name: array.to(dtype) if name in _BIASES else array for name, array in arrays.items()}


def grouped_mm_step(problem: TrainingProblem) -> Callable[[], dict[str, torch.Tensor]]:
    """torch's own grouped product through autograd, eager; index_select has a faster gradient than x[rows]."""
    arrays = _in_one_dtype(problem.arrays, problem.gradient.dtype)

    def take(array: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return array.index_select(0, rows)

    def step() -> dict[str, torch.Tensor]:
        leaves = {name: array.detach().requires_grad_() for name, array in arrays.items()}
        x, experts, routing = arguments(leaves)
        logits = x.float() @ routing.weight.float()
        if routing.bias is not None:
            logits = logits + routing.bias
        output = plain.torch_forward(x, logits, experts, problem.shape, take)
        return dict(zip(leaves, torch.autograd.grad(output, list(leaves.values()), problem.gradient), strict=True))

    return step


def ragged_dot_step(problem: TrainingProblem) -> Callable[..., dict[str, Any]]:
    """JAX's own ragged product through its own gradient."""

    def forward(arrays: dict[str, Any]) -> Any:
        x, experts, routing = arguments(arrays)
        logits = x.astype(jnp.float32) @ routing.weight.astype(jnp.float32)
        if routing.bias is not None:
            logits = logits + routing.bias
        return plain.jax_forward(jax.lax.ragged_dot, problem.shape, x, logits, experts)

    def step(arrays: dict[str, Any], gradient: Any) -> dict[str, Any]:
        _, pull = jax.vjp(forward, arrays)
        return pull(gradient)[0]

    return step


TRAINING_PEERS = {
    peer.name: peer
    for peer in (
        TrainingPeer("grouped_mm", grouped_mm_step),
        TrainingPeer("ragged_dot", ragged_dot_step, "jax", every_expert=True),
        TrainingPeer("sonicmoe", sonicmoe.step, unsuited=sonicmoe.why_no_step, as_ours=sonicmoe.as_ours),
    )
}


def sample(gradients: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What peers are compared with: all gradients, those of the matrices of a few experts only."""
    return {name: _part(name, gradient).clone() for name, gradient in gradients.items()}


def _part(name: str, gradient: torch.Tensor) -> torch.Tensor:
    if name not in ("experts.gate_up", "experts.down"):
        return gradient
    count = gradient.shape[0]
    chosen = torch.linspace(0, count - 1, min(count, _CHECKED_EXPERTS)).round().long()
    return gradient[chosen.to(gradient.device)]


def check_peer(peer: TrainingPeer, found: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> float:
    """The largest error of a peer's gradients to a `sample` of ours; raises ParityIsRed where one is too large."""
    parts = {name: peer.as_ours(name, _part(name, found[name])) for name in wanted}
    errors = {name: relative_error(parts[name], one.float()) for name, one in wanted.items()}
    allowed = {name: BIAS_TOLERANCE if name in _BIASES else TOLERANCE for name in errors}
    red = [
        f"d_{name} {error:.3g}, at most {allowed[name]:g} is allowed"
        for name, error in errors.items()
        if not error < allowed[name]
    ]
    if red:
        raise ParityIsRed(f"parity of {peer.name} is red: {'; '.join(red)}")
    return max(errors.values())


def time_training_peer(
    peer: TrainingPeer, problem: TrainingProblem, wanted: Mapping[str, torch.Tensor], timer: Any, seconds: float
) -> dict[str, Any]:
    """{"us", "error"} of one peer, of torch's `beside`, too; raises ParityIsRed before anything is timed.

    seconds: repeats stop after these.
    """
    step = peer.build(problem)
    if peer.framework == "torch":
        with tf32():
            error = check_peer(peer, step(), wanted)
            return {"us": timer.time(step, seconds=seconds), "error": error} | beside(peer, problem, step, timer)
    arrays, gradient = problem.jax_arrays()
    others = {name: array for name, array in arrays.items() if name != "x"}
    errors = []

    def chained(state: tuple[Any, Any], others: dict[str, Any], gradient: Any) -> tuple[Any, Any]:
        # All gradients are results: XLA would not compute what nobody reads.
        gradients = step({"x": state[0], **others}, gradient)
        return state[0] + gradients["x"] * 1e-6, gradients

    def check(state: tuple[Any, Any]) -> None:
        found = {name: moe_torch.from_dlpack(one) for name, one in state[1].items()}
        errors.append(check_peer(peer, found, wanted))

    unread = jax.tree.map(lambda one: jnp.zeros(one.shape, one.dtype), jax.eval_shape(step, arrays, gradient))
    chain = timer.device_time_of_jax_chain(chained, (arrays["x"], unread), (others, gradient), 1, seconds, check)
    return {"us": chain.us, "error": errors[0]}


def beside(
    peer: TrainingPeer, problem: TrainingProblem, step: Callable[[], dict[str, torch.Tensor]], timer: Any
) -> dict[str, Any]:
    """{"turns", "over", "spread", "peak"}: medians of replays by turns with ours, ours over the peer's and its spread,
    the median over rounds; and the peer's peak in bytes per token as `training.memory` counts ours, on a GPU."""
    rounds = timer.rounds({"ours": lambda: torch_step(problem), peer.name: step})
    found: dict[str, Any] = {"turns": medians(rounds), "over": paired_ratio(rounds, "ours", peer.name)}
    found["spread"] = paired_spread(rounds, "ours", peer.name)
    if problem.gradient.device.type == "cuda":
        gradients, peak = peak_bytes(step)
        results = problem.gradient.nbytes + sum(one.nbytes for one in gradients.values())
        found["peak"] = (peak - results) / problem.tokens
    return found


@contextlib.contextmanager
def tf32() -> Iterator[None]:
    """torch computes fp32 products of factors in bf16 by TF32, exactly."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def dense_step(shape: Shape, tokens: int, device: Any = "cuda", layout: str = "in_out") -> Callable[[], None]:
    """Six cuBLAS products over T * K rows: both products of the layer, and for each the gradients of its factors.

    The weights are stored in layout, and their gradients are written in it."""
    rows = tokens * shape.top_k

    def draw(*size: int) -> torch.Tensor:
        return torch.randn(size, dtype=torch.bfloat16, device=device)

    def product(left: torch.Tensor, right: torch.Tensor) -> None:
        """A weight's gradient, `left.T @ right` where weights are in_out."""
        torch.matmul(left.T, right) if layout == "in_out" else torch.matmul(right.T, left)

    def weight(inputs: int, outputs: int) -> torch.Tensor:
        return draw(inputs, outputs) if layout == "in_out" else draw(outputs, inputs).T

    x, d_out = draw(rows, shape.d_model), draw(rows, shape.d_model)
    first, second = weight(shape.d_model, 2 * shape.d_ff), weight(shape.d_ff, shape.d_model)
    hidden, d_wide = draw(rows, shape.d_ff), draw(rows, 2 * shape.d_ff)

    def step() -> None:
        torch.matmul(x, first)
        torch.matmul(hidden, second)
        torch.matmul(d_out, second.T)
        product(hidden, d_out)
        torch.matmul(d_wide, first.T)
        product(x, d_wide)

    return step
