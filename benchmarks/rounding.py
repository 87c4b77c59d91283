"""One bf16 training step of a layer with token rounding beside the same step without, in torch: what rounding gains.

    python -m benchmarks.rounding --shapes qwen3,gptoss120b --tokens 4096,16384 --output build/rounding.jsonl

Both steps go from x through the router to every gradient, replayed by turns from CUDA graphs; the layer computes
something else with rounding (docs/user/routing.md), so this compares times and nothing else. `moe` is the composed op,
`stages` the same step as router, route and experts, which is how a layer with rounding runs. Each cell is one line of
JSON. Parity comes first: with rounding, the counts must be multiples of the tile, and the step must find the same with
and without a limit of rows, else the cell is refused.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

import moe_torch
from benchmarks.options import chosen_names, numbers_of_tokens
from benchmarks.provenance import provenance
from benchmarks.record import command
from benchmarks.shapes import ALL_SHAPES
from benchmarks.timing import GraphTimer, free_memory, medians, paired_ratio, peak_bytes
from benchmarks.training_problem import TrainingProblem, arguments, draw_parameters, draw_training_problem, torch_step
from moe_core.specs import TokenRounding

_SHAPES, _TOKENS = ("qwen3", "olmoe", "glm45air", "gptoss120b"), (4096, 16384)
_HEIGHTS = (64, 128, 192)
#: Both steps round to bf16 several times, and may choose other tiles.
TOLERANCE = 1e-2


def staged_step(
    problem: TrainingProblem, rounding: TokenRounding | None, *, limited: bool = True
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """(output, ids, gradients by name) of router, route or route_rounded, and experts. limited: memory for the rows
    that there can be."""
    leaves = problem.leaves()
    x, experts, routing = arguments(leaves)
    spec, rule = problem.spec, problem.shape.router
    logits = moe_torch.router(x, routing.weight, bias=routing.bias, spec=spec.logits_spec())
    limit = None
    if rounding is None:
        ids, weights = moe_torch.route(logits, rule)
    else:
        ids, weights, _ = moe_torch.route_rounded(logits, rule, rounding)
        limit = rounding.row_limit(problem.shape.top_k) if limited else None
    given = dataclasses.replace(spec, router=None, row_limit=limit)
    output = moe_torch.moe(x, experts, moe_torch.TopK(ids, weights), given).output
    gradients = torch.autograd.grad(output, list(leaves.values()), problem.gradient)
    return output.detach(), ids, dict(zip(leaves, gradients, strict=True))


def padded(counts: torch.Tensor, height: int) -> float:
    """The share of the rows of tiles of a height that hold no token."""
    rows = int(((counts + height - 1) // height * height).sum())
    return 1 - int(counts.sum()) / max(1, rows)


def tokens_per_expert(ids: torch.Tensor, num_experts: int) -> torch.Tensor:
    return torch.bincount(ids[ids >= 0].long(), minlength=num_experts)


def check(problem: TrainingProblem, rounding: TokenRounding, row: dict[str, Any]) -> bool:
    """Add the facts of a cell's routing to its row; False, with the reason, where parity is red."""
    experts = problem.shape.num_experts
    plain = tokens_per_expert(staged_step(problem, None)[1], experts)
    output, ids, gradients = staged_step(problem, rounding)
    rounded = tokens_per_expert(ids, experts)
    row["rows"] = {"without": int(plain.sum()), "with": int(rounded.sum())}
    row["padded"] = {
        name: {str(height): round(padded(counts, height), 4) for height in _HEIGHTS}
        for name, counts in (("without", plain), ("with", rounded))
    }
    row["changed_pairs"] = round(float((rounded - plain).abs().sum() / plain.sum()), 4)
    whole, _, others = staged_step(problem, rounding, limited=False)
    pairs = {"output": (output, whole)} | {name: (one, others[name]) for name, one in gradients.items()}
    row["differing_bits"] = [name for name, (one, other) in pairs.items() if not torch.equal(one, other)]
    errors = {
        name: float((one.float() - other.float()).norm() / other.float().norm()) for name, (one, other) in pairs.items()
    }
    red = [f"{name} {error:.3g}" for name, error in errors.items() if not error < TOLERANCE]
    if red or (rounded % rounding.tile).any():
        row["refused"] = f"parity is red: {', '.join(red) or 'counts are no multiples of the tile'}"
        return False
    return True


def measure(problem: TrainingProblem, rounding: TokenRounding, row: dict[str, Any], seconds: float) -> None:
    """Add times and memory to a row."""
    steps: dict[str, Callable[[], Any]] = {
        "moe": lambda: torch_step(problem),
        "stages": lambda: staged_step(problem, None),
        "rounded": lambda: staged_step(problem, rounding),
    }
    row["peak_mb"] = {name: round(peak_bytes(step)[1] / 1e6, 1) for name, step in steps.items()}
    rounds = GraphTimer().rounds(steps, repeats=60, seconds=seconds)
    row["us"] = {name: round(value, 1) for name, value in medians(rounds).items()}
    row["rounded_over"] = {name: paired_ratio(rounds, "rounded", name) for name in ("moe", "stages")}
    logits = torch.randn(problem.tokens, problem.shape.num_experts, device="cuda")
    rule = problem.shape.router
    routings = {
        "route": lambda: moe_torch.route(logits, rule),
        "route_rounded": lambda: moe_torch.route_rounded(logits, rule, rounding),
    }
    row["routing_us"] = {
        name: round(value, 1) for name, value in medians(GraphTimer().rounds(routings, seconds=0.5)).items()
    }


def main(given: Sequence[str] | None = None) -> int:
    parser = command(__doc__, shapes=_SHAPES, tokens=_TOKENS, tile=128, mode="nearest", seconds=2.0)
    parser.add_argument("--candidates", type=int, help="of each token (default: twice top_k)")
    found = parser.parse_args(given)
    shapes = chosen_names(parser, "--shapes", found.shapes, list(ALL_SHAPES))
    rounding = TokenRounding(found.tile, found.mode, found.candidates)
    red = False

    def write(row: dict[str, Any]) -> None:
        print(json.dumps(row), flush=True)
        if found.output is not None:
            with found.output.open("a") as file:
                file.write(json.dumps(row) + "\n")

    write(provenance("benchmarks.rounding"))
    for name in shapes:
        parameters = draw_parameters(ALL_SHAPES[name], torch.device("cuda"))
        for tokens in numbers_of_tokens(parser, found.tokens):
            row: dict[str, Any] = {"shape": name, "tokens": tokens, "tile": found.tile, "mode": found.mode}
            problem = draw_training_problem(ALL_SHAPES[name], tokens, parameters)
            if check(problem, rounding, row):
                measure(problem, rounding, row, found.seconds)
            red = red or "refused" in row
            write(row)
            del problem
            free_memory()
        del parameters
        free_memory()
    return int(red)


if __name__ == "__main__":
    sys.exit(main())
