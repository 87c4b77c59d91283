"""Load of each expert while a model trains, out of a record of examples/watch_router.py.

    python -m benchmarks.figures monitored benchmarks/results/monitor-cpu.json --output docs/figures/monitor.svg

One panel of each run, under the other, so that a phone shows them: experts by steps, coloured by load over the mean.
"""

from __future__ import annotations

from typing import Any

import numpy as np

#: Load over the mean at which the colour is full.
_FULL = 4.0


def draw(record: dict[str, Any], layer: str = "blocks.0.moe") -> Any:
    """A figure with a heat map of each run; experts are sorted by their load in the last steps."""
    from matplotlib import pyplot
    from matplotlib.colors import LinearSegmentedColormap

    colors = LinearSegmentedColormap.from_list(
        "load", [(0.0, (0.18, 0.5, 0.97, 0.0)), (1 / _FULL, "#2f81f7"), (1.0, "#d9730d")]
    )
    figure, panels = pyplot.subplots(len(record["runs"]), 1, sharex=True, figsize=(4.8, 4.8), layout="constrained")
    image = None
    for panel, (name, rows) in zip(panels, record["runs"].items(), strict=True):
        load = np.array([row[f"moe/{layer}/load"] for row in rows]).T
        load = load[np.argsort(-load[:, -5:].mean(1), kind="stable")]
        steps = [row["step"] for row in rows]
        edges = (steps[0] - (steps[1] - steps[0]), steps[-1], len(load), 0)
        image = panel.imshow(
            load, cmap=colors, vmin=0, vmax=_FULL, aspect="auto", extent=edges, interpolation="nearest"
        )
        used = len(load) - rows[-1][f"moe/{layer}/dead_experts"]
        panel.set_title(f"{name}: {used} of {len(load)} experts used", fontsize=11, loc="left")
        panel.set_ylabel("experts, busiest first", fontsize=9)
        panel.set_yticks([])
        panel.tick_params(labelsize=8)
    panels[-1].set_xlabel("step", fontsize=9)
    assert image is not None
    bar = figure.colorbar(image, ax=panels, orientation="horizontal", aspect=40)
    bar.set_label("tokens of the expert over the mean", fontsize=9)
    bar.ax.tick_params(labelsize=8)
    pyplot.close(figure)
    return figure
