"""The forward from logits with quantised experts, beside triton_kernels and the bf16 op of dequantised weights.

    python -m benchmarks.quantized --cells gptoss120b:mxfp4,mixtral:fp8_block --output record.json
    python -m benchmarks.quantized --cells gptoss120b:int4_g64,qwen3:int4_g128,qwen3:int8_g128 --tokens 16,64,256

Parity comes first: torch and JAX must agree bitwise, and the output with that of the dequantised weights, or nothing is
timed; triton_kernels, where it has the scheme, is checked too, and a row says what keeps it from a figure
(benchmarks/quantized_peers.py). Weights whose format has a tiling are prepared (`prepack_weights`) unless --published
is given. Codes and scales are random, with the rms of real weights. Both products are timed apart too, beside the time
that the bytes of their weights take at the fastest streaming: codes, scales and zero points, as they are published, of
the experts that have tokens. By default what matters most comes first: cells with a peer, then the numbers of tokens
at which only a ratio within one run decides. benchmarks/README.md describes the record.
"""

from __future__ import annotations

import argparse
import functools
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import torch

import moe_jax
import moe_torch
from benchmarks.breakdown import summarize
from benchmarks.budget import Budget
from benchmarks.draws import SEED, load_of
from benchmarks.options import chosen_names, numbers_of_tokens
from benchmarks.peers import TOLERANCE as PEER_TOLERANCE
from benchmarks.peers import Peer, add_peer, dense_forwards, why_not_importable, why_not_timed
from benchmarks.problem import Problem, relative_error
from benchmarks.provenance import provenance
from benchmarks.quantized_peers import NAME, upstream_peer, why_not_upstream
from benchmarks.quantized_problem import (
    SCHEMES,
    Cell,
    dequantized,
    draw_experts,
    draw_rows,
    specs_of,
    stored_bytes,
    with_static_scales,
)
from benchmarks.record import STREAMING_BYTES_PER_US, command, reasons, table, write_record
from benchmarks.shapes import SHAPES
from benchmarks.timing import GraphTimer, KernelSpan, free_memory
from moe_core.formats import why_not_tileable
from moe_core.specs.moe import MoESpec
from moe_core.specs.operands import ExpertWeights, RouterLogits, map_arrays

SCHEMA = 4
#: Largest relative Frobenius error of an output: of bf16 rows, and of rows that are quantised to e4m3 too.
TOLERANCES = {False: 1e-2, True: 8e-2}
#: Those that triton_kernels has, too, come first.
CELLS = (
    "gptoss120b:mxfp4,qwen3:mxfp4,mixtral:fp8_tensor,gptoss120b:fp8_tensor,mixtral:fp8_block,qwen3:fp8_block,"
    "gptoss120b:int4_g64,qwen3:int4_g128,qwen3:int4_g128_zp,gptoss120b:int8_g64,qwen3:int8_g128,qwen3:int8_channel"
)
#: From 1024 tokens on only a ratio within one run decides: these first, then some of the few.
TOKENS = "4096,1024,16384,64,1,16,256"
COLUMNS = {
    "shape": "shape", "scheme": "scheme", "prepared": "prepared", "tokens": "tokens", "active_experts": "active",
    "torch_us": "torch", "static_scales_us": "static scales", "triton_kernels_us": NAME,
    "ratio_triton_kernels": f"/ {NAME}", "static_ratio_triton_kernels": f"static / {NAME}", "bf16_us": "bf16",
    "bound_streaming_us": "stream bound", "dense_us": "dense bf16",
    "matmul1_us": "matmul 1", "matmul1_of_bound": "of its bound", "matmul2_us": "matmul 2",
    "matmul2_of_bound": "of its bound",
}  # fmt: skip


def product_spans(spans: Sequence[KernelSpan]) -> list[tuple[int, KernelSpan]]:
    """The launches of grouped products among the kernels of one replay, with their places."""
    return [(place, span) for place, span in enumerate(spans) if "matmul_" in span.name]


def why_not_apart(replays: Sequence[Sequence[KernelSpan]]) -> str | None:
    """Why both products of a forward have no times of their own, or None where each is one launch of every replay."""
    counts = sorted({len(product_spans(spans)) for spans in replays})
    if counts == [2]:
        return None
    return f"each must be a launch of its own: a replay has {' or '.join(map(str, counts))} kernels of products, not 2"


def product_times(replays: Sequence[Sequence[KernelSpan]]) -> dict[str, float]:
    """Median us of both products of a forward, from the end of the kernel ahead where launches overlap."""
    times: dict[str, list[float]] = {"matmul1": [], "matmul2": []}
    for spans in replays:
        for name, (place, span) in zip(times, product_spans(spans), strict=True):
            ahead = max((other.end for other in spans[:place]), default=span.start)
            times[name].append(span.end - max(span.start, ahead))
    return {name: statistics.median(found) for name, found in times.items()}


