"""Rules of figures: replays by turns, bounds, ratios, peers of other libraries, routing of traces, provenance."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import json
import pathlib
import re
import time
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
flop_counter = pytest.importorskip("torch.utils.flop_counter")
pytest.importorskip("jax")

from benchmarks import forward, parallel, parallel_records, peers, quantized, quantized_peers, sustained
from benchmarks.breakdown import breakdown_table, summarize
from benchmarks.budget import Budget
from benchmarks.libraries import flashinfer, hugging_face, sonicmoe
from benchmarks.libraries.recorded import add_recorded, read_recorded
from benchmarks.parallel_cell import fitting
from benchmarks.peers import PEERS, beside_dense, dense_forwards, time_peer, why_not_importable
from benchmarks.problem import Problem, expected
from benchmarks.provenance import provenance
from benchmarks.record import add_over_balanced, add_ratios, read_vllm_figures, reasons, standings, table
from benchmarks.shapes import ALL_SHAPES, SHAPES, Shape
from benchmarks.timing import EagerTimer, GraphTimer, KernelSpan, equal_parts, medians, paired_ratio
from benchmarks.traces import traced_logits
from benchmarks.training_peers import dense_step
from benchmarks.training_problem import TrainingProblem
from benchmarks.training_record import add_training_ratios, read_sonicmoe_figures
from moe_core.errors import InvalidInput
from moe_core.specs.matmul import Activation
from moe_core.trace import LayerRouting, RoutingTrace
from tests.support.benchmarks import TINY, CallingTimer, problem_of

SILU = Shape("silu", 16, 32, 4, 2, Activation("silu"), False)


pytestmark = pytest.mark.usefixtures("cpu")


# Timing.


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
    rounds = timer.rounds({"ours": lambda: "a", "theirs": lambda: "b"}, repeats=5)
    assert timer.replayed == [*"abbaabbaab"], "every other round runs backwards"
    assert rounds == {"ours": [1.0, 4.0, 5.0, 8.0, 9.0], "theirs": [2.0, 3.0, 6.0, 7.0, 10.0]}
    assert medians(rounds) == {"ours": 5.0, "theirs": 6.0}
    assert paired_ratio(rounds, "ours", "theirs") == 9.0 / 10.0, "the median of 1/2, 4/3, 5/6, 8/7 and 9/10"
    timer = Replays()
    timer.rounds({"ours": lambda: "a"}, seconds=0.0)
    assert timer.replayed == ["a"] * 5, "enough for a median, though the time is up"
    order: list[str] = []
    EagerTimer().rounds({"a": lambda: order.append("a"), "b": lambda: order.append("b")}, seconds=0.0)
    assert "".join(order) == "ab" + "ab" + "ba" + "ab" + "ba" + "ab"
    order.clear()
    used = itertools.count()
    replays = {name: functools.partial(order.append, name) for name in "ab"}
    found = sustained.sustained(replays, lambda: float(next(used)), 0.0)
    assert "".join(order) == "".join(10 * name for name in "aabba"), "a turn ahead heats the chip"
    assert [one["joules"] for one in found.values()] == [0.1, 0.1]


def test_kernels_of_equal_calls_are_told_apart() -> None:
    def spans(*names: str) -> list[KernelSpan]:
        return [KernelSpan(name, start, start + 1) for start, name in enumerate(names)]

    six = spans("route", "product", "product", "route", "product", "product")
    assert equal_parts(six, 2) == [six[:3], six[3:]]
    # Two branches of a graph may start in either order.
    assert equal_parts(spans("route", "product", "product", "route"), 2) is not None
    assert equal_parts(spans("route", "product", "product", "product"), 2) is None
    assert equal_parts(six[:5], 2) is None and equal_parts([], 2) is None


def test_a_breakdown_keeps_launches_of_one_kernel_apart() -> None:
    ends = ((2, 3, 7, 10), (2, 4, 9, 10), (2, 4, 10, 13))
    replays = [
        [KernelSpan("route", 0, a), KernelSpan("product", b, c), KernelSpan("product", c, d)] for a, b, c, d in ends
    ]
    summary = summarize(replays)
    assert [(one["kernel"], one["us"]) for one in summary["kernels"]] == [("route", 2), ("product", 5), ("product", 3)]
    row = {"shape": "qwen3", "routing": "zipf", "tokens": 64, "breakdown": {"ours": summary}}
    assert "| ours | route | 2.0 | 20% |" in breakdown_table(row) and "between kernels" in breakdown_table(row)
    one, two = [KernelSpan("chain_matmul_both", 0, 7)], [KernelSpan("matmul_a", 0, 3), KernelSpan("matmul_b", 3, 7)]
    reason = "each must be a launch of its own: a replay has 1 or 2 kernels of products, not 2"
    assert quantized.why_not_apart([one, two]) == reason and quantized.why_not_apart([two, two]) is None


def test_a_cell_borrows_half_of_what_later_ones_have() -> None:
    now = [100.0]
    budget = Budget(6, 3, clock=lambda: now[0])
    assert (budget.left(), budget.left(0), budget.left(1)) == (12, 18, 6)
    now[0] += 10
    assert budget.left() == 2
    budget.finish_cell()
    assert budget.left() == 5


# Bounds and ratios.


def test_the_dense_bounds_have_the_flops_of_the_layer() -> None:
    shape = TINY["qwen3"]
    for products in dense_forwards(shape, 12, "cpu", torch.float16).values():
        with flop_counter.FlopCounterMode(display=False) as counter:
            products()
        assert counter.get_total_flops() == shape.flops(12)
    for layout in ("in_out", "out_in"):
        with torch.profiler.profile(with_flops=True, acc_events=True) as profiler:
            dense_step(shape, 12, "cpu", layout)()
        assert sum(event.flops for event in profiler.key_averages()) == 3 * shape.flops(12)


def test_the_faster_dense_products_are_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    rounds = {"ours": [30.0, 44.0, 50.0], "in_out": [12.0, 11.0, 10.0], "out_in": [10.0, 11.0, 9.0]}
    monkeypatch.setattr(CallingTimer, "rounds", lambda self, functions, seconds=1.0: rounds)
    bound = beside_dense(min, dense_forwards(TINY["qwen3"], 2, "cpu"), CallingTimer())
    assert bound == {"dense_us": 10.0, "dense_layout": "out_in", "over_dense": 4.0}


def row_of(**fields: Any) -> dict[str, Any]:
    """A row of a record before its ratios."""
    row = {"shape": "qwen3", "routing": "balanced", "tokens": 64, "torch_us": 300.0, "routing_us": 8.0}
    row |= {"torch_device_us": 290.0, "jax_device_us": 319.0, "bound_streaming_us": 270.0, "dense_us": 20.0}
    return row | {"scratch_bytes": 500, "scratch_allowed_bytes": 1000, "not_timed": {}} | fields


def test_ratios() -> None:
    row = row_of(triton_kernels_us=250.0, grouped_mm_us=500.0)
    add_ratios(row, {"qwen3": {"64": {"us": 292.0, "active": 124}}})
    assert (row["bound_us"], row["bound_fraction"], row["over_best_peer"]) == (270.0, 0.9, 1.2)
    assert (row["scratch_over_allowed"], row["jax_over_torch"]) == (0.5, pytest.approx(1.1))
    assert (row["vllm_us"], row["vllm_active_experts"], row["over_allowed"]) == (292.0, 124, 0.8)
    zipf = row_of(routing="zipf", torch_us=330.0)
    add_ratios(zipf, read_vllm_figures())
    add_over_balanced(zipf, [row_of(tokens=1, torch_us=10.0), row_of(), row_of(shape="dsv3", torch_us=1.0)])
    assert "vllm_us" not in zipf and zipf["over_balanced"] == pytest.approx(1.1)
    ties: list[dict[str, float]] = [{"over_triton_kernels": ratio} for ratio in (0.9, 1.019, 0.981, 1.021, 0.979)]
    assert "faster in 2, tie in 2, slower in 1 of 5 cells (a tie: within 2%)" in standings([*ties, {}])
    step = {"shape": "qwen3", "tokens": 4096, "torch_us": 300.0, "forward_us": 100.0}
    add_training_ratios(step, read_sonicmoe_figures())
    page = (pathlib.Path(forward.__file__).parents[1] / "docs" / "user" / "training.md").read_text()
    for name in ("qwen3", "gptoss120b", "mixtral"):
        assert f" {TrainingProblem(SHAPES[name], {}, torch.empty(0)).kept_bytes_of_sonicmoe()} |" in page
    assert (step["backward_us"], round(step["sonicmoe_over_dense"], 2), step["wanted_over_dense"]) == (200, 2.42, 1.98)


def test_a_table_has_the_columns_that_have_figures() -> None:
    shown = table([row_of(), row_of(tokens=1, triton_kernels_us=9.876, active_experts=8)])
    heading, _, first, second = (line.split(" | ") for line in shown.splitlines())
    cells = dict(zip(heading, second, strict=True))
    assert (cells["tokens"], cells["active"], cells["torch"], cells["triton_kernels"]) == ("1", "8", "300", "9.88")
    assert dict(zip(heading, first, strict=True))["triton_kernels"] == "-" and "tokamax" not in heading
    rows = [row_of(tokens=tokens, not_timed={"ragged_dot": "out of memory"}) for tokens in (64, 1)]
    assert reasons(rows) == "ragged_dot: out of memory (qwen3 balanced 64, qwen3 balanced 1)"


def test_provenance(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOEBIUS_COMMIT", "0123456789abcdef")
    monkeypatch.setattr("sys.argv", ["forward.py", "--shapes", "qwen3"])
    origin = provenance("benchmarks.forward")
    assert set(origin) == {"device", "driver", "versions", "commit", "command", "date"} and origin["device"]
    assert origin["commit"] == "0123456789abcdef"
    assert origin["command"] == "python -m benchmarks.forward --shapes qwen3"
    assert {"python", "moebius", "torch", "jax", "triton", "numpy"} <= set(origin["versions"])
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", origin["date"]) and json.dumps(origin)


def test_a_shape_that_does_not_fit_has_fewer_experts() -> None:
    sizes = ((80e9, True), (40e9, False), (40e9, True))
    assert [fitting(SHAPES["dsv3"], size, training=step).num_experts for size, step in sizes] == [256, 256, 128]


# Peers.


@pytest.mark.parametrize("shape", [TINY["gptoss20b"], TINY["qwen3"]], ids=["gpt-oss", "qwen3"])
def test_transformers_gets_the_layer(shape: Shape) -> None:
    pytest.importorskip("transformers")
    with torch.no_grad():
        _, figures = time_peer(PEERS["transformers"], problem_of(shape), CallingTimer(), 1.0)
    assert 0 < figures["error"] < 2e-2


def test_why_a_library_is_not_timed() -> None:
    texts = {
        sonicmoe.why_unsuited(ALL_SHAPES["gptoss120b"]): "SonicMoE is timed with silu and without biases; add",
        flashinfer.why_unsuited(TINY["qwen3"]): "FlashInfer needs F to be a multiple of 32, got 24",
        hugging_face.why_unsuited(dataclasses.replace(SILU, biased=True)): "transformers has no silu experts with b",
        why_not_importable(PEERS["tokamax"]): "tokamax cannot be imported; pip install tokamax",
        PEERS["ragged_dot"].why_left_out(SHAPES["dsv3"], 4096): "takes 7.4e+14 FLOPs, every row times every expert;",
    }
    assert all(reason and reason.startswith(text) for reason, text in texts.items())


def test_recorded_figures_stand_in_scaled_by_dense_products() -> None:
    recorded = read_recorded()
    figures = recorded["forward"]["flashinfer"]["qwen3"]
    row = {"shape": "qwen3", "mode": "forward", "routing": "balanced", "tokens": 4096, "torch_us": 1000.0}
    scaled = row | {"dense_us": 2 * figures["4096"]["dense_us"], "over_sonicmoe": 0.9}
    add_recorded(scaled, recorded)
    assert scaled["recorded_us"] == {"flashinfer": 2 * figures["4096"]["us"]}
    assert scaled["over_recorded"]["flashinfer"] == 1000 / (2 * figures["4096"]["us"])
    for other in ({"routing": "zipf"}, {"weight_layout": "in_out"}, {"dtype": "float16"}, {"shape": "olmoe"}):
        plain = row | other
        add_recorded(plain, recorded)
        assert plain == row | other


@pytest.mark.parametrize(("factor", "red"), [(1.0, False), (1.1, True)])
def test_upstream_is_compared_before_it_is_timed(factor: float, red: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def arithmetic(problem: Problem) -> Any:
        return lambda: factor * expected(problem, slice(None), quantized_peers.UPSTREAM_ACTIVATION)

    monkeypatch.setattr(quantized_peers, "_FORWARDS", dict.fromkeys(("fp8_tensor",), lambda experts: arithmetic))
    for module in (peers, quantized):
        monkeypatch.setattr(module, "why_not_importable", lambda peer: None)
    real = quantized.with_static_scales

    def saturating(cell: quantized.Cell, experts: Any) -> Any:
        static: Any = real(cell, experts)
        return dataclasses.replace(static, down_input_scale=static.down_input_scale / (256 if red else 1))

    monkeypatch.setattr(quantized, "with_static_scales", saturating)
    chosen = quantized.parse(["--tokens", "3", "--cell-seconds", "200"])
    shape = Shape("tiny", 128, 128, 4, 2, Activation("swiglu_oai", gate_layout="interleaved"), True)
    chosen.cells = [quantized.Cell(shape, "fp8_tensor", *quantized.SCHEMES["fp8_tensor"])]
    (row,) = quantized.run(chosen, CallingTimer(), "cpu")["rows"]
    assert ("triton_kernels_us" in row) == ("static_scales_us" in row) == ("ratio_triton_kernels" in row) == (not red)
    assert sorted(row["red_peers"]) == (["static_scales", "triton_kernels"] if red else [])
    monkeypatch.setitem(quantized.TOLERANCES, True, 0.0)
    with pytest.raises(SystemExit, match="parity is red for tiny fp8_tensor 3"):
        quantized.run(chosen, CallingTimer(), "cpu")


# Routing of recorded traces.


def layer(tokens: int, experts: int, seed: int) -> LayerRouting:
    """Two experts of every token in any order, weights that add up to 1."""
    random = np.random.default_rng(seed)
    ids = np.argsort(random.random((tokens, experts)), axis=1)[:, :2].astype(np.int32)
    first = random.uniform(0.01, 0.99, (tokens, 1))
    return LayerRouting(ids, np.concatenate([first, 1 - first], axis=1).astype(np.float32), experts)


def test_a_problem_is_routed_as_the_trace_was(tmp_path: pathlib.Path) -> None:
    pytest.importorskip("safetensors")
    path, masked = tmp_path / "trace.safetensors", layer(5, 4, 3)
    masked.ids[3, 1] = -1
    RoutingTrace((layer(40, 4, 0), layer(24, 4, 1), layer(24, 8, 2), masked)).save(path)
    for suffix, number in (("", 0), ("@1", 1)):
        ids, weights = dataclasses.replace(
            problem_of(TINY["qwen3"]), logits=torch.from_numpy(traced_logits(f"trace:{path}{suffix}", 12, 4, 2))
        ).top_k
        traced = RoutingTrace.load(path)[number]
        order = np.argsort(-traced.weights[:12], axis=1)
        np.testing.assert_array_equal(ids.numpy(), np.take_along_axis(traced.ids[:12], order, axis=1))
        np.testing.assert_allclose(weights.numpy(), np.take_along_axis(traced.weights[:12], order, axis=1), rtol=1e-5)
    for suffix, tokens, message in (
        ("@2", 16, r"must have 4 experts and top_k 2, got 8 and 2; choose the shape"),
        ("", 41, r"must have 41 tokens, got 40; give smaller --tokens"),
        ("@3", 5, r"got none for token 3; take a trace without masked tokens"),
    ):
        with pytest.raises(InvalidInput, match=message):
            traced_logits(f"trace:{path}{suffix}", tokens, 4, 2)


def test_parts_of_records_end_with_all_that_they_start(tmp_path: pathlib.Path) -> None:
    for name in ("training", "dsv3", "forward"):
        command = parallel_records.commands(name, tmp_path, 2, "cpu")
        cells = parallel.parse(command[2:]).cells
        assert command[1] == "benchmarks.parallel" and {cell.training for cell in cells} == {name == "training"}
    begun = tmp_path / "begun"
    child = f"import os, time, pathlib; pathlib.Path({str(begun)!r}).write_text(str(os.getpid())); time.sleep(60)"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    runs = parallel_records.Runs(tmp_path, 60.0)
    runs.run([("slow", ["-c", parent]), ("quick", ["-c", "print('done')"])], 3.0)
    assert [row["exit"] for row in runs.rows] == ["ended: the time was spent", 0]
    assert (tmp_path / "quick.log").read_text() == "done\n"
    assert "print('done')" in json.loads((tmp_path / "parts.json").read_text())[1]["command"]
    state, patience = pathlib.Path(f"/proc/{begun.read_text()}/stat"), time.monotonic() + 20
    with contextlib.suppress(OSError):  # it is gone; a killed process may run for another moment
        while state.read_text().split()[2] != "Z":
            assert time.monotonic() < patience, "the child of a part that was ended still runs"
            time.sleep(0.05)
