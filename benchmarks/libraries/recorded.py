"""Figures of libraries that are not installed, recorded earlier by turns with ours (`recorded_h200.json`).

They are scaled by the dense products of both runs, where both have them: another chip, or a warmer one, is slower for
all. With few tokens there are none, and the figures stand as they were.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_FIGURES = Path(__file__).with_name("recorded_h200.json")


def read_recorded() -> dict[str, Any]:
    """By mode (`forward`, `step`), peer, shape and number of tokens: microseconds of the peer, ours and dense ones."""
    return json.loads(_FIGURES.read_text())["microseconds"]


def add_recorded(row: dict[str, Any], recorded: dict[str, Any]) -> None:
    """Add `recorded_us`, `recorded_scale` and `over_recorded` of every peer that has no figure of this run.

    All were taken from bf16 `out_in` weights with balanced routing.
    """
    alike = row.get("routing") in ("balanced", "router") and row.get("weight_layout", "out_in") == "out_in"
    if not alike or row.get("dtype", "bfloat16") != "bfloat16" or "torch_us" not in row:
        return
    found: dict[str, dict[str, float]] = {"recorded_us": {}, "recorded_scale": {}, "over_recorded": {}}
    for peer, shapes in recorded[row["mode"]].items():
        figures = shapes.get(row["shape"], {}).get(str(row["tokens"]))
        if figures is None or f"over_{peer}" in row:
            continue
        scale = row["dense_us"] / figures["dense_us"] if {"dense_us"} <= row.keys() & figures.keys() else 1.0
        found["recorded_scale"][peer], found["recorded_us"][peer] = scale, figures["us"] * scale
        found["over_recorded"][peer] = row["torch_us"] / found["recorded_us"][peer]
    if found["recorded_us"]:
        row |= found
