"""Figures of the documents: bars out of records, drawings, light and dark, and that they are those of the records."""

from __future__ import annotations

import pathlib
import re
from typing import Any

import pytest

pytest.importorskip("matplotlib")

from benchmarks import bars, figures, theme
from tests.support.paths import ROOT
from tools import drawings

TEXT = re.compile(r"<text [^>]*>([^<]*)</text>")
PROVENANCE = {
    "device": "H200",
    "versions": {"torch": "1", "jax": "2", "triton": "3"},
    "commit": "0123",
    "date": "today",
}


def record(*rows: dict[str, Any]) -> dict[str, Any]:
    return {"provenance": PROVENANCE, "rows": list(rows)}


def row(tokens: int, mode: str = "forward", **figures: Any) -> dict[str, Any]:
    return {"shape": "qwen3", "routing": "balanced", "tokens": tokens, "mode": mode, "torch_us": 10.0, **figures}


def ratios(peer: str, *rows: dict[str, Any], mode: str = "forward") -> list[float]:
    found = next(one for one in bars.PARTS[mode] if one.name == peer)
    return bars.ratios([record(one) for one in rows], mode, found)


def test_ratios_are_of_one_run_and_one_clock() -> None:
    turns = {"by_turns_us": {"ours": 8.0, "triton_kernels": 12.0}, "triton_kernels_us": 99.0}
    assert ratios("triton_kernels", row(1, **turns), row(2)) == [1.5]
    assert ratios("torch grouped_mm", row(1, grouped_mm_us=30.0, grouped_mm_compiled_us=20.0)) == [2.0]
    assert ratios("jax.lax.ragged_dot", row(1, ragged_dot_us=30.0, jax_device_us=5.0)) == [6.0]
    experts = {"vllm_us": 12.0, "active_experts": 8}
    assert ratios("vLLM", row(1, **experts, vllm_active_experts=8), row(2, **experts, vllm_active_experts=7)) == [1.2]
    assert ratios("triton_kernels", row(1, over_triton_kernels_best=0.5, **turns)) == [2.0]
    recorded = bars.read_recorded()["step"]["sonicmoe"]["qwen3"]["4096"]["over"]
    steps = row(4096, "step"), row(1, "step", over_sonicmoe=0.5), row(2, "step")
    assert ratios("SonicMoE", *steps, mode="step") == [1 / recorded, 2.0]
    # A cell of two records counts once, another routing not at all.
    again = row(1, grouped_mm_us=50.0)
    assert ratios("torch grouped_mm", row(1, grouped_mm_us=30.0), again, again | {"routing": "zipf"}) == [3.0]
    assert bars.mean([2.0, 8.0]) == pytest.approx(4.0)


def test_peers_without_a_cell_are_left_out() -> None:
    with theme.drawing():
        figure = bars.draw_speedups([record(row(3, grouped_mm_us=30.0), row(2, grouped_mm_us=20.0))], "source")
    (panel,) = figure.axes
    assert [label.get_text().split("\n")[0] for label in panel.get_yticklabels()] == ["torch grouped_mm"]
    assert [text.get_text() for text in panel.texts] == ["2.45× (2.00 to 3.00), 2 cells"]


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> list[pathlib.Path]:
    return figures.draw(tmp_path_factory.mktemp("figures"))


def test_figures_of_the_documents_show_the_records(drawn: list[pathlib.Path]) -> None:
    """Every text of every figure; lines may lie elsewhere with another matplotlib."""
    for path in drawn:
        stored = figures.FIGURES / path.name
        assert TEXT.findall(stored.read_text()) == TEXT.findall(path.read_text()), f"{path.name}: run `make figures`"
    pages = "".join(page.read_text() for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
    unused = [path.name for path in drawn if f"figures/{path.name}" not in pages]
    assert not unused, f"{unused} are in no page"


def test_figures_follow_light_and_dark(drawn: list[pathlib.Path]) -> None:
    for path in drawn:
        text = path.read_text()
        assert "prefers-color-scheme:dark" in text and "currentColor" in text
        assert theme.INK not in text and "#12ab34" not in text and "#ffffff" not in text.lower()


def test_the_drawing_of_routing_is_the_worked_example() -> None:
    page = (ROOT / "docs" / "user" / "routing.md").read_text()
    assert f"ids = torch.tensor({drawings.IDS.tolist()}" in page
    boxes = re.findall(r'class="on">([^<]*)</text>', drawings.routing().svg())
    slots = [int(text.removeprefix("slot ")) for text in boxes if text.startswith("slot ")]
    assert sorted(slots) == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4] and "expert 1: 1 row" in boxes
