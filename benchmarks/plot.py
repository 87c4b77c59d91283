"""Plots of records of benchmarks.forward: time, and fraction of the bound, against the number of tokens.

    python -m benchmarks.plot benchmarks/results/forward-peers-h200.json --output docs/figures/

One file per routing and quantity (`time-balanced.svg`, `fraction-balanced.svg`), a panel per shape, and a roofline
(`roofline-balanced.svg`): FLOPs per second against FLOPs per byte of weights, all shapes together. Records may hold
different cells; a cell that two of them hold is refused, since figures compare within one run only. Equal records give
equal files. Needs matplotlib (extra `bench`).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import theme
from benchmarks.record import PLOTTED_SCHEMAS, STREAMING_BYTES_PER_US
from benchmarks.shapes import ALL_SHAPES

Row = dict[str, Any]


class Series(NamedTuple):
    """One line: the field it shows, its label, its colour and how it is drawn."""

    field: str
    label: str
    color: str
    style: str


SERIES = (
    Series("torch_us", "Moebius, from torch (JAX runs the same kernels)", theme.OURS, "o-"),
    Series("triton_kernels_us", "triton_kernels", theme.PEERS[0], "s-"),
    Series("grouped_mm_us", "torch grouped_mm", theme.PEERS[1], "^-"),
    Series("grouped_mm_compiled_us", "torch grouped_mm, compiled", theme.PEERS[5], "v-"),
    Series("ragged_dot_us", "jax.lax.ragged_dot (device time)", theme.PEERS[3], "D-"),
    Series("tokamax_us", "tokamax (device time)", theme.PEERS[4], "P-"),
)
BOUND = Series("bound_us", "bound: weight streaming or cuBLAS", theme.INK, "--")
#: Ours and the dense products of equal FLOPs.
_TIMES = ("torch_us", "dense_us")
_MARKERS = "os^vDP"
_PANEL_INCHES = (4.2, 3.2)
#: Room for the legend and the source below the panels.
_FOOT_INCHES = 0.9
QUANTITIES = {"time": "microseconds", "fraction": "fraction of the bound"}


def read_records(paths: Sequence[Path]) -> list[dict[str, Any]]:
    """The records of some files; raises ValueError for another schema and for a cell that two of them hold."""
    records, cells = [], {}
    for path in paths:
        record = json.loads(path.read_text())
        if record.get("schema") not in PLOTTED_SCHEMAS:
            wanted = " or ".join(map(str, PLOTTED_SCHEMAS))
            raise ValueError(
                f"{path} must be a record of schema {wanted}, got {record.get('schema')}; run benchmarks.forward again"
            )
        for row in record["rows"]:
            cell = (row["shape"], row["routing"], row["tokens"])
            if cell in cells:
                raise ValueError(f"{cell} must be in one record, it is in {cells[cell]} and {path}; leave one out")
            cells[cell] = path
        records.append(record)
    return records


def points(rows: Sequence[Row], series: Series, quantity: str) -> tuple[list[int], list[float]]:
    """(numbers of tokens, values) of one line, in the order of tokens; rows without the figure have no point."""
    found = sorted((row["tokens"], row) for row in rows if series.field in row)
    values = [row[series.field] if quantity == "time" else row["bound_us"] / row[series.field] for _, row in found]
    return [tokens for tokens, _ in found], values


def source_line(records: Sequence[dict[str, Any]]) -> str:
    """Where the figures come from: device, versions, commit and date of every record."""
    parts = []
    for record in records:
        origin = record["provenance"]
        versions = ", ".join(f"{name} {origin['versions'][name]}" for name in ("torch", "jax", "triton"))
        partial = ", partial" if record.get("partial") else ""
        parts.append(f"{origin['device']}, {versions}, commit {origin['commit'][:10]}, {origin['date']}{partial}")
    return "; ".join(parts)


def draw(rows: Sequence[Row], quantity: str, title: str, source: str) -> Any:
    """A figure with a panel per shape, in the order the shapes come in."""
    from matplotlib import pyplot

    shapes = list(dict.fromkeys(row["shape"] for row in rows))
    columns = min(3, len(shapes))
    lines = -(-len(shapes) // columns)
    height = _PANEL_INCHES[1] * lines + _FOOT_INCHES
    figure, panels = pyplot.subplots(lines, columns, figsize=(_PANEL_INCHES[0] * columns, height), squeeze=False)
    handles: dict[str, Any] = {}
    for panel, shape in zip(panels.flat, shapes, strict=False):
        mine = [row for row in rows if row["shape"] == shape]
        for series in (*SERIES, BOUND) if quantity == "time" else SERIES:
            tokens, values = points(mine, series, quantity)
            if tokens:
                look = {"color": series.color, "markersize": 4, "linewidth": 1.2}
                (handles[series.label],) = panel.plot(tokens, values, series.style, **look)
        counts = sorted({row["tokens"] for row in mine})
        panel.set(title=shape, xlabel="tokens", ylabel=QUANTITIES[quantity], xscale="log")
        panel.set_xticks(counts, [str(count) for count in counts], minor=False, fontsize=7)
        panel.set_xticks([], minor=True)
        panel.grid(True, alpha=0.3)
        if quantity == "time":
            panel.set_yscale("log")
        else:
            panel.set_ylim(0, max(1.05, panel.get_ylim()[1]))
            panel.axhline(1, color=theme.INK, linewidth=0.8, linestyle="--")
    for panel in list(panels.flat)[len(shapes) :]:
        panel.set_visible(False)
    figure.suptitle(title)
    figure.text(0.5, 0.06 / height, source, ha="center", fontsize=6)
    place = {"loc": "lower center", "bbox_to_anchor": (0.5, 0.2 / height), "fontsize": 8}
    figure.legend(list(handles.values()), list(handles), ncols=min(4, len(handles)), **place)
    figure.tight_layout(rect=(0, _FOOT_INCHES / height, 1, 1))
    pyplot.close(figure)
    return figure


def roofline_points(rows: Sequence[Row]) -> dict[str, tuple[list[float], list[float], list[float]]]:
    """Shape -> (FLOPs per byte of weights, TFLOP/s of ours, TFLOP/s of the dense products) in the order of tokens.

    The weights are those of the experts that have tokens; a row that does not say how many, or whose shape is unknown
    here, has no point.
    """
    found: dict[str, tuple[list[float], list[float], list[float]]] = {}
    for row in sorted(rows, key=lambda row: row["tokens"]):
        if row["shape"] not in ALL_SHAPES or not {"active_experts", "torch_us", "dense_us"} <= set(row):
            continue
        shape = ALL_SHAPES[row["shape"]]
        flops = shape.flops(row["tokens"])
        figures = (flops / shape.weight_bytes(row["active_experts"]), *(flops / row[k] / 1e6 for k in _TIMES))
        for values, figure in zip(found.setdefault(shape.name, ([], [], [])), figures, strict=True):
            values.append(figure)
    return found


def draw_roofline(found: dict[str, tuple[list[float], list[float], list[float]]], title: str, source: str) -> Any:
    """A figure of `roofline_points` below the two roofs: the memory's bandwidth and the fastest dense product."""
    from matplotlib import pyplot

    figure, panel = pyplot.subplots(figsize=(8.4, 5.4))
    compute = max(max(dense) for _, _, dense in found.values())
    ridge = compute / (STREAMING_BYTES_PER_US / 1e6)
    lowest = min(ridge, *(min(intensity) for intensity, _, _ in found.values()))
    highest = max(2 * ridge, *(max(intensity) for intensity, _, _ in found.values()))
    panel.plot(
        [lowest, ridge, highest], [lowest * compute / ridge, compute, compute], "--", color=theme.INK, linewidth=1
    )
    panel.text(ridge, compute * 1.06, f"fastest dense product: {compute:.0f} TFLOP/s", fontsize=7)
    panel.text(lowest, 1.8 * lowest * compute / ridge, f"weights at {STREAMING_BYTES_PER_US / 1e6} TB/s", fontsize=7)
    colors = (theme.OURS, *theme.PEERS)
    for number, (shape, (intensity, ours, _)) in enumerate(found.items()):
        color, marker = colors[number % len(colors)], _MARKERS[number % len(_MARKERS)]
        panel.plot(intensity, ours, f"{marker}-", color=color, label=shape, markersize=4)
    panel.set(title=title, xscale="log", yscale="log", xlabel="FLOPs per byte of the weights touched")
    panel.set_ylabel("TFLOP/s")
    panel.grid(True, alpha=0.3)
    panel.legend(loc="lower right", fontsize=8)
    figure.text(0.5, 0.01, source, ha="center", fontsize=6)
    figure.tight_layout(rect=(0, 0.03, 1, 1))
    pyplot.close(figure)
    return figure


