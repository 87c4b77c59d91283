"""The full bf16 forward from logits: torch and JAX side by side, peers and bounds in the same run.

    python -m benchmarks.forward --shapes qwen3,gptoss120b --output benchmarks/results/forward.json

Parity comes first: torch and JAX must agree bitwise and both must agree with plain fp32 arithmetic, or nothing is
timed; a peer that disagrees is not timed and makes the run fail. benchmarks/README.md describes the record.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import time
from collections.abc import Sequence
from typing import Any

# XLA keeps what it once took: what it may take must leave room for torch's weights of 22 GB and the peers' scratch.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.6")

import jax
import torch

import moe_jax
import moe_torch
from benchmarks import plain, sustained
from benchmarks.breakdown import breakdown_table, summarize
from benchmarks.budget import Budget
from benchmarks.draws import load_of
from benchmarks.large import run_large
from benchmarks.libraries.recorded import add_recorded, read_recorded
from benchmarks.options import parse
from benchmarks.peers import add_peer, beside_dense, dense_forwards, why_not_timed
from benchmarks.problem import Problem, checked_tokens, draw_problem, expected, relative_error
from benchmarks.provenance import provenance
from benchmarks.record import (
    SCHEMA,
    STREAMING_BYTES_PER_US,
    add_over_balanced,
    add_ratios,
    read_vllm_figures,
    reasons,
    standings,
    table,
    write_record,
)
from benchmarks.shapes import Shape
from benchmarks.timing import GraphTimer, free_memory
from benchmarks.weights import draw_weights
from moe_core.base.target import Target
from moe_core.runtime.devices import target_of
from moe_core.specs.operands import ExpertWeights, RouterLogits

TOLERANCE = 1e-2


def check(problem: Problem, ours: Any, theirs: Any) -> dict[str, Any]:
    """Parity of one problem; raises SystemExit where it fails."""
    names = ("output", "ids", "weights", "tokens_per_expert")
    other = [moe_torch.from_dlpack(getattr(theirs, name)) for name in names]
    bitwise = all(torch.equal(getattr(ours, name), value) for name, value in zip(names, other, strict=True))
    tokens = checked_tokens(problem.tokens).to(problem.x.device)
    error = relative_error(ours.output[tokens], expected(problem, tokens))
    if not bitwise or not error < TOLERANCE:
        sys.exit(f"parity is red for {problem.shape.name}: bitwise {bitwise}, error {error}; nothing was timed")
    return {"bitwise_torch_jax": bitwise, "error_fp32_loop": error}


def measure(problem: Problem, timer: Any, target: Target) -> dict[str, Any]:
    """Our figures and the bounds of one problem, in microseconds and bytes."""
    shape, tokens, spec = problem.shape, problem.tokens, problem.spec
    ours = problem.torch_forward()
    jax_x, *jax_arguments = problem.jax_arrays

    @jax.jit
    def jax_forward(x: Any, logits: Any, weights: ExpertWeights) -> Any:
        return moe_jax.moe(x, weights, RouterLogits(logits), spec)

    parity = check(problem, ours, jax_forward(jax_x, *jax_arguments))
    load = load_of(ours.tokens_per_expert.cpu().numpy())
    row: dict[str, Any] = {"shape": shape.name, "weight_layout": shape.weight_layout, "dtype": problem.dtype}
    row |= {"routing": problem.routing, "tokens": tokens, "mode": "forward"}
    row |= {"active_experts": load.active, "busiest_expert_tokens": load.busiest, **parity}
    row["scratch_bytes"] = problem.plan(target).scratch_bytes
    row["scratch_allowed_bytes"] = problem.allowed_scratch()
    row["bound_streaming_us"] = shape.weight_bytes(load.active) / STREAMING_BYTES_PER_US
    row["torch_us"] = timer.time(problem.torch_forward)
    row["torch_clean_us"] = timer.time(problem.torch_forward, written=False)
    row["routing_us"] = timer.time(lambda: _route(problem))
    length = 20 if tokens <= 1024 else 6
    state = problem.x.clone()

    def step() -> None:
        output = moe_torch.moe(state, problem.experts, RouterLogits(problem.logits), spec).output
        state.add_(output, alpha=1e-6)

    def jax_step(x: Any, logits: Any, weights: ExpertWeights) -> Any:
        return x + moe_jax.moe(x, weights, RouterLogits(logits), spec).output * 1e-6

    # On both sides of JAX: the chip's clock falls from one to the next.
    before = timer.device_time_of_chain(step, length)
    chain = timer.device_time_of_jax_chain(jax_step, jax_x, tuple(jax_arguments), length)
    row["torch_device_us"] = (before + timer.device_time_of_chain(step, length)) / 2
    row["jax_device_us"], row["jax_callbacks"] = chain.us, chain.callbacks
    dense = dense_forwards(shape, tokens, problem.x.device, problem.x.dtype)
    row |= beside_dense(problem.torch_forward, dense, timer)
    return row | sustained.beside(row, "dense", problem.torch_forward, dense[row["dense_layout"]], timer)


def _route(problem: Problem) -> Any:
    routing = moe_torch.route(problem.logits, problem.shape.router)
    return moe_torch.make_layout(routing.ids, problem.shape.num_experts)


def add_peers(row: dict[str, Any], problem: Problem, timer: Any, options: argparse.Namespace, budget: Budget) -> None:
    """The figures of every peer, or why it has none, and the breakdowns of ours and of triton_kernels."""
    row |= {"peer_errors": {}, "not_timed": {}, "red_peers": []}
    if options.batch_invariant:
        add_batch_invariant(row, problem, timer)
    if options.breakdown:
        row["breakdown"] = {"ours": summarize(timer.kernels(problem.torch_forward))}
    for peer in options.peers:
        seconds = budget.left(peer.kept)
        reason = why_not_timed(peer, problem.shape, problem.tokens, seconds, everywhere=options.everywhere)
        if reason is None:
            ours = problem.experts_forward() if peer.experts_alone else problem.torch_forward
            reason = add_peer(row, peer, problem, timer, seconds, {"ours": ours})
            free_memory()
        if reason is not None:
            row["not_timed"][peer.name] = reason


def add_batch_invariant(row: dict[str, Any], problem: Problem, timer: Any) -> None:
    """Ours with one summation order for every number of tokens, or what is wrong with it."""
    spec = problem.batch_invariant_spec
    output = problem.torch_forward(spec).output
    tokens = checked_tokens(problem.tokens).to(problem.x.device)
    error = relative_error(output[tokens], expected(problem, tokens))
    alone = torch.equal(problem.torch_forward(spec, 1).output, output[:1])
    if not alone or not error < TOLERANCE:
        row["red_peers"].append("batch_invariant")
        row["not_timed"]["batch_invariant"] = f"parity is red: a token alone bitwise {alone}, error {error:.3g}"
        return
    row["batch_invariant_us"] = timer.time(lambda: problem.torch_forward(spec))


def warmup(shape: Shape, experts: ExpertWeights, options: argparse.Namespace) -> dict[str, Any]:
    """Compile what the cells of a shape need, several kernels at a time, and say what it took."""
    problem = draw_problem(shape, "balanced", 1, experts, options.seed)
    specs = [problem.spec, problem.batch_invariant_spec] if options.batch_invariant else [problem.spec]
    reports = [
        moe_torch.warmup(problem.x, experts, RouterLogits(problem.logits), spec, tokens=options.tokens)
        for spec in specs
    ]
    return {
        "kernels": sum(len(report.kernels) for report in reports),
        "compiled": sum(len(report.compiled) for report in reports),
        "seconds": sum(report.seconds for report in reports),
    }


def run(options: argparse.Namespace, timer: Any, device: str) -> dict[str, Any]:
    """The record of a run, written after every cell where an output is named."""
    figures, recorded, target = read_vllm_figures(), read_recorded(), target_of((device, 0))
    record: dict[str, Any] = {
        "schema": SCHEMA,
        "provenance": provenance("benchmarks.forward"),
        "partial": options.partial,
        "seed": options.seed,
        "streaming_bytes_per_us": {"assumed": STREAMING_BYTES_PER_US, "measured": timer.streaming_bytes_per_us()},
        "warmup": [],
        "rows": [],
    }
    for shape in options.shapes:
        generator = torch.Generator(device).manual_seed(options.seed)
        weights = draw_weights(shape, generator, getattr(torch, options.dtype))
        record["warmup"].append({"shape": shape.name, **warmup(shape, weights, options)})
        cells = [(routing, tokens) for routing in options.routings for tokens in options.tokens]
        budget = Budget(options.cell_seconds, len(cells))
        for routing, tokens in cells:
            start = time.monotonic()
            problem = draw_problem(shape, routing, tokens, weights, options.seed)
            with torch.no_grad():
                row = measure(problem, timer, target)
                free_memory()
                add_peers(row, problem, timer, options, budget)
            add_ratios(row, figures)
            add_recorded(row, recorded)
            add_over_balanced(row, record["rows"])
            row["seconds"] = time.monotonic() - start
            budget.finish_cell()
            record["rows"].append(row)
            del problem
            free_memory()
            print(f"{shape.name} {routing} {tokens}: {row['torch_us']:.1f} us", file=sys.stderr, flush=True)
            write_record(options.output, record)
        del weights
        plain.forget_compiled()
        jax.clear_caches()
        free_memory()
    if options.large:
        with torch.no_grad():
            record["large"] = run_large(device)
        write_record(options.output, record)
    return record


def show(record: dict[str, Any]) -> str:
    """The tables of a record, and what has no figure."""
    rows = record["rows"]
    parts = [table(rows)] if rows else []
    parts += [breakdown_table(row) for row in rows if "breakdown" in row]
    parts += [standings(rows), reasons(rows)]
    if "large" in record:
        parts.append(f"over 2**31 elements: {json.dumps(record['large'])}")
    return "\n\n".join(part for part in parts if part)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run and print; 1 where a peer's parity was red."""
    options = parse(arguments, __doc__)
    record = run(options, GraphTimer(), "cuda")
    print(show(record))
    red = sorted({name for row in record["rows"] for name in row["red_peers"]})
    if red:
        print(f"parity is red for {', '.join(red)}: not timed there", file=sys.stderr)
    return 1 if red else 0


if __name__ == "__main__":
    # What the imports made stays: looking through it costs every collection tenths of a second.
    gc.collect()
    gc.freeze()
    sys.exit(main())
