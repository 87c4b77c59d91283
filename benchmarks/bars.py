"""Bars out of records: how much longer each peer takes than Moebius, and what a training step keeps per token.

    python -m benchmarks.figures bars benchmarks/results/forward-h200.json \\
        benchmarks/results/training-h200.json --output docs/figures/

`speedup.svg` has a mark for every cell of a peer, that is a shape and a number of tokens, and a bar to their geometric
mean; both times of a cell are of one run and one clock. `kept-bytes.svg` has a pair of bars for every shape.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import theme
from benchmarks.libraries.recorded import read_recorded
from benchmarks.plot import Row, source_line


class Peer(NamedTuple):
    """Somebody else's implementation: its name, what is compared, and its time over ours in a row, None = not timed."""

    name: str
    about: str
    ratio: Callable[[Row], float | None]


def by_turns(row: Row) -> float | None:
    """Of interleaved replays, so that the chip's temperature counts for both; with its better layout, if both ran."""
    if "over_triton_kernels_best" in row:
        return 1 / row["over_triton_kernels_best"]
    times = row.get("by_turns_us", {})
    return times["triton_kernels"] / times["ours"] if "triton_kernels" in times else None


def grouped_mm(row: Row) -> float | None:
    """Of the faster one: compiled, or eager."""
    found = [row[name] for name in ("grouped_mm_us", "grouped_mm_compiled_us") if name in row]
    return min(found) / row["torch_us"] if found else None


def device(field: str) -> Callable[[Row], float | None]:
    """A peer in JAX: device times on both sides."""
    return lambda row: row[field] / row["jax_device_us"] if field in row else None


def vllm(row: Row) -> float | None:
    """vLLM's experts alone, of a recorded run, over our whole forward, where both read as many experts."""
    if "vllm_us" not in row or row["vllm_active_experts"] != row["active_experts"]:
        return None
    return row["vllm_us"] / row["torch_us"]


def library(peer: str) -> Callable[[Row], float | None]:
    """A library by turns with ours, in this run or in that of `recorded_h200.json`."""
    recorded = read_recorded()

    def ratio(row: Row) -> float | None:
        if f"over_{peer}" in row:
            return 1 / row[f"over_{peer}"]
        cell = recorded[row["mode"]].get(peer, {}).get(row["shape"], {}).get(str(row["tokens"]))
        return None if cell is None else 1 / cell["over"]

    return ratio


FORWARD = (
    Peer("triton_kernels", "interleaved replays", by_turns),
    Peer("vLLM", "its experts alone, separate run", vllm),
    Peer("FlashInfer", "interleaved, separate run", library("flashinfer")),
    Peer("SonicMoE", "interleaved, separate run", library("sonicmoe")),
    Peer("torch grouped_mm", "transformers' experts", grouped_mm),
    Peer("tokamax", "ragged product, JAX", device("tokamax_us")),
    Peer("jax.lax.ragged_dot", "JAX", device("ragged_dot_us")),
)
STEP = (
    Peer("SonicMoE", "interleaved, separate run", library("sonicmoe")),
    Peer("torch grouped_mm", "transformers' experts", grouped_mm),
)
PARTS = {"forward": FORWARD, "step": STEP}
TITLES = {"forward": "Forward", "step": "Training step"}


def ratios(records: Sequence[dict[str, Any]], mode: str, peer: Peer) -> list[float]:
    """A peer's time over ours for every cell; of records that share a cell, the first that has the peer counts."""
    found: dict[tuple[Any, ...], float] = {}
    for record in records:
        for row in record["rows"]:
            ratio = peer.ratio(row) if row["mode"] == mode and row["routing"] in ("balanced", "router") else None
            if ratio is not None:
                found.setdefault((row["shape"], row["tokens"]), ratio)
    return list(found.values())


def mean(values: Sequence[float]) -> float:
    """The geometric mean."""
    return math.exp(sum(map(math.log, values)) / len(values))


#: A peer that is slower than this on average is named below the panels: its bar would hide the others' differences.
_FAR = 4.0


