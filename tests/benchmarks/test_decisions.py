"""What the benchmarks decide without a device: routing draws, budgets, tables, provenance, what their page says."""

from __future__ import annotations

import json
import pathlib
import re
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from benchmarks import draws
from benchmarks.budget import Budget, time_limit
from benchmarks.compile_time import measure, show
from benchmarks.draws import ROUTINGS, draw_logits, drawn_load, load_of, load_table
from benchmarks.provenance import provenance
from benchmarks.record import (
    COLUMNS,
    add_over_balanced,
    add_ratios,
    read_vllm_figures,
    reasons,
    standing,
    standings,
    table,
)
from benchmarks.shapes import ALL_SHAPES, ALL_TOKENS, SHAPES, TOKENS
from moe_core.base.target import Target
from moe_core.runtime.warmup import KernelReport

README = pathlib.Path(draws.__file__).parent / "README.md"


def row_of(**fields: object) -> dict[str, object]:
    """A row of a record before its ratios."""
    figures = {
        "shape": "qwen3",
        "routing": "balanced",
        "tokens": 64,
        "torch_us": 300.0,
        "routing_us": 8.0,
        "torch_device_us": 290.0,
        "jax_device_us": 319.0,
        "bound_streaming_us": 270.0,
        "dense_us": 20.0,
        "scratch_bytes": 500,
        "scratch_allowed_bytes": 1000,
        "not_timed": {},
    }
    return {**figures, **fields}


def test_shapes_are_those_of_the_models() -> None:
    sizes = {name: (s.d_model, s.d_ff, s.num_experts, s.top_k, s.biased) for name, s in SHAPES.items()}
    assert sizes == {
        "gptoss120b": (2880, 2880, 128, 4, True),
        "gptoss20b": (2880, 2880, 32, 4, True),
        "qwen3": (2048, 768, 128, 8, False),
        "mixtral": (4096, 14336, 8, 2, False),
        "dsv3": (7168, 2048, 256, 8, False),
    }
    assert (TOKENS[0], TOKENS[-1]) == (1, 16384) and set(TOKENS) < set(ALL_TOKENS)
    more = {name: (s.d_model, s.d_ff, s.num_experts, s.top_k) for name, s in ALL_SHAPES.items() if name not in SHAPES}
    assert more == {
        "olmoe": (2048, 1024, 64, 8),
        "qwen3next": (2048, 512, 512, 10),
        "glm45air": (4096, 1408, 128, 8),
        "phimoe": (4096, 6400, 16, 2),
        "llama4": (5120, 8192, 16, 1),
        "granite": (1536, 512, 40, 8),
        "kimik2": (7168, 2048, 384, 8),
        "qwen3tp2": (2048, 384, 128, 8),
        "qwen3tp4": (2048, 192, 128, 8),
        "gptoss120bsilu": (2880, 2880, 128, 4),
    }
    in_out = {name for name, shape in ALL_SHAPES.items() if shape.weight_layout == "in_out"}
    assert in_out == {"gptoss120b", "gptoss20b", "llama4"}, "as checkpoints store them"
    assert SHAPES["gptoss20b"].matrices() == ((32, 2880, 5760), (32, 2880, 2880))
    assert SHAPES["qwen3"].matrices() == ((128, 1536, 2048), (128, 2048, 768))


@pytest.mark.parametrize("routing", ROUTINGS)
def test_draws_are_repeatable_and_differ_by_seed(routing: str) -> None:
    first = draw_logits(routing, 32, 16, seed=3)
    assert first.dtype == np.float32 and first.shape == (32, 16) and np.isfinite(first).all()
    assert np.array_equal(first, draw_logits(routing, 32, 16, seed=3))
    assert not np.array_equal(first, draw_logits(routing, 32, 16, seed=4))


