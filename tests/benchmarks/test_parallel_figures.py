"""Figures of expert parallelism: links, balance, and what is predicted, beside measurements and alone."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import pytest

pytest.importorskip("matplotlib")

from benchmarks import figures, parallel_figures, theme
from benchmarks.parallel_figures import CASES, balance, pairs, predictions
from moe_core.parallel import Link, LinkTiming, MachineRecord
from moe_core.parallel.machine import H200

ORIGIN = {"gpu": "GPU", "driver": "1", "versions": {"torch": "2", "kernels": "x"}, "commit": "0123", "command": "c"}


def machine() -> MachineRecord:
    link = Link(20.0, 200.0)
    timings = [
        LinkTiming(kind, "nccl", where, 4, size, link.us(size))
        for kind, where in (("all_gather", "domain"), ("all_to_all", "domain"), ("all_to_all", "network"))
        for size in (1000, 10**6, 10**8)
    ]
    return MachineRecord.of(timings, ORIGIN | {"date": "today"}, domain=4, tflops=1.0, memory=1.0)


def test_links_are_points_on_the_line_of_their_fit() -> None:
    with theme.drawing():
        (panel,) = parallel_figures.draw_links([machine()]).axes
    labels = [text.get_text() for text in panel.get_legend().get_texts()]
    assert labels == ["all_gather, nccl", "all_to_all, nccl", "all_to_all, nccl, between hosts"]
    points, line = panel.lines[0], panel.lines[1]
    assert list(points.get_xdata()) == [1000, 10**6, 10**8]
    assert line.get_ydata()[[0, -1]] == pytest.approx([points.get_ydata()[0], points.get_ydata()[-1]])


def test_spare_places_keep_ranks_balanced() -> None:
    linear, full, spare = (balance(256, 8, 64, case) for case in CASES)
    assert linear[-1] < 0.15 and full[-1] < 0.2 and min(spare) > 0.85 and linear[0] > 0.9


def row(**figures: Any) -> dict[str, Any]:
    cell = {"shape": "qwen3", "experts": 128, "tokens": 64, "mode": "padded", "rows": "tokens", "what": "forward"}
    return cell | {"us": 900.0, "alone_us": 500.0, "experts_us": 400.0} | figures


def test_predictions_lie_beside_what_was_measured() -> None:
    rows = [
        row(),
        row(graph_us=600.0),
        row(what="training"),
        row(error="no"),
        row(shape="tiny"),
        row(mode="all_to_all"),
    ]
    found = pairs({"ranks": 2, "rows": rows}, H200)
    assert list(found) == ["padded, eager", "padded, CUDA graph", "all_to_all, eager"]
    ((measured, predicted),) = found["padded, CUDA graph"]
    assert measured == 600.0 and 400 < predicted < 500 and found["padded, eager"] == [(900.0, predicted)]


def test_scaling_is_that_of_the_latest_records() -> None:
    """Of CUDA graphs where there are any; nothing of training, of slots, or of cells that failed."""
    versions = dict.fromkeys(("torch", "jax", "triton"), "2")
    origin = {"device": "GPU", "versions": versions, "commit": "0", "date": "today"}
    other = row(rows="slots", scaling=9.0), row(what="training", scaling=9.0), row(error="no")
    old = [row(scaling=0.5), row(scaling=0.25, tokens=8), row(scaling=0.5, mode="peer", graph_scaling=0.75), *other]
    records = [{"ranks": 2, "provenance": origin, "rows": rows} for rows in (old, [row(scaling=0.125)])]
    with theme.drawing():
        panel = parallel_figures.draw_scaling(records).axes[0]
    lines = {line.get_label(): line.get_xydata().tolist() for line in panel.lines[:-1]}
    assert panel.get_title() == "qwen3" and lines == {"padded": [[8, 25], [64, 12.5]], "peer": [[64, 75]]}


def test_predictions_for_many_gpus() -> None:
    found = dict(predictions("qwen3"))
    assert list(found) == [2**power for power in range(1, 12)] and found[8] > 2 * found[16] > 0


def test_files_by_the_command(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    machine().save(tmp_path / "machine.json")
    given = [str(tmp_path / "machine.json"), *(str(figures.RESULTS / name) for name in figures.PARALLEL)]
    assert parallel_figures.main([*given, "--output", str(tmp_path / "figures")]) == 0
    kinds = ("links", "balance", "scale", "scaling", "predicted")
    names = [f"parallel-{kind}" for kind in kinds]
    assert [pathlib.Path(line).stem for line in capsys.readouterr().out.split()] == names
    texts = {name: (tmp_path / "figures" / f"{name}.svg").read_text() for name in names}
    assert "Predicted, not measured" in texts["parallel-scale"] and "Simulated" in texts["parallel-balance"]
    assert "links of the prediction: measured, machine.json" in texts["parallel-predicted"]
    with pytest.raises(SystemExit):
        parallel_figures.main([given[0], "--output", str(tmp_path)])
    assert "a record of benchmarks.parallel must be named" in capsys.readouterr().err
    assert json.loads((tmp_path / "machine.json").read_text())["format"] == 1
