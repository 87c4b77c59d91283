"""Peers timed in the same run, each checked first, and the cuBLAS products of equal FLOPs as the bound."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import torch

import moe_torch
from benchmarks import plain, sustained
from benchmarks.breakdown import summarize
from benchmarks.budget import time_limit
from benchmarks.libraries import deepgemm, flashinfer, hugging_face, sonicmoe
from benchmarks.problem import Problem, checked_tokens, expected, relative_error
from benchmarks.record import reason_of
from benchmarks.shapes import Shape
from benchmarks.timing import medians, paired_ratio, paired_spread
from moe_core.specs.matmul import Activation

#: Peers round more often than we do (bf16 between every two operations).
TOLERANCE = 2e-2
INSTALL_TRITON_KERNELS = (
    "put python/triton_kernels of the Triton repository (github.com/triton-lang/triton, tag v3.5.1) on PYTHONPATH; the "
    "distribution named triton-kernels on the package index is an unrelated project"
)
#: A tenth of a second or two at the speed of dense products, and tens of gigabytes of copies.
_MOST_FLOPS = 1.5e14
#: A peer's repeats may take this long, and replays of ours and a peer's by turns.
_SECONDS, _SECONDS_BY_TURNS = 0.5, 1.0
#: Upstream fuses this one activation, whatever the shape's: the work is equal.
UPSTREAM_ACTIVATION = Activation("swiglu_oai", gate_layout="interleaved")


class ParityIsRed(Exception):
    """A peer's result is not the layer's."""


@dataclass(frozen=True)
class Peer:
    """build(problem) -> a function without arguments (torch: timed by graph replay) or of (x, logits, experts) (JAX:
    timed on the device). tokens: numbers of tokens it is timed at, None = all. activation: None = the shape's.
    required: a record lacks something without it. every_expert: it multiplies every row by every expert, and is timed
    where that is at most `_MOST_FLOPS`. tolerance: the largest relative error of its output. by_turns: ours is timed
    once more, replay by replay beside it. experts_alone: it is given experts and weights of every token, and so is ours
    then. unsuited(shape): why it cannot compute a shape, or None. tunes: its first call of a size compiles much.
    """

    name: str
    build: Callable[[Problem], Callable[..., Any]]
    framework: str = "torch"
    required: bool = True
    tokens: tuple[int, ...] | None = None
    activation: Activation | None = None
    every_expert: bool = False
    tolerance: float = TOLERANCE
    by_turns: bool = False
    experts_alone: bool = False
    unsuited: Callable[[Shape], str | None] = lambda shape: None
    tunes: bool = False

    @property
    def kept(self) -> float:
        """The part of its share of time that each later cell keeps while this peer runs (`Budget.left`): one that is
        slow to compile must not leave the others without figures."""
        return 0.0 if self.tokens is None and not self.tunes else 0.5

    def why_left_out(self, shape: Shape, num_tokens: int) -> str | None:
        """Why it is not timed at a number of tokens unless everything is, or None."""
        if self.tokens is not None and num_tokens not in self.tokens:
            return f"timed at {', '.join(map(str, self.tokens))} tokens only"
        flops = shape.flops(num_tokens) * shape.num_experts
        if self.every_expert and flops > _MOST_FLOPS:
            return f"takes {flops:.2g} FLOPs, every row times every expert; timed up to {_MOST_FLOPS:.2g}"
        return None


@dataclass(frozen=True)
class UpstreamOperands:
    """What upstream's two products take: both matrices, `[E, D, 2F]` and `[E, F, D]` of torch or wrapped by upstream,
    their precision configurations (None = upstream's default), and what makes the rows of the first product of x."""

    gate_up: Any
    down: Any
    gate_up_precision: Any = None
    down_precision: Any = None
    rows: Callable[[torch.Tensor], torch.Tensor] = lambda x: x


def turned_upstream_forward(problem: Problem) -> Callable[[], torch.Tensor]:
    """Upstream triton_kernels' forward with copies of the matrices in the other weight layout."""
    experts = problem.in_out
    turned = (
        matrix.mT.contiguous().mT if matrix.is_contiguous() else matrix.contiguous()
        for matrix in (experts.gate_up, experts.down)
    )
    return upstream_forward(problem, UpstreamOperands(*turned))


def upstream_forward(problem: Problem, operands: UpstreamOperands | None = None) -> Callable[[], torch.Tensor]:
    """Upstream triton_kernels' forward from logits, with its fused swiglu whatever the activation (equal work).

    operands: in place of the problem's matrices, None = these. Raises ImportError where upstream is not on PYTHONPATH:
    a recorded run needs it.
    """
    from triton_kernels.matmul_ogs import FnSpecs, FusedActivation, PrecisionConfig, matmul_ogs  # pyright: ignore[reportMissingImports]
    from triton_kernels.routing import routing  # pyright: ignore[reportMissingImports]
    from triton_kernels.swiglu import swiglu_fn  # pyright: ignore[reportMissingImports]

    arguments = (UPSTREAM_ACTIVATION.alpha, UPSTREAM_ACTIVATION.limit)
    fused = FusedActivation(FnSpecs("swiglu", swiglu_fn, ("alpha", "limit")), arguments, 2)
    experts, top_k = problem.in_out, problem.shape.top_k
    given = operands or UpstreamOperands(experts.gate_up, experts.down)

    def forward() -> torch.Tensor:
        data, gather, scatter = routing(problem.logits, top_k, sm_first=False)
        hidden: Any = matmul_ogs(
            given.rows(problem.x),
            given.gate_up,
            experts.gate_up_bias,
            data,
            gather_indx=gather,
            precision_config=given.gate_up_precision or PrecisionConfig(),
            fused_activation=fused,
        )
        return matmul_ogs(
            hidden,
            given.down,
            experts.down_bias,
            data,
            scatter_indx=scatter,
            precision_config=given.down_precision or PrecisionConfig(),
            gammas=data.gate_scal,
        )

    return forward


def grouped_mm_forward(problem: Problem) -> Callable[[], torch.Tensor]:
    """torch's own grouped product, eager."""
    experts = plain.in_one_dtype(problem.experts)
    return lambda: plain.torch_forward(problem.x, problem.logits, experts, problem.shape)


def compiled_forward(problem: Problem) -> Callable[[], torch.Tensor]:
    """The same through torch.compile."""
    experts = plain.in_one_dtype(problem.experts)
    plain.mark_tokens(problem.x, problem.logits)
    return lambda: plain.compiled()(problem.x, problem.logits, experts, problem.shape)


def ragged_dot_forward(problem: Problem) -> Callable[..., Any]:
    """JAX's own ragged product."""
    return functools.partial(plain.jax_forward, jax.lax.ragged_dot, problem.shape)


def tokamax_forward(problem: Problem) -> Callable[..., Any]:
    """tokamax's ragged product by its Pallas Mosaic kernel, its first choice on a GPU: it never falls back to XLA's."""
    ragged_dot = importlib.import_module("tokamax").ragged_dot

    def product(rows: Any, weights: Any, group_sizes: Any) -> Any:
        return ragged_dot(rows, weights, group_sizes, implementation="mosaic")

    return functools.partial(plain.jax_forward, product, problem.shape)


#: Compiling for one token means compiling once more: its program is not the others'.
_COMPILED_TOKENS = (16, 64, 256, 1024, 4096, 16384)
#: What XLA compiles takes seconds.
_RAGGED_TOKENS = (64, 1024, 4096)


def _library(
    name: str, build: Callable[[Problem], Callable[..., Any]], unsuited: Callable[..., Any], **more: Any
) -> Peer:
    return Peer(name, build, required=False, by_turns=True, unsuited=unsuited, **more)


PEERS = {
    peer.name: peer
    for peer in (
        Peer("triton_kernels", upstream_forward, activation=UPSTREAM_ACTIVATION, by_turns=True),
        Peer(
            "triton_kernels_turned",
            turned_upstream_forward,
            required=False,
            activation=UPSTREAM_ACTIVATION,
            by_turns=True,
        ),
        Peer("grouped_mm", grouped_mm_forward),
        Peer("grouped_mm_compiled", compiled_forward, tokens=_COMPILED_TOKENS),
        Peer("ragged_dot", ragged_dot_forward, "jax", tokens=_RAGGED_TOKENS, every_expert=True),
        Peer("tokamax", tokamax_forward, "jax", required=False, tokens=_RAGGED_TOKENS),
        _library("transformers", hugging_face.grouped_mm, hugging_face.why_unsuited),
        _library("sonicmoe", sonicmoe.forward, sonicmoe.why_unsuited, tunes=True),
        _library("sonicmoe_experts", sonicmoe.experts_forward, sonicmoe.why_unsuited, tunes=True, experts_alone=True),
        _library("flashinfer", flashinfer.forward, flashinfer.why_unsuited, tunes=True),
        _library(
            "flashinfer_experts", flashinfer.experts_forward, flashinfer.why_unsuited, tunes=True, experts_alone=True
        ),
        _library("deepgemm", deepgemm.forward, deepgemm.why_unsuited, tunes=True),
    )
}
#: Peer -> the module that it needs, and how to get it.
_MODULES = {
    "triton_kernels": ("triton_kernels", INSTALL_TRITON_KERNELS),
    "triton_kernels_turned": ("triton_kernels", INSTALL_TRITON_KERNELS),
    "tokamax": ("tokamax", "pip install tokamax"),
    "transformers": ("transformers", "pip install transformers"),
    "sonicmoe": ("sonicmoe", "pip install sonic-moe"),
    "sonicmoe_experts": ("sonicmoe", "pip install sonic-moe"),
    "flashinfer": ("flashinfer", "pip install flashinfer-python"),
    "flashinfer_experts": ("flashinfer", "pip install flashinfer-python"),
    "deepgemm": ("deep_gemm", "build it from github.com/deepseek-ai/DeepGEMM"),
}


def why_not_importable(peer: Peer | str) -> str | None:
    """What is missing for a peer that is a package of its own, and how to get it; None where nothing is."""
    module, fix = _MODULES.get(peer if isinstance(peer, str) else peer.name, (None, None))
    if module is None or importlib.util.find_spec(module) is not None:
        return None
    return f"{module} cannot be imported; {fix}"


def why_not_timed(peer: Any, shape: Shape, num_tokens: int, seconds: float, *, everywhere: bool = False) -> str | None:
    """Why a peer of forwards or steps is not timed in a cell that has so many seconds left, or None."""
    left_out = None if everywhere else peer.why_left_out(shape, num_tokens)
    spent = "the time of the cell was spent" if seconds <= 0 else None
    return peer.unsuited(shape) or why_not_importable(peer.name) or left_out or spent


def add_peer(
    row: dict[str, Any], peer: Peer, problem: Problem, timer: Any, seconds: float, ours: Mapping[str, Callable[[], Any]]
) -> str | None:
    """Add one peer's figures to a row and return None, or the reason why it lacks some.

    seconds: what it may take with compiling. ours: by name, what a peer is timed by turns with, if it is. A row with a
    `breakdown` gets that of triton_kernels, too.
    """
    try:
        with time_limit(seconds):
            forward, figures = time_peer(peer, problem, timer, _SECONDS)
            row[f"{peer.name}_us"], row["peer_errors"][peer.name] = figures["us"], figures["error"]
            if peer.by_turns:
                row |= beside(peer, ours, forward, timer, row)
                row |= sustained.beside(row, peer.name, next(iter(ours.values())), forward, timer)
            if peer.name == "triton_kernels" and "breakdown" in row:
                row["breakdown"][peer.name] = summarize(timer.kernels(forward))
    except ParityIsRed as red:
        row["red_peers"].append(peer.name)
        return str(red)
    except Exception as error:  # whatever a peer raises is the reason it has no figure
        return reason_of(error)
    return None


def beside(
    peer: Peer, ours: Mapping[str, Callable[[], Any]], forward: Callable[[], Any], timer: Any, row: Mapping[str, Any]
) -> dict[str, Any]:
    """What is new in a row when ours and a peer were replayed by turns."""
    rounds = timer.rounds({**ours, peer.name: forward}, seconds=_SECONDS_BY_TURNS)
    times = medians(rounds)
    ratios = {name: paired_ratio(rounds, name, peer.name) for name in ours}
    found: dict[str, Any] = {
        "turns_us": {**row.get("turns_us", {}), peer.name: times},
        "turns_spread": {**row.get("turns_spread", {}), peer.name: paired_spread(rounds, next(iter(ours)), peer.name)},
    }
    if peer.name == "triton_kernels":
        return found | {"by_turns_us": times, "over_by_turns": ratios}
    return found | {f"over_{peer.name}": next(iter(ratios.values()))}


def time_peer(peer: Peer, problem: Problem, timer: Any, seconds: float) -> tuple[Callable[..., Any], dict[str, float]]:
    """(what was timed, {"us", "error"}) of one peer; raises ParityIsRed before anything is timed.

    seconds: repeats stop after about this long.
    """
    forward = peer.build(problem)
    if peer.framework == "torch":
        error = check_peer(peer, problem, forward())
        return forward, {"us": timer.time(forward, seconds=seconds), "error": error}
    x, logits, experts = problem.jax_arrays
    errors: list[float] = []

    def step(state: Any, logits: Any, experts: Any) -> Any:
        return state[0], forward(state[0], logits, experts)

    def check(state: Any) -> None:
        # A copy, because the program that comes next is given the memory of this result.
        errors.append(check_peer(peer, problem, moe_torch.from_dlpack(jax.numpy.copy(state[1]))))

    state = (x, jax.numpy.zeros_like(x))
    chain = timer.device_time_of_jax_chain(step, state, (logits, experts), 1, seconds, check)
    return forward, {"us": chain.us, "error": errors[0]}


def check_peer(peer: Peer, problem: Problem, output: torch.Tensor) -> float:
    """The error of a peer's output; raises ParityIsRed where it is too large."""
    tokens = checked_tokens(problem.tokens).to(problem.x.device)
    error = relative_error(output[tokens], expected(problem, tokens, peer.activation))
    if not error < peer.tolerance:
        raise ParityIsRed(f"parity of {peer.name} is red: error {error:.3g}, at most {peer.tolerance:g} is allowed")
    return error


def beside_dense(
    ours: Callable[[], Any], dense: Mapping[str, Callable[[], Any]], timer: Any, seconds: float = 1.0
) -> dict[str, Any]:
    """Ours and the dense products of both weight layouts by turns: the faster one's layout and time, and ours over it,
    the median over rounds."""
    rounds = timer.rounds({"ours": ours, **dense}, seconds=seconds)
    times = medians(rounds)
    best = min(dense, key=times.__getitem__)
    return {"dense_us": times[best], "dense_layout": best, "over_dense": paired_ratio(rounds, "ours", best)}


def dense_forwards(
    shape: Shape, tokens: int, device: Any = "cuda", dtype: torch.dtype = torch.bfloat16
) -> dict[str, Callable[[], torch.Tensor]]:
    """By weight layout, two cuBLAS products over T * K rows: the FLOPs of the layer without its routing."""
    rows = tokens * shape.top_k
    random = {"dtype": dtype, "device": device}
    x, hidden = torch.randn(rows, shape.d_model, **random), torch.randn(rows, shape.d_ff, **random)
    first = torch.randn(shape.d_model, 2 * shape.d_ff, **random)
    second = torch.randn(shape.d_ff, shape.d_model, **random)
    turned = [matrix.T.contiguous().T for matrix in (first, second)]

    def forward(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        torch.matmul(x, first)
        return torch.matmul(hidden, second)

    return {"in_out": functools.partial(forward, first, second), "out_in": functools.partial(forward, *turned)}
