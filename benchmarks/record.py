"""Records: what a run leaves behind, and its table. The schema is described in benchmarks/README.md."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

#: Raised when the meaning of a field changes.
SCHEMA = 4
#: Schemas whose plotted fields mean what they mean now.
PLOTTED_SCHEMAS = (2, 3, SCHEMA)
#: Times within this part of each other are a tie.
TIE = 0.02
#: The fastest streaming seen on an H200 (its datasheet says 4.8 TB/s).
STREAMING_BYTES_PER_US = 4.5e6
#: How far above vLLM's experts and our routing a forward may lie.
_VLLM_FACTOR = 1.25
_FIGURES = Path(__file__).parent / "vllm_h200.json"
#: Field -> heading of the table, in order.
COLUMNS = {
    "shape": "shape", "weight_layout": "layout", "dtype": "dtype", "routing": "routing", "tokens": "tokens",
    "active_experts": "active", "torch_us": "torch",
    "routing_us": "of it routing", "torch_device_us": "torch device", "jax_device_us": "jax device",
    "jax_over_torch": "jax / torch", "jax_callbacks": "callbacks", "triton_kernels_us": "triton_kernels",
    "over_triton_kernels": "/ triton_kernels", "over_triton_kernels_best": "/ its better layout",
    "sonicmoe_us": "SonicMoE", "over_sonicmoe": "/ SonicMoE", "over_sonicmoe_experts": "/ its experts alone",
    "flashinfer_us": "FlashInfer", "over_flashinfer": "/ FlashInfer",
    "over_flashinfer_experts": "/ its experts alone", "over_deepgemm": "/ DeepGEMM",
    "over_transformers": "/ transformers",
    "grouped_mm_us": "grouped_mm", "grouped_mm_compiled_us": "compiled", "ragged_dot_us": "ragged_dot",
    "tokamax_us": "tokamax", "batch_invariant_us": "batch invariant", "bound_streaming_us": "stream bound",
    "dense_us": "dense bound", "over_dense": "/ dense", "bound_fraction": "of the bound",
    "sustained_us": "sustained", "sustained_over_dense": "/ dense, sustained",
    "sustained_over_triton_kernels": "/ triton_kernels, sustained", "mj_per_token": "mJ per token",
    "over_best_peer": "/ best peer", "over_balanced": "/ balanced", "vllm_us": "vllm", "over_allowed": "over 1.25x",
    "scratch_over_allowed": "scratch / allowed",
}  # fmt: skip
#: Peers measured as torch_us is: from logits, by graph replay.
GRAPH_TIMED = (
    "triton_kernels", "triton_kernels_turned", "grouped_mm", "grouped_mm_compiled", "transformers", "sonicmoe",
    "flashinfer", "deepgemm",
)  # fmt: skip
#: What options mean that several commands have.
_MEANINGS = {
    "cells": "what is measured", "cell_seconds": "replays of a cell", "experts": "of a layer", "layers": "with weights",
    "length": "of a sequence, or ops of a chain", "limit": "seconds of one way", "mode": "nearest, up or down",
    "peers": "or `none`", "seconds": "of calls by turns", "tokens": "numbers of them", "width": "of tokens and experts",
    "widths": "d_model and d_ff of Qwen3's layer, and of gpt-oss's",
}  # fmt: skip


def command(description: str | None, **defaults: Any) -> argparse.ArgumentParser:
    """A parser with `--output` and an option for each default; several of one are text with commas between them."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in defaults.items():
        value = default if isinstance(default, str | float | int) else ",".join(map(str, default))
        text = f"{_MEANINGS.get(name, '')} (default: %(default)s)"
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value, help=text)
    parser.add_argument("--output", type=Path, help="write the record here")
    return parser


def read_vllm_figures() -> dict[str, Any]:
    """Recorded figures of vLLM by shape and number of tokens."""
    return json.loads(_FIGURES.read_text())["microseconds"]


