"""How figures look: one picture for light and for dark pages, with colours that both can show.

Foregrounds are drawn in a colour that nothing else has. In the SVG it becomes the colour of the page's text, which a
media query chooses. Backgrounds are transparent.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

#: Of ours and of others; all keep a contrast of 3 to 1 against white and against dark grey.
OURS, PEERS = "#2f81f7", ("#d9730d", "#2a9d4a", "#c2410c", "#9a6ee0", "#b08800", "#c94f7c")
LIGHT, DARK = "#1f2328", "#e6edf3"
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
    with matplotlib.rc_context(settings):
        yield


def save(figure: Any, path: Path) -> None:
    """Write a figure; of an SVG, with the foreground of the page."""
    if path.suffix != ".svg":
        figure.savefig(path, dpi=150)
        return
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    before, tag, after = buffer.getvalue().partition("<defs>")
    path.write_text(f"{before}{STYLE}\n {tag}{after}".replace(_DRAWN, "currentColor"))
