"""Figures of expert parallelism: links out of records of `moebius-tune --links`, the balance of ranks by Zipf's law,
scaling and predicted beside measured times of records of benchmarks.parallel, and predictions for many GPUs.

    python -m benchmarks.parallel_figures benchmarks/results/machine-4-h200.json \\
        benchmarks/results/parallel-4-h200.json --output docs/figures/

Files that show what nobody measured say "predicted" or "simulated" in their title.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks import theme
from benchmarks.parallel_cell import EXCHANGES, layer_of, predicted
from benchmarks.plot import source_line
from benchmarks.shapes import ALL_SHAPES
from moe_core.parallel import ExchangeSpec, MachineRecord, Placement, Zipf, simulate
from moe_core.parallel.machine import H200

_COLORS = (theme.OURS, *theme.PEERS)
_SHAPES = {name: ALL_SHAPES[name] for name in ("gptoss120b", "qwen3", "mixtral", "dsv3", "glm45air")}
#: How names of series without CUDA graphs end.
_EAGER = ", eager"
#: What tells rows of a record apart.
_CELL = ("shape", "tokens", "mode", "rows", "what")
_LAW = "Simulated, not measured: experts drawn by Zipf's law in random order, 8192 tokens"
_EXPONENTS = tuple(number / 5 for number in range(7))
#: Experts, top-k and ranks of the panels of balance.
_BALANCED = ((128, 8, 4), (128, 8, 16), (256, 8, 64))
#: GPUs and tokens of each for which is predicted, and the law of their routing.
_GPUS, _TOKENS, _PREDICTED_LAW = tuple(2**power for power in range(1, 12)), 4096, Zipf(0.6)


class Case(NamedTuple):
    """Which placement: its name, and spare places of a rank, None = linear."""

    name: str
    spare: int | None


CASES = (
    Case("linear", None),
    Case("balanced", 0),
    Case("balanced, one spare place", 1),
)


def draw_links(records: Sequence[MachineRecord]) -> Any:
    """GB/s against bytes of every kind of message, and the line of the fit, a panel for each record."""
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(len(records), 1, figsize=(theme.WIDTH, 3.9 * len(records)), squeeze=False)
    rates: dict[str, float] = {}
    for panel, record in zip(panels.flat, records, strict=True):
        kinds = list(dict.fromkeys((one.kind, one.backend, one.where) for one in record.timings))
        for number, (kind, backend, where) in enumerate(kinds):
            own = sorted(
                (one.bytes, one.gb_s)
                for one in record.timings
                if (one.kind, one.backend, one.where) == (kind, backend, where)
            )
            color, name = _COLORS[number % len(_COLORS)], f"{kind}, {backend}{', hosts' if where == 'network' else ''}"
            rates[name] = max(rates.get(name, 0), *(rate for _, rate in own))
            label = f"{name}: {rates[name]:.0f} GB/s"
            panel.plot(*zip(*own, strict=True), theme.MARKERS[number % len(theme.MARKERS)], color=color, label=label)
            link = record.machine.network if where == "network" else dict(record.machine.measured).get(kind)
            if link is not None:
                sizes = np.geomspace(own[0][0], own[-1][0], 60)
                panel.plot(sizes, [size / link.us(size) / 1e3 for size in sizes], "-", linewidth=1, color=color)
        panel.set(xscale="log", yscale="log", xlabel="bytes that a rank sends", ylabel="GB/s of a rank")
        panel.set_title(f"{record.timings[0].ranks} × {record.provenance['gpu']}")
        panel.grid(True)
        panel.legend(loc="lower right")
    best, least = (choose(rates, key=lambda name: rates[name]) for choose in (max, min))
    message = f"Messages between GPUs: up to {rates[best]:.0f} GB/s ({best}), {rates[least]:.0f} for {least}"
    return theme.finish(
        figure, message, ["Points: measured. Lines: fitted latency, bandwidth.", *map(_origin, records)]
    )


def _origin(record: MachineRecord) -> str:
    origin = record.provenance
    versions = ", ".join(f"{name} {version}" for name, version in origin["versions"].items() if name != "kernels")
    return f"{origin['gpu']}, {versions}, commit {origin['commit'][:10]}, {origin['date']}"


@functools.cache
def _counts(exponent: float, experts: int, top_k: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows of experts from two halves of one draw: what was counted, and what comes then."""
    known, next_ones = np.split(Zipf(exponent).ids(16384, top_k, experts), 2)
    return np.bincount(known.reshape(-1), minlength=experts), np.bincount(next_ones.reshape(-1), minlength=experts)


