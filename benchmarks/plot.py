"""Plots of records of benchmarks.forward: time, and fraction of the bound, against the number of tokens.

    python -m benchmarks.figures plot benchmarks/results/forward-h200.json --output docs/figures/

One file per routing and quantity (`time-balanced.svg`, `fraction-balanced.svg`), a panel per shape, and a roofline
(`roofline-balanced.svg`): FLOPs per second against FLOPs per byte of weights, all shapes together. Records may hold
different cells; a cell that two of them hold is refused, since figures compare within one run only. Equal records give
equal files. Needs matplotlib (extra `bench`).
"""

from __future__ import annotations

import json
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
    Series("torch_us", "Moebius", theme.OURS, "o-"),
    Series("triton_kernels_us", "triton_kernels", theme.PEERS[0], "s-"),
    Series("grouped_mm_us", "torch grouped_mm", theme.PEERS[1], "^-"),
    Series("grouped_mm_compiled_us", "grouped_mm, compiled", theme.PEERS[5], "v-"),
    Series("ragged_dot_us", "jax ragged_dot", theme.PEERS[3], "D-"),
    Series("tokamax_us", "tokamax", theme.PEERS[4], "P-"),
)
_OURS = SERIES[0]
BOUND = Series("bound_us", "bound", theme.INK, "--")
#: Ours and the dense products of equal FLOPs.
_TIMES = ("torch_us", "dense_us")
QUANTITIES = ("time", "fraction")
_ABOUT = "Bound: reading the weights, or cuBLAS. JAX libraries: device time."


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
    """Where figures come from: device, versions, commit and date of one record, cards and dates of several."""
    origins = [record["provenance"] for record in records]
    if len(origins) > 1:
        days = sorted({origin["date"][:10] for origin in origins})
        devices = ", ".join(sorted({origin["device"] for origin in origins}))
        return f"{devices}; runs of {' to '.join(dict.fromkeys((days[0], days[-1])))}, in benchmarks/results."
    (origin,) = origins
    versions = ", ".join(f"{name} {origin['versions'][name]}" for name in ("torch", "jax", "triton"))
    partial = ", partial" if records[0].get("partial") else ""
    return f"{origin['device']}, {versions}, commit {origin['commit'][:10]}, {origin['date']}{partial}"


def message(rows: Sequence[Row], quantity: str) -> str:
    """What a figure of rows says, in figures."""
    if quantity == "fraction":
        shares = [row["bound_us"] / row[_OURS.field] for row in rows if _OURS.field in row]
        return f"Forwards of Moebius reach {min(shares):.2f} to {max(shares):.2f} of the bound"
    others = [one.field for one in SERIES[1:]]
    compared = [row for row in rows if _OURS.field in row and any(other in row for other in others)]
    first = sum(row[_OURS.field] <= min(row[other] for other in others if other in row) for row in compared)
    return f"Microseconds of a forward: Moebius is first in {first} of {len(compared)} cells"


def draw(rows: Sequence[Row], quantity: str, about: str, source: str) -> Any:
    """A figure with a panel per shape, two beside each other, in the order the shapes come in, and the legend last."""
    from matplotlib import pyplot

    shapes = list(dict.fromkeys(row["shape"] for row in rows))
    lines = len(shapes) // 2 + 1
    figure, panels = pyplot.subplots(lines, 2, figsize=(theme.WIDTH, 1.9 * lines + 0.8), squeeze=False)
    handles: dict[str, Any] = {}
    for panel, shape in zip(panels.flat, shapes, strict=False):
        mine = [row for row in rows if row["shape"] == shape]
        for series in (*reversed(SERIES), BOUND) if quantity == "time" else reversed(SERIES):
            tokens, values = points(mine, series, quantity)
            if tokens:
                look: dict[str, Any] = {"color": series.color, "markersize": 3, "linewidth": 1}
                look |= {"markersize": 4, "linewidth": 2.2} if series is _OURS else {}
                (handles[series.label],) = panel.plot(tokens, values, series.style, **look)
        panel.set(title=shape, xscale="log")
        theme.compact(panel, sorted({row["tokens"] for row in mine} & {1, 16, 256, 4096} or {mine[0]["tokens"]}))
        panel.grid(True)
        if quantity == "time":
            panel.set_yscale("log")
        else:
            panel.set_ylim(0, max(1.05, panel.get_ylim()[1]))
            panel.axhline(1, color=theme.INK, linewidth=0.8, linestyle="--")
    for panel in list(panels.flat)[len(shapes) :]:
        panel.axis("off")
    order = [one.label for one in (*SERIES, BOUND) if one.label in handles]
    panels.flat[-1].legend([handles[label] for label in order], order, loc="center left", borderaxespad=0)
    return theme.finish(figure, message(rows, quantity), [about, source])


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


