"""Loss curves of both frameworks, out of records of examples/compare_training.py.

    python -m benchmarks.figures curves benchmarks/results/training-curves-h200.json --output training-h200.svg

Above, the loss of every step; below, how far the two are apart. Equal records give equal files.
"""

from __future__ import annotations

from typing import Any

from benchmarks import theme

CURVES = (
    ("torch", "PyTorch, Adam of torch", theme.PEERS[0], 3.0),
    ("flax", "Flax NNX, Adam of optax", theme.OURS, 1.2),
)


def source_line(record: dict[str, Any]) -> str:
    """Where the curves come from: device, versions, and commit and date where the record has them."""
    versions = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
    origin = f", commit {record['commit'][:10]}, {record['date']}" if "commit" in record else ""
    return f"{record['device']}, {versions}{origin}"


def draw(record: dict[str, Any]) -> Any:
    """A figure with both curves, and their difference below; steps of equal losses have no point there."""
    from matplotlib import pyplot

    losses = record["losses"]
    size = (theme.WIDTH, 4.6)
    figure, (above, below) = pyplot.subplots(2, 1, sharex=True, figsize=size, height_ratios=(2, 1))
    for name, label, color, width in CURVES:
        dashes = "--" if width < 2 else "-"
        above.plot(losses[name], dashes, color=color, linewidth=width, alpha=1 if width < 2 else 0.5, label=label)
    above.set_ylabel("loss, nats per byte")
    above.legend()
    apart = [abs(one - other) for one, other in zip(losses["torch"], losses["flax"], strict=True)]
    steps = [step for step, distance in enumerate(apart) if distance]
    below.plot(steps, [apart[step] for step in steps], ".", color=theme.OURS)
    if steps:
        below.set_yscale("log")
    below.set(ylabel="difference", xlabel="step")
    for panel in (above, below):
        panel.grid(True)
    message = f"torch and Flax train alike: losses are at most {max(apart):.2g} nats apart"
    same = f"Steps with equal losses: {len(apart) - len(steps)} of {len(apart)}."
    return theme.finish(figure, message, [same, source_line(record)])
