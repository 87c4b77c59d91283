"""The check of records: which cells it times anew, in which layout, and which it calls slower. Timing needs a GPU."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("jax")

import moe_torch
from benchmarks import check
from benchmarks.check import Cell, cells_of, last_record
from benchmarks.draws import ROUTINGS
from benchmarks.shapes import ALL_SHAPES
from moe_core.specs.operands import ExpertWeights
from tests.support.benchmarks import TINY, CallingTimer

STORED = sorted(check.RESULTS.glob("forward*.json"))


@pytest.fixture(autouse=True)
def on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(check, "free_memory", lambda: None)
    with moe_torch.cpu_engine("reference"):
        yield


class Ratios(CallingTimer):
    """Ours takes the next of these times 100 us, the dense products 100 us."""

    def __init__(self, *ratios: float) -> None:
        super().__init__()
        self.ratios = iter(ratios)

    def rounds(self, functions: dict[str, Callable[[], Any]], seconds: float = 1.0) -> dict[str, list[float]]:
        found = super().rounds(functions, seconds)
        return found | {"ours": [100.0 * next(self.ratios)]}


def row_of(**fields: Any) -> dict[str, Any]:
    row = {"shape": "qwen3", "routing": "balanced", "tokens": 9, "torch_us": 200.0, "dense_us": 100.0}
    return row | {"weight_layout": "out_in", "dtype": "float16", "over_dense": 2.1} | fields


@pytest.mark.parametrize("path", STORED, ids=[path.stem for path in STORED])
def test_every_stored_record_can_be_checked(path: pathlib.Path) -> None:
    record = json.loads(path.read_text())
    cells = cells_of(record)
    assert len(cells) == len(record["rows"]) > 0 and isinstance(record["seed"], int)
    for cell, row in zip(cells, record["rows"], strict=True):
        assert (cell.shape.name, cell.tokens) == (row["shape"], row["tokens"]) and cell.routing in ROUTINGS
        assert cell.over_dense == row.get("over_dense", row["torch_us"] / row["dense_us"]) > 0
        if record["schema"] < 4:
            assert (cell.shape.weight_layout, cell.dtype) == ("in_out", "bfloat16")


def test_the_last_record_is_the_newest_with_most_cells(tmp_path: pathlib.Path) -> None:
    assert last_record() in STORED
    for name, date, cells in (
        ("forward-a", "2026-11-23", 9),
        ("forward-b", "2026-11-24", 1),
        ("forward-c", "2026-11-24", 2),
    ):
        record = {"provenance": {"date": date}, "rows": [row_of()] * cells}
        (tmp_path / f"{name}.json").write_text(json.dumps(record))
    assert last_record(tmp_path).name == "forward-c.json"
    with pytest.raises(SystemExit, match=r"there is no forward\*\.json"):
        last_record(tmp_path / "nowhere")


def test_cells_have_the_layout_and_dtype_of_their_row() -> None:
    old = {name: value for name, value in row_of().items() if name not in ("weight_layout", "dtype", "over_dense")}
    (cell,), (older,) = cells_of({"schema": 4, "rows": [row_of()]}), cells_of({"schema": 3, "rows": [old]})
    assert cell == Cell(ALL_SHAPES["qwen3"], "float16", "balanced", 9, 2.1)
    assert (older.shape.weight_layout, older.dtype, older.over_dense) == ("in_out", "bfloat16", 2.0)


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"schema": 1, "rows": [row_of()]}, "must be one of benchmarks.forward with cells, got schema 1"),
        ({"schema": 4, "rows": []}, "with cells"),
        ({"schema": 4, "rows": [{"shape": "qwen3", "tokens": 9}]}, "with cells"),
        ({"schema": 4, "rows": [row_of(shape="tiny")]}, r"shape must be of gptoss120b, .*, got 'tiny'"),
    ],
)
def test_what_is_no_record_is_refused(record: dict[str, Any], message: str) -> None:
    with pytest.raises(SystemExit, match=message):
        cells_of(record)


def test_a_cell_that_slowed_is_timed_twice() -> None:
    cells = [Cell(TINY["qwen3"], dtype, "balanced", tokens, 2.0) for dtype, tokens in (("float16", 5), ("bfloat16", 9))]
    ok, slower = check.check(cells, Ratios(2.05, 2.4, 2.1), "cpu", 1.0)
    assert (ok["now"], ok["change"], ok["verdict"]) == (2.05, "+2.5%", "ok")
    assert (slower["now"], slower["change"], slower["verdict"]) == (2.1, "+5.0%", "slower")
    (once,) = check.check(cells[:1], Ratios(2.4, 1.9), "cpu", 1.0)
    assert (once["now"], once["verdict"]) == (1.9, "ok"), "it did not take as long again"


def test_a_wrong_output_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "expected", lambda problem, tokens: torch.zeros(len(tokens), 16) + 7)
    with pytest.raises(SystemExit, match=r"parity is red for qwen3 5: .*nothing was timed"):
        check.check([Cell(TINY["qwen3"], "bfloat16", "balanced", 5, 2.0)], Ratios(), "cpu", 1.0)


def test_the_exit_status_names_what_slowed(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path, seen = tmp_path / "forward.json", []

    def line(cell: Cell, problem: Any, timer: Any, seconds: float) -> dict[str, Any]:
        assert isinstance(problem.experts, ExpertWeights)
        seen.append(cell.tokens)
        change = "+9.0%" if cell.tokens == 16 else "-1.0%"
        verdict = "slower" if cell.tokens == 16 else "ok"
        return {"shape": cell.shape.name, "tokens": cell.tokens, "change": change, "verdict": verdict}

    monkeypatch.setattr(check, "ALL_SHAPES", TINY)
    monkeypatch.setattr(check, "GraphTimer", CallingTimer)
    monkeypatch.setattr(check, "check_cell", line)
    real = check.check
    monkeypatch.setattr(check, "check", lambda cells, timer, device, *rest: real(cells, timer, "cpu", *rest))
    rows = [row_of(tokens=tokens, shape=name) for name in ("qwen3", "gptoss20b") for tokens in (1, 16)]
    path.write_text(json.dumps({"schema": 4, "seed": 0, "rows": rows}))
    assert check.main([str(path)]) == 1 and seen == [1, 16, 1, 16]
    printed = capsys.readouterr()
    assert "2 of 4 cells are more than 3% slower beside dense" in printed.err and "gptoss20b 16 (+9.0%)" in printed.err
    assert "| qwen3 | 16 | +9.0% | slower |" in printed.out
    assert check.main([str(path), "--tokens", "1"]) == 0 and seen[4:] == [1, 1]
    assert check.main([str(path), "--shapes", "gptoss20b", "--tokens", "1"]) == 0 and seen[6:] == [1]
    for arguments, message in (
        (["--tokens", "2"], "has no such cell"),
        (["--shapes", "x"], "--shapes must be of qwen3"),
    ):
        with pytest.raises(SystemExit):
            check.main([str(path), *arguments])
        assert message in capsys.readouterr().err
