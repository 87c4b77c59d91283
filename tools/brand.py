"""The logo and the badges: `python -m tools.brand docs/figures`. The logo is a Möbius band, computed from its formula;
badges say what pyproject.toml says."""

from __future__ import annotations

import math
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
#: Colours of the band at the beginning, after a third and after two thirds of a turn.
_COLORS = ((31, 111, 235), (194, 87, 12), (35, 134, 63))
_PIECES, _WIDTH, _TILT = 72, 0.46, math.radians(48)

Point = tuple[float, float, float]


def _point(turn: float, side: float) -> Point:
    """A point of the band, turned towards the reader; the last number is its distance."""
    radius = 1 + side * _WIDTH * math.cos(turn / 2)
    x, y, z = -radius * math.sin(turn), radius * math.cos(turn), side * _WIDTH * math.sin(turn / 2)
    return x, y * math.cos(_TILT) - z * math.sin(_TILT), y * math.sin(_TILT) + z * math.cos(_TILT)


def _color(turn: float, light: float) -> str:
    place = turn / (2 * math.pi) * len(_COLORS)
    one, other = (_COLORS[(int(place) + step) % len(_COLORS)] for step in (0, 1))
    share = place - int(place)
    mixed = [a + (b - a) * share for a, b in zip(one, other, strict=True)]
    return "#" + "".join(f"{min(255, round(part + (255 - part) * light)):02x}" for part in mixed)


def logo() -> str:
    """The band as an SVG of 64 by 64; the farthest pieces first."""
    pieces = []
    for number in range(_PIECES):
        ends = [2 * math.pi * (number + step) / _PIECES for step in (0, 1.25)]
        corners = [_point(ends[0], -1), _point(ends[0], 1), _point(ends[1], 1), _point(ends[1], -1)]
        one, other = ([corners[k][i] - corners[0][i] for i in range(3)] for k in (1, 3))
        normal = [one[(i + 1) % 3] * other[(i + 2) % 3] - one[(i + 2) % 3] * other[(i + 1) % 3] for i in range(3)]
        facing = abs(normal[2]) / math.sqrt(sum(part * part for part in normal))
        path = " ".join(f"{31 + 22.5 * x:.1f},{32 + 22.5 * y:.1f}" for x, y, _ in corners)
        depth = sum(corner[2] for corner in corners)
        color = _color(ends[0], 0.3 * facing**2)
        pieces.append((depth, f'<polygon points="{path}" fill="{color}" stroke="{color}" stroke-width=".3"/>'))
    shapes = "\n".join(shape for _, shape in sorted(pieces))
    head = '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 64 64" role="img"><title>Moebius</title>'
    return f"{head}\n{shapes}\n</svg>\n"


def badge(label: str, value: str) -> str:
    """A label and its value side by side, 20 pixels high."""
    left, right = (round(6.6 * len(text)) + 12 for text in (label, value))
    box = '<rect width="{}" height="20" x="{}" fill="{}"/><text x="{}" y="14">{}</text>'
    parts = box.format(left, 0, "#424a53", left / 2, label), box.format(right, left, "#1f6feb", left + right / 2, value)
    style = 'fill="#fff" font-family="Verdana,sans-serif" font-size="11" text-anchor="middle"'
    size = f'width="{left + right}" height="20"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img"><title>{label}: {value}</title>'
        f'<clipPath id="r"><rect {size} rx="3"/></clipPath><g clip-path="url(#r)" {style}>{"".join(parts)}</g></svg>\n'
    )


def badges() -> dict[str, str]:
    """Badge -> its SVG."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = [name.rpartition(" ")[2] for name in project["classifiers"] if name.startswith("Programming Language")]
    least = {name: project["optional-dependencies"][name][0].removeprefix(f"{name}>=") for name in ("torch", "jax")}
    return {
        "python": badge("python", " | ".join(name for name in named if "." in name)),
        "frameworks": badge("runs on", f"torch {least['torch']}+ | jax {least['jax']}+"),
        "license": badge("license", project["license"]),
    }


def draw(output: Path) -> list[Path]:
    """Write logo and badges into a folder; returns the files."""
    made = {"logo": logo()} | {f"badge-{name}": text for name, text in badges().items()}
    for name, text in made.items():
        (output / f"{name}.svg").write_text(text)
    return [output / f"{name}.svg" for name in made]


def main(arguments: Sequence[str] | None = None) -> int:
    """Draw into the named folder."""
    (folder,) = sys.argv[1:] if arguments is None else arguments
    print("\n".join(map(str, draw(Path(folder)))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