def measure(
    cell: Cell, problem: Problem, experts: tuple[ExpertWeights, ExpertWeights], stored: dict[str, int], timer: Any
) -> dict[str, Any]:
    """Our figures of one cell; exits where parity is red. experts: quantised, and the same in bf16; stored: bytes of
    both matrices in the published layout."""
    shape, (quantised, plain), (spec, bf16) = cell.shape, experts, specs_of(cell)
    x, logits, tokens = problem.x, problem.logits, problem.tokens

    def forward(weights: ExpertWeights, spec: MoESpec) -> Any:
        return moe_torch.moe(x, weights, RouterLogits(logits), spec)

    ours, expected = forward(quantised, spec), forward(plain, bf16)
    theirs = jax.jit(lambda x, logits, weights: moe_jax.moe(x, weights, RouterLogits(logits), spec).output)(
        moe_jax.from_dlpack(x), moe_jax.from_dlpack(logits), map_arrays(quantised, moe_jax.from_dlpack)
    )
    same = torch.equal(moe_torch.from_dlpack(theirs), ours.output)
    error, tolerance = relative_error(ours.output, expected.output), TOLERANCES[cell.scheme.activations is not None]
    if not same or not error < tolerance:
        sys.exit(
            f"parity is red for {shape.name} {cell.name} {tokens}: bitwise {same}, error {error}; nothing was timed"
        )
    active = load_of(ours.tokens_per_expert.cpu().numpy()).active
    bounds = {name: size * active / shape.num_experts / STREAMING_BYTES_PER_US for name, size in stored.items()}
    row = {
        "shape": shape.name, "scheme": cell.name, "tokens": tokens, "active_experts": active,
        "prepared": quantised.down.spec.tiling is not None, "bitwise_torch_jax": same, "error_dequantized": error,
        "torch_us": timer.time(lambda: forward(quantised, spec)),
        "bf16_us": timer.time(lambda: forward(plain, bf16)),
        "bound_streaming_us": sum(bounds.values()),
        "dense_us": timer.time(dense_forwards(shape, tokens, x.device)["in_out"]),
        "scale_dtype": str(quantised.down.scales.dtype).removeprefix("torch."),
        "peer_errors": {}, "not_timed": {}, "red_peers": [],
    }  # fmt: skip
    static = with_static_scales(cell, quantised)
    if static is not None:
        error = relative_error(forward(static, spec).output, expected.output)
        if error < tolerance:
            row |= {"error_static_scales": error, "static_scales_us": timer.time(lambda: forward(static, spec))}
        else:
            row["red_peers"].append("static_scales")
            row["not_timed"]["static_scales"] = f"parity is red: error {error:.3g}, at most {tolerance:g} is allowed"
    replays = timer.kernels(lambda: forward(quantised, spec))
    row["breakdown"] = {"ours": summarize(replays)}
    reason = why_not_apart(replays)
    if reason is not None:
        row["not_timed"]["products"] = reason
        return row
    for name, time_taken in product_times(replays).items():
        row |= {f"{name}_us": time_taken, f"{name}_of_bound": bounds[name] / time_taken}
    return row


def add_upstream(
    row: dict[str, Any],
    peer: Peer | str,
    problem: Problem,
    timer: Any,
    seconds: float,
    ours: dict[str, Callable[[], Any]],
) -> None:
    """triton_kernels' figures, or why it has none. peer: a string is the reason; seconds: what it may take; ours: the
    forward `torch`, and that with given scales, `static_scales`, if there is one."""
    reason = peer if isinstance(peer, str) else why_not_timed(peer, problem.shape, problem.tokens, seconds)
    if reason is None and isinstance(peer, Peer):
        reason = add_peer(row, peer, problem, timer, seconds, ours)
        free_memory()
    if reason is not None:
        row["not_timed"][NAME] = reason
    turns = row.get("over_by_turns", {})
    for ratio, name in ((f"ratio_{NAME}", "torch"), (f"static_ratio_{NAME}", "static_scales")):
        if name in turns:
            row[ratio] = turns[name]


def forwards_of(cell: Cell, problem: Problem, experts: ExpertWeights) -> dict[str, Callable[[], Any]]:
    """Ours, `torch`, and the same with given scales of rows, `static_scales`, where the scheme takes them."""
    spec, logits = specs_of(cell)[0], RouterLogits(problem.logits)
    weights = {"torch": experts, "static_scales": with_static_scales(cell, experts)}
    return {
        name: functools.partial(moe_torch.moe, problem.x, of, logits, spec)
        for name, of in weights.items()
        if of is not None
    }


def peer_of(cell: Cell, experts: ExpertWeights, options: argparse.Namespace) -> Peer | str | None:
    """triton_kernels with experts in their published layout, why it cannot be timed, or None where nobody asked."""
    if not options.peers:
        return None
    reason = why_not_upstream(cell.scheme)
    if reason is not None:
        return reason
    tolerance = PEER_TOLERANCE if cell.scheme.activations is None else TOLERANCES[True]
    peer = upstream_peer(cell.scheme, experts, tolerance, options.peer_tokens)
    return why_not_importable(peer) or peer


