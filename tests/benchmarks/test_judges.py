"""Judges of benchmarks: parity before timing, paired replays, ratios, and the check of stored records."""

from __future__ import annotations

import functools
import importlib
import json
import pathlib
import re
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")
flop_counter = pytest.importorskip("torch.utils.flop_counter")
jax = pytest.importorskip("jax")

import torch.distributed as dist

import moe_jax
import moe_torch
from benchmarks import (
    check,
    forward,
    modular,
    options,
    parallel,
    parallel_ahead,
    parallel_rank,
    parallel_serve,
    parallel_uses,
    peers,
    plain,
    rounding,
    tiles,
    torch_host_time,
)
from benchmarks import training as training
from benchmarks.check import Cell, cells_of, last_record
from benchmarks.draws import ROUTINGS
from benchmarks.parallel_cell import Setting
from benchmarks.peers import PEERS, ParityIsRed, Peer, time_peer
from benchmarks.problem import Problem, checked_tokens, expected, relative_error
from benchmarks.shapes import SHAPES
from benchmarks.training_peers import TRAINING_PEERS, sample
from benchmarks.training_problem import (
    TrainingProblem,
    differing,
    draw_parameters,
    draw_training_problem,
    errors_fp32,
    jax_step,
    torch_step,
)
from moe_core.base.target import Target
from moe_core.specs import TokenRounding, Tuning
from tests.support.benchmarks import TINY, CallingTimer, TracingTimer, problem_of, tiny_host_time, tiny_models

STORED = sorted(check.RESULTS.glob("forward*.json"))


pytestmark = pytest.mark.usefixtures("cpu")


class Ratios(CallingTimer):
    """Ours takes the next of these times 100 us, everything else 100 us."""

    def __init__(self, *ratios: float) -> None:
        super().__init__()
        self.ratios = iter(ratios)

    def rounds(self, functions: Any, seconds: float = 1.0) -> dict[str, list[float]]:
        return super().rounds(functions, seconds) | {"ours": [100.0 * next(self.ratios)]}


# Stored records, checked anew.


def row_of(**fields: Any) -> dict[str, Any]:
    row = {"shape": "qwen3", "routing": "balanced", "tokens": 9, "torch_us": 200.0, "dense_us": 100.0}
    return row | {"weight_layout": "out_in", "dtype": "float16", "over_dense": 2.1, "not_timed": {}} | fields


@pytest.mark.parametrize("path", STORED, ids=[path.stem for path in STORED])
def test_every_stored_record_can_be_checked(path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
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
    for name, date, cells in (("a", "2026-11-23", 9), ("b", "2026-11-24", 1), ("c", "2026-11-24", 2)):
        record = {"provenance": {"date": date}, "rows": [row_of()] * cells}
        (tmp_path / f"forward-{name}.json").write_text(json.dumps(record))
    assert last_record(tmp_path).name == "forward-c.json"
    with pytest.raises(SystemExit, match=r"there is no forward\*\.json"):
        last_record(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"schema": 1, "rows": [row_of()]}, "must be one of benchmarks.forward with cells, got schema 1"),
        ({"schema": 4, "rows": []}, "with cells"),
        ({"schema": 4, "rows": [{"shape": "qwen3", "tokens": 9}]}, "with cells"),
        ({"schema": 4, "rows": [row_of(shape="tiny")]}, r"shape must be of qwen3, gptoss20b, got 'tiny'"),
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


