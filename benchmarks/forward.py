"""The full bf16 forward from logits: torch and JAX side by side, upstream triton_kernels and cuBLAS in the same run.

    python -m benchmarks.forward --shapes qwen3,gptoss120b --output benchmarks/results/forward.json

Parity comes first: torch and JAX must agree bitwise and both must agree with a plain fp32 loop, or nothing is timed.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import torch

import moe_jax
import moe_torch
from benchmarks.peers import dense_forward, upstream_forward
from benchmarks.provenance import provenance
from benchmarks.shapes import SHAPES, TOKENS, Shape
from benchmarks.timing import GraphTimer, device_time_of_jax_chain
from moe_core.operands import ExpertWeights, RouterLogits, map_arrays
from moe_core.specs import MoESpec

_STREAMING_BYTES_PER_US = 4.5e6
_CHECKED_TOKENS = 48
_FIGURES = Path(__file__).parent / "vllm_h200.json"


@dataclass
class Problem:
    """One layer's arrays on the GPU, seen by both frameworks without a copy."""

    shape: Shape
    spec: MoESpec
    x: torch.Tensor
    logits: torch.Tensor
    experts: ExpertWeights

    @property
    def jax_experts(self) -> ExpertWeights:
        return map_arrays(self.experts, moe_jax.from_dlpack)

    def torch_forward(self) -> Any:
        return moe_torch.moe(self.x, self.experts, RouterLogits(self.logits), self.spec)


def draw_weights(shape: Shape, generator: torch.Generator) -> ExpertWeights:
    """Random bf16 experts whose activations keep an rms of about 1."""

    def matrix(inside: int, outside: int) -> torch.Tensor:
        size = (shape.num_experts, inside, outside)
        values = torch.randn(size, generator=generator, device="cuda", dtype=torch.bfloat16)
        return values.mul_(inside**-0.5)

    def bias(width: int) -> torch.Tensor | None:
        if not shape.biased:
            return None
        return 0.1 * torch.randn(shape.num_experts, width, generator=generator, device="cuda")

    return ExpertWeights(
        matrix(shape.d_model, 2 * shape.d_ff),
        matrix(shape.d_ff, shape.d_model),
        gate_up_bias=bias(2 * shape.d_ff),
        down_bias=bias(shape.d_model),
    )


def expected(problem: Problem, tokens: slice) -> torch.Tensor:
    """The forward of some tokens as a plain fp32 loop over slots."""
    shape, experts = problem.shape, problem.experts
    values, ids = problem.logits[tokens].topk(shape.top_k, dim=1)
    weights = values.softmax(dim=1)
    result = torch.zeros(problem.x[tokens].shape, device="cuda")
    for row, token in enumerate(problem.x[tokens].float()):
        for k in range(shape.top_k):
            expert = int(ids[row, k])
            wide = token @ experts.gate_up[expert].float()
            if experts.gate_up_bias is not None:
                wide += experts.gate_up_bias[expert]
            if shape.activation.name == "swiglu_oai":
                gate, up = wide[::2].clamp(max=7.0), wide[1::2].clamp(-7.0, 7.0)
                hidden = gate * torch.sigmoid(1.702 * gate) * (up + 1)
            else:
                gate, up = wide.chunk(2)
                hidden = torch.nn.functional.silu(gate) * up
            out = hidden.bfloat16().float() @ experts.down[expert].float()
            if experts.down_bias is not None:
                out += experts.down_bias[expert]
            result[row] += weights[row, k] * out
    return result


def check(problem: Problem, ours: Any, theirs: Any) -> dict[str, Any]:
    """Parity of one problem; raises SystemExit where it fails."""
    names = ("output", "ids", "weights", "tokens_per_expert")
    other = [moe_torch.from_dlpack(getattr(theirs, name)) for name in names]
    bitwise = all(torch.equal(getattr(ours, name), value) for name, value in zip(names, other, strict=True))
    tokens = slice(0, _CHECKED_TOKENS)
    reference = expected(problem, tokens)
    error = float((ours.output[tokens].float() - reference).norm() / reference.norm())
    if not bitwise or not error < 1e-2:
        sys.exit(f"parity is red for {problem.shape.name}: bitwise {bitwise}, error {error}; nothing was timed")
    return {"bitwise_torch_jax": bitwise, "error_fp32_loop": error}


