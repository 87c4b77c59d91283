"""Tokens per second of the MoE layers of Qwen3-30B-A3B and gpt-oss-120b inside transformers, prefill and decode.

    python -m benchmarks.models.inference --output build/models.json
    python -m benchmarks.models.inference --models qwen3-30b-a3b --tokens 1 --implementations moebius,grouped_mm

Some layers with random weights of the real sizes, under every experts implementation that transformers knows: parity
of the first layer comes first, then eager calls by turns, and replays of CUDA graphs by turns.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

from benchmarks.draws import SEED
from benchmarks.models.blocks import MODELS, Blocks, Model
from benchmarks.options import chosen_names, numbers_of_tokens
from benchmarks.problem import relative_error
from benchmarks.provenance import provenance
from benchmarks.record import command, reason_of, table, write_record
from benchmarks.timing import EagerTimer, GraphTimer, free_memory, medians, paired_ratio, paired_spread

SCHEMA = 1
#: Ours first; `eager` is what the model's own code does, an expert after the other.
IMPLEMENTATIONS = ("moebius", "grouped_mm", "eager", "batched_mm", "sonicmoe", "deepgemm")
#: Implementations round to bf16 in different places.
TOLERANCE = 2e-2
#: It copies the weights of every slot.
_MOST_BATCHED_TOKENS = 1
COLUMNS = {
    "model": "model", "phase": "phase", "tokens": "tokens", "mode": "mode", "implementation": "experts",
    "us_per_layer": "us per layer", "tokens_per_s": "tokens/s of all layers", "over": "moebius / it",
    "spread": "spread", "error": "error",
}  # fmt: skip


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Options from the command line; exits with a message that names the fix where they make no sense."""
    names = {"models": MODELS, "implementations": IMPLEMENTATIONS}
    parser = command(__doc__, **names, tokens="4096,1,64", layers=4, seconds=1.0, seed=SEED)
    found = parser.parse_args(arguments)
    implementations = chosen_names(parser, "--implementations", found.implementations, IMPLEMENTATIONS)
    if "moebius" not in implementations:
        parser.error("--implementations must have moebius, which the others are compared with")
    if found.layers < 1 or not found.seconds > 0:
        parser.error(f"--layers and --seconds must be positive, got {found.layers} and {found.seconds}")
    found.models = [MODELS[name] for name in chosen_names(parser, "--models", found.models, list(MODELS))]
    found.tokens = numbers_of_tokens(parser, found.tokens)
    found.implementations = [name for name in IMPLEMENTATIONS if name in implementations]
    return found


def runnable(
    blocks: Blocks, x: torch.Tensor, options: argparse.Namespace
) -> tuple[dict[str, Callable[[], torch.Tensor]], dict[str, float], dict[str, str]]:
    """By implementation: what is timed, its error to ours, and why it is not timed.

    The first layer alone is compared: the routers of later ones read what was rounded, and may choose other experts.
    """
    calls: dict[str, Callable[[], torch.Tensor]] = {}
    errors: dict[str, float] = {}
    reasons: dict[str, str] = {}

    def call(name: str) -> torch.Tensor:
        blocks.use(name)
        return blocks(x)

    def first(name: str) -> torch.Tensor:
        blocks.use(name)
        return blocks.first(x)

    ours = first("moebius")
    for name in options.implementations:
        try:
            if name == "batched_mm" and x.shape[1] > _MOST_BATCHED_TOKENS:
                raise ValueError(f"copies the weights of every slot; timed up to {_MOST_BATCHED_TOKENS} tokens")
            error = relative_error(first(name), ours.float())
            if not error < TOLERANCE:
                raise ValueError(f"parity is red: error {error:.3g}, at most {TOLERANCE:g} is allowed")
        except Exception as error:  # whatever an implementation raises is the reason that it has no figure
            reasons[name] = reason_of(error)
            continue
        calls[name], errors[name] = functools.partial(call, name), error
    return calls, errors, reasons


def capturable(
    calls: dict[str, Callable[[], Any]], timer: Any, reasons: dict[str, str]
) -> dict[str, Callable[[], Any]]:
    """Those that a CUDA graph can hold; the others get their reason."""
    found = {}
    for name, call in calls.items():
        if name == "eager":
            reasons[f"{name} graph"] = "reads on the host which experts have tokens"
            continue
        try:
            timer.capture(call)
        except Exception as error:
            reasons[f"{name} graph"] = reason_of(error)
            torch.cuda.synchronize()
            continue
        found[name] = call
    return found


def cell(
    model: Model, blocks: Blocks, tokens: int, options: argparse.Namespace, timers: tuple[Any, Any]
) -> list[dict[str, Any]]:
    """The rows of one model and number of tokens: one per implementation, eager and as a graph."""
    eager_timer, graph_timer = timers
    parameter = next(blocks.parameters())
    generator = torch.Generator(parameter.device).manual_seed(options.seed + tokens)
    size = (1, tokens, model.sizes["hidden_size"])
    x = torch.randn(size, generator=generator, device=parameter.device, dtype=parameter.dtype)
    calls, errors, reasons = runnable(blocks, x, options)
    rows = []
    for mode, timer in (("eager", eager_timer), ("graph", graph_timer)):
        chosen = calls if mode == "eager" else capturable(calls, timer, reasons)
        rounds = timer.rounds(chosen, seconds=options.seconds)
        for name, microseconds in medians(rounds).items():
            per_layer = microseconds / options.layers
            rows.append(
                {
                    "model": model.name,
                    "phase": "decode" if tokens <= 256 else "prefill",
                    "tokens": tokens,
                    "mode": mode,
                    "implementation": name,
                    "us_per_layer": per_layer,
                    "tokens_per_s": tokens / (per_layer * model.layers) * 1e6,
                    "over": paired_ratio(rounds, "moebius", name),
                    "spread": paired_spread(rounds, "moebius", name),
                    "error": errors[name],
                }
            )
    where = {"model": model.name, "tokens": tokens}
    return rows + [{**where, "implementation": name, "not_timed": reason} for name, reason in reasons.items()]


def run(options: argparse.Namespace, timers: tuple[Any, Any], device: str) -> dict[str, Any]:
    """The record of a run, written after every cell where an output is named."""
    record: dict[str, Any] = {"schema": SCHEMA, "provenance": provenance("benchmarks.models.inference")}
    record |= {"seed": options.seed, "layers": options.layers, "rows": []}
    for model in options.models:
        blocks = Blocks(model, options.layers, device, options.seed)
        for tokens in options.tokens:
            with torch.no_grad():
                rows = cell(model, blocks, tokens, options, timers)
            record["rows"] += rows
            print(show(rows), file=sys.stderr, flush=True)
            free_memory()
            write_record(options.output, record)
        del blocks
        free_memory()
    return record


def show(rows: list[dict[str, Any]]) -> str:
    """The table, and what has no figure."""
    timed = [row for row in rows if "us_per_layer" in row]
    lacking = [row for row in rows if "not_timed" in row]
    lines = [f"{row['model']} {row['tokens']} {row['implementation']}: {row['not_timed']}" for row in lacking]
    return "\n".join([table(timed, COLUMNS), *lines])


def main(arguments: Sequence[str] | None = None) -> int:
    """Run and print; 1 where ours was not timed."""
    options = parse(arguments)
    record = run(options, (EagerTimer(), GraphTimer()), "cuda")
    print(show(record["rows"]))
    failed = [row for row in record["rows"] if "not_timed" in row and row["implementation"].startswith("moebius")]
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
