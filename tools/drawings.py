"""Drawings of the documents, as SVG: how logits become ids, rows, products and sums, and the modular kernel's parts.

    python -m tools.drawings docs/figures

The numbers are those of the worked example of docs/user/routing.md, computed by the NumPy reference. Every expert has a
colour. Text and lines have the colour of the page, light or dark.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from html import escape
from pathlib import Path

import numpy as np

from moe_core.ops.routing import reference
from moe_core.specs.routing import LayoutSpec

#: Of experts 0, 1, 2, and of a slot without an expert. Text on them is white or, on the last, the page's.
COLORS = {0: "#1f6feb", 1: "#c2570c", 2: "#23863f", -1: "none"}
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
    drawing = Drawing(860, 330, "How logits become ids, rows, products and sums")
    top, step, cell = 66, 38, (46, 28)
    columns = {"tokens": 8, "slots": 128, "rows": 300, "products": 440, "back": 606, "sums": 760}
    heads = (
        ("tokens", 84, "tokens", "x [T, D]"),
        ("slots", 102, "ids", "logits → ids [T, K]"),
        ("rows", 46, "rows", "make_layout"),
        ("products", 112, "products", "matmul_ogs, twice"),
        ("back", 46, "slots", "scatter"),
        ("sums", 92, "sums", "reduce: y [T, D]"),
    )
    for name, width, title, op in heads:
        drawing.text(columns[name] + width / 2, 22, title, "title")
        drawing.text(columns[name] + width / 2, 40, op, "small")
    rows = [int(slot) for slot in slot_of_row]
    place = {slot: top + step * row for row, slot in enumerate(rows) if slot >= 0}
    for token in range(3):
        y = top + 2 * step * token + step / 2
        drawing.box(columns["tokens"], y, (84, 28), f"token {token}")
        drawing.box(columns["sums"], y, (92, 28), f"y of token {token}")
    for slot in range(slots):
        y, expert = top + step * slot, int(experts[slot])
        token_y = top + 2 * step * (slot // 2) + step / 2
        drawing.arrow((columns["tokens"] + 84, token_y + 14), (columns["slots"] - 3, y + 14))
        drawing.box(columns["slots"], y, (102, 28), f"expert {expert}" if expert >= 0 else "none (−1)", expert)
        if expert < 0:
            continue
        there = place[slot]
        drawing.arrow((columns["slots"] + 102, y + 14), (columns["rows"] - 3, there + 14))
        drawing.box(columns["rows"], there, cell, f"slot {slot}", expert)
        drawing.arrow((columns["products"] + 112, there + 14), (columns["back"] - 3, y + 14))
        drawing.box(columns["back"], y, cell, f"slot {slot}", expert)
        drawing.arrow((columns["back"] + 46, y + 14), (columns["sums"] - 3, token_y + 14))
    for expert, (start, count) in enumerate(zip(group_start, group_sizes, strict=False)):
        y, height = top + step * int(start), step * int(count) - 10
        drawing.box(
            columns["products"],
            y,
            (100, height),
            f"expert {expert}:\n{int(count)} rows" if count > 1 else f"expert {expert}: 1 row",
            expert,
        )
        drawing.arrow((columns["rows"] + 46, y + height / 2), (columns["products"] - 3, y + height / 2))
    note = "Rows of an expert lie next to each other, in the order of slots. A slot without an expert has no row."
    drawing.text(430, 312, note, "small")
    return drawing


def modular() -> Drawing:
    """prepare, experts and finalize, and what travels between them."""
    drawing = Drawing(860, 250, "What prepare, experts and finalize of the modular kernel do")
    boxes = (
        (
            150,
            "prepare",
            ("weight x, if asked to", "quantise x", "dispatch rows, and count", "those of each expert"),
        ),
        (370, "experts", ("group rows by expert", "product with w1", "activation", "product with w2")),
        (
            590,
            "finalize",
            ("bring rows back", "router weights, unless", "the experts applied them", "add up each token's slots"),
        ),
    )
    for x, title, lines in boxes:
        drawing.box(x, 60, (180, 130), "", 0 if title == "prepare" else 2 if title == "experts" else 1)
        drawing.text(x + 90, 84, title, "on title")
        for number, line in enumerate(lines):
            drawing.text(x + 90, 108 + 20 * number, line, "on small")
    for start, end, above, below in (
        (8, 150, "hidden states", "ids, weights [M, topk]"),
        (330, 370, "", ""),
        (550, 590, "", ""),
        (770, 852, "output [M, K]", ""),
    ):
        drawing.arrow((start, 125), (end - 3, 125))
        drawing.text((start + end) / 2, 112, above, "small")
        drawing.text((start + end) / 2, 146, below, "small")
    drawing.text(350, 48, "a1q, scales, counts", "small")
    drawing.text(570, 48, "rows of slots", "small")
    drawing.text(
        430,
        222,
        "Each part can be replaced: other experts, or a prepare and finalize that move tokens between ranks.",
        "small",
    )
    drawing.text(430, 30, "FusedMoEModularKernel: owns the scratch memory, and calls its parts in this order", "title")
    return drawing


def draw(output: Path) -> list[Path]:
    """Write the drawings into a folder; returns the files."""
    output.mkdir(parents=True, exist_ok=True)
    found = {"routing": routing(), "modular": modular()}
    for name, drawing in found.items():
        (output / f"{name}.svg").write_text(drawing.svg())
    return [output / f"{name}.svg" for name in found]


def main(arguments: Sequence[str] | None = None) -> int:
    """Draw into the named folder."""
    (folder,) = sys.argv[1:] if arguments is None else arguments
    print("\n".join(map(str, draw(Path(folder)))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