@functools.cache
def balance(experts: int, top_k: int, ranks: int, case: Case) -> tuple[float, ...]:
    """Mean over maximum of ranks' rows by exponent, the placement being computed from other tokens of the same law."""
    found = []
    for exponent in _EXPONENTS:
        counted, coming = _counts(exponent, experts, top_k)
        placement = Placement.linear(experts, ranks)
        if case.spare is not None:
            placement = Placement.balanced(counted, ranks, -(-experts // ranks) + case.spare)
        found.append(placement.balancedness(coming))
    return tuple(found)


def draw_balance() -> Any:
    """Efficiency against the exponent of Zipf's law, a panel for each number of experts and ranks."""
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, len(_BALANCED), figsize=(theme.WIDTH, 3.6), sharey=True)
    for panel, (experts, top_k, ranks) in zip(panels.flat, _BALANCED, strict=True):
        for number, case in enumerate(CASES):
            values = [100 * value for value in balance(experts, top_k, ranks, case)]
            panel.plot(_EXPONENTS, values, f"{theme.MARKERS[number]}-", color=_COLORS[number], label=case.name)
        panel.set_title(f"{ranks} GPUs\n{experts} experts", fontsize=theme.SMALL)
        panel.set(xlabel="exponent", ylim=(0, 104))
        theme.compact(panel, (0, 0.4, 0.8, 1.2))
        panel.grid(True)
    panels.flat[0].set_ylabel("% of the throughput")
    figure.legend(*panels.flat[0].get_legend_handles_labels(), ncols=3, loc="lower center", bbox_to_anchor=(0.5, 0.17))
    figure.supxlabel("\n", fontsize=theme.SMALL)  # room for the legend
    least = 100 * min(min(balance(*sizes, CASES[-1])) for sizes in _BALANCED)
    message = f"Uneven experts: one spare place on each GPU keeps {least:.0f} % of the throughput or more"
    return theme.finish(figure, message, ["Mean over maximum of ranks' rows. Exponent 0: uniform.", f"{_LAW}."])


def pairs(record: dict[str, Any], machine: Any) -> dict[str, list[tuple[float, float]]]:
    """(measured, predicted) microseconds of every row, by mode; graphs where there are any."""
    found: dict[str, list[tuple[float, float]]] = {}
    for row in record["rows"]:
        if "error" in row or row["what"] != "forward" or row["shape"] not in _SHAPES or row["mode"] not in EXCHANGES:
            continue
        name = f"{row['mode']}, {'CUDA graph' if 'graph_us' in row else 'eager'}"
        found.setdefault(name, []).append((row.get("graph_us", row["us"]), predicted(row, record["ranks"], machine)))
    return found


def latest(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The records without rows of cells that a later one has, too."""
    known: set[Any] = set()
    found = []
    for record in reversed(records):
        names = {id(row): (record["ranks"], *(row[name] for name in _CELL)) for row in record["rows"]}
        found.append(record | {"rows": [row for row in record["rows"] if names[id(row)] not in known]})
        known |= set(names.values())
    return found[::-1]


def draw_scaling(records: Sequence[dict[str, Any]]) -> Any:
    """Measured scaling against tokens of a GPU for every mode, a panel for each model. Later records come last."""
    from matplotlib import pyplot

    found: dict[str, dict[str, dict[int, float]]] = {}
    for record in latest(records):
        for row in record["rows"]:
            if "error" not in row and row["what"] == "forward" and row["rows"] == "tokens":
                own = found.setdefault(row["shape"], {}).setdefault(row["mode"], {})
                own[row["tokens"]] = 100 * row.get("graph_scaling", row["scaling"])
    names = [name for name in _SHAPES if name in found]
    modes = [mode for mode in EXCHANGES if any(mode in found[name] for name in names)]
    lines = len(names) // 2 + 1
    figure, panels = pyplot.subplots(lines, 2, figsize=(theme.WIDTH, 1.9 * lines + 1), squeeze=False)
    handles: dict[str, Any] = {}
    for panel, name in zip(panels.flat, names, strict=False):
        for number, mode in enumerate(modes):
            own = sorted(found[name].get(mode, {}).items())
            tokens, scaling = [one for one, _ in own], [one for _, one in own]
            look: dict[str, Any] = {"color": _COLORS[number % len(_COLORS)], "linewidth": 2.2 if mode == "peer" else 1}
            style = f"{theme.MARKERS[number % len(theme.MARKERS)]}-"
            (handles[mode],) = panel.plot(tokens, scaling, style, label=mode, zorder=3 if mode == "peer" else 2, **look)
        panel.axhline(100, color=theme.INK, linewidth=1, linestyle="--")
        panel.set(title=name, xscale="log", ylim=(0, None))
        theme.compact(panel, sorted({token for own in found[name].values() for token in own} & {1, 16, 128, 4096}))
        panel.grid(True)
    for panel in list(panels.flat)[len(names) :]:
        panel.axis("off")
    panels.flat[-1].legend(handles.values(), handles, loc="center left", borderaxespad=0)
    cells = {(name, tokens) for name in names for own in found[name].values() for tokens in own}
    best = [max((own[tokens], mode) for mode, own in found[name].items() if tokens in own) for name, tokens in cells]
    first = sum(mode.startswith("peer") for _, mode in best)
    ranks = max(record["ranks"] for record in records)
    notes = [
        f"Time of one GPU with as many tokens as each, over the time of {ranks}, in %, against tokens of a GPU.",
        f"Above 100 %: small batches wait for weights, and each of {ranks} GPUs reads a share of them, once for all.",
        source_line(records),
    ]
    message = f"{ranks} GPUs: peers scale best in {first} of {len(best)} cells, up to {max(best)[0]:.0f} %"
    return theme.finish(figure, message, notes)


def draw_predicted(records: Sequence[dict[str, Any]], machine: Any, about: str) -> Any:
    """Predicted over measured times, 1 being a perfect model; eager rows hollow. Later records come last."""
    from matplotlib import pyplot

    figure, panel = pyplot.subplots(figsize=(theme.WIDTH, 4.6))
    series: dict[str, list[tuple[float, float]]] = {}
    for record in latest(records):
        for name, own in pairs(record, machine).items():
            series.setdefault(name, []).extend(own)
    for number, (name, own) in enumerate(sorted(series.items(), key=lambda one: one[0].endswith(_EAGER))):
        look: dict[str, Any] = {"markerfacecolor": "none", "markersize": 6} if name.endswith(_EAGER) else {}
        values = [(measured, predicted / measured) for measured, predicted in own]
        style, color = theme.MARKERS[number % len(theme.MARKERS)], _COLORS[number % len(_COLORS)]
        panel.plot(*zip(*values, strict=True), style, label=name, color=color, **look)
    within = _spread(series, eager=False)
    panel.axhspan(*within, color=theme.PEERS[1], alpha=0.12, linewidth=0)
    panel.axhline(1, color=theme.INK, linewidth=1, linestyle="--")
    panel.set(
        xscale="log", xlabel="measured, µs", ylabel="predicted over measured", ylim=(0, max(1.3, within[1] + 0.1))
    )
    panel.grid(True)
    panel.legend(ncols=2, loc="upper center", bbox_to_anchor=(0.45, -0.2))
    low, high = (f"{100 * share:.0f}" for share in within)
    notes = [source_line(records), f"Links of the prediction: {about}."]
    if late := [
        measured - predicted for name in series if name.endswith(_EAGER) for measured, predicted in series[name]
    ]:
        factor = 1 / _spread(series, eager=True)[0]
        notes[:0] = [
            f"Hollow: eager calls, up to {factor:.1f} times as long as predicted. The model leaves out the host, "
            f"which adds up to {max(late) / 1e3:.1f} ms; do not plan eager calls by it."
        ]
    return theme.finish(figure, f"In CUDA graphs, predictions are {low} to {high} % of what was measured", notes)


def _spread(series: dict[str, list[tuple[float, float]]], eager: bool) -> tuple[float, float]:
    """The smallest and the largest predicted over measured time of eager series, or of all others."""
    chosen = [own for name, own in series.items() if name.endswith(_EAGER) == eager] or list(series.values())
    shares = [predicted / measured for own in chosen for measured, predicted in own]
    return min(shares), max(shares)


@functools.cache
def predictions(name: str) -> tuple[tuple[int, float], ...]:
    """(GPUs, efficiency) of a shape with a spare place on each, replicas beyond as many GPUs as experts."""
    shape, found = _SHAPES[name], []
    load = _PREDICTED_LAW.load(shape.top_k, shape.num_experts)
    for ranks in _GPUS:
        each = min(shape.num_experts, -(-shape.num_experts // ranks) + 1)
        placement = Placement.balanced(load, ranks, each)
        spec = ExchangeSpec("all_to_all")
        one = simulate(layer_of(shape), _PREDICTED_LAW, _TOKENS, placement, H200, spec)
        found.append((ranks, one.efficiency))
    return tuple(found)


def draw_scale() -> Any:
    """Predicted efficiency against the number of GPUs, names at the ends of their lines."""
    from matplotlib import pyplot

    figure, panel = pyplot.subplots(figsize=(theme.WIDTH, 4.2))
    for number, name in enumerate(_SHAPES):
        ranks, efficiency = zip(*predictions(name), strict=True)
        values = [100 * value for value in efficiency]
        panel.plot(ranks, values, f"{theme.MARKERS[number]}--", color=_COLORS[number])
        panel.text(ranks[-1] * 1.2, values[-1], name, color=_COLORS[number], va="center", fontsize=theme.SMALL)
    panel.axvline(H200.domain, color=theme.INK, linewidth=0.8, linestyle=":")
    panel.text(H200.domain * 1.1, 104, "more than one host", fontsize=theme.SMALL)
    panel.set(xscale="log", xlabel="GPUs that share the experts", ylabel="% of as many single GPUs", ylim=(0, 112))
    theme.compact(panel, _GPUS[::2])
    panel.grid(True)
    notes = [
        f"Predicted, not measured: H200, {H200.nvlink.bandwidth:.0f} GB/s of NVLink, 45 GB/s of assumed network, "
        f"{_TOKENS} tokens of each GPU, Zipf exponent {_PREDICTED_LAW.exponent}, all_to_all, a spare place, no "
        "overlap.",
        "More GPUs than experts hold replicas of them, so these parts of the lines hold for inference only.",
    ]
    return theme.finish(figure, "Predicted: beyond one host, the network decides", notes)


def plot(machines: Sequence[Path], records: Sequence[Path], output: Path, kind: str = "svg") -> list[Path]:
    """Write all figures into a folder; returns the files. machines: records of links, the first of which predicts."""
    known = [MachineRecord.load(path) for path in machines]
    measured = [json.loads(path.read_text()) for path in records]
    output.mkdir(parents=True, exist_ok=True)
    machine, about = H200, "moe_core.parallel.machine.H200"
    if known:
        machine, about = known[0].machine, f"measured, {machines[0].name}"
    written = []
    with theme.drawing(kind):
        figures = {"parallel-links": draw_links(known)} if known else {}
        figures |= {"parallel-balance": draw_balance(), "parallel-scale": draw_scale()}
        figures["parallel-scaling"] = draw_scaling(measured)
        figures["parallel-predicted"] = draw_predicted(measured, machine, about)
        for name, figure in figures.items():
            written.append(output / f"{name}.{kind}")
            theme.save(figure, written[-1])
    return written


def main(arguments: Sequence[str] | None = None) -> int:
    """Draw the figures of the named records: of `moebius-tune --links`, and of benchmarks.parallel."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("records", nargs="+", type=Path, metavar="RECORD")
    parser.add_argument("--output", type=Path, required=True, help="folder of the figures")
    parser.add_argument("--format", choices=("svg", "png"), default="svg")
    options = parser.parse_args(arguments)
    machines = [path for path in options.records if "timings" in json.loads(path.read_text())]
    others = [path for path in options.records if path not in machines]
    if not others:
        parser.error("a record of benchmarks.parallel must be named, for what is predicted beside it")
    print("\n".join(map(str, plot(machines, others, options.output, options.format))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
