"""One bf16 training step of a layer, from x: forward with its router, and every gradient, torch and JAX side by side.

    python -m benchmarks.training --output build/training.json
    python -m benchmarks.training --shapes qwen3 --tokens 4096 --peers none --breakdown

Parity comes first: the gradients of torch and JAX must agree bitwise, and with torch's autograd in fp32, or their cell
is not timed and the run fails; so it is for peers. benchmarks/README.md describes the record.
"""

from __future__ import annotations

import argparse
import functools
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any

# XLA keeps what it once took: what it may take must leave room for torch's weights, their gradients and the peers'.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.5")

import jax
import torch

import moe_torch
from benchmarks import sustained
from benchmarks.breakdown import breakdown_table, summarize
from benchmarks.budget import Budget, time_limit
from benchmarks.draws import SEED, load_of
from benchmarks.libraries.recorded import add_recorded, read_recorded
from benchmarks.options import chosen_names, numbers_of_tokens
from benchmarks.peers import ParityIsRed, beside_dense, why_not_timed
from benchmarks.provenance import provenance
from benchmarks.record import command, reason_of, reasons, table, write_record
from benchmarks.shapes import ALL_SHAPES
from benchmarks.timing import GraphTimer, free_memory
from benchmarks.training_peers import TRAINING_PEERS, TrainingPeer, dense_step, sample, time_training_peer
from benchmarks.training_problem import (
    Step,
    TrainingProblem,
    arguments,
    differing,
    draw_parameters,
    draw_training_problem,
    errors_fp32,
    jax_gradients,
    jax_step,
    torch_step,
)
from benchmarks.training_record import TRAINING_COLUMNS, TRAINING_SCHEMA, add_training_ratios, read_sonicmoe_figures
from moe_core.base.target import Target
from moe_core.runtime.devices import target_of

