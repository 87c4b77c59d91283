"""The benchmark of expert parallelism: a run on a CPU, and ranks that fail, die or hang."""

from __future__ import annotations

import contextlib
import importlib
import json
import multiprocessing
import multiprocessing.connection
import os
import pathlib
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("jax")

import torch.distributed as dist

from benchmarks import parallel, parallel_rank, parallel_serve
from benchmarks.parallel_cell import Cell, Setting, fitting
from benchmarks.shapes import SHAPES

README = pathlib.Path(parallel.__file__).parent / "README.md"
CELL = Cell(SHAPES["qwen3"], 64, "padded", "tokens", False)


def test_a_run_on_a_cpu(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setenv("MOEBIUS_COMMIT", "0123456789abcdef")
    output = tmp_path / "record.json"
    given = ["--device", "cpu", "--shapes", "tiny_biased", "--tokens", "3", "--cell-seconds", "0.01"]
    assert parallel.main([*given, "--output", str(output)]) == 0
    record = json.loads(output.read_text())
    assert record["provenance"]["command"].startswith("python -m benchmarks.parallel") and record["ranks"] == 2
    assert [row["mode"] for row in record["rows"]] == list(parallel.MODES)
    for row in record["rows"]:
        assert row["scaling"] == row["alone_us"] / row["us"] and row["plan_bytes"] > 0
        assert row["link_bytes"] > 0 and row["seconds"] > 0
    assert "| tiny_biased | 3 | padded | tokens | forward |" in capsys.readouterr().out


@pytest.fixture
def bench() -> Iterator[parallel_rank.Bench]:
    """A group of one rank, in this process."""
    # torch does not export all of what it documents.
    store: Any = importlib.import_module("torch.distributed").HashStore()
    threads, where = torch.get_num_threads(), {"store": store, "rank": 0, "world_size": 1}
    with parallel_serve.joined(Setting(1, "cpu", 0, 0.01, 60.0), 0, **where) as found:
        yield found
    dist.destroy_process_group()
    torch.set_num_threads(threads)


def test_a_step_is_timed_and_red_parity_is_not(bench: parallel_rank.Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    (cell,) = parallel.parse(
        ["--device", "cpu", "--shapes", "tiny", "--tokens", "4", "--modes", "padded", "--training", "--shared"]
    ).cells
    found = bench.measure(cell)
    assert cell.named["shared"] and str(cell).endswith("training with a shared expert")
    assert len(found["us"]) >= 5 and found["link_bytes"] == 0 and "plan_bytes" not in found
    real = parallel_rank.moe
    monkeypatch.setattr(parallel_rank, "moe", lambda *given, **options: real(-given[0], *given[1:], **options))
    assert "parity is red" in parallel_serve.attempt(bench.measure, cell)["error"]


class Thread(threading.Thread):
    """In the place of a process that is a rank."""

    def __init__(self, target: Any, args: Any, daemon: bool) -> None:
        *given, there = args
        # The parent closes its own end, which a process would have a copy of.
        copy = multiprocessing.connection.Connection(os.dup(there.fileno()))
        super().__init__(target=target, args=(*given, copy), daemon=daemon)

    def run(self) -> None:
        with contextlib.suppress(EOFError, OSError):
            super().run()

    def kill(self) -> None:
        pass

    def join(self, timeout: float | None = None) -> None:
        del timeout


def rank_of(setting: Setting, rank: int, store: str, pipe: Any) -> None:
    """A rank whose second one fails at 1 token, dies at 2 and hangs at 3."""
    pipe.send({})
    while True:
        cell = pipe.recv()
        if rank == 1 and cell.tokens == 1:
            pipe.send({"error": "Unsupported: no"})
        elif rank == 1 and cell.tokens == 2:
            return pipe.close()
        elif rank == 1 and cell.tokens == 3:
            time.sleep(setting.limit + 0.2)
            return pipe.close()
        else:
            pipe.send(figures(rank))


def figures(rank: int) -> dict[str, Any]:
    """What a rank finds: the first one is the slower of the two in the second repeat."""
    times = {"us": [10.0, 30.0 - 20 * rank, 10.0 + 10 * rank], "alone_us": [18.0], "experts_us": [8.0]}
    sizes = {"plain_us": [2.0], "plain_bytes": 4000, "received_slots": 30 - 10 * rank, "link_bytes": 24_000}
    return times | sizes | {"plan_bytes": 100, "peak_bytes": 90 + rank}


def test_ranks_that_fail_die_or_hang_cost_their_cell_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    class Context:
        Pipe, Process = staticmethod(multiprocessing.Pipe), Thread

        def set_forkserver_preload(self, names: list[str]) -> None:
            assert names == [__name__]

    monkeypatch.setattr(parallel.multiprocessing, "get_context", lambda _: Context())
    cells = tuple(Cell(SHAPES["qwen3"], tokens, "padded", "tokens", False) for tokens in (1, 2, 3, 4))
    options = parallel.Options(cells, Setting(2, "cpu", 0, 0.1, 0.3), 60.0, None)
    rows = list(parallel.rows_of_processes(options, time.monotonic() + 60, rank_of))
    errors = ["rank 1: Unsupported: no", "the process of rank 1 ended", "rank 1 did not answer in 0.3 s", None]
    assert [row.get("error") for row in rows] == errors
    late = list(parallel.rows_of_processes(options, time.monotonic() - 1, rank_of))
    assert {row["error"] for row in late} == {"not run: the time was spent"}


def test_figures_are_those_of_the_slowest_rank() -> None:
    row = parallel.merged(CELL, [figures(0), figures(1)])
    assert row["us"] == 20.0 and row["scaling"] == 0.9 and row["exchange_us"] == 12.0 and row["gb_s"] == 2.0
    assert row["plain_gb_s"] == 2.0 and row["imbalance"] == 1.2 and row["peak_over_plan"] == 0.91
    assert "| qwen3 | 64 | padded | tokens | forward | 20 |" in parallel.table([row], parallel.COLUMNS)


def test_a_shape_that_does_not_fit_has_fewer_experts() -> None:
    assert fitting(SHAPES["dsv3"], 80e9, training=True).num_experts == 256
    assert fitting(SHAPES["dsv3"], 40e9, training=False).num_experts == 256
    assert fitting(SHAPES["dsv3"], 40e9, training=True).num_experts == 128


@pytest.mark.parametrize(
    "given, message",
    [
        (["--device", "cpu", "--ranks", "1"], "--ranks must be 2 or more, and as many GPUs, got 1 of 0"),
        (
            ["--device", "cpu", "--modes", "nccl"],
            "--modes must be of all_gather, all_to_all, padded, peer, ",
        ),
        (["--device", "cpu", "--modes", "all_gather", "--rows", "slots"], "there is nothing to run"),
    ],
)
def test_wrong_options_are_refused(given: list[str], message: str, capsys: Any) -> None:
    with pytest.raises(SystemExit):
        parallel.parse(given)
    assert message in capsys.readouterr().err


def test_the_readme_says_what_it_does() -> None:
    text = README.read_text()
    assert "`python -m benchmarks.parallel`" in text and all(f"`{name}`" in text for name in parallel.COLUMNS)