def warmup(cell: Cell, experts: tuple[ExpertWeights, ExpertWeights], tokens: Sequence[int]) -> dict[str, Any]:
    """Compile what a cell's own forwards need, several kernels at a time, and say what it took."""
    problem, (quantised, plain), (spec, bf16) = draw_rows(cell, 1, experts[1]), experts, specs_of(cell)
    reports = [
        moe_torch.warmup(problem.x, weights, RouterLogits(problem.logits), of, tokens=tokens)
        for weights, of in ((quantised, spec), (with_static_scales(cell, quantised), spec), (plain, bf16))
        if weights is not None
    ]
    return {
        "shape": cell.shape.name,
        "scheme": cell.name,
        "kernels": sum(len(report.kernels) for report in reports),
        "compiled": sum(len(report.compiled) for report in reports),
        "seconds": sum(report.seconds for report in reports),
    }


def run(options: argparse.Namespace, timer: Any, device: str) -> dict[str, Any]:
    """The record of every cell, written after each of them where an output is named; progress is printed."""
    start = time.monotonic()
    rows: list[dict[str, Any]] = []
    record = {
        "schema": SCHEMA,
        "provenance": provenance("benchmarks.quantized"),
        "seed": SEED,
        "warmup": [],
        "rows": rows,
    }

    def progress(text: str) -> None:
        print(f"{time.monotonic() - start:7.1f} s  {text}", file=sys.stderr, flush=True)

    for cell in options.cells:
        experts = draw_experts(cell, torch.Generator(device).manual_seed(SEED))
        plain = dequantized(experts)
        stored = stored_bytes(experts)
        peer = peer_of(cell, experts, options)
        if why_not_tileable(cell.scheme.weights) is None and not options.published:
            experts = moe_torch.prepack_weights(experts, MoESpec(cell.shape.activation, weight_layout="out_in"))
        record["warmup"].append(warmup(cell, (experts, plain), options.tokens))
        progress(f"{cell.shape.name} {cell.name}: {record['warmup'][-1]['compiled']} kernels compiled")
        budget = Budget(options.cell_seconds, len(options.tokens))
        for count in options.tokens:
            began = time.monotonic()
            with torch.no_grad():
                problem = draw_rows(cell, count, plain)
                row = measure(cell, problem, (experts, plain), stored, timer)
                if peer is not None:
                    ours = forwards_of(cell, problem, experts)
                    if "static_scales_us" not in row:
                        ours.pop("static_scales", None)
                    add_upstream(row, peer, problem, timer, budget.left(), ours)
            row["seconds"] = time.monotonic() - began
            budget.finish_cell()
            rows.append(row)
            progress(describe(row))
            write_record(options.output, record)
        del experts, plain, peer
        jax.clear_caches()
        free_memory()
    return record


def describe(row: dict[str, Any]) -> str:
    """A row in a line: ours, and triton_kernels' figure or why it has none."""
    text = f"{row['shape']} {row['scheme']} {row['tokens']}: {row['torch_us']:.1f} us"
    if f"{NAME}_us" in row:
        text += f", {NAME} {row[f'{NAME}_us']:.1f} us"
    if f"ratio_{NAME}" in row:
        text += f", ratio {row[f'ratio_{NAME}']:.3f}"
    if NAME in row["not_timed"]:
        text += f", {NAME}: {row['not_timed'][NAME]}"
    return text


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line; exits with a message where it makes no sense."""
    parser = command(__doc__, cells=CELLS, tokens=TOKENS, peers=NAME, cell_seconds=20.0)
    parser.add_argument("--peer-tokens", help="time the peer at these numbers of tokens only (default: at all)")
    parser.add_argument("--published", action="store_true", help="leave weights in their published layout")
    scales = ("bfloat16", "float16", "float32")
    parser.add_argument("--scales", choices=scales, default=scales[0], help="of grouped integers (default: bfloat16)")
    found = parser.parse_args(arguments)
    cells = []
    for text in found.cells.split(","):
        shape, _, scheme = text.partition(":")
        if shape not in SHAPES or scheme not in SCHEMES:
            parser.error(f"--cells must be of {', '.join(SHAPES)} and {', '.join(SCHEMES)}, got {text!r}")
        cells.append(Cell(SHAPES[shape], scheme, *SCHEMES[scheme], found.scales))
    if not found.cell_seconds > 0:
        parser.error(f"--cell-seconds must be positive, got {found.cell_seconds}")
    found.cells, found.tokens = cells, numbers_of_tokens(parser, found.tokens)
    found.peers = chosen_names(parser, "--peers", found.peers, (NAME,))
    if found.peer_tokens is not None:
        found.peer_tokens = numbers_of_tokens(parser, found.peer_tokens, "--peer-tokens")
    return found


def show(rows: list[dict[str, Any]]) -> str:
    """The table of the rows, and what has no figure."""
    return "\n\n".join(part for part in (table(rows, COLUMNS), reasons(rows)) if part)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run and print; 1 where a parity was red: the peer's, or with given scales."""
    rows = run(parse(arguments), GraphTimer(), "cuda")["rows"]
    print(show(rows))
    red = sorted({name for row in rows for name in row["red_peers"]})
    if red:
        print(f"parity is red for {', '.join(red)}: not timed there", file=sys.stderr)
    return 1 if red else 0


if __name__ == "__main__":
    sys.exit(main())