def plot(paths: Sequence[Path], output: Path, kind: str = "svg") -> list[Path]:
    """Write every figure of some records into a folder; returns the files."""
    records = read_records(paths)
    rows = [row for record in records for row in record["rows"]]
    output.mkdir(parents=True, exist_ok=True)
    written, figures = [], {}
    with theme.drawing(kind):
        for routing in dict.fromkeys(row["routing"] for row in rows):
            mine = [row for row in rows if row["routing"] == routing]
            for quantity in QUANTITIES:
                title = f"MoE forward in bf16, from logits, {routing} routing: {QUANTITIES[quantity]}"
                figures[f"{quantity}-{routing}"] = draw(mine, quantity, title, source_line(records))
            found = roofline_points(mine)
            if found:
                title = f"MoE forward in bf16, from logits, {routing} routing: roofline"
                figures[f"roofline-{routing}"] = draw_roofline(found, title, source_line(records))
        for name, figure in figures.items():
            path = output / f"{name}.{kind}"
            theme.save(figure, path)
            written.append(path)
    return written


def main(arguments: Sequence[str] | None = None) -> int:
    """Plot; 2 with a message where the records cannot be plotted."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("records", nargs="+", type=Path, metavar="RECORD")
    parser.add_argument("--output", type=Path, required=True, help="folder of the figures")
    parser.add_argument("--format", choices=("svg", "png"), default="svg")
    options = parser.parse_args(arguments)
    try:
        written = plot(options.records, options.output, options.format)
    except ValueError as error:
        parser.error(str(error))
    print("\n".join(map(str, written)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