def test_the_exit_status_of_a_check(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path, real = tmp_path / "forward.json", check.check
    ratios = {1: [2.0], 16: [2.4, 2.3]}
    monkeypatch.setattr(check, "GraphTimer", lambda: None)

    def one_by_one(cells: Any, *_: Any) -> list[dict[str, Any]]:
        return [line for cell in cells for line in real([cell], Ratios(*ratios[cell.tokens]), "cpu", 1)]

    monkeypatch.setattr(check, "check", one_by_one)
    path.write_text(json.dumps({"schema": 4, "seed": 0, "rows": [row_of(tokens=tokens) for tokens in (1, 16)]}))
    assert check.main([str(path)]) == 1
    printed = capsys.readouterr()
    assert "1 of 2 cells are more than 3% slower beside dense" in printed.err and "qwen3 16 (+9.5%)" in printed.err
    assert check.main([str(path), "--tokens", "1"]) == 0
    for arguments, message in ((["--tokens", "2"], "has no such cell"), (["--shapes", "x"], "--shapes must be of q")):
        with pytest.raises(SystemExit):
            check.main([str(path), *arguments])
        assert message in capsys.readouterr().err


# Parity.


def test_fp32_arithmetic_shows_a_fault() -> None:
    for shape in TINY.values():
        problem = problem_of(shape)
        with torch.no_grad():
            output = problem.torch_forward().output
        wanted = expected(problem, slice(None))
        assert relative_error(output, wanted) < forward.TOLERANCE
        for factor in (1.5, float("nan")):
            wrong = output.clone()
            wrong[1] *= factor
            assert not relative_error(wrong, wanted) < forward.TOLERANCE
    spread = checked_tokens(4096).tolist()
    assert len(set(spread)) == 48 and (spread[0], spread[-1]) == (0, 4095)


@pytest.mark.parametrize("name", TINY)
def test_fp32_autograd_shows_a_fault_of_every_gradient(name: str) -> None:
    problem = training_problem_of(name)
    step = torch_step(problem)
    assert max(errors_fp32(problem, step).values()) < training.TOLERANCE and differing(step, jax_step(problem)) == []
    for wrong, gradient in step.gradients.items():
        for factor in (1.05, float("nan")):
            changed = step._replace(gradients={**step.gradients, wrong: gradient * factor})
            errors = errors_fp32(problem, changed)
            assert {key for key, error in errors.items() if not error < training.TOLERANCE} == {f"d_{wrong}"}
        nudged = step._replace(gradients={**step.gradients, wrong: gradient.nextafter(gradient + 1)})
        assert differing(step, nudged) == [f"d_{wrong}"]
    with pytest.raises(ValueError, match="the ids are not the top 2 of the logits"):
        errors_fp32(problem, step._replace(ids=(step.ids + 1) % 4))


def training_problem_of(name: str) -> TrainingProblem:
    return draw_training_problem(TINY[name], 24, draw_parameters(TINY[name], "cpu"))


def scaled(function: Callable[..., Any], factor: float) -> Callable[..., Any]:
    def wrong(*given: Any, **named: Any) -> Any:
        result = function(*given, **named)
        return result._replace(output=result.output * factor)

    return wrong


def forward_record(timer: Any, *arguments: str) -> dict[str, Any]:
    given = ["--partial", "--shapes", "qwen3", "--tokens", "16", "--cell-seconds", "200", *arguments]
    return forward.run(options.parse(given, ""), timer, "cpu")


@pytest.mark.parametrize("fault", ["bits", "values"])
def test_red_parity_of_a_forward_ends_the_run(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    timer = CallingTimer()
    if fault == "bits":
        monkeypatch.setattr(moe_jax, "moe", scaled(moe_jax.moe, 1 + 2**-7))
    else:
        monkeypatch.setattr(forward, "expected", lambda *given: 1.5 * expected(*given))
    with pytest.raises(SystemExit, match=r"parity is red for qwen3: .*nothing was timed"):
        forward_record(timer, "--peers", "none")
    assert timer.calls == 0


def test_a_token_that_depends_on_its_batch_is_red(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Problem.torch_forward

    def by_batch(problem: Problem, spec: Any = None, tokens: int | None = None) -> Any:
        return (real if tokens is None else scaled(real, 1 + 2**-7))(problem, spec, tokens)

    monkeypatch.setattr(Problem, "torch_forward", by_batch)
    (row,) = forward_record(CallingTimer(), "--peers", "none", "--batch-invariant")["rows"]
    assert row["not_timed"]["batch_invariant"].startswith("parity is red: a token alone bitwise False, error 0.0")
    assert row["red_peers"] == ["batch_invariant"] and "batch_invariant_us" not in row


def wrong_peer(problem: Problem) -> Callable[[], Any]:
    """A forward whose second token is wrong."""
    output = plain.torch_forward(problem.x, problem.logits, plain.in_one_dtype(problem.experts), problem.shape)
    output[1] *= 2
    return lambda: output


def test_peers_that_fail_say_why_and_a_red_one_fails_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(problem: Problem) -> Callable[[], Any]:
        raise RuntimeError("RESOURCE_EXHAUSTED: out of memory\na long story")

    known = {"broken": Peer("broken", broken), "wrong": Peer("wrong", wrong_peer), "ragged_dot": PEERS["ragged_dot"]}
    monkeypatch.setattr(options, "PEERS", known)
    record = forward_record(CallingTimer())
    (row,) = record["rows"]
    assert row["not_timed"].pop("wrong").startswith("parity of wrong is red") and row["red_peers"] == ["wrong"]
    assert row["not_timed"] == {
        "broken": "RuntimeError: RESOURCE_EXHAUSTED: out of memory",
        "ragged_dot": "timed at 64, 1024, 4096 tokens only",
    }
    monkeypatch.setattr(forward, "GraphTimer", CallingTimer)
    (late,) = forward_record(CallingTimer(), "--cell-seconds", "1e-6")["rows"]
    assert late["not_timed"]["broken"] == "the time of the cell was spent" and late["torch_us"] == 100.0
    monkeypatch.setattr(forward, "run", lambda *_: record)
    arguments = ["--shapes", "qwen3"]
    assert forward.main(arguments) == 1
    row["red_peers"] = []
    assert forward.main(arguments) == 0


@pytest.mark.parametrize("name", ["grouped_mm", "grouped_mm_compiled", "ragged_dot"])
def test_peers_agree(name: str) -> None:
    for shape in TINY.values():
        with torch.no_grad():
            _, figures = time_peer(PEERS[name], problem_of(shape), CallingTimer(), 1.0)
        assert 0 < figures["error"] < peers.TOLERANCE


def test_a_red_peer_in_jax_is_not_timed() -> None:
    timer, problem = CallingTimer(), problem_of(TINY["qwen3"])
    output = jax.numpy.asarray(wrong_peer(problem)().float().numpy(), jax.numpy.bfloat16)
    with pytest.raises(ParityIsRed, match=r"parity of wrong is red: error 0\.\d+, at most 0\.02"):
        time_peer(Peer("wrong", lambda problem: lambda *_: output, "jax"), problem, timer, 1.0)
    assert timer.calls == 0


@pytest.mark.parametrize(
    ("function", "factor", "reason"),
    [
        ("jax_step", 1 + 2**-7, "parity is red: torch and JAX differ in output"),
        ("torch_step", 2.0, r"parity is red: error to fp32 arithmetic: output [\d.]+; at most .*"),
        ("torch_step", None, "RuntimeError: an illegal memory access"),
    ],
)
def test_red_parity_refuses_a_training_step(
    function: str, factor: float | None, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(problem: TrainingProblem) -> Any:
        raise RuntimeError("an illegal memory access")

    wrong = broken if factor is None else scaled(getattr(training, function), factor)
    monkeypatch.setattr(training, function, wrong)
    timer, arguments = TracingTimer(), ["--shapes", "qwen3", "--peers", "none", "--tokens", "16"]
    record = training.run(training.parse(arguments), timer, "cpu")
    (row,) = record["rows"]
    assert re.fullmatch(reason, row["refused"]) and timer.calls == 0
    assert re.search(f"nothing was timed, qwen3 16: {reason}", training.show(record))
    monkeypatch.setattr(training, "GraphTimer", TracingTimer)
    monkeypatch.setattr(training, "run", lambda *_: record)
    assert training.main(arguments) == 1


@pytest.mark.parametrize("name", ["grouped_mm", "ragged_dot"])
def test_a_training_peer_agrees_and_a_red_one_is_not_timed(name: str) -> None:
    problem, timer = training_problem_of("gptoss20b"), TracingTimer()
    wanted = sample(torch_step(problem).gradients)
    assert 0 < training.time_training_peer(TRAINING_PEERS[name], problem, wanted, timer, 1.0)["error"] < 3e-2
    calls = timer.calls
    wanted["experts.down"] = wanted["experts.down"] * 1.1
    with pytest.raises(training.ParityIsRed, match=rf"parity of {name} is red: d_experts.down 0\.\d+, at most 0\.03"):
        training.time_training_peer(TRAINING_PEERS[name], problem, wanted, timer, 1.0)
    assert timer.calls == calls


def test_red_parity_of_token_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    real, row = rounding.staged_step, dict[str, Any]()

    def wrong(*arguments: Any, limited: bool = True) -> Any:
        output, ids, gradients = real(*arguments, limited=limited)
        return output * (1.1 if limited else 1.0), ids, gradients

    monkeypatch.setattr(rounding, "staged_step", wrong)
    assert not rounding.check(training_problem_of("qwen3"), TokenRounding(16), row) and "output 0.1" in row["refused"]


def test_red_parity_of_smaller_benchmarks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modular, "draw_calls", lambda *_: (lambda: torch.zeros(2), lambda: torch.ones(2)))
    with pytest.raises(SystemExit, match="parity is red for qwen3 5"):
        modular.measure(TINY["qwen3"], problem_of(TINY["qwen3"]).experts, 5, lambda one, two: ([], []))
    target, other, real = Target("cuda", 90, 132), Tuning(batch_invariant=True), Problem.torch_forward
    built_in = tiles.choices(SHAPES["qwen3"], 4096, target)[0]
    monkeypatch.setattr(tiles, "choices", lambda *_: (built_in, {"192, 128": other}))

    def wrong(problem: Problem, spec: Any = None) -> Any:
        return scaled(real, 1.0 if spec is None or spec.tuning != other else 2.0)(problem, spec)

    monkeypatch.setattr(Problem, "torch_forward", wrong)
    with pytest.raises(SystemExit, match="parity is red for qwen3 12: 192, 128 rows change bits; nothing was timed"):
        tiles.measure(problem_of(TINY["qwen3"]), Target("reference"), CallingTimer(), 1.0)


def test_red_parity_of_models(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    from benchmarks.models import inference
    from benchmarks.models import training as model_training

    tiny_models(monkeypatch)
    monkeypatch.setattr(inference, "relative_error", lambda result, wanted: 0.5)
    given = ["--models", "qwen3-30b-a3b", "--tokens", "4", "--implementations", "moebius,grouped_mm", "--layers", "1"]
    rows = inference.run(inference.parse(given), (CallingTimer(), CallingTimer()), "cpu")["rows"]
    reason = "ValueError: parity is red: error 0.5, at most 0.02 is allowed"
    assert {row["not_timed"] for row in rows} == {reason}
    monkeypatch.setattr(model_training, "TOLERANCE", -1.0)
    options = model_training.parse(["--layers", "1", "--tokens", "8", "--length", "8"])
    rows = model_training.run(options, CallingTimer(), "cpu")["rows"]
    assert all(row["not_timed"].startswith("parity is red: loss 4.") for row in rows)


def test_red_parity_of_host_time(monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_host_time(monkeypatch)
    real = moe_torch.prepare_moe
    monkeypatch.setattr(moe_torch, "prepare_moe", lambda *given: lambda x: 2 * real(*given)(x))
    with pytest.raises(SystemExit, match="parity is red for launcher; nothing was timed"):
        torch_host_time.calls("cpu")


def test_red_parity_of_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    # torch does not export all of what it documents.
    store: Any = importlib.import_module("torch.distributed").HashStore()
    threads, real = torch.get_num_threads(), parallel_rank.moe
    given = ["--device", "cpu", "--shapes", "tiny", "--tokens", "4", "--modes", "padded", "--training", "--shared"]
    (cell,) = parallel.parse(given).cells
    with parallel_serve.joined(Setting(1, "cpu", 0, 0.01, 60.0), 0, store=store, rank=0, world_size=1) as bench:
        figures = bench.measure(cell)
        assert len(figures["us"]) >= 5 and figures["link_bytes"] == 0 and cell.named["shared"]
        monkeypatch.setattr(parallel_rank, "moe", lambda *given, **options: real(-given[0], *given[1:], **options))
        assert "parity is red" in parallel_serve.attempt(bench.measure, cell)["error"]
    dist.destroy_process_group()
    torch.set_num_threads(threads)


@pytest.mark.parametrize(("mode", "training"), [("peer", True), ("all_to_all", False)])
def test_kernels_of_ranks_are_found_without_a_gpu(mode: str, training: bool) -> None:
    run = functools.partial(parallel_ahead.measured, parallel.Cell(parallel_uses._TINY, 48, mode, "tokens", training))
    kernels = {launch.kernel.name.rpartition(":")[2] for _, launch in parallel_ahead.kernels_of([run])}
    way = {"push_tokens_once", "sum_results", "pull_weights", "push_rows", "weight_gradient", "routing_backward"}
    wanted = way if training else {"count_sends", "place_sends", "gather_rows", "reduce"}
    assert wanted | {"matmul_ogs", "route"} <= kernels
