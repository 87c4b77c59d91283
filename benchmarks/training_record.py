"""Records of benchmarks.training: SonicMoE's recorded figures, ratios, columns; described in benchmarks/README.md."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

#: Raised when the meaning of a field changes.
TRAINING_SCHEMA = 2
_FIGURES = Path(__file__).parent / "sonicmoe_h200.json"
#: Field -> heading of the table, in order.
TRAINING_COLUMNS = {
    "shape": "shape", "tokens": "tokens", "active_experts": "active", "busiest_expert_tokens": "busiest",
    "torch_us": "torch", "forward_us": "of it forward", "backward_us": "backward", "torch_device_us": "torch device",
    "jax_device_us": "jax device", "jax_over_torch": "jax / torch", "jax_callbacks": "callbacks",
    "dense_us": "dense", "over_dense": "/ dense", "sonicmoe_over_dense": "SonicMoE / dense",
    "over_sonicmoe": "/ SonicMoE", "wanted_over_dense": "wanted / dense", "grouped_mm_us": "grouped_mm",
    "over_grouped_mm": "/ grouped_mm", "ragged_dot_us": "ragged_dot",
    "sustained_us": "sustained", "sustained_over_dense": "/ dense, sustained", "mj_per_token": "mJ per token",
    "over_best_peer": "/ best peer", "kept_bytes_per_token": "kept B/token",
    "sonicmoe_kept_bytes_per_token": "SonicMoE's", "peak_bytes_per_token": "peak B/token",
}  # fmt: skip


def read_sonicmoe_figures() -> dict[str, Any]:
    """Recorded figures of SonicMoE and of its dense products by shape and number of tokens."""
    return json.loads(_FIGURES.read_text())["microseconds"]


def add_training_ratios(row: dict[str, Any], figures: dict[str, Any]) -> None:
    """What follows from the figures of one row, as far as they are there.

    backward_us is what a step takes beyond its forward; sonicmoe_over_dense SonicMoE's time over the dense products of
    its run: this one where it was timed, else the one that was recorded earlier.
    """

    def divide(name: str, above: str, below: str) -> None:
        if above in row and below in row:
            row[name] = row[above] / row[below]

    recorded = figures.get(row["shape"], {}).get(str(row["tokens"]))
    if recorded is not None:
        row["wanted_over_dense"] = recorded["wanted_over_dense"]
        if "sonicmoe_us" not in row:
            row["sonicmoe_us"], row["sonicmoe_forward_us"] = recorded["step_us"], recorded["forward_us"]
            row["sonicmoe_over_dense"] = recorded["step_us"] / recorded["dense_us"]
    if "over_sonicmoe" in row:
        divide("sonicmoe_over_dense", "sonicmoe_us", "dense_us")
    if "torch_us" in row and "forward_us" in row:
        row["backward_us"] = row["torch_us"] - row["forward_us"]
    divide("jax_over_torch", "jax_device_us", "torch_device_us")
    peers = [row[f"{name}_us"] for name in ("grouped_mm", "sonicmoe") if f"over_{name}" in row]
    if peers and "torch_us" in row:
        row["over_best_peer"] = row["torch_us"] / min(peers)
