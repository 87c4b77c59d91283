"""Whole bf16 forwards from logits with other heights of the sm90 family's row blocks, beside the built-in choice.

    python -m benchmarks.tiles --shapes gptoss120b,mixtral --tokens 4096,16384 --output record.json

Every combination of 128, 160 (swapped operands) and 192 rows in both products. The other fields are those of the
built-in choice, or else of the heuristics, where they have that height, and else as many stages as there is room for,
in groups of 4. All outputs must be equal bit by bit, or nothing of that cell is timed. Graphs are replayed by turns,
so that the chip's clock is the same for all. `moebius-tune` times products alone.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import sys
from collections.abc import Sequence
from typing import Any

import torch

from benchmarks.draws import SEED
from benchmarks.options import chosen_names, numbers_of_tokens
from benchmarks.problem import Problem, draw_problem
from benchmarks.provenance import provenance
from benchmarks.record import command, table, write_record
from benchmarks.shapes import ALL_SHAPES, SHAPES, Shape
from benchmarks.timing import GraphTimer, free_memory, medians, paired_ratio
from benchmarks.weights import draw_weights
from moe_core.base.arrays import ArraySpec
from moe_core.base.target import Target
from moe_core.ops.matmul.families import why_illegal
from moe_core.ops.matmul.problem import MatmulProblem
from moe_core.ops.matmul.sm90.plan import (
    SM90_BLOCK_M,
    SM90_STAGES,
    SM90_SWAPPED_BLOCK_M,
    SM90_TALL_BLOCK_M,
    SM90_TALL_STAGES,
    sm90_config,
)
from moe_core.ops.matmul.tile_choice import choose_tile, heuristic_tile
from moe_core.runtime.devices import target_of
from moe_core.specs.matmul import MatmulSpec
from moe_core.specs.operands import MatmulOperands
from moe_core.specs.routing import LayoutSpec
from moe_core.specs.tile import TileConfig
from moe_core.specs.tuning import Tuning

SCHEMA = 1
HEIGHTS = (SM90_BLOCK_M, SM90_SWAPPED_BLOCK_M, SM90_TALL_BLOCK_M)
#: Row blocks that share weights, of a height that nothing chooses, and its stages.
_GROUP_M = 4
_STAGES = {SM90_BLOCK_M: SM90_STAGES, SM90_SWAPPED_BLOCK_M: SM90_STAGES, SM90_TALL_BLOCK_M: SM90_TALL_STAGES}


def products(shape: Shape, tokens: int, target: Target) -> tuple[MatmulProblem, MatmulProblem]:
    """What the configurations of both products of a forward are chosen by."""
    layout = LayoutSpec(tokens, shape.top_k, shape.num_experts)
    x, hidden = ArraySpec((tokens, shape.d_model), "bfloat16"), ArraySpec((layout.capacity, shape.d_ff), "bfloat16")
    gate_up, down = (ArraySpec(size, "bfloat16") for size in shape.matrices())
    first = MatmulSpec(shape.weight_layout, "token", "row", shape.activation)
    second = MatmulSpec(shape.weight_layout, "row", "slot")
    return (
        MatmulProblem(MatmulOperands(x, gate_up), layout, first, target),
        MatmulProblem(MatmulOperands(hidden, down), layout, second, target),
    )


def of_height(height: int, own: TileConfig, problem: MatmulProblem) -> TileConfig:
    """A configuration with row blocks of that height. own: the built-in choice."""
    for config in (own, heuristic_tile(problem).config):
        if (config.family, config.block_m) == ("sm90", height):
            return config
    return sm90_config(problem, _STAGES[height], _GROUP_M, height)


def built_in(problem: MatmulProblem) -> TileConfig:
    """What a forward takes for a product."""
    choice = choose_tile(problem)
    assert choice is not None, "a GPU has tiles"
    return choice.config


def choices(shape: Shape, tokens: int, target: Target) -> tuple[tuple[TileConfig, TileConfig], dict[str, Tuning]]:
    """Both products' built-in configurations, and every legal combination of heights by name, `128, 192` for both
    products' in order."""
    problems = products(shape, tokens, target)
    first, second = (built_in(problem) for problem in problems)
    found: dict[str, Tuning] = {}
    for heights in itertools.product(HEIGHTS, repeat=2):
        configs = [
            of_height(height, own, problem)
            for own, problem, height in zip((first, second), problems, heights, strict=True)
        ]
        if not any(why_illegal(config, problem) for config, problem in zip(configs, problems, strict=True)):
            found[", ".join(map(str, heights))] = Tuning(matmul_1=configs[0], matmul_2=configs[1])
    return (first, second), found


def measure(problem: Problem, target: Target, timer: Any, seconds: float) -> dict[str, Any]:
    """The figures of one cell; exits where the bits of two outputs differ."""
    shape, tokens = problem.shape, problem.tokens
    own, tunings = choices(shape, tokens, target)
    specs = {"built in": problem.spec}
    specs |= {name: dataclasses.replace(problem.spec, tuning=tuning) for name, tuning in tunings.items()}
    forwards = {name: functools.partial(problem.torch_forward, spec) for name, spec in specs.items()}
    expected = forwards["built in"]().output
    for name, forward in forwards.items():
        if not torch.equal(forward().output, expected):
            sys.exit(f"parity is red for {shape.name} {tokens}: {name} rows change bits; nothing was timed")
    rounds = timer.rounds(forwards, seconds=seconds)
    return {
        "shape": shape.name,
        "tokens": tokens,
        "rows_per_expert": tokens * shape.top_k / shape.num_experts,
        "built_in_rows": [config.block_m if config.family == "sm90" else 0 for config in own],
        "us": medians(rounds),
        "over_built_in": {name: paired_ratio(rounds, name, "built in") for name in rounds},
    }


def show(rows: Sequence[dict[str, Any]]) -> str:
    """A line per cell: the built-in choice's time, and the others' over it."""
    flat = [
        {
            "cell": f"{row['shape']} {row['tokens']} ({row['rows_per_expert']:g})",
            "us": row["us"]["built in"],
            **{name: ratio for name, ratio in row["over_built_in"].items() if name != "built in"},
        }
        for row in rows
    ]
    names = dict.fromkeys(name for row in flat for name in row)
    return table(flat, {name: name for name in names} | {"cell": "shape, tokens (rows per expert)", "us": "built in"})


def main(arguments: Sequence[str] | None = None) -> int:
    parser = command(__doc__, shapes=SHAPES, tokens="1024,4096,16384", cell_seconds=2.0)
    options = parser.parse_args(arguments)
    shapes = [ALL_SHAPES[name] for name in chosen_names(parser, "--shapes", options.shapes, list(ALL_SHAPES))]
    tokens, timer, target = numbers_of_tokens(parser, options.tokens), GraphTimer(), target_of(("cuda", 0))
    rows: list[dict[str, Any]] = []
    record = {"schema": SCHEMA, "provenance": provenance("benchmarks.tiles"), "seed": SEED, "rows": rows}
    for shape in shapes:
        weights = draw_weights(shape, torch.Generator("cuda").manual_seed(SEED))
        for count in tokens:
            with torch.no_grad():
                problem = draw_problem(shape, "balanced", count, weights)
                rows.append(measure(problem, target, timer, options.cell_seconds))
            print(show(rows[-1:]).splitlines()[-1], file=sys.stderr, flush=True)
            write_record(options.output, record)
            del problem
            free_memory()
        del weights
        free_memory()
    print(show(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
