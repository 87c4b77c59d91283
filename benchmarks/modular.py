"""The modular kernel's forward beside the composed op of the same weights, from given ids and weights, in torch.

    python -m benchmarks.modular --output record.json

Parity comes first: both outputs must be equal bit by bit, or nothing is timed. Then graphs of ten calls each are
replayed by turns after an L2 flush: `ratio` is the median of the ratios of rounds, which a clock that changes slowly
does not move.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

import moe_torch
from benchmarks.draws import SEED
from benchmarks.provenance import provenance
from benchmarks.record import command, table, write_record
from benchmarks.shapes import SHAPES, TOKENS, Shape
from benchmarks.timing import GraphTimer, medians, paired_ratio
from benchmarks.weights import draw_weights
from moe_core.specs.moe import MoESpec
from moe_core.specs.operands import ExpertWeights, TopK
from moe_torch.modular import FusedMoEModularKernel, MoEPrepareAndFinalizeNoEP, TritonExperts, Workspaces

SCHEMA = 1
#: Calls of a graph, and turns in which each of the two graphs is replayed once.
CALLS, TURNS, _SECONDS = 10, 200, 10.0
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


def measure(shape: Shape, weights: ExpertWeights, tokens: int, timer: Any) -> dict[str, Any]:
    """The figures of one cell; exits where parity is red."""
    composed, modular = draw_calls(shape, weights, tokens)
    with torch.no_grad():
        if not torch.equal(composed(), modular()):
            sys.exit(f"parity is red for {shape.name} {tokens}: the outputs differ; nothing was timed")
        chains = {"composed": lambda: [composed() for _ in range(CALLS)]}
        chains |= {"modular": lambda: [modular() for _ in range(CALLS)]}
        rounds = timer.rounds(chains, repeats=TURNS, seconds=_SECONDS)
    times = medians(rounds)
    return {
        "shape": shape.name,
        "tokens": tokens,
        "composed_us": times["composed"] / CALLS,
        "modular_us": times["modular"] / CALLS,
        "ratio": paired_ratio(rounds, "modular", "composed"),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = command(__doc__, tokens=TOKENS)
    options = parser.parse_args(arguments)
    shape = SHAPES["qwen3"]
    weights = draw_weights(shape, torch.Generator("cuda").manual_seed(SEED))
    timer = GraphTimer()
    rows = [measure(shape, weights, int(tokens), timer) for tokens in options.tokens.split(",")]
    print(table(rows, COLUMNS))
    if options.output is not None:
        record = {"schema": SCHEMA, "provenance": provenance("benchmarks.modular"), "seed": SEED, "rows": rows}
        write_record(options.output, record)
    return 0


if __name__ == "__main__":
    sys.exit(main())
