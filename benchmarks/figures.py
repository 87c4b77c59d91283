"""Draw the figures of the documents, or one kind of figure for some records.

    python -m benchmarks.figures                       # or `make figures`
    python -m benchmarks.figures plot RECORD ... --output FOLDER
    python -m benchmarks.figures curves RECORD --output FILE.svg

The figures of performance come from records and are drawn by matplotlib (extra `bench`); the drawings of how things
work come from tools.drawings, badges from tools.brand. With newer records, change the names below.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks import bars, curves, monitored, parallel_figures, plot, theme
from tools import brand, drawings

ROOT = Path(__file__).resolve().parents[1]
RESULTS, FIGURES = ROOT / "benchmarks" / "results", ROOT / "docs" / "figures"
#: Lines against tokens, and bars: the records that they show.
LINES = ("forward-h200.json",)
#: Forwards are of one run, and so are steps.
BARS = ("forward-h200.json", "training-h200.json")
#: Figure -> the record of its loss curves.
CURVES = {f"training-{place}.svg": f"training-curves-{place}.json" for place in ("h200", "cpu")}
#: Of a watched training.
MONITORED = "monitor-cpu.json"
#: Of links, and of expert-parallel layers; later ones last.
MACHINES = ("machine-4-h200.json",)
PARALLEL = tuple(f"parallel-{name}4-h200.json" for name in ("", "peer-", "shapes-", "qwen3-", "few-", "again-"))


def draw(output: Path) -> list[Path]:
    """Write every figure into a folder; returns the files."""
    written = plot.plot([RESULTS / name for name in LINES], output)
    written += bars.plot([RESULTS / name for name in BARS], output)
    written += [theme.plot(curves.draw, RESULTS / record, output / figure) for figure, record in CURVES.items()]
    written.append(theme.plot(monitored.draw, RESULTS / MONITORED, output / "monitor.svg"))
    machines, layers = ([RESULTS / name for name in names] for names in (MACHINES, PARALLEL))
    written += parallel_figures.plot(machines, layers, output)
    return written + drawings.draw(output) + brand.draw(output)


#: By kind, a function of records, the output (a folder, or of one record a file) and `svg` or `png`, and its files.
KINDS: dict[str, Callable[[list[Path], Path, str], list[Path]]] = {
    "plot": plot.plot,
    "bars": bars.plot,
    "curves": lambda records, output, _: [theme.plot(curves.draw, records[0], output)],
    "monitored": lambda records, output, _: [theme.plot(monitored.draw, records[0], output)],
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Draw; 2 with a message where the records cannot be drawn."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", nargs="?", choices=KINDS, help="of figures of the records (default: all of the pages)")
    parser.add_argument("records", nargs="*", type=Path, metavar="RECORD", help="one of curves and monitored")
    parser.add_argument("--output", type=Path, default=FIGURES, help="folder or file (default: docs/figures)")
    parser.add_argument("--format", choices=("svg", "png"), default="svg", help="of plot and bars")
    options = parser.parse_args(arguments)
    if options.kind and (not options.records or (len(options.records) > 1 and options.kind in ("curves", "monitored"))):
        parser.error(f"{options.kind} must have a record, and curves and monitored just one; name it")
    try:
        written = KINDS[options.kind](options.records, options.output, options.format) if options.kind else None
    except ValueError as error:
        parser.error(str(error))
    print("\n".join(map(str, draw(options.output) if written is None else written)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
