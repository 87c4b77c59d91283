"""Figures of expert parallelism: links out of records of `moebius-tune --links`, the balance of ranks by Zipf's law,
scaling and predicted beside measured times of records of benchmarks.parallel, and predictions for many GPUs.

    python -m benchmarks.parallel_figures benchmarks/results/machine-4-h200.json \\
        benchmarks/results/parallel-4-h200.json --output docs/figures/

Files that show what nobody measured say "predicted" or "simulated" in their title.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks import theme
from benchmarks.parallel_cell import EXCHANGES
from benchmarks.plot import source_line
from benchmarks.shapes import ALL_SHAPES, Shape
from moe_core.layers.spec import MoELayerSpec
from moe_core.parallel import ExchangeSpec, MachineRecord, Placement, Zipf, predict, simulate
from moe_core.parallel.machine import H200, machine_of

_COLORS = (theme.OURS, *theme.PEERS)
_MARKERS = "os^vDP"
_SHAPES = {name: ALL_SHAPES[name] for name in ("gptoss120b", "qwen3", "mixtral", "dsv3", "glm45air")}
#: What tells rows of a record apart.
_CELL = ("shape", "tokens", "mode", "rows", "what")
_LAW = "experts drawn by Zipf's law in random order, 8192 tokens"
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
    Case("balanced, no spare place", 0),
    Case("balanced, one spare place a rank", 1),
)


def layer_of(shape: Shape, experts: int | None = None) -> MoELayerSpec:
    """A shape as a layer of the cost model."""
    return MoELayerSpec(shape.d_model, shape.d_ff, experts or shape.num_experts, shape.top_k)


def draw_links(records: Sequence[MachineRecord]) -> Any:
    """GB/s against bytes of every kind of message, and the line of the fit, a panel for each record."""
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, len(records), figsize=(max(6.4, 4.6 * len(records)), 3.9), squeeze=False)
    for panel, record in zip(panels.flat, records, strict=True):
        kinds = list(dict.fromkeys((one.kind, one.backend, one.where) for one in record.timings))
        for number, (kind, backend, where) in enumerate(kinds):
            own = sorted(
                (one.bytes, one.gb_s)
                for one in record.timings
                if (one.kind, one.backend, one.where) == (kind, backend, where)
            )
            look: dict[str, Any] = {"color": _COLORS[number % len(_COLORS)], "markersize": 4}
            label = f"{kind}, {backend}{', between hosts' if where == 'network' else ''}"
            panel.plot(*zip(*own, strict=True), _MARKERS[number % len(_MARKERS)], label=label, **look)
            link = record.machine.network if where == "network" else dict(record.machine.measured).get(kind)
            if link is not None:
                sizes = np.geomspace(own[0][0], own[-1][0], 60)
                panel.plot(sizes, [size / link.us(size) / 1e3 for size in sizes], "-", linewidth=1, color=look["color"])
        ranks = record.timings[0].ranks
        panel.set(xscale="log", yscale="log", xlabel="bytes that a rank sends", ylabel="GB/s of a rank")
        panel.set_title(f"{ranks} x {record.provenance['gpu']}", fontsize=9)
        panel.grid(True, alpha=0.3)
        panel.legend(fontsize=7)
    lines = "; ".join(map(_origin, records))
    return _finished(figure, "Messages between ranks: measured (points), latency and bandwidth (lines)", lines)


def _origin(record: MachineRecord) -> str:
    origin = record.provenance
    versions = ", ".join(f"{name} {version}" for name, version in origin["versions"].items() if name != "kernels")
    return f"{origin['gpu']}, {versions}, commit {origin['commit'][:10]}, {origin['date']}"


@functools.cache
def balance(experts: int, top_k: int, ranks: int, case: Case) -> tuple[float, ...]:
    """Mean over maximum of ranks' rows by exponent, the placement being computed from other tokens of the same law."""
    found = []
    for exponent in _EXPONENTS:
        ids = Zipf(exponent).ids(16384, top_k, experts)
        # What was counted, and what comes then.
        counted, coming = (np.bincount(half.reshape(-1), minlength=experts) for half in np.split(ids, 2))
        placement = Placement.linear(experts, ranks)
        if case.spare is not None:
            placement = Placement.balanced(counted, ranks, -(-experts // ranks) + case.spare)
        found.append(placement.balancedness(coming))
    return tuple(found)


def draw_balance() -> Any:
    """Efficiency against the exponent of Zipf's law, a panel for each number of experts and ranks."""
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, len(_BALANCED), figsize=(10.4, 3.7), sharey=True)
    for panel, (experts, top_k, ranks) in zip(panels.flat, _BALANCED, strict=True):
        for number, case in enumerate(CASES):
            values = [100 * value for value in balance(experts, top_k, ranks, case)]
            look: dict[str, Any] = {"color": _COLORS[number], "markersize": 4, "linewidth": 1.2}
            panel.plot(_EXPONENTS, values, f"{_MARKERS[number]}-", label=case.name, **look)
        panel.set_title(f"{experts} experts, top {top_k}, {ranks} ranks", fontsize=9)
        panel.set(xlabel="exponent (0 = uniform)", ylim=(0, 104))
        panel.grid(True, alpha=0.3)
    panels.flat[0].set_ylabel("mean over maximum of ranks' rows, %")
    panels.flat[0].legend(fontsize=7, loc="lower left")
    return _finished(
        figure, "Simulated: what imbalance leaves of the ranks' throughput", f"Simulated, not measured: {_LAW}"
    )


def pairs(record: dict[str, Any], machine: Any) -> dict[str, list[tuple[float, float]]]:
    """(measured, predicted) microseconds of every row, by mode; graphs where there are any. One device's times are
    measured, of all experts and of a rank's, and what is predicted is the exchange."""
    found: dict[str, list[tuple[float, float]]] = {}
    for row in record["rows"]:
        if "error" in row or row["what"] != "forward" or row["shape"] not in _SHAPES or row["mode"] not in EXCHANGES:
            continue
        layer = layer_of(_SHAPES[row["shape"]], row["experts"])
        given = (row["alone_us"], row["experts_us"])
        spec = ExchangeSpec(rows=row["rows"], **EXCHANGES[row["mode"]])
        of_layer = dataclasses.replace(machine_of(machine), products=given)
        predicted = predict(layer, row["tokens"], record["ranks"], of_layer, spec)
        name = f"{row['mode']}, {'CUDA graph' if 'graph_us' in row else 'eager'}"
        found.setdefault(name, []).append((row.get("graph_us", row["us"]), predicted.us))
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
    figure, panels = pyplot.subplots(2, 3, figsize=(10.4, 6.0))
    for panel, name in zip(panels.flat, names, strict=False):
        for number, mode in enumerate(modes):
            look: dict[str, Any] = {"color": _COLORS[number % len(_COLORS)], "markersize": 4, "linewidth": 1.2}
            own = sorted(found[name].get(mode, {}).items())
            tokens, scaling = [one for one, _ in own], [one for _, one in own]
            panel.plot(tokens, scaling, f"{_MARKERS[number % len(_MARKERS)]}-", label=mode, **look)
        panel.axhline(100, color=theme.INK, linewidth=0.8, linestyle=":")
        panel.set_title(name, fontsize=9)
        panel.set(xscale="log", xlabel="tokens of a GPU", ylabel="scaling, %", ylim=(0, None))
        panel.grid(True, alpha=0.3)
    for panel in panels.flat[len(names) :]:
        panel.axis("off")
    panels.flat[-1].legend(*panels.flat[0].get_legend_handles_labels(), fontsize=8, loc="center")
    source = "\n".join(dict.fromkeys(source_line([record]) for record in records))
    title = "Forwards on several GPUs: the time of one GPU with as many tokens as each, over theirs"
    return _finished(figure, title, source)


def draw_predicted(records: Sequence[dict[str, Any]], machine: Any, about: str) -> Any:
    """Predicted against measured times, the diagonal being a perfect model. Later records come last."""
    from matplotlib import pyplot

    figure, panel = pyplot.subplots(figsize=(6.4, 5.2))
    series: dict[str, list[tuple[float, float]]] = {}
    for record in latest(records):
        for name, own in pairs(record, machine).items():
            series.setdefault(f"{name}, {record['ranks']} GPUs", []).extend(own)
    for number, (name, own) in enumerate(series.items()):
        look: dict[str, Any] = {"color": _COLORS[number % len(_COLORS)], "markersize": 5}
        panel.plot(*zip(*own, strict=True), _MARKERS[number % len(_MARKERS)], label=name, **look)
    values = [value for own in series.values() for pair in own for value in pair]
    ends = [0.8 * min(values), 1.25 * max(values)]
    panel.plot(ends, ends, "--", color=theme.INK, linewidth=1)
    panel.set(xscale="log", yscale="log", xlabel="measured, us", ylabel="predicted, us", xlim=ends, ylim=ends)
    panel.grid(True, alpha=0.3)
    panel.legend(fontsize=8)
    sources = dict.fromkeys(source_line([record]) for record in records)
    source = "\n".join([*sources, f"links of the prediction: {about}"])
    return _finished(figure, "Forwards of expert-parallel layers: predicted beside measured", source)


@functools.cache
def predictions(name: str) -> tuple[tuple[int, float], ...]:
    """(GPUs, efficiency) of a shape with a spare place on each, replicas beyond as many GPUs as experts."""
    shape, found = _SHAPES[name], []
    for ranks in _GPUS:
        each = min(shape.num_experts, -(-shape.num_experts // ranks) + 1)
        load = _PREDICTED_LAW.load(shape.top_k, shape.num_experts)
        placement = Placement.balanced(load, ranks, each)
        spec = ExchangeSpec("all_to_all")
        one = simulate(layer_of(shape), _PREDICTED_LAW, _TOKENS, placement, H200, spec)
        found.append((ranks, one.efficiency))
    return tuple(found)


def draw_scale() -> Any:
    """Predicted efficiency against the number of GPUs."""
    from matplotlib import pyplot

    figure, panel = pyplot.subplots(figsize=(8.4, 4.4))
    for number, name in enumerate(_SHAPES):
        ranks, efficiency = zip(*predictions(name), strict=True)
        look: dict[str, Any] = {"color": _COLORS[number], "markersize": 4, "linewidth": 1.2}
        panel.plot(ranks, [100 * value for value in efficiency], f"{_MARKERS[number]}--", label=name, **look)
    panel.axvline(H200.domain, color=theme.INK, linewidth=0.8, linestyle=":")
    panel.text(H200.domain * 1.06, 104, "hosts of 8", fontsize=7)
    panel.set(xscale="log", xlabel="GPUs that share the experts", ylabel="% of as many single GPUs", ylim=(0, 112))
    panel.set_xticks(_GPUS, [str(count) for count in _GPUS], fontsize=8)
    panel.set_xticks([], minor=True)
    panel.grid(True, alpha=0.3)
    panel.legend(fontsize=8)
    source = (
        f"Predicted, not measured: H200, hosts of 8, {H200.nvlink.bandwidth:.0f} GB/s of NVLink, 45 GB/s of network, "
        f"{_TOKENS} tokens of each GPU, Zipf exponent {_PREDICTED_LAW.exponent}, all_to_all, a spare place, no overlap"
    )
    return _finished(figure, "Predicted: one layer's forward on up to 2048 GPUs", source)


def _finished(figure: Any, title: str, source: str) -> Any:
    from matplotlib import pyplot

    figure.suptitle(title, fontsize=10)
    height = figure.get_figheight()
    figure.text(0.5, 0.06 / height, source, ha="center", fontsize=6)
    figure.tight_layout(rect=(0, (0.16 + 0.11 * source.count("\n")) / height, 1, 1))
    pyplot.close(figure)
    return figure


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