def counts(routing: str, tokens: int, top_k: int = 4, experts: int = 32) -> np.ndarray:
    """Sorted tokens per expert, most first."""
    ids = np.argsort(-draw_logits(routing, tokens, experts), axis=1)[:, :top_k]
    return np.sort(np.bincount(ids.ravel(), minlength=experts))[::-1]


def test_balanced_routing_is_even() -> None:
    found = counts("balanced", 8192)
    mean = 8192 * 4 / 32
    # Five standard deviations of a binomial count.
    assert np.abs(found - mean).max() < 5 * mean**0.5


def test_zipf_routing_falls_with_the_rank() -> None:
    first_choices = np.bincount(draw_logits("zipf", 65536, 32).argmax(axis=1), minlength=32)
    shares = np.sort(first_choices)[::-1] / 65536
    popularity = np.arange(1, 33) ** -1.2
    np.testing.assert_allclose(shares[:4], popularity[:4] / popularity.sum(), rtol=0.05)


def test_single_hot_routing_sends_every_token_to_one_expert() -> None:
    logits = draw_logits("single_hot", 4096, 32)
    assert len(set(logits.argmax(axis=1))) == 1
    found = counts("single_hot", 4096)
    assert found[0] == 4096
    mean = 4096 * 3 / 31
    assert np.abs(found[1:] - mean).max() < 5 * mean**0.5


def test_an_unknown_routing_is_refused() -> None:
    with pytest.raises(ValueError, match=r"balanced, zipf, single_hot, got 'even'"):
        draw_logits("even", 4, 4)


def test_loads() -> None:
    assert load_of(np.array([0, 3, 1, 0])) == (2, 3)
    logits = np.array([[3, 2, 1, 0], [0, 3, 1, 2], [1, 2, 0, 3]], np.float32)
    assert drawn_load(logits, 2) == (3, 3)


def test_the_page_publishes_the_loads_of_its_seed() -> None:
    assert load_table() in README.read_text()


def test_a_cell_borrows_half_of_what_later_ones_have() -> None:
    now = [100.0]
    budget = Budget(6, 3, clock=lambda: now[0])
    assert (budget.left(), budget.left(0), budget.left(1)) == (12, 18, 6)
    now[0] += 10
    assert budget.left() == 2
    budget.finish_cell()
    assert budget.left() == 5
    budget.finish_cell()
    assert budget.left() == 8
    now[0] += 9
    assert budget.left() < 0


def test_a_time_limit_stops_what_takes_longer_and_nothing_else() -> None:
    start = time.monotonic()
    with pytest.raises(TimeoutError, match="took longer than 0 s"), time_limit(0.05):
        time.sleep(30)
    assert time.monotonic() - start < 10
    with time_limit(0.05):
        pass
    time.sleep(0.1)


def test_ratios() -> None:
    row = row_of(triton_kernels_us=250.0, grouped_mm_us=500.0)
    add_ratios(row, {"qwen3": {"64": {"us": 292.0, "active": 124}}})
    assert (row["bound_us"], row["bound_fraction"], row["over_best_peer"]) == (270.0, 0.9, 1.2)
    assert (row["scratch_over_allowed"], row["jax_over_torch"]) == (0.5, pytest.approx(1.1))
    assert (row["vllm_us"], row["vllm_active_experts"], row["over_allowed"]) == (292.0, 124, 0.8)


def test_ties() -> None:
    assert [standing(ratio) for ratio in (0.5, 0.979, 0.981, 1.0, 1.019, 1.021)] == [
        "faster", "faster", "tie", "tie", "tie", "slower",
    ]  # fmt: skip
    rows: list[dict[str, float]] = [{"over_triton_kernels": ratio} for ratio in (0.9, 1.01, 0.99, 1.1, 0.5)]
    assert standings([*rows, {}]) == (
        "ours beside triton_kernels: faster in 2, tie in 2, slower in 1 of 5 cells (a tie: within 2%)"
    )
    assert standings([{}]) == ""


