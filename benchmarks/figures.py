"""Every figure of the documents, from recorded results: `python -m benchmarks.figures`, or `make figures`.

The figures of performance come from records and are drawn by matplotlib (extra `bench`); the drawings of how things
work come from tools.drawings, logo and badges from tools.brand. With newer records, change the names below.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks import bars, curves, monitored, parallel_figures, plot
from tools import brand, drawings

ROOT = Path(__file__).resolve().parents[1]
RESULTS, FIGURES = ROOT / "benchmarks" / "results", ROOT / "docs" / "figures"
#: Lines against tokens, and bars: the records that they show.
LINES = ("forward-peers-h200.json",)
#: Forwards are of one run, and so are steps.
BARS = ("forward-peers-h200.json", "training-h200.json")
#: Later steps: what they keep is counted, not timed.
KEPT = tuple(f"training-{name}-h200.json" for name in ("gptoss120b", "qwen3-silu", "mixtral", "glm45air-olmoe"))
#: Figure -> the record of its loss curves.
CURVES = {f"training-{place}.svg": f"training-curves-{place}.json" for place in ("h200", "cpu")}
#: Of a watched training.
MONITORED = "monitor-cpu.json"
#: Of links, and of expert-parallel layers; later ones last.
MACHINES = ("machine-4-h200.json",)
PARALLEL = tuple(f"parallel-{name}4-h200.json" for name in ("", "peer-", "shapes-", "qwen3-", "few-"))


def draw(output: Path) -> list[Path]:
    """Write every figure into a folder; returns the files."""
    written = plot.plot([RESULTS / name for name in LINES], output)
    bar_records, later = ([RESULTS / name for name in names] for names in (BARS, KEPT))
    written += bars.plot(bar_records, output, kept_in=later)
    written += [curves.plot(RESULTS / record, output / figure) for figure, record in CURVES.items()]
    written.append(monitored.plot(RESULTS / MONITORED, output / "monitor.svg"))
    machines, layers = ([RESULTS / name for name in names] for names in (MACHINES, PARALLEL))
    written += parallel_figures.plot(machines, layers, output)
    return written + drawings.draw(output) + brand.draw(output)


def main(arguments: Sequence[str] | None = None) -> int:
    """Draw all figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=FIGURES, help="folder of the figures (default: docs/figures)")
    print("\n".join(map(str, draw(parser.parse_args(arguments).output))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