def draw_roofline(found: dict[str, tuple[list[float], list[float], list[float]]], about: str, source: str) -> Any:
    """A figure of `roofline_points` below the two roofs: the memory's bandwidth and the fastest dense product."""
    from matplotlib import pyplot

    figure, panel = pyplot.subplots(figsize=(theme.WIDTH, 5.0))
    compute = max(max(dense) for _, _, dense in found.values())
    ridge = compute / (STREAMING_BYTES_PER_US / 1e6)
    lowest = min(ridge, *(min(intensity) for intensity, _, _ in found.values()))
    highest = max(2 * ridge, *(max(intensity) for intensity, _, _ in found.values()))
    roof = [lowest, ridge, highest], [lowest * compute / ridge, compute, compute]
    panel.plot(*roof, "--", color=theme.INK, linewidth=1)
    colors = (theme.OURS, *theme.PEERS)
    for number, (shape, (intensity, ours, _)) in enumerate(found.items()):
        panel.plot(intensity, ours, f"{theme.MARKERS[number]}-", color=colors[number], label=shape)
    panel.set(xscale="log", yscale="log", xlabel="FLOPs per byte of the weights touched", ylabel="TFLOP/s")
    panel.set_ylim(top=2.4 * compute)
    panel.text(
        highest, 1.12 * compute, f"fastest dense product, {compute:.0f} TFLOP/s", ha="right", fontsize=theme.SMALL
    )
    half = (lowest * ridge) ** 0.5
    place = {"ha": "right", "va": "bottom", "fontsize": theme.SMALL}
    panel.text(half * 0.8, half * compute / ridge, f"weights read at\n{STREAMING_BYTES_PER_US / 1e6} TB/s", **place)
    panel.grid(True)
    panel.legend(loc="lower right")
    shares = [max(ours) / compute for _, ours, _ in found.values()]
    return theme.finish(
        figure,
        f"Forwards run along the memory's roof, then reach {min(shares):.0%} to {max(shares):.0%} of dense products",
        [about, source],
    )


def plot(paths: Sequence[Path], output: Path, kind: str = "svg") -> list[Path]:
    """Write every figure of some records into a folder; returns the files."""
    records = read_records(paths)
    rows = [row for record in records for row in record["rows"]]
    output.mkdir(parents=True, exist_ok=True)
    written, figures = [], {}
    with theme.drawing(kind):
        for routing in dict.fromkeys(row["routing"] for row in rows):
            mine = [row for row in rows if row["routing"] == routing]
            about = f"bf16, from logits, {routing} routing, against tokens. {_ABOUT}"
            for quantity in QUANTITIES:
                figures[f"{quantity}-{routing}"] = draw(mine, quantity, about, source_line(records))
            found = roofline_points(mine)
            if found:
                about = f"bf16, from logits, {routing} routing. A line is a model from 1 token on."
                figures[f"roofline-{routing}"] = draw_roofline(found, about, source_line(records))
        for name, figure in figures.items():
            path = output / f"{name}.{kind}"
            theme.save(figure, path)
            written.append(path)
    return written
