"""Drawings of the documents, as SVG: how logits become ids, rows, products and sums, the modular kernel's parts,
expert parallelism, and the way from layer to kernel. `make figures` draws them.

The numbers are those of the worked example of docs/user/routing.md, computed by the NumPy reference. Every expert has a
colour. Text and lines have the colour of the page, light or dark.
"""

from __future__ import annotations

from html import escape
from pathlib import Path

import numpy as np

from moe_core.ops.routing import reference
from moe_core.specs.routing import LayoutSpec

#: Of experts 0 to 3, and of a slot without an expert. Text on them is white or, on the last, the page's.
COLORS = {0: "#1f6feb", 1: "#c2570c", 2: "#23863f", 3: "#8250df", -1: "none"}
#: The worked example: three tokens, two choices each, three experts; -1 = none.
IDS = np.array([[2, 0], [0, 1], [2, -1]], np.int32)
STYLE = (
    "<style>svg{color:#1f2328;font:13px sans-serif}text{fill:currentColor}.on{fill:#fff}.small{font-size:11px}"
    ".title{font-weight:600}.line{stroke:currentColor;fill:none;opacity:.55}.box{stroke:currentColor;fill:none}"
    "@media(prefers-color-scheme:dark){svg{color:#e6edf3}}</style>"
    '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
    '<path d="M0 0 8 4 0 8z" fill="currentColor"/></marker></defs>'
)