def add_ratios(row: dict[str, Any], vllm_figures: dict[str, Any]) -> None:
    """What follows from the figures of one row.

    bound_us is the larger of the two bounds and bound_fraction its share of our time; over_best_peer our time over the
    best peer's that was measured alike, over_triton_kernels the paired median of replays by turns; over_allowed our
    time over 1.25 * (vLLM's experts alone + our routing), where vLLM's were recorded, which they are for balanced
    routing.
    """
    row["bound_us"] = max(row["bound_streaming_us"], row["dense_us"])
    row["bound_fraction"] = row["bound_us"] / row["torch_us"]
    row["jax_over_torch"] = row["jax_device_us"] / row["torch_device_us"]
    row["scratch_over_allowed"] = row["scratch_bytes"] / row["scratch_allowed_bytes"]
    peers = [row[f"{name}_us"] for name in GRAPH_TIMED if f"{name}_us" in row]
    if peers:
        row["over_best_peer"] = row["torch_us"] / min(peers)
    if turns := row.get("over_by_turns"):
        row["over_triton_kernels"] = turns["ours"]
        if "over_triton_kernels_turned" in row:
            row["over_triton_kernels_best"] = max(turns["ours"], row["over_triton_kernels_turned"])
    recorded = vllm_figures.get(row["shape"], {}).get(str(row["tokens"]))
    if recorded is not None and row["routing"] == "balanced":
        row["vllm_us"], row["vllm_active_experts"] = recorded["us"], recorded["active"]
        row["over_allowed"] = row["torch_us"] / (_VLLM_FACTOR * (recorded["us"] + row["routing_us"]))


def add_over_balanced(row: dict[str, Any], rows: Iterable[dict[str, Any]]) -> None:
    """The time of a row over that of balanced routing, where `rows` has the same cell so routed."""
    for other in rows:
        if [other[field] for field in ("shape", "routing", "tokens")] == [row["shape"], "balanced", row["tokens"]]:
            row["over_balanced"] = row["torch_us"] / other["torch_us"]


def table(rows: list[dict[str, Any]], columns: Mapping[str, str] = COLUMNS) -> str:
    """The rows as a Markdown table; a column that no row has is left out, what has no figure is a dash."""
    shown = {name: heading for name, heading in columns.items() if any(name in row for row in rows)}
    lines = ["| " + " | ".join(shown.values()) + " |", "|" + " --- |" * len(shown)]
    lines += ["| " + " | ".join(_cell(row.get(name, "-")) for name in shown) + " |" for row in rows]
    return "\n".join(lines)


def standing(ratio: float) -> str:
    """`faster`, `tie` or `slower`, for our time over another's."""
    if abs(ratio - 1) <= TIE:
        return "tie"
    return "faster" if ratio < 1 else "slower"


def standings(rows: Iterable[Mapping[str, Any]], field: str = "over_triton_kernels") -> str:
    """In how many cells ours is faster, in how many it is a tie or slower; "" where no row has the field."""
    found = [standing(row[field]) for row in rows if field in row]
    if not found:
        return ""
    counts = ", ".join(f"{name} in {found.count(name)}" for name in ("faster", "tie", "slower"))
    return f"ours beside {field.removeprefix('over_')}: {counts} of {len(found)} cells (a tie: within {TIE:.0%})"


def reasons(rows: list[dict[str, Any]]) -> str:
    """Why peers have no figure, one line per peer and reason."""
    places: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        for peer, reason in row["not_timed"].items():
            place = " ".join(str(row[field]) for field in ("shape", "scheme", "routing", "tokens") if field in row)
            places.setdefault((peer, reason), []).append(place)
    return "\n".join(f"{peer}: {reason} ({', '.join(cells)})" for (peer, reason), cells in places.items())


def write_record(output: Path | None, record: Mapping[str, Any]) -> None:
    """Write a record where an output is named."""
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(json.dumps(record, indent=1) + "\n")


def reason_of(error: Exception) -> str:
    """Why something has no figure: the kind of error and its first line."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:300]}"


def _cell(value: Any) -> str:
    if not isinstance(value, float):
        return str(value)
    return f"{value:.2f}" if value < 10 else f"{value:.0f}"
