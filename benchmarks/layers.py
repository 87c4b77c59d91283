"""What the layers cost: their host time over the composed op, and transformers' experts on Moebius against grouped_mm.

    python -m benchmarks.layers --output benchmarks/results/layers.json

The transformers part times Qwen3-30B-A3B's MoE block in bf16 by CUDA-graph replay with a flushed L2, and checks first
that both implementations agree.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import moe_torch
import moe_torch.transformers
from benchmarks.provenance import provenance
from benchmarks.timing import GraphTimer
from moe_core.layers.spec import HUGGING_FACE

_TOKENS = (1, 64, 1024, 4096)
_CALLS, _TURNS = 30, 100


def host_times(functions: dict[str, Callable[[], Any]]) -> dict[str, float]:
    """Microseconds of the host's share of a call of each function: the best of many short turns, taken by turns.

    A turn is short enough for the device's queue never to fill, and waits for it before the next.
    """
    best = dict.fromkeys(functions, float("inf"))
    for _ in range(_TURNS):
        for name, function in functions.items():
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(_CALLS):
                function()
            best[name] = min(best[name], (time.perf_counter() - start) / _CALLS * 1e6)
    torch.cuda.synchronize()
    return best


def layer_rows() -> list[dict[str, Any]]:
    """Host time of a small layer and of the op it calls."""
    layer = moe_torch.MoE(256, 128, 8, 2, device="cuda", dtype=torch.bfloat16)
    weights = layer.experts
    experts = moe_torch.ExpertWeights(weights.gate_up, weights.down)
    routing = moe_torch.RouterWeights(layer.router.weight)
    spec = layer.spec.moe_spec(HUGGING_FACE)
    rows = []
    for shape in ((16, 256), (2, 8, 256)):
        x = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
        flat = x.reshape(-1, 256)
        times = host_times(
            {
                "op_us": lambda flat=flat: moe_torch.moe(flat, experts, routing, spec),
                "layer_us": lambda x=x: layer(x),
            }
        )
        rows.append(
            {"what": "host time", "x": list(shape), **times, "layer_over_op": times["layer_us"] / times["op_us"]}
        )
    return rows


def blocks() -> dict[str, Any]:
    """transformers' Qwen3-30B-A3B MoE block with equal weights, by experts implementation."""
    configuration = importlib.import_module("transformers.models.qwen3_moe.configuration_qwen3_moe")
    modeling = importlib.import_module("transformers.models.qwen3_moe.modeling_qwen3_moe")
    made: dict[str, Any] = {}
    for name in ("grouped_mm", "moebius"):
        config = configuration.Qwen3MoeConfig(
            hidden_size=2048, moe_intermediate_size=768, num_experts=128, num_experts_per_tok=8, norm_topk_prob=True
        )
        config._experts_implementation = name
        with torch.device("cuda"):
            block = modeling.Qwen3MoeSparseMoeBlock(config).to(torch.bfloat16).eval().requires_grad_(False)
        made[name] = block
    for parameter in made["grouped_mm"].parameters():
        parameter.normal_(std=parameter.shape[-1] ** -0.5)
    made["moebius"].load_state_dict(made["grouped_mm"].state_dict())
    return made


def transformers_rows(timer: GraphTimer) -> list[dict[str, Any]]:
    """Time of the whole block under both implementations."""
    moe_torch.transformers.register()
    made, rows = blocks(), []
    for tokens in _TOKENS:
        x = torch.randn(1, tokens, 2048, device="cuda", dtype=torch.bfloat16)

        def output(name: str, x: torch.Tensor = x) -> torch.Tensor:
            result = made[name](x)
            return result[0] if isinstance(result, tuple) else result

        ours, theirs = output("moebius").float(), output("grouped_mm").float()
        error = float((ours - theirs).norm() / theirs.norm())
        if not error < 2e-2:
            sys.exit(f"parity is red at {tokens} tokens: error {error}; nothing was timed")
        row: dict[str, Any] = {"what": "transformers qwen3_moe block", "tokens": tokens, "error": error}
        for name in made:
            row[f"{name}_us"] = timer.time(lambda name=name: output(name))
        row["moebius_over_grouped_mm"] = row["moebius_us"] / row["grouped_mm_us"]
        rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    with torch.no_grad():
        rows = layer_rows() + transformers_rows(GraphTimer())
    record = {"provenance": provenance("benchmarks.layers"), "rows": rows}
    text = json.dumps(record, indent=1) + "\n"
    if options.output:
        options.output.write_text(text)
    print(text)


if __name__ == "__main__":
    main()