def test_recorded_figures_are_those_of_balanced_routing() -> None:
    assert read_vllm_figures()["qwen3"]["64"]["us"] > 0
    row = row_of(routing="zipf")
    add_ratios(row, read_vllm_figures())
    assert "vllm_us" not in row and "over_best_peer" not in row


def test_routing_is_compared_with_the_balanced_of_the_same_run() -> None:
    rows = [row_of(tokens=1, torch_us=10.0), row_of(), row_of(shape="dsv3", torch_us=1.0)]
    row = row_of(routing="zipf", torch_us=330.0)
    add_over_balanced(row, rows)
    assert row["over_balanced"] == pytest.approx(1.1)
    other = row_of(routing="zipf", tokens=256)
    add_over_balanced(other, rows)
    assert "over_balanced" not in other


def test_a_table_has_the_columns_that_have_figures() -> None:
    shown = table([row_of(), row_of(tokens=1, triton_kernels_us=9.876, active_experts=8)])
    heading, ruler, first, second = shown.splitlines()
    assert heading.startswith("| shape | routing | tokens | active | torch |") and "tokamax" not in heading
    assert len({line.count("|") for line in (heading, ruler, first, second)}) == 1
    cells = dict(zip(heading.split(" | "), second.split(" | "), strict=True))
    assert (cells["tokens"], cells["active"], cells["torch"], cells["triton_kernels"]) == ("1", "8", "300", "9.88")
    assert dict(zip(heading.split(" | "), first.split(" | "), strict=True))["triton_kernels"] == "-"


def test_reasons_are_gathered() -> None:
    rows = [
        row_of(not_timed={"ragged_dot": "out of memory"}),
        row_of(tokens=1, not_timed={"ragged_dot": "out of memory"}),
    ]
    assert reasons(rows) == "ragged_dot: out of memory (qwen3 balanced 64, qwen3 balanced 1)"


def test_provenance(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOEBIUS_COMMIT", "0123456789abcdef")
    monkeypatch.setattr("sys.argv", ["forward.py", "--shapes", "qwen3"])
    found = provenance("benchmarks.forward")
    assert set(found) == {"device", "driver", "versions", "commit", "command", "date"}
    assert found["commit"] == "0123456789abcdef" and found["device"]
    assert found["command"] == "python -m benchmarks.forward --shapes qwen3"
    assert {"python", "moebius", "torch", "jax", "triton", "numpy"} <= set(found["versions"])
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", found["date"])
    json.dumps(found)


def test_a_first_call_waits_for_each_of_its_kernels_once() -> None:
    """Two kernels of one compilation are one; a cell's time is that of its own kernels."""

    def two_seconds_each(kernels: Sequence[Any]) -> list[KernelReport]:
        return [
            KernelReport(launch.kernel.name, "16 x 128", 2.0, number == 0) for number, (_, launch) in enumerate(kernels)
        ]

    found = measure([SHAPES["qwen3"]], (9, 16, 4096), Target("cuda", 90, 132), two_seconds_each)
    one, two, many = found["cells"]
    assert one == {
        "shape": "qwen3",
        "tokens": 9,
        "kernels": 2,
        "first_call_seconds": 4.0,
        "slowest_kernel_seconds": 2.0,
    }
    assert two["first_call_seconds"] == 4.0 and many["first_call_seconds"] == 2.0 * many["kernels"] >= 8.0
    assert len(found["kernels"]) < one["kernels"] + two["kernels"] + many["kernels"]
    lines = show(found, 2).splitlines()
    assert lines[0] == "qwen3 9: 2 kernels, first call 4.00 s, slowest kernel 2.00 s"
    assert lines[3].startswith(f"{len(found['kernels'])} kernels (1 existed) by 2 processes: ")
    json.dumps(found)


def test_the_page_describes_every_column() -> None:
    text = README.read_text()
    assert not [name for name in COLUMNS if f"`{name}`" not in text]
