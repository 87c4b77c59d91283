"""Plots of records: what is drawn, what is refused, equal files for equal records."""

from __future__ import annotations

import copy
import json
import pathlib
import subprocess
import sys
from typing import Any

import pytest

pytest.importorskip("matplotlib")

from benchmarks import theme
from benchmarks.plot import BOUND, SERIES, draw, main, plot, points, read_records, roofline_points
from benchmarks.record import SCHEMA
from tests.support.paths import ROOT


def row(shape: str, tokens: int, routing: str = "balanced", **figures: float) -> dict[str, Any]:
    return {"shape": shape, "routing": routing, "tokens": tokens, "bound_us": 50.0, **figures}


RECORD = {
    "schema": SCHEMA,
    "provenance": {
        "device": "NVIDIA H200",
        "versions": {"torch": "2.11.0", "jax": "0.11.2", "triton": "3.6.0"},
        "commit": "0123456789abcdef",
        "date": "2026-11-21",
    },
    "partial": False,
    "rows": [
        row("qwen3", 64, torch_us=80.0, jax_device_us=75.0, triton_kernels_us=100.0, ragged_dot_us=5000.0),
        row("qwen3", 1, torch_us=60.0, jax_device_us=55.0, triton_kernels_us=90.0),
        row("dsv3", 1, torch_us=200.0, jax_device_us=190.0),
        row("qwen3", 64, "zipf", torch_us=85.0, jax_device_us=80.0),
    ],
}
BALANCED = [found for found in RECORD["rows"] if found["routing"] == "balanced"]


def written(tmp_path: pathlib.Path, name: str, record: dict[str, Any]) -> pathlib.Path:
    path = tmp_path / name
    path.write_text(json.dumps(record))
    return path


def test_points_are_sorted_and_leave_out_what_has_no_figure() -> None:
    rows = [found for found in BALANCED if found["shape"] == "qwen3"]
    by_field = {series.field: series for series in SERIES}
    assert points(rows, by_field["torch_us"], "time") == ([1, 64], [60.0, 80.0])
    assert points(rows, by_field["torch_us"], "fraction") == ([1, 64], [50 / 60, 50 / 80])
    assert points(rows, by_field["ragged_dot_us"], "time") == ([64], [5000.0])
    assert points(rows, by_field["tokamax_us"], "time") == ([], [])


@pytest.mark.parametrize("quantity", ["time", "fraction"])
def test_a_panel_per_shape(quantity: str) -> None:
    with theme.drawing():
        figure = draw(BALANCED, quantity, "title", "source")
    panels = [panel for panel in figure.axes if panel.get_visible()]
    assert [panel.get_title() for panel in panels] == ["qwen3", "dsv3"]
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert {SERIES[0].label, "triton_kernels", "jax.lax.ragged_dot (device time)"} <= set(labels)
    assert (BOUND.label in labels) == (quantity == "time") and "tokamax (device time)" not in labels
    assert panels[0].get_xscale() == "log" and (panels[0].get_yscale() == "log") == (quantity == "time")
    assert [text.get_text() for text in panels[0].get_xticklabels()] == ["1", "64"]


def test_files_by_routing_and_quantity(tmp_path: pathlib.Path) -> None:
    path = written(tmp_path, "a.json", RECORD)
    names = ["time-balanced", "fraction-balanced", "time-zipf", "fraction-zipf"]
    found = plot([path], tmp_path / "figures")
    assert [file.name for file in found] == [f"{name}.svg" for name in names]
    text = found[0].read_text()
    assert "NVIDIA H200, torch 2.11.0, jax 0.11.2, triton 3.6.0, commit 0123456789, 2026-11-21" in text
    assert "balanced routing: microseconds" in text
    again = plot([path], tmp_path / "again")
    assert [file.read_bytes() for file in again] == [file.read_bytes() for file in found]
    pictures = plot([path], tmp_path / "pictures", "png")
    assert all(file.read_bytes().startswith(b"\x89PNG") for file in pictures)


def test_a_roofline_of_the_rows_that_say_what_was_touched(tmp_path: pathlib.Path) -> None:
    record = copy.deepcopy(RECORD)
    for found in record["rows"]:
        if found["routing"] == "balanced":
            found |= {"active_experts": 8, "dense_us": 40.0}
    points = roofline_points([*record["rows"], row("llama", 1, active_experts=8, torch_us=1.0, dense_us=1.0)])
    assert list(points) == ["qwen3", "dsv3"]
    intensity, ours, dense = points["qwen3"]
    # Of a token, 8 slots of 3 * 2048 * 768 weights: 2 FLOPs for each, which is 2 bytes.
    assert intensity == [1.0, 64.0] and ours[0] == pytest.approx(8 * 6 * 2048 * 768 / 60.0 / 1e6)
    assert dense[1] == pytest.approx(64 * 8 * 6 * 2048 * 768 / 40.0 / 1e6)
    files = plot([written(tmp_path, "a.json", record)], tmp_path / "figures")
    assert [file.name for file in files if "roofline" in file.name] == ["roofline-balanced.svg"]
    assert "FLOPs per byte of the weights touched" in (tmp_path / "figures" / "roofline-balanced.svg").read_text()


def test_records_of_different_cells_go_together(tmp_path: pathlib.Path) -> None:
    other = copy.deepcopy(RECORD) | {"partial": True}
    other["rows"] = [row("mixtral", 1, torch_us=100.0, jax_device_us=90.0)]
    paths = [written(tmp_path, "a.json", RECORD), written(tmp_path, "b.json", other)]
    assert len(read_records(paths)) == 2
    found = plot(paths, tmp_path / "figures")
    text = found[0].read_text()
    assert "mixtral" in text and "2026-11-21; NVIDIA H200" in text and "2026-11-21, partial" in text


@pytest.mark.parametrize("fault", ["the same cell", "an old schema"])
def test_refused_records(fault: str, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [written(tmp_path, "a.json", RECORD)]
    if fault == "the same cell":
        paths.append(written(tmp_path, "b.json", RECORD))
        message = "('qwen3', 'balanced', 64) must be in one record"
    else:
        paths = [written(tmp_path, "b.json", {"provenance": {}, "rows": []})]
        message = f"must be a record of schema 2 or 3 or {SCHEMA}, got None; run benchmarks.forward again"
    with pytest.raises(SystemExit) as refused:
        main([*map(str, paths), "--output", str(tmp_path / "figures")])
    assert refused.value.code == 2 and message in capsys.readouterr().err
    assert not (tmp_path / "figures").exists()


def test_the_command_needs_no_framework(tmp_path: pathlib.Path) -> None:
    path = written(tmp_path, "a.json", RECORD)
    code = "import sys; sys.modules.update(torch=None, jax=None, triton=None); import benchmarks.plot as p; p.main()"
    command = [sys.executable, "-c", code, str(path), "--output", str(tmp_path / "figures")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 4
