"""The badges, which say what pyproject.toml says; `make figures` draws them."""

from __future__ import annotations

import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]


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
    """Write the badges into a folder; returns the files."""
    made = {output / f"badge-{name}.svg": text for name, text in badges().items()}
    for path, text in made.items():
        path.write_text(text)
    return list(made)