def draw_speedups(records: Sequence[dict[str, Any]], source: str) -> Any:
    """A panel for forwards and one for training steps; peers without a cell are left out."""
    from matplotlib import pyplot

    parts = {mode: [(peer, ratios(records, mode, peer)) for peer in peers] for mode, peers in PARTS.items()}
    parts = {mode: [pair for pair in pairs if pair[1]] for mode, pairs in parts.items()}
    far = [(mode, *pair) for mode, pairs in parts.items() for pair in pairs if mean(pair[1]) > _FAR]
    parts = {mode: [pair for pair in pairs if mean(pair[1]) <= _FAR] for mode, pairs in parts.items()}
    parts = {mode: pairs for mode, pairs in parts.items() if pairs}
    notes = ["Bars: geometric means. Marks: cells, both sides in one run.", *map(_far_line, far), source]
    sizes = [len(pairs) for pairs in parts.values()]
    height = 0.42 * sum(sizes) + 0.4 * len(sizes) + 0.7 + 0.17 * len(notes)
    shared: dict[str, Any] = {"sharex": True, "squeeze": False, "height_ratios": sizes}
    figure, panels = pyplot.subplots(len(parts), 1, figsize=(theme.WIDTH, height), **shared)
    most = 1.0
    for panel, (mode, pairs) in zip(panels.flat, parts.items(), strict=True):
        for place, (_, values) in enumerate(pairs):
            middle, most = mean(values), max(most, *values)
            panel.barh(place, middle - 1, left=1, height=0.56, color=theme.OURS, alpha=0.4, linewidth=0)
            panel.plot(values, [place] * len(values), "|", color=theme.OURS, markersize=9, markeredgewidth=1.2)
            panel.text(max(values) * 1.03, place, f"{middle:.2f}×", va="center", fontsize=10, fontweight="bold")
        panel.set_yticks(range(len(pairs)), [peer.name for peer, _ in pairs], fontsize=10)
        panel.invert_yaxis()
        panel.axvline(1, color=theme.INK, linewidth=1)
        panel.set_title(TITLES[mode])
        panel.set_xscale("log")
        panel.tick_params(axis="y", length=0)
        panel.spines["left"].set_visible(False)
    last, ticks = panels.flat[-1], [tick for tick in (1, 1.25, 1.5, 2, 3, 4, 6, 8) if tick <= most]
    last.set_xlim(0.88, most * 1.25)
    last.set_xticks(ticks, [f"{tick:g}×" for tick in ticks], fontsize=10)
    last.set_xticks([], minor=True)
    return theme.finish(figure, "Time of others over the time of Moebius, bf16", notes)


def _far_line(part: tuple[str, Peer, list[float]]) -> str:
    mode, peer, values = part
    return f"{TITLES[mode]}, {peer.name}: {min(values):.0f}× to {max(values):.0f}×."


def draw_kept(records: Sequence[dict[str, Any]], source: str) -> Any:
    """What a step keeps between forward and backward, of ours and of SonicMoE's formula, in KiB per token."""
    from matplotlib import pyplot

    rows = {row["shape"]: row for record in records for row in record["rows"] if "kept_bytes_per_token" in row}
    figure, panel = pyplot.subplots(figsize=(theme.WIDTH, 0.5 * len(rows) + 1.6))
    series = (
        ("kept_bytes_per_token", "Moebius", theme.OURS),
        ("sonicmoe_kept_bytes_per_token", "SonicMoE, by its formula", theme.PEERS[0]),
    )
    for offset, (field, label, color) in zip((-0.19, 0.19), series, strict=True):
        values = [row[field] / 1024 for row in rows.values()]
        places = [place + offset for place in range(len(rows))]
        panel.barh(places, values, height=0.36, color=color, label=label, linewidth=0)
        for place, value in zip(places, values, strict=True):
            panel.text(value + 1, place, f"{value:.1f}", va="center", fontsize=theme.SMALL)
    panel.set_yticks(range(len(rows)), list(rows), fontsize=10)
    panel.tick_params(axis="y", length=0)
    panel.spines[["left", "bottom"]].set_visible(False)
    panel.set_xticks([])
    panel.invert_yaxis()
    panel.legend(loc="lower right")
    apart = max(row[series[0][0]] / row[series[1][0]] - 1 for row in rows.values())
    message = f"A training step keeps at most {apart:.1%} more than SonicMoE counts"
    return theme.finish(figure, message, ["KiB per token from forward to backward, x included.", source])


def plot(paths: Sequence[Path], output: Path, kind: str = "svg") -> list[Path]:
    """Write both figures of some records into a folder; returns the files."""
    records = [json.loads(path.read_text()) for path in paths]
    output.mkdir(parents=True, exist_ok=True)
    kept = [record for record in records if any("kept_bytes_per_token" in row for row in record["rows"])]
    written = []
    with theme.drawing(kind):
        figures = {"speedup": draw_speedups(records, source_line(records))}
        if kept:
            figures["kept-bytes"] = draw_kept(kept, source_line(kept))
        for name, figure in figures.items():
            written.append(output / f"{name}.{kind}")
            theme.save(figure, written[-1])
    return written
