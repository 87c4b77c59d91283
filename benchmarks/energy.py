"""Energy per token of forwards and training steps, by the GPU's own counter, ours and peers by turns.

    python -m benchmarks.energy --output build/energy.json
    python -m benchmarks.energy --cells qwen3:forward:4096,qwen3:step:4096 --seconds 1

A CUDA graph is replayed again and again for some seconds; the driver's counter of the energy that the whole board has
used is read before and after. Parity comes first, as in `forward` and `training`. No cache is flushed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.draws import SEED
from benchmarks.peers import PEERS, check_peer, why_not_importable
from benchmarks.problem import checked_tokens, draw_problem, expected, relative_error
from benchmarks.provenance import provenance
from benchmarks.record import command, reason_of, table, write_record
from benchmarks.shapes import ALL_SHAPES, Shape
from benchmarks.sustained import Meter, sustained
from benchmarks.timing import GraphTimer, free_memory
from benchmarks.training_peers import TRAINING_PEERS, sample, tf32
from benchmarks.training_peers import check_peer as check_training_peer
from benchmarks.training_problem import draw_parameters, draw_training_problem, errors_fp32, torch_step
from benchmarks.weights import draw_weights

SCHEMA = 1
CELLS = "qwen3:forward:64,qwen3:forward:4096,gptoss120b:forward:64,gptoss120b:forward:4096,qwen3:step:4096"
_FORWARD_PEERS, _STEP_PEERS = ("triton_kernels", "grouped_mm"), ("grouped_mm",)
COLUMNS = {
    "shape": "shape", "what": "what", "tokens": "tokens", "implementation": "implementation",
    "mj_per_token": "mJ per token", "watts": "W", "us": "us", "over": "ours / it",
}  # fmt: skip


@dataclass(frozen=True)
class Cell:
    """what: `forward` from logits or training `step`."""

    shape: Shape
    what: str
    tokens: int


def parse_cells(parser: argparse.ArgumentParser, text: str) -> tuple[Cell, ...]:
    """Cells from `shape:what:tokens,...`; exits where one is not known."""
    found = []
    for one in text.split(","):
        shape, what, tokens = (*one.split(":"), "", "", "")[:3]
        if shape not in ALL_SHAPES or what not in ("forward", "step") or not tokens.isdecimal() or int(tokens) < 1:
            known = ", ".join(ALL_SHAPES)
            parser.error(f"--cells must be SHAPE:forward:TOKENS or SHAPE:step:TOKENS, shapes of {known}; got {one!r}")
        found.append(Cell(ALL_SHAPES[shape], what, int(tokens)))
    return tuple(found)


def forwards(cell: Cell, device: Any, seed: int) -> tuple[dict[str, Callable[[], Any]], dict[str, str]]:
    """By name, forwards from logits whose parity is green; and why others have none."""
    weights = draw_weights(cell.shape, torch.Generator(device).manual_seed(seed))
    problem = draw_problem(cell.shape, "balanced", cell.tokens, weights, seed)
    tokens = checked_tokens(cell.tokens).to(problem.x.device)
    error = relative_error(problem.torch_forward().output[tokens], expected(problem, tokens))
    if not error < 1e-2:
        raise ValueError(f"parity is red: error {error:.3g}, at most 0.01 is allowed")
    found: dict[str, Callable[[], Any]] = {"moebius": problem.torch_forward}
    reasons = {}
    for name in _FORWARD_PEERS:
        try:
            reason = why_not_importable(name)
            if reason is not None:
                raise ImportError(reason)
            forward = PEERS[name].build(problem)
            check_peer(PEERS[name], problem, forward())
            found[name] = forward
        except Exception as error:  # the reason that it has no figure
            reasons[name] = reason_of(error)
    return found, reasons


def steps(cell: Cell, device: Any, seed: int) -> tuple[dict[str, Callable[[], Any]], dict[str, str]]:
    """By name, training steps whose parity is green; and why others have none."""
    problem = draw_training_problem(cell.shape, cell.tokens, draw_parameters(cell.shape, device, seed), seed)
    ours = torch_step(problem)
    worst = max(errors_fp32(problem, ours).values())
    if not worst < 2e-2:
        raise ValueError(f"parity is red: error {worst:.3g}, at most 0.02 is allowed")
    wanted = sample(ours.gradients)
    del ours
    found: dict[str, Callable[[], Any]] = {"moebius": lambda: torch_step(problem)}
    reasons = {}
    for name in _STEP_PEERS:
        try:
            step = tf32()(TRAINING_PEERS[name].build(problem))
            check_training_peer(TRAINING_PEERS[name], step(), wanted)
            found[name] = step
        except Exception as error:
            reasons[name] = reason_of(error)
    return found, reasons


def run_cell(
    cell: Cell, capture: Callable[[Any], Callable[[], Any]], meter: Any, seconds: float, given: tuple[Any, int]
) -> list[dict[str, Any]]:
    """The rows of one cell, ours first. given: device and seed."""
    where = {"shape": cell.shape.name, "what": cell.what, "tokens": cell.tokens}
    calls, reasons = (forwards if cell.what == "forward" else steps)(cell, *given)
    replays = {}
    for name, call in calls.items():
        try:
            replays[name] = capture(call)
        except Exception as error:
            reasons[name] = reason_of(error)
    found = sustained(replays, meter.joules, seconds)
    rows = []
    for name, figures in found.items():
        row = {**where, "implementation": name, "mj_per_token": figures["joules"] / cell.tokens * 1e3}
        row |= {"watts": figures["watts"], "us": figures["us"]}
        rows.append(row | {"over": found["moebius"]["joules"] / figures["joules"] if figures["joules"] else 0.0})
    return rows + [{**where, "implementation": name, "not_timed": reason} for name, reason in reasons.items()]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run and print; 1 where ours has no figure."""
    parser = command(__doc__, cells=CELLS, seconds=2.0, seed=SEED)
    options = parser.parse_args(arguments)
    cells = parse_cells(parser, options.cells)
    timer, meter = GraphTimer(), Meter()
    record: dict[str, Any] = {"schema": SCHEMA, "provenance": provenance("benchmarks.energy"), "seed": options.seed}
    record |= {"seconds": options.seconds, "rows": []}
    for cell in cells:
        given = ("cuda", options.seed)
        record["rows"] += run_cell(cell, lambda call: timer.capture(call).replay, meter, options.seconds, given)
        free_memory()
        print(show(record["rows"][-4:]), file=sys.stderr, flush=True)
        write_record(options.output, record)
    print(show(record["rows"]))
    return 1 if any("not_timed" in row and row["implementation"] == "moebius" for row in record["rows"]) else 0


def show(rows: list[dict[str, Any]]) -> str:
    """The table, and what has no figure."""
    lines = [
        f"{row['shape']} {row['what']} {row['tokens']} {row['implementation']}: {row['not_timed']}"
        for row in rows
        if "not_timed" in row
    ]
    return "\n".join([table([row for row in rows if "us" in row], COLUMNS), *lines])


if __name__ == "__main__":
    sys.exit(main())
