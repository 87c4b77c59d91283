"""How figures look: one picture for light and for dark pages, with colours that both can show.

Foregrounds are drawn in a colour that nothing else has. In the SVG it becomes the colour of the page's text, which a
media query chooses. Backgrounds are transparent. A figure is one column wide, so that a phone of 390 px shows its text
at 8 px or more, and its title is its message.
"""

from __future__ import annotations

import contextlib
import io
import json
import textwrap
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

#: Of ours and of others; all keep a contrast of 3 to 1 against white and against dark grey.
OURS, PEERS = "#2f81f7", ("#d9730d", "#2a9d4a", "#c2410c", "#9a6ee0", "#b08800", "#c94f7c")
LIGHT, DARK = "#1f2328", "#e6edf3"
#: Inches of every figure's width, and points of its smallest text.
WIDTH, SMALL = 5.4, 9
MARKERS = "os^vDPX"
#: The foreground, by a name that matplotlib gets here, and as it is drawn into an SVG.
INK, _DRAWN = "moebius:ink", "#12ab34"
STYLE = f"<style>svg{{color:{LIGHT}}}@media(prefers-color-scheme:dark){{svg{{color:{DARK}}}}}</style>"
_FOREGROUNDS = ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color", "grid.color")
_BACKGROUNDS = ("figure.facecolor", "axes.facecolor", "savefig.facecolor", "legend.facecolor")


@contextlib.contextmanager
def drawing(kind: str = "svg") -> Iterator[None]:
    """matplotlib's settings for figures of a kind, `svg` or `png`; equal figures give equal files."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib.colors import get_named_colors_mapping

    color, paper = (_DRAWN, "none") if kind == "svg" else ("#000000", "white")
    get_named_colors_mapping()[INK] = color
    settings: Any = dict.fromkeys(_FOREGROUNDS, color) | dict.fromkeys(_BACKGROUNDS, paper)
    settings |= {"svg.hashsalt": "moebius", "svg.fonttype": "none", "font.family": "sans-serif"}
    settings |= {"axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False}
    settings |= dict.fromkeys(("axes.labelsize", "xtick.labelsize", "ytick.labelsize", "legend.fontsize"), SMALL)
    settings |= {"axes.titlesize": 10, "axes.titleweight": "bold", "axes.titlelocation": "left", "grid.alpha": 0.2}
    settings |= {"xtick.minor.size": 0, "ytick.minor.size": 0, "lines.markersize": 4, "lines.linewidth": 1.4}
    with matplotlib.rc_context(settings):
        yield


def compact(panel: Any, ticks: Sequence[float], axis: str = "x") -> None:
    """Ticks of an axis at these values alone, written in full."""
    getattr(panel, f"set_{axis}ticks")(ticks, [f"{tick:g}" for tick in ticks])
    getattr(panel, f"set_{axis}ticks")([], minor=True)


def _short(value: float, _: Any = None) -> str:
    """A number of a logarithmic axis, such as 10k: exponents would be too small for phones."""
    size, unit = next(((size, unit) for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")) if value >= size), (1, ""))
    return f"{value / size:g}{unit}"


def finish(figure: Any, message: str, notes: Sequence[str]) -> Any:
    """Lay out a figure with its message above and notes below, and close it; returns it."""
    from matplotlib import pyplot
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullFormatter

    for axis in (axis for panel in figure.axes for axis in (panel.xaxis, panel.yaxis)):
        if axis.get_scale() == "log" and not isinstance(axis.get_major_locator(), FixedLocator):
            axis.set_major_formatter(FuncFormatter(_short))
            axis.set_minor_formatter(NullFormatter())
    height, title = figure.get_figheight(), textwrap.wrap(message, 58)
    lines = [line for note in notes for line in textwrap.wrap(note, 76)]
    figure.text(0.015, 1 - 0.07 / height, "\n".join(title), fontsize=11, fontweight="bold", va="top")
    for number, line in enumerate(lines, 1):
        figure.text(0.015, (0.06 + 0.17 * (len(lines) - number)) / height, line, fontsize=SMALL)
    figure.tight_layout(rect=(0, (0.17 * len(lines) + 0.1) / height, 1, 1 - (0.19 * len(title) + 0.1) / height))
    pyplot.close(figure)
    return figure


def save(figure: Any, path: Path) -> None:
    """Write a figure; of an SVG, with the foreground of the page."""
    if path.suffix != ".svg":
        figure.savefig(path, dpi=150)
        return
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    before, tag, after = buffer.getvalue().partition("<defs>")
    path.write_text(f"{before}{STYLE}\n {tag}{after}".replace(_DRAWN, "currentColor"))


def plot(draw: Callable[[dict[str, Any]], Any], record: Path, output: Path) -> Path:
    """Write the figure that a function draws of one record, as .svg or .png; returns the file."""
    with drawing(output.suffix[1:]):
        save(draw(json.loads(record.read_text())), output)
    return output