def measure(problem: Problem, timer: GraphTimer, with_peers: bool) -> dict[str, Any]:
    """Every figure of one problem, in microseconds."""
    shape, tokens = problem.shape, problem.x.shape[0]
    ours = problem.torch_forward()
    jax_x, jax_logits = moe_jax.from_dlpack(problem.x), moe_jax.from_dlpack(problem.logits)
    experts = problem.jax_experts

    @jax.jit
    def jax_forward(x: Any, logits: Any, weights: ExpertWeights) -> Any:
        return moe_jax.moe(x, weights, RouterLogits(logits), problem.spec)

    row = check(problem, ours, jax_forward(jax_x, jax_logits, experts))
    active = int((ours.tokens_per_expert > 0).sum())
    row |= {"shape": shape.name, "tokens": tokens, "active_experts": active}
    row["bound_streaming_us"] = shape.weight_bytes(active) / _STREAMING_BYTES_PER_US
    row["torch_us"] = timer.time(problem.torch_forward)
    row["routing_us"] = timer.time(lambda: _route(problem))
    length = 20 if tokens <= 1024 else 6
    state = problem.x.clone()

    def step() -> None:
        output = moe_torch.moe(state, problem.experts, RouterLogits(problem.logits), problem.spec).output
        state.add_(output, alpha=1e-6)

    def jax_step(x: Any, logits: Any, weights: ExpertWeights) -> Any:
        return x + moe_jax.moe(x, weights, RouterLogits(logits), problem.spec).output * 1e-6

    row["torch_device_us"] = timer.device_time_of_chain(step, length)
    jax_arguments = (jax_logits, experts)
    row["jax_device_us"], row["jax_callbacks"] = device_time_of_jax_chain(jax_step, jax_x, jax_arguments, length)
    row["jax_over_torch"] = row["jax_device_us"] / row["torch_device_us"]
    if with_peers:
        weights = {name: getattr(problem.experts, name) for name in ("gate_up", "down", "gate_up_bias", "down_bias")}
        row["triton_kernels_us"] = timer.time(upstream_forward(shape, problem.x, weights, problem.logits))
        row["dense_us"] = timer.time(dense_forward(shape, tokens))
    return row


def _route(problem: Problem) -> Any:
    routing = moe_torch.route(problem.logits, problem.shape.router)
    return moe_torch.make_layout(routing.ids, problem.shape.num_experts)


def add_vllm(row: dict[str, Any], figures: dict[str, Any]) -> None:
    """vLLM's recorded figure (routing and alignment given to it) and our time over 1.25 * (it + our routing)."""
    recorded = figures["microseconds"].get(row["shape"], {}).get(str(row["tokens"]))
    if recorded is not None:
        row["vllm_us"], row["vllm_active_experts"] = recorded["us"], recorded["active"]
        row["over_allowed"] = row["torch_us"] / (1.25 * (recorded["us"] + row["routing_us"]))


def table(rows: list[dict[str, Any]]) -> str:
    names = {
        "shape": "shape", "tokens": "tokens", "active_experts": "active", "torch_us": "torch", "routing_us": "routing",
        "torch_device_us": "torch device", "jax_device_us": "jax device", "jax_over_torch": "jax / torch",
        "jax_callbacks": "callbacks", "triton_kernels_us": "triton_kernels",
        "dense_us": "dense", "bound_streaming_us": "stream bound", "vllm_us": "vllm", "over_allowed": "over 1.25x",
    }  # fmt: skip
    lines = ["| " + " | ".join(names.values()) + " |", "|" + " --- |" * len(names)]
    for row in rows:
        lines.append("| " + " | ".join(_cell(row.get(name, "")) for name in names) + " |")
    return "\n".join(lines)


def _cell(value: Any) -> str:
    if not isinstance(value, float):
        return str(value)
    return f"{value:.2f}" if value < 10 else f"{value:.0f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="qwen3,gptoss120b")
    parser.add_argument("--tokens", default=",".join(map(str, TOKENS)))
    parser.add_argument("--output", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-peers", action="store_true", help="leave out triton_kernels and cuBLAS (not for records)")
    options = parser.parse_args()
    figures = json.loads(_FIGURES.read_text())
    timer, rows = GraphTimer(), []
    for name in options.shapes.split(","):
        shape = SHAPES[name]
        generator = torch.Generator("cuda").manual_seed(options.seed)
        weights = draw_weights(shape, generator)
        spec = MoESpec(shape.activation, shape.router)
        for tokens in map(int, options.tokens.split(",")):
            x = torch.randn(tokens, shape.d_model, generator=generator, device="cuda", dtype=torch.bfloat16)
            logits = torch.randn(tokens, shape.num_experts, generator=generator, device="cuda")
            with torch.no_grad():
                row = measure(Problem(shape, spec, x, logits, weights), timer, not options.no_peers)
            add_vllm(row, figures)
            rows.append(row)
            print(f"{name} {tokens}: {row['torch_us']:.1f} us", file=sys.stderr, flush=True)
            if options.output:
                options.output.write_text(
                    json.dumps({"provenance": provenance("benchmarks.forward"), "rows": rows}, indent=1) + "\n"
                )
        del weights
        torch.cuda.empty_cache()
    print(table(rows))


if __name__ == "__main__":
    main()
