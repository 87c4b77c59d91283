"""What the benchmarks make of the kernels that CUPTI saw: calls told apart, and breakdowns."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("jax")

from benchmarks.breakdown import breakdown_table, summarize
from benchmarks.timing import GraphTimer, KernelSpan, equal_parts, medians, paired_ratio


class Replays(GraphTimer):
    """Without a GPU: a graph is its function's name, and each replay takes 1 us more than the one before."""

    def __init__(self) -> None:
        self.replayed: list[str] = []

    def capture(self, function: Any) -> Any:
        return function()

    def _replay(self, graph: Any, written: bool = True) -> float:
        self.replayed.append(graph)
        return float(len(self.replayed))


def test_replays_by_turns() -> None:
    timer = Replays()
    found = timer.rounds({"ours": lambda: "a", "theirs": lambda: "b"}, repeats=5)
    assert timer.replayed == [*"abbaabbaab"], "every other round runs backwards"
    assert found == {"ours": [1.0, 4.0, 5.0, 8.0, 9.0], "theirs": [2.0, 3.0, 6.0, 7.0, 10.0]}
    assert medians(found) == {"ours": 5.0, "theirs": 6.0}
    assert paired_ratio(found, "ours", "theirs") == 9.0 / 10.0, "the median of 1/2, 4/3, 5/6, 8/7 and 9/10"
    timer = Replays()
    assert timer.time(lambda: "a", repeats=5) == 3.0 and timer.replayed == ["a"] * 5
    timer = Replays()
    timer.rounds({"ours": lambda: "a"}, seconds=0.0)
    assert timer.replayed == ["a"] * 5, "enough for a median, though the time is up"


def test_kernels_of_equal_calls_are_told_apart() -> None:
    def spans(*names: str) -> list[KernelSpan]:
        return [KernelSpan(name, start, start + 1) for start, name in enumerate(names)]

    found = spans("route", "product", "product", "route", "product", "product")
    assert equal_parts(found, 2) == [found[:3], found[3:]]
    # Two branches of a graph may start in either order.
    assert equal_parts(spans("route", "product", "product", "route"), 2) is not None
    assert equal_parts(spans("route", "product", "product", "product"), 2) is None
    assert equal_parts(found[:5], 2) is None and equal_parts([], 2) is None


def test_a_breakdown_keeps_launches_of_one_kernel_apart() -> None:
    replays = [
        [KernelSpan("route", 0, 2), KernelSpan("product", 3, 7), KernelSpan("product", 7, 10)],
        [KernelSpan("route", 0, 2), KernelSpan("product", 4, 9), KernelSpan("product", 9, 10)],
        [KernelSpan("route", 1, 2), KernelSpan("product", 4, 10), KernelSpan("product", 10, 13)],
    ]
    found = summarize(replays)
    assert found == {
        "span_us": 10,
        "busy_us": 9,
        "kernels": [{"kernel": "route", "us": 2}, {"kernel": "product", "us": 5}, {"kernel": "product", "us": 3}],
    }
    row = {"shape": "qwen3", "routing": "zipf", "tokens": 64, "breakdown": {"ours": found, "triton_kernels": found}}
    lines = breakdown_table(row).splitlines()
    assert lines[0] == "| qwen3, zipf, 64 tokens | kernel | us | share |"
    assert lines[2:6] == [
        "| ours | route | 2.0 | 20% |",
        "| ours | product | 5.0 | 50% |",
        "| ours | product | 3.0 | 30% |",
        "| ours | between kernels | 1.0 | 10% |",
    ]
    assert len(lines) == 10 and lines[6].startswith("| triton_kernels | route |")