#: Several casts to bf16 lie between a gradient and what it is the gradient of.
TOLERANCE = 2e-2
_SHAPES, _TOKENS = ("qwen3", "gptoss120b", "mixtral"), (4096, 16384)
#: A peer's repeats may take this long.
_PEER_SECONDS = 0.5


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Options from the command line; exits with a message that names the fix where they make no sense."""
    parser = command(__doc__, shapes=_SHAPES, tokens=_TOKENS, peers=TRAINING_PEERS, cell_seconds=30.0, seed=SEED)
    parser.add_argument("--everywhere", action="store_true", help="time costly peers at every number of tokens")
    parser.add_argument("--breakdown", action="store_true", help="device time by kernel")
    found = parser.parse_args(arguments)
    if not found.cell_seconds > 0:
        parser.error(f"--cell-seconds must be positive, got {found.cell_seconds}")
    shapes = chosen_names(parser, "--shapes", found.shapes, list(ALL_SHAPES))
    if not shapes:
        parser.error("there is nothing to run; name --shapes")
    peers = chosen_names(parser, "--peers", found.peers, list(TRAINING_PEERS))
    found.shapes, found.peers = [ALL_SHAPES[name] for name in shapes], [TRAINING_PEERS[name] for name in peers]
    found.tokens = numbers_of_tokens(parser, found.tokens)
    return found


def check(problem: TrainingProblem, row: dict[str, Any]) -> Step | None:
    """Add the parity of one problem to its row; torch's step, or None where parity is red and nothing may be timed.

    JAX's step may fail to run at all: then that is its reason to have no figure, and torch's is checked alone.
    """
    ours = torch_step(problem)
    counts = torch.bincount(ours.ids.flatten().long(), minlength=problem.shape.num_experts)
    load = load_of(counts.cpu().numpy())
    row |= {"active_experts": load.active, "busiest_expert_tokens": load.busiest}
    row["errors_fp32"] = errors_fp32(problem, ours)
    red = [f"{name} {error:.3g}" for name, error in row["errors_fp32"].items() if not error < TOLERANCE]
    red = [f"error to fp32 arithmetic: {', '.join(red)}; at most {TOLERANCE:g} is allowed"] if red else []
    _attempt(row, "jax", lambda: {"differing_torch_jax": differing(ours, jax_step(problem))})
    if "differing_torch_jax" in row:
        row["bitwise_torch_jax"] = not row["differing_torch_jax"]
        if row["differing_torch_jax"]:
            red.append(f"torch and JAX differ in {', '.join(row['differing_torch_jax'])}")
    if red:
        row["refused"] = f"parity is red: {'; '.join(red)}"
        return None
    return ours


def measure(problem: TrainingProblem, row: dict[str, Any], timer: Any, target: Target, breakdown: bool) -> None:
    """Our figures and the bound of one problem, each on its own: what fails has its reason in the row."""
    device, spec = problem.gradient.device, problem.spec
    # Few enough to be quick, enough for XLA to make a graph of them.
    length = 6 if problem.tokens <= 4096 else 3
    step = functools.partial(torch_step, problem)
    dense = functools.partial(dense_step, problem.shape, problem.tokens, device)

    def forward() -> Any:
        return moe_torch.moe(*arguments(problem.leaves()), spec).output

    def device_time() -> dict[str, Any]:
        state = problem.arrays["x"].clone()
        moving = TrainingProblem(problem.shape, {**problem.arrays, "x": state}, problem.gradient)
        return {"torch_device_us": timer.device_time_of_chain(lambda: _advance(state, torch_step(moving)), length)}

    def jax_device_time() -> dict[str, Any]:
        arrays, gradient = problem.jax_arrays()
        x = arrays.pop("x")

        def step(x: Any, arrays: dict[str, Any], gradient: Any) -> Any:
            return x + jax_gradients({"x": x, **arrays}, gradient, spec)[1]["x"] * 1e-6

        chain = timer.device_time_of_jax_chain(step, x, (arrays, gradient), length)
        # Torch's on both sides of it: the chip's clock falls from one to the next.
        torch_us = (row["torch_device_us"] + device_time()["torch_device_us"]) / 2
        return {"jax_device_us": chain.us, "jax_callbacks": chain.callbacks / length, "torch_device_us": torch_us}

    def scratch() -> dict[str, Any]:
        sizes = problem.scratch_bytes(target)
        return dict(zip(("scratch_forward_bytes", "scratch_backward_bytes"), sizes, strict=True))

    figures: dict[str, Callable[[], dict[str, Any]]] = {
        "torch": lambda: {"torch_us": timer.time(step)},
        "forward": lambda: {"forward_us": timer.time(forward)},
        "dense": lambda: beside_dense(step, {name: dense(name) for name in ("in_out", "out_in")}, timer),
        "scratch": scratch,
        "memory": lambda: memory(problem),
        "torch device": device_time,
    }
    if "jax" not in row["not_timed"]:
        figures["jax"] = jax_device_time
    figures["sustained"] = lambda: sustained.beside(row, "dense", step, dense(row.get("dense_layout", "in_out")), timer)
    if breakdown:
        figures["breakdown"] = lambda: {"breakdown": {"ours": summarize(timer.kernels(step))}}
    for name, figure in figures.items():
        _attempt(row, name, figure)


def _advance(state: torch.Tensor, step: Step) -> None:
    with torch.no_grad():
        state.add_(step.gradients["x"], alpha=1e-6)


def memory(problem: TrainingProblem) -> dict[str, Any]:
    """What torch's allocator holds between forward and backward, x included, and at most; per token.

    The peak is that of one eager step beyond x, parameters and their gradients; both are without the output.
    """
    if problem.gradient.device.type != "cuda":
        return {}
    leaves = problem.leaves()
    x, output_bytes = leaves["x"], problem.gradient.nbytes
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    output = moe_torch.moe(*arguments(leaves), problem.spec).output
    kept = torch.cuda.memory_allocated() - before - output_bytes
    gradients = torch.autograd.grad(output, list(leaves.values()), problem.gradient)
    peak = torch.cuda.max_memory_allocated() - before - output_bytes - sum(one.nbytes for one in gradients)
    return {
        "kept_bytes_per_token": (kept + x.nbytes) / problem.tokens,
        "sonicmoe_kept_bytes_per_token": problem.kept_bytes_of_sonicmoe(),
        "peak_bytes_per_token": peak / problem.tokens,
    }


def add_peers(
    row: dict[str, Any],
    problem: TrainingProblem,
    wanted: dict[str, torch.Tensor],
    timer: Any,
    options: argparse.Namespace,
    budget: Budget,
) -> None:
    """The figures of every peer, or why it has none. wanted: what their gradients are compared with."""
    for peer in options.peers:
        seconds = budget.left()
        reason = why_not_timed(peer, problem.shape, problem.tokens, seconds, everywhere=options.everywhere)
        if reason is not None:
            row["not_timed"][peer.name] = reason
            continue

        def figures(peer: TrainingPeer = peer, seconds: float = seconds) -> dict[str, Any]:
            with time_limit(seconds):
                found = time_training_peer(peer, problem, wanted, timer, _PEER_SECONDS)
            row["peer_errors"][peer.name] = found["error"]
            for field, key in (("turns_us", "turns"), ("turns_spread", "spread"), ("peer_peak_bytes", "peak")):
                if key in found:
                    row.setdefault(field, {})[peer.name] = found[key]
            ratio = {f"over_{peer.name}": found["over"]} if "over" in found else {}
            return {f"{peer.name}_us": found["us"], **ratio}

        _attempt(row, peer.name, figures)
        free_memory()


def _attempt(row: dict[str, Any], name: str, figures: Callable[[], dict[str, Any]]) -> None:
    """Add figures to a row, or the reason why there are none, of which the record has the first line."""
    try:
        row |= figures()
    except Exception as error:  # whatever is raised is the reason that there is no figure
        traceback.print_exc()
        row["not_timed"][name] = reason_of(error)
        if isinstance(error, ParityIsRed):
            row["red_peers"].append(name)
        # What the failed part had allocated hangs on its traceback.
        free_memory()


def run_cell(
    problem: TrainingProblem, timer: Any, target: Target, options: argparse.Namespace, budget: Budget
) -> dict[str, Any]:
    """The row of one problem."""
    row: dict[str, Any] = {"shape": problem.shape.name, "routing": "router", "tokens": problem.tokens, "mode": "step"}
    row |= {"not_timed": {}, "peer_errors": {}, "red_peers": []}
    try:
        ours = check(problem, row)
    except Exception as error:  # a kernel that does not run must not take the other cells' figures with it
        traceback.print_exc()
        row["refused"] = reason_of(error)
        return row
    if ours is not None:
        wanted = sample(ours.gradients)
        del ours
        free_memory()
        measure(problem, row, timer, target, options.breakdown)
        add_peers(row, problem, wanted, timer, options, budget)
    return row


def run(options: argparse.Namespace, timer: Any, device: str) -> dict[str, Any]:
    """The record of a run, written after every cell where an output is named."""
    figures, recorded, target = read_sonicmoe_figures(), read_recorded(), target_of((device, 0))
    record: dict[str, Any] = {
        "schema": TRAINING_SCHEMA,
        "provenance": provenance("benchmarks.training"),
        "seed": options.seed,
        "rows": [],
    }
    for shape in options.shapes:
        parameters = draw_parameters(shape, device, options.seed)
        budget = Budget(options.cell_seconds, len(options.tokens))
        for tokens in options.tokens:
            start = time.monotonic()
            problem = draw_training_problem(shape, tokens, parameters, options.seed)
            row = run_cell(problem, timer, target, options, budget)
            add_training_ratios(row, figures)
            add_recorded(row, recorded)
            row["seconds"] = time.monotonic() - start
            budget.finish_cell()
            record["rows"].append(row)
            del problem
            free_memory()
            outcome = row.get("refused") or f"{row.get('torch_us', float('nan')):.1f} us"
            print(f"{shape.name} {tokens}: {outcome} ({row['seconds']:.1f} s)", file=sys.stderr, flush=True)
            write_record(options.output, record)
        del parameters
        jax.clear_caches()
        free_memory()
    return record


def show(record: dict[str, Any]) -> str:
    """The tables of a record, and what has no figure."""
    rows = record["rows"]
    parts = [table(rows, TRAINING_COLUMNS)]
    parts += [breakdown_table(row) for row in rows if "breakdown" in row]
    parts.append(reasons(rows))
    parts += [
        f"nothing was timed, {row['shape']} {row['tokens']}: {row['refused']}" for row in rows if "refused" in row
    ]
    return "\n\n".join(part for part in parts if part)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run and print; 1 where parity was red or one of our figures is lacking."""
    options = parse(arguments)
    record = run(options, GraphTimer(), "cuda")
    print(show(record))
    peers = {peer.name for peer in TRAINING_PEERS.values()}
    failed = [row for row in record["rows"] if "refused" in row or row["red_peers"] or set(row["not_timed"]) - peers]
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
