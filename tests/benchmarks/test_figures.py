"""Figures of the documents: what is read from records, what is refused, and that stored figures show the records."""

from __future__ import annotations

import json
import pathlib
import re
import subprocess
import sys
from typing import Any

import pytest

pytest.importorskip("matplotlib")

from benchmarks import bars, figures, parallel_figures, theme
from benchmarks.parallel_figures import pairs
from benchmarks.plot import SERIES, plot, points, roofline_points
from benchmarks.record import SCHEMA
from moe_core.parallel.machine import H200
from tests.support.paths import ROOT
from tools import drawings

TEXT = re.compile(r"<text [^>]*>([^<]*)</text>")
PROVENANCE = {
    "device": "NVIDIA H200",
    "versions": {"torch": "2.11.0", "jax": "0.11.2", "triton": "3.6.0"},
    "commit": "0123456789abcdef",
    "date": "2026-11-21",
}


def row(tokens: int, mode: str = "forward", **fields: Any) -> dict[str, Any]:
    cell = {"shape": "qwen3", "routing": "balanced", "tokens": tokens, "mode": mode}
    return cell | {"torch_us": 10.0, "bound_us": 5.0} | fields


def record(*rows: dict[str, Any], schema: int | None = SCHEMA) -> dict[str, Any]:
    return {"schema": schema, "provenance": PROVENANCE, "partial": False, "rows": list(rows)}


def written(path: pathlib.Path, content: dict[str, Any]) -> pathlib.Path:
    path.write_text(json.dumps(content))
    return path


def ratios(peer: str, *rows: dict[str, Any], mode: str = "forward") -> list[float]:
    part = next(one for one in bars.PARTS[mode] if one.name == peer)
    return bars.ratios([record(one) for one in rows], mode, part)


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
    with theme.drawing():
        figure = bars.draw_speedups([record(row(3, grouped_mm_us=30.0), row(2, grouped_mm_us=20.0))], "source")
    assert [text.get_text() for text in figure.axes[0].texts] == ["2.45×"]


def test_points_of_a_record() -> None:
    rows = [row(64, torch_us=80.0, ragged_dot_us=5000.0), row(1, torch_us=60.0)]
    series = {one.field: one for one in SERIES}
    assert points(rows, series["torch_us"], "time") == ([1, 64], [60.0, 80.0])
    assert points(rows, series["torch_us"], "fraction") == ([1, 64], [5 / 60, 5 / 80])
    assert points(rows, series["ragged_dot_us"], "time") == ([64], [5000.0])
    intensity, ours, dense = roofline_points([row(1, torch_us=60.0, active_experts=8, dense_us=40.0)])["qwen3"]
    # Of a token, 8 slots of 3 * 2048 * 768 weights: 2 FLOPs for each, which is 2 bytes.
    assert intensity == [1.0] and ours[0] == pytest.approx(8 * 6 * 2048 * 768 / 60.0 / 1e6)
    assert dense[0] == pytest.approx(8 * 6 * 2048 * 768 / 40.0 / 1e6)


