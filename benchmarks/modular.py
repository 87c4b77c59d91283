"""The modular kernel's forward beside the composed op of the same weights, from given ids and weights, in torch.

    python -m benchmarks.modular --output record.json

Parity comes first: both outputs must be equal bit by bit, or nothing is timed. Then graphs of ten calls each are
replayed by turns, which of the two begins changing from turn to turn: `ratio` is the median of the ratios of
neighbours, which a clock that changes slowly does not move.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

import moe_torch
from benchmarks.draws import SEED
from benchmarks.provenance import provenance
from benchmarks.record import table
from benchmarks.shapes import SHAPES, TOKENS, Shape
from benchmarks.timing import GraphTimer
from benchmarks.weights import draw_weights
from moe_core.specs.moe import MoESpec
from moe_core.specs.operands import ExpertWeights, TopK
from moe_torch.modular import FusedMoEModularKernel, MoEPrepareAndFinalizeNoEP, TritonExperts, Workspaces

SCHEMA = 1
#: Calls of a graph, and turns in which each of the two graphs is replayed once.
CALLS, TURNS = 10, 200
COLUMNS = {"shape": "shape", "tokens": "tokens", "composed_us": "composed", "modular_us": "modular", "ratio": "ratio"}
Call = Callable[[], torch.Tensor]


def draw_calls(shape: Shape, weights: ExpertWeights, tokens: int) -> tuple[Call, Call]:
    """The composed op and the modular kernel of the same bf16 layer on the same tokens."""
    device = weights.down.device
    generator = torch.Generator(device).manual_seed(SEED + tokens)
    x = torch.randn(tokens, shape.d_model, device=device, generator=generator).bfloat16()
    logits = torch.randn(tokens, shape.num_experts, device=device, generator=generator)
    chosen, ids = logits.softmax(-1).topk(shape.top_k)
    ids = ids.int()
    spec = MoESpec(shape.activation, weight_layout="out_in")
    kernel = FusedMoEModularKernel(MoEPrepareAndFinalizeNoEP(), TritonExperts(), workspaces=Workspaces())
    return (
        lambda: moe_torch.moe(x, weights, TopK(ids, chosen), spec).output,
        lambda: kernel(x, weights.gate_up, weights.down, chosen, ids),
    )


def replay_by_turns(one: Call, two: Call) -> tuple[list[float], list[float]]:
    """Microseconds per call of both, turn by turn."""
    timer, times = GraphTimer(), ([], [])
    graphs = [timer.capture(lambda call=call: [call() for _ in range(CALLS)]) for call in (one, two)]
    for turn in range(TURNS):
        for which in ((0, 1), (1, 0))[turn % 2]:
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            graphs[which].replay()
            end.record()
            torch.cuda.synchronize()
            times[which].append(begin.elapsed_time(end) * 1e3 / CALLS)
    return times


def measure(
    shape: Shape, weights: ExpertWeights, tokens: int, by_turns: Callable[[Call, Call], Any] = replay_by_turns
) -> dict[str, Any]:
    """The figures of one cell; exits where parity is red."""
    composed, modular = draw_calls(shape, weights, tokens)
    with torch.no_grad():
        if not torch.equal(composed(), modular()):
            sys.exit(f"parity is red for {shape.name} {tokens}: the outputs differ; nothing was timed")
        first, second = by_turns(composed, modular)
    return {
        "shape": shape.name,
        "tokens": tokens,
        "composed_us": statistics.median(first),
        "modular_us": statistics.median(second),
        "ratio": statistics.median(b / a for a, b in zip(first, second, strict=True)),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", default=",".join(map(str, TOKENS)), help="numbers of tokens (default: %(default)s)")
    parser.add_argument("--output", type=Path, help="write the record here")
    options = parser.parse_args(arguments)
    shape = SHAPES["qwen3"]
    weights = draw_weights(shape, torch.Generator("cuda").manual_seed(SEED))
    rows = [measure(shape, weights, int(tokens)) for tokens in options.tokens.split(",")]
    print(table(rows, COLUMNS))
    if options.output is not None:
        record = {"schema": SCHEMA, "provenance": provenance("benchmarks.modular"), "seed": SEED, "rows": rows}
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps(record, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
