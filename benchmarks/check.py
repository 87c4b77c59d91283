"""Times the cells of a record of `forward` anew; fails where one has slowed beside dense products.

    python -m benchmarks.check
    python -m benchmarks.check build/forward.json --shapes qwen3 --tokens 16,64

Ours and the dense products of both weight layouts are replayed by turns, so that a slower chip slows both. A cell that
takes more than 3 % longer beside dense than it did is timed once more, and fails where it takes as long again. Without
a record it is the newest of benchmarks/results.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.draws import SEED
from benchmarks.forward import TOLERANCE
from benchmarks.options import chosen_names, numbers_of_tokens
from benchmarks.peers import beside_dense, dense_forwards
from benchmarks.problem import Problem, checked_tokens, draw_problem, expected, relative_error
from benchmarks.record import PLOTTED_SCHEMAS, table
from benchmarks.shapes import ALL_SHAPES, Shape
from benchmarks.timing import GraphTimer, free_memory
from benchmarks.weights import draw_weights

RESULTS = Path(__file__).parent / "results"
#: The part of its time by which a cell may slow.
ALLOWED = 0.03
COLUMNS = {
    "shape": "shape", "weight_layout": "layout", "dtype": "dtype", "routing": "routing", "tokens": "tokens",
    "recorded": "recorded / dense", "now": "now / dense", "change": "change", "verdict": "verdict",
}  # fmt: skip


class Cell(NamedTuple):
    """What was timed, with the shape in the layout it had, and its time over that of the dense products."""

    shape: Shape
    dtype: str
    routing: str
    tokens: int
    over_dense: float


def last_record(folder: Path = RESULTS) -> Path:
    """The record of `forward` with the newest date; of several the one with most cells."""
    found = {path: json.loads(path.read_text()) for path in sorted(folder.glob("forward*.json"))}
    if not found:
        sys.exit(f"there is no forward*.json in {folder}; name a record")
    return max(found, key=lambda path: (found[path]["provenance"]["date"], len(found[path]["rows"])))


def cells_of(record: Mapping[str, Any]) -> list[Cell]:
    """The cells of a record; exits where it is none of `forward`. Before schema 4 all were bf16 with in_out weights,
    and both times came one after another."""
    rows = record.get("rows") if record.get("schema") in PLOTTED_SCHEMAS else None
    if not rows or not all({"shape", "routing", "torch_us", "dense_us"} <= set(row) for row in rows):
        sys.exit(f"a record must be one of benchmarks.forward with cells, got schema {record.get('schema')!r}")
    found = []
    for row in rows:
        if row["shape"] not in ALL_SHAPES:
            sys.exit(f"shape must be of {', '.join(ALL_SHAPES)}, got {row['shape']!r}; its sizes are not known here")
        shape = dataclasses.replace(ALL_SHAPES[row["shape"]], weight_layout=row.get("weight_layout", "in_out"))
        ratio = row.get("over_dense", row["torch_us"] / row["dense_us"])
        found.append(Cell(shape, row.get("dtype", "bfloat16"), row["routing"], row["tokens"], ratio))
    return found


def check_cell(cell: Cell, problem: Problem, timer: Any, seconds: float) -> dict[str, Any]:
    """One line of the table; exits where the output is wrong."""
    tokens = checked_tokens(problem.tokens).to(problem.x.device)
    error = relative_error(problem.torch_forward().output[tokens], expected(problem, tokens))
    if not error < TOLERANCE:
        sys.exit(f"parity is red for {cell.shape.name} {cell.tokens}: error {error}; nothing was timed")
    dense = dense_forwards(problem.shape, problem.tokens, problem.x.device, problem.x.dtype)
    now = beside_dense(problem.torch_forward, dense, timer, seconds)["over_dense"]
    if now > (1 + ALLOWED) * cell.over_dense:
        now = min(now, beside_dense(problem.torch_forward, dense, timer, seconds)["over_dense"])
    change = now / cell.over_dense - 1
    row = {"shape": cell.shape.name, "weight_layout": cell.shape.weight_layout, "dtype": cell.dtype}
    row |= {"routing": cell.routing, "tokens": cell.tokens, "recorded": cell.over_dense, "now": now}
    return row | {"change": f"{change:+.1%}", "verdict": "slower" if change > ALLOWED else "ok"}


def check(cells: Iterable[Cell], timer: Any, device: str, seconds: float, seed: int = SEED) -> list[dict[str, Any]]:
    """A line for each cell; weights are drawn once for neighbours that share them."""
    rows = []
    for (shape, dtype), own in itertools.groupby(cells, key=lambda cell: cell[:2]):
        weights = draw_weights(shape, torch.Generator(device).manual_seed(seed), getattr(torch, dtype))
        for cell in own:
            with torch.no_grad():
                problem = draw_problem(shape, cell.routing, cell.tokens, weights, seed)
                rows.append(check_cell(cell, problem, timer, seconds))
            print(table(rows[-1:], COLUMNS).splitlines()[-1], file=sys.stderr, flush=True)
            del problem
            free_memory()
        del weights
        free_memory()
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    """Check and print; 1 where a cell has slowed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("record", nargs="?", type=Path, help="a record of benchmarks.forward (default: the newest)")
    parser.add_argument("--shapes", help="of the record's (default: all)")
    parser.add_argument("--tokens", help="of the record's numbers of tokens (default: all)")
    parser.add_argument("--cell-seconds", type=float, default=1.0, help="replays of a cell (default: %(default)s)")
    options = parser.parse_args(arguments)
    path = options.record or last_record()
    record = json.loads(path.read_text())
    cells = cells_of(record)
    if options.shapes is not None:
        names = chosen_names(parser, "--shapes", options.shapes, list(dict.fromkeys(cell.shape.name for cell in cells)))
        cells = [cell for cell in cells if cell.shape.name in names]
    if options.tokens is not None:
        tokens = numbers_of_tokens(parser, options.tokens)
        cells = [cell for cell in cells if cell.tokens in tokens]
    if not cells:
        parser.error(f"{path} has no such cell; leave out --shapes or --tokens")
    rows = check(cells, GraphTimer(), "cuda", options.cell_seconds, record["seed"])
    print(table(rows, COLUMNS))
    slower = [f"{row['shape']} {row['tokens']} ({row['change']})" for row in rows if row["verdict"] == "slower"]
    if slower:
        text = f"{len(slower)} of {len(rows)} cells are more than {ALLOWED:.0%} slower beside dense than in {path}"
        print(f"{text}: {', '.join(slower)}", file=sys.stderr)
    return 1 if slower else 0


if __name__ == "__main__":
    sys.exit(main())