def test_figures_name_their_records_and_need_no_framework(tmp_path: pathlib.Path) -> None:
    path = written(tmp_path / "a.json", record(row(1), row(64), row(64, routing="zipf")))
    code = "import sys; sys.modules.update(torch=None, jax=None, triton=None); import benchmarks.figures as f; f.main()"
    command = [sys.executable, "-c", code, "plot", str(path), "--output", str(tmp_path / "figures")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    names = ["time-balanced", "fraction-balanced", "time-zipf", "fraction-zipf"]
    assert [pathlib.Path(line).stem for line in done.stdout.splitlines()] == names
    text = (tmp_path / "figures" / "time-balanced.svg").read_text()
    assert "NVIDIA H200, torch 2.11.0, jax 0.11.2, triton 3.6.0, commit 0123456789, 2026-11-21" in " ".join(
        TEXT.findall(text)
    )
    again = plot([path], tmp_path / "again")
    assert [file.read_bytes() for file in again] == [(tmp_path / "figures" / file.name).read_bytes() for file in again]


@pytest.mark.parametrize(
    ("schemas", "message"),
    [
        ((SCHEMA, SCHEMA), "('qwen3', 'balanced', 64) must be in one record"),
        ((None,), f"must be a record of schema 2 or 3 or {SCHEMA}, got None; run benchmarks.forward again"),
    ],
)
def test_refused_records(schemas: Any, message: str, tmp_path: pathlib.Path, capsys: Any) -> None:
    paths = [written(tmp_path / f"{n}.json", record(row(64), schema=schema)) for n, schema in enumerate(schemas)]
    with pytest.raises(SystemExit) as refused:
        figures.main(["plot", *map(str, paths), "--output", str(tmp_path / "figures")])
    assert refused.value.code == 2 and message in capsys.readouterr().err and not (tmp_path / "figures").exists()


def cell(**fields: Any) -> dict[str, Any]:
    row = {"shape": "qwen3", "experts": 128, "tokens": 64, "mode": "padded", "rows": "tokens", "what": "forward"}
    return row | {"us": 900.0, "alone_us": 500.0, "experts_us": 400.0} | fields


def test_predictions_lie_beside_what_was_measured() -> None:
    other = cell(what="training"), cell(error="no"), cell(shape="tiny")
    found = pairs({"ranks": 2, "rows": [cell(), cell(graph_us=600.0), *other, cell(mode="all_to_all")]}, H200)
    assert list(found) == ["padded, eager", "padded, CUDA graph", "all_to_all, eager"]
    ((measured, predicted),) = found["padded, CUDA graph"]
    assert measured == 600.0 and 400 < predicted < 500 and found["padded, eager"] == [(900.0, predicted)]


def test_scaling_is_that_of_the_latest_records() -> None:
    """Of CUDA graphs where there are any; nothing of training, of slots, or of cells that failed."""
    other = cell(rows="slots", scaling=9.0), cell(what="training", scaling=9.0), cell(error="no")
    old = [cell(scaling=0.5), cell(scaling=0.25, tokens=8), cell(scaling=0.5, mode="peer", graph_scaling=0.75), *other]
    records = [{"ranks": 2, "provenance": PROVENANCE, "rows": rows} for rows in (old, [cell(scaling=0.125)])]
    with theme.drawing():
        panel = parallel_figures.draw_scaling(records).axes[0]
    lines = {line.get_label(): line.get_xydata().tolist() for line in panel.lines[:-1]}
    assert panel.get_title("left") == "qwen3" and lines == {"padded": [[8, 25], [64, 12.5]], "peer": [[64, 75]]}


def test_figures_of_the_documents_show_the_records(tmp_path: pathlib.Path) -> None:
    """Every text of every figure; lines may lie elsewhere with another matplotlib. On a phone it is readable: 8 px or
    more of the 358 that a page leaves on a screen of 390."""
    drawn = figures.draw(tmp_path)
    for path in drawn:
        stored, text = figures.FIGURES / path.name, path.read_text()
        assert TEXT.findall(stored.read_text()) == TEXT.findall(text), f"{path.name}: run `make figures`"
        if path.name.startswith("badge-"):
            continue  # right on any paper
        assert "prefers-color-scheme:dark" in text and "currentColor" in text, "follows light and dark"
        assert theme.INK not in text and "#12ab34" not in text and "#ffffff" not in text.lower()
        width, *_ = re.findall(r'viewBox="0 0 ([\d.]+) ', text)
        sizes = [float(size) for size in re.findall(r"font(?:-size)?:[^;\"]*?([\d.]+)px", text)]
        assert min(sizes) * min(1, 358 / float(width)) >= 8, (path.name, min(sizes))
    pages = "".join(page.read_text() for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
    unused = [path.name for path in drawn if f"figures/{path.name}" not in pages]
    assert not unused, f"{unused} are in no page"


def test_the_drawing_of_routing_is_the_worked_example() -> None:
    page = (ROOT / "docs" / "user" / "routing.md").read_text()
    assert f"ids = torch.tensor({drawings.IDS.tolist()}" in page
    boxes = re.findall(r'class="on">([^<]*)</text>', drawings.routing().svg())
    slots = [int(text.removeprefix("slot ")) for text in boxes if text.startswith("slot ")]
    assert sorted(slots) == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4] and boxes.count("expert 1") == 2