class Drawing:
    """An SVG that grows by boxes, texts and arrows; sizes in pixels."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self.width, self.height, self.parts = width, height, [f"<title>{escape(title)}</title>", STYLE]

    def text(self, x: float, y: float, text: str, kind: str = "", anchor: str = "middle") -> None:
        self.parts.append(f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" class="{kind}">{escape(text)}</text>')

    def box(self, x: float, y: float, size: tuple[float, float], text: str, expert: int | None = None) -> None:
        """A box with a text in its middle, filled with an expert's colour; None = not filled."""
        width, height = size
        fill = "none" if expert is None else COLORS[expert]
        dash = ' stroke-dasharray="3 3"' if expert == -1 else ""
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="4" class="box" style="fill:{fill}"'
            f"{dash}/>"
        )
        kind = "on" if fill != "none" else ""
        lines = text.split("\n")
        for number, line in enumerate(lines):
            self.text(x + width / 2, y + height / 2 + 4.5 + 16 * (number - (len(lines) - 1) / 2), line, kind)

    def arrow(self, start: tuple[float, float], end: tuple[float, float]) -> None:
        (x, y), (to_x, to_y) = start, end
        middle = (x + to_x) / 2
        path = f"M{x:g} {y:g}C{middle:g} {y:g} {middle:g} {to_y:g} {to_x:g} {to_y:g}"
        self.parts.append(f'<path d="{path}" class="line" marker-end="url(#tip)"/>')

    def svg(self) -> str:
        size = f'width="{self.width}" height="{self.height}" viewBox="0 0 {self.width} {self.height}"'
        return "\n".join([f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">', *self.parts, "</svg>\n"])


def routing() -> Drawing:
    """Logits -> ids -> slots -> rows grouped by expert -> products -> slots -> sums per token."""
    spec = LayoutSpec(num_tokens=len(IDS), top_k=IDS.shape[1], num_experts=3)
    group_sizes, group_start, slot_of_row, *_ = reference.layout(IDS, layout=spec)
    experts, slots = IDS.reshape(-1), IDS.size
    drawing = Drawing(400, 330, "How logits become ids, rows, products and sums")
    top, step = 66, 38
    heads = (
        ("tokens", 0, 54, "tokens", "x"),
        ("slots", 68, 62, "ids", "top-k"),
        ("rows", 146, 44, "rows", "layout"),
        ("products", 204, 66, "products", "matmul_ogs"),
        ("back", 286, 44, "slots", "scatter"),
        ("sums", 346, 54, "sums", "reduce"),
    )
    left, wide = {head[0]: head[1] for head in heads}, {head[0]: head[2] for head in heads}
    for _, x, width, title, op in heads:
        drawing.text(x + width / 2, 22, title, "title")
        drawing.text(x + width / 2, 40, op, "small")

    def arrow(source: str, y: float, to: str, to_y: float) -> None:
        drawing.arrow((left[source] + wide[source], y + 14), (left[to] - 1, to_y + 14))

    def box(name: str, y: float, text: str, expert: int | None = None, height: float = 28) -> None:
        drawing.box(left[name], y, (wide[name], height), text, expert)

    place = {int(slot): top + step * row for row, slot in enumerate(slot_of_row) if slot >= 0}
    tokens = [top + 2 * step * token + step / 2 for token in range(len(IDS))]
    for token, y in enumerate(tokens):
        box("tokens", y, f"token {token}")
        box("sums", y, f"y[{token}]")
    for slot in range(slots):
        y, expert = top + step * slot, int(experts[slot])
        arrow("tokens", tokens[slot // 2], "slots", y)
        box("slots", y, f"expert {expert}" if expert >= 0 else "none", expert)
        if expert < 0:
            continue
        arrow("slots", y, "rows", place[slot])
        box("rows", place[slot], f"slot {slot}", expert)
        arrow("products", place[slot], "back", y)
        box("back", y, f"slot {slot}", expert)
        arrow("back", y, "sums", tokens[slot // 2])
    for expert, (start, count) in enumerate(zip(group_start, group_sizes, strict=False)):
        y, height = top + step * int(start), step * int(count) - 10
        box("products", y, f"expert {expert}" + f"\n{int(count)} rows" * int(count > 1), expert, height)
        arrow("rows", y + height / 2 - 14, "products", y + height / 2 - 14)
    note = "Rows of an expert are neighbours. A slot without an expert has no row."
    drawing.text(200, 316, note, "small")
    return drawing


def modular() -> Drawing:
    """prepare, experts and finalize, and what travels between them."""
    drawing = Drawing(400, 420, "What prepare, experts and finalize of the modular kernel do")
    boxes = (
        ("prepare", "weight and quantise x, if asked to", "dispatch rows, count those of each expert", 0),
        ("experts", "group rows by expert", "product with w1, activation, product with w2", 2),
        ("finalize", "bring rows back, apply router weights once", "add up the slots of each token", 1),
    )
    between = ("x, ids, weights [M, topk]", "a1q, scales, counts", "rows of slots", "output [M, K]")
    drawing.text(200, 18, "FusedMoEModularKernel", "title")
    for number, (title, first, second, expert) in enumerate(boxes):
        y = 70 + 112 * number
        drawing.box(40, y, (320, 76), "", expert)
        for line, (text, kind) in enumerate(((title, "on title"), (first, "on"), (second, "on"))):
            drawing.text(200, y + 22 + 21 * line, text, kind)
    for number, text in enumerate(between):
        y = 34 + 112 * number
        drawing.parts.append(f'<path d="M200 {y}V{y + 34}" class="line" marker-end="url(#tip)"/>')
        drawing.text(212, y + 20, text, "small", "start")
    drawing.text(200, 416, "Each part can be replaced, to move tokens between ranks.", "small")
    return drawing


def exchange() -> Drawing:
    """Tokens of two ranks on their way to the ranks that have their experts, and back."""
    ids, tokens = ((2, 0), (1, 3)), ((50, 118), (242, 310))
    drawing = Drawing(400, 300, "How two ranks share four experts")
    for rank in range(2):
        left = 4 + 200 * rank
        drawing.parts.append(f'<rect x="{left}" y="26" width="192" height="268" rx="8" class="line"/>')
        drawing.text(left + 96, 18, f"rank {rank}", "title")
        for place in range(2):
            expert = 2 * rank + place
            drawing.box(left + 8 + 92 * place, 132, (84, 40), f"expert {expert}", expert)
        for token, (x, expert) in enumerate(zip(tokens[rank], ids[rank], strict=True)):
            there = 54 + 92 * (expert % 2) + 200 * (expert // 2)
            drawing.box(x - 8, 52, (52, 28), f"token {2 * rank + token}", expert)
            drawing.box(x - 8, 224, (52, 28), f"y[{2 * rank + token}]", expert)
            for start, end in (((x + 18, 80), (there, 131)), ((there, 172), (x + 18, 223))):
                middle = (start[1] + end[1]) / 2
                path = f"M{start[0]} {start[1]}C{start[0]} {middle} {end[0]} {middle} {end[0]} {end[1]}"
                drawing.parts.append(f'<path d="{path}" class="line" marker-end="url(#tip)"/>')
    for y, text in ((46, "its tokens"), (270, "its results, added up"), (286, "in the order of one device")):
        for x in (100, 300):
            drawing.text(x, y, text, "small")
    return drawing


def stack() -> Drawing:
    """The layers of code that every call passes."""
    rows = (
        ("layer", "parameters, and one call of the composed op", "moe_torch/layers, moe_jax/nnx.py, linen.py"),
        ("op", "checks arrays, turns them into specs", "moe_torch/ops.py, moe_jax/ops.py, bridges"),
        ("plan", "kernels, grids, tiles, scratch: pure Python, cached", "moe_core/ops/*/, moe_core/plan/"),
        ("run", "compiles once per device, launches on a stream", "moe_core/runtime/"),
        ("kernel", "Triton on a GPU or interpreted, NumPy on a CPU", "moe_core/ops/*/kernels, reference"),
    )
    drawing = Drawing(400, 86 * len(rows) - 16, "From layer to kernel")
    for number, (title, what, where) in enumerate(rows):
        y = 86 * number + 2
        drawing.box(10, y, (380, 66), "", 0 if number < 2 else 2)
        for line, (text, kind) in enumerate(((title, "on title"), (what, "on"), (where, "on small"))):
            drawing.text(200, y + 19 + 19 * line, text, kind)
        if number:
            drawing.parts.append(f'<path d="M200 {y - 20}V{y - 2}" class="line" marker-end="url(#tip)"/>')
    return drawing


def draw(output: Path) -> list[Path]:
    """Write the drawings into a folder; returns the files."""
    output.mkdir(parents=True, exist_ok=True)
    found = {"routing": routing(), "modular": modular(), "exchange": exchange(), "stack": stack()}
    for name, drawing in found.items():
        (output / f"{name}.svg").write_text(drawing.svg())
    return [output / f"{name}.svg" for name in found]
