"""Pictures of pages: `python -m tools.pictures`, with Chromium, writes docs/figures/view-*.png, look-inside.png and
social.png, which other sites show of a link to ours.

The trace is drawn: each layer routes by a law of its own. Plans and times are of a recorded step. The last picture is
of the page that docs/tutorials/look_inside.ipynb writes.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import numpy as np

from moe_core.parallel.traffic import Zipf
from moe_core.parity.cli import main as parity
from moe_core.trace import LayerRouting, RoutingTrace
from moe_core.view.page import trace_page, view_page, write_page
from tools.browser import Page

_DOCS = Path(__file__).parents[1] / "docs"
_FIGURES = _DOCS / "figures"
_PLANS = _DOCS.parent / "benchmarks" / "results" / "plans"
_SOCIAL = """<style>body{{margin:0;height:630px;display:flex;align-items:center;gap:60px;box-sizing:border-box;
font:34px/1.4 sans-serif;color:#1f2328;background:#fff;border-bottom:16px solid #1f6feb;padding:0 80px}}p{{margin:0}}
h1{{font-size:92px;line-height:1;margin:0 0 28px}}svg{{width:340px;flex:none}}</style>
{logo}<div><h1>Moebius</h1><p>{pitch}</div>"""
_READY = "document.getElementById('main')?.getAttribute('aria-busy') === 'false'"


def _trace() -> RoutingTrace:
    layers, random = [], np.random.default_rng(0)
    for number in range(24):
        ids = Zipf(0.3 + 0.03 * number, seed=number).ids(4096, 4, 64)
        weights = -np.sort(-random.dirichlet(np.ones(4), 4096).astype(np.float32), axis=1)
        layers.append(LayerRouting(ids, weights, 64))
    return RoutingTrace(tuple(layers))


def _page_of_notebook() -> Path:
    """Run the notebook up to the cell that writes its page."""
    notebook, names = json.loads((_DOCS / "tutorials" / "look_inside.ipynb").read_text()), {"__name__": "notebook"}
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code" and "page" not in names:
            exec("".join(cell["source"]), names)
    return Path(str(names["page"]))


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, Page(Path(folder) / "browser") as page:
        path = Path(folder) / "page.html"
        write_page(path, trace_page([_trace()], ["routing.safetensors"], sizes=(2048, 768)))
        page.open(path, _READY)
        page.value("document.querySelector('canvas.pick').focus()")
        page.press("ArrowRight")
        page.picture(_FIGURES / "view-routing.png", 1240)
        write_page(path, view_page([_PLANS / "step-h200.json"], profile=_PLANS / "step-times-h200.json"))
        page.open(path, _READY)
        page.picture(_FIGURES / "view-plans.png", 900)
        pitch = (_FIGURES.parents[1] / "README.md").read_text().split("\n\n")[1]
        path.write_text(_SOCIAL.format(logo=(_FIGURES / "logo.svg").read_text(), pitch=pitch))
        page.open(path, "document.readyState == 'complete'", width=1200, height=630)
        page.picture(_FIGURES / "social.png")
        cases = ["--case", "mixtral", "--case", "qwen3_moe", "--dtype", "bfloat16"]
        parity([*cases, "--engines", "torch,jax", "--html", str(path)])
        page.open(path, _READY)
        page.value("document.querySelector('details.case').open = true")
        page.picture(_FIGURES / "view-parity.png", 760)
        page.open(_page_of_notebook(), _READY)
        page.value("document.querySelector('canvas.pick').focus()")
        page.press("ArrowRight")
        page.value("document.querySelectorAll('section:not(#layer), .tiles').forEach((one) => one.remove())")
        page.value("document.querySelector('#layer input[type=checkbox]').click()")
        page.picture(_FIGURES / "look-inside.png", 1380)


if __name__ == "__main__":
    main()
