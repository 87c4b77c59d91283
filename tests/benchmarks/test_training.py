"""The benchmark of training steps from its command line to its record, on a CPU and with a timer that only calls."""

from __future__ import annotations

import dataclasses
import functools
import json
import pathlib
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")
jax = pytest.importorskip("jax")

import moe_jax
import moe_torch
from benchmarks import rounding, training, training_peers, training_problem
from benchmarks.record import table
from benchmarks.shapes import SHAPES, Shape
from benchmarks.timing import ChainTime, GraphTimer
from benchmarks.training_peers import (
    TOLERANCE,
    TRAINING_PEERS,
    TrainingPeer,
    check_peer,
    dense_step,
    grouped_mm_step,
    sample,
)
from benchmarks.training_problem import (
    Step,
    TrainingProblem,
    differing,
    draw_parameters,
    draw_training_problem,
    errors_fp32,
    jax_step,
    torch_step,
)
from benchmarks.training_record import TRAINING_COLUMNS, add_training_ratios, read_sonicmoe_figures
from moe_core.specs import TokenRounding
from moe_core.specs.matmul import Activation
from tests.support.benchmarks import TINY, CallingTimer

README = pathlib.Path(training.__file__).parent / "README.md"


class TracingTimer(CallingTimer):
    """Traces what JAX is to time: running its ragged product costs seconds on a CPU."""

    def device_time_of_jax_chain(
        self,
        function: Callable[..., Any],
        x: Any,
        arguments: tuple[Any, ...],
        length: int,
        seconds: float = 1.0,
        check: Callable[[Any], None] | None = None,
    ) -> ChainTime:
        if check is not None:
            check(jax.jit(function)(x, *arguments))
        found = jax.eval_shape(function, x, *arguments)
        assert jax.tree.map(lambda one: (one.shape, one.dtype), found) == jax.tree.map(
            lambda one: (one.shape, one.dtype), x
        )
        return ChainTime(self.time(lambda: None), 0)


@pytest.fixture(autouse=True)
def on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Tiny shapes and the reference; JAX arrays by copy, since it refuses a CPU address not aligned to 64 bytes."""
    monkeypatch.setattr(training, "ALL_SHAPES", TINY)
    monkeypatch.setattr(training, "_SHAPES", tuple(TINY))
    # A collection takes long in a process with both frameworks.
    monkeypatch.setattr(training, "free_memory", lambda: None)
    monkeypatch.setattr(moe_jax, "from_dlpack", lambda array: jax.dlpack.from_dlpack(array, copy=True))
    with (
        moe_torch.cpu_engine("reference"),
        moe_jax.cpu_engine("reference"),
        jax.default_device(jax.devices("cpu")[0]),
    ):
        yield


def problem_of(name: str, tokens: int = 24, device: str = "cpu") -> TrainingProblem:
    return draw_training_problem(TINY[name], tokens, draw_parameters(TINY[name], device))


def changed(step: Step, name: str, change: Callable[[Any], Any]) -> Step:
    """The step with another gradient."""
    return step._replace(gradients={**step.gradients, name: change(step.gradients[name])})


# Parity.


@pytest.mark.parametrize("name", TINY)
def test_a_step_agrees_with_fp32_autograd_and_a_fault_shows(name: str) -> None:
    problem = problem_of(name)
    step = torch_step(problem)
    errors = errors_fp32(problem, step)
    assert set(errors) == {"output", "logits", *(f"d_{one}" for one in problem.arrays)}
    assert max(errors.values()) < training.TOLERANCE
    for wrong in problem.arrays:
        found = errors_fp32(problem, changed(step, wrong, lambda gradient: gradient * 1.05))
        assert {key for key, error in found.items() if not error < training.TOLERANCE} == {f"d_{wrong}"}
    wrong_expert = changed(step, "experts.down", lambda gradient: gradient.roll(1, dims=0))
    assert errors_fp32(problem, wrong_expert)["d_experts.down"] > 0.5
    assert not errors_fp32(problem, changed(step, "x", lambda gradient: gradient * float("nan")))["d_x"] < 1
    with pytest.raises(ValueError, match="the ids are not the top 2 of the logits"):
        errors_fp32(problem, step._replace(ids=(step.ids + 1) % 4))


def test_frameworks_differ_where_bits_differ() -> None:
    problem = problem_of("gptoss20b")
    step = torch_step(problem)
    assert differing(step, jax_step(problem)) == []
    assert differing(step, changed(step, "routing.bias", lambda one: one.nextafter(one + 1))) == ["d_routing.bias"]
    assert differing(step, step._replace(output=step.output[1:])) == ["output"]
    zeros = changed(step, "x", torch.zeros_like)
    assert differing(zeros, changed(zeros, "x", torch.neg)) == ["d_x"]
    not_numbers = changed(step, "x", lambda gradient: gradient * float("nan"))
    assert differing(not_numbers, not_numbers) == []


def test_routing_from_x_is_near_balanced() -> None:
    shape = Shape("wide", 256, 2, 32, 4, Activation("silu"), True)
    routing = torch_step(draw_training_problem(shape, 1024, draw_parameters(shape, "cpu")))
    counts = routing.ids.flatten().bincount(minlength=32)
    assert counts.min() > 0.5 * 128 and counts.max() < 1.6 * 128
    assert 0.9 < routing.logits.std() < 1.1


# Peers and the dense products.


@pytest.mark.parametrize(
    ("name", "shape"), [("grouped_mm", "qwen3"), ("grouped_mm", "gptoss20b"), ("ragged_dot", "gptoss20b")]
)
def test_peers_agree_and_a_red_one_is_not_timed(name: str, shape: str) -> None:
    problem = problem_of(shape)
    wanted = sample(torch_step(problem).gradients)
    peer, timer = TRAINING_PEERS[name], TracingTimer()
    found = training.time_training_peer(peer, problem, wanted, timer, 1.0)
    assert found["us"] == 100.0 and 0 < found["error"] < TOLERANCE
    wanted["experts.down"] = wanted["experts.down"] * 1.1
    with pytest.raises(training.ParityIsRed, match=rf"parity of {name} is red: d_experts.down 0\.\d+, at most 0\.03"):
        training.time_training_peer(peer, problem, wanted, timer, 1.0)
    # A peer of torch is timed alone, and once more by turns with ours.
    assert timer.calls == (1 if peer.framework == "jax" else 3) and torch.get_float32_matmul_precision() == "highest"


def test_a_sample_has_few_experts() -> None:
    gradients = {"experts.down": torch.arange(10.0)[:, None].expand(10, 3), "x": torch.ones(5, 2)}
    found = sample(gradients)
    assert found["experts.down"][:, 0].tolist() == [0, 3, 6, 9] and found["x"].shape == (5, 2)
    assert check_peer(TrainingPeer("same", grouped_mm_step), gradients, found) == 0


@pytest.mark.parametrize("layout", ["in_out", "out_in"])
def test_the_dense_products_have_the_flops_of_a_step(layout: str) -> None:
    shape = TINY["qwen3"]
    with torch.profiler.profile(with_flops=True, acc_events=True) as profiler:
        dense_step(shape, 12, "cpu", layout)()
    assert sum(event.flops for event in profiler.key_averages()) == 3 * shape.flops(12)


# Whole runs.


def run(tmp_path: pathlib.Path, *arguments: str, timer: Any = None) -> dict[str, Any]:
    """The record as it stands in the file."""
    output = tmp_path / "records" / "record.json"
    chosen = training.parse(["--output", str(output), "--cell-seconds", "200", *arguments])
    returned = training.run(chosen, timer or TracingTimer(), "cpu")
    assert json.loads(output.read_text()) == json.loads(json.dumps(returned))
    return returned


def test_a_run(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    on_both = ("--shapes", "qwen3,gptoss20b")
    monkeypatch.setitem(
        TRAINING_PEERS, "ragged_dot", dataclasses.replace(TRAINING_PEERS["grouped_mm"], name="ragged_dot")
    )
    record = run(tmp_path, "--tokens", "16", "--everywhere", "--breakdown", *on_both)
    assert [row["shape"] for row in record["rows"]] == ["qwen3", "gptoss20b"]
    for row in record["rows"]:
        assert row["bitwise_torch_jax"] and max(row["errors_fp32"].values()) < training.TOLERANCE
        assert set(row["peer_errors"]) == {"grouped_mm", "ragged_dot"} and set(row["not_timed"]) == {"sonicmoe"}
        assert row["over_grouped_mm"] == 1 and row["turns_us"]["grouped_mm"] == {"ours": 100.0, "grouped_mm": 100.0}
        assert row["torch_us"] == row["jax_device_us"] == row["dense_us"] == row["ragged_dot_us"] == 100.0
        assert row["over_dense"] == row["jax_over_torch"] == row["over_best_peer"] == 1 and row["backward_us"] == 0
        assert [kernel["kernel"] for kernel in row["breakdown"]["ours"]["kernels"]] == ["route", "product", "product"]
    text = README.read_text()
    fields = {*record, *TRAINING_COLUMNS, *(name for row in record["rows"] for name in row)}
    fields -= {"over_ragged_dot"}  # It is JAX's, and stands beside ours only here.
    assert not [name for name in fields if f"`{name}`" not in text], "fields that the page does not describe"
    shown = training.show(record)
    assert "| gptoss20b | 16 | 4 |" in shown and "between kernels" in shown


def test_parts_that_fail_say_why(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Failing(TracingTimer):
        def device_time_of_chain(self, function: Callable[[], Any], length: int, repeats: int = 5) -> float:
            raise RuntimeError("operation not permitted when stream is capturing\na long story")

    def no_jax(problem: TrainingProblem) -> Step:
        raise NotImplementedError("no such call")

    monkeypatch.setattr(training, "jax_step", no_jax)
    monkeypatch.setattr(training_peers, "_MOST_FLOPS", 0.0)
    arguments = ("--shapes", "qwen3", "--tokens", "16", "--cell-seconds")
    (row,) = run(tmp_path, *arguments, "200", timer=Failing())["rows"]
    assert row["not_timed"].pop("ragged_dot").endswith("FLOPs, every row times every expert; timed up to 0")
    assert row["not_timed"].pop("sonicmoe") == "sonicmoe cannot be imported; pip install sonic-moe"
    assert row["not_timed"] == {
        "jax": "NotImplementedError: no such call",
        "torch device": "RuntimeError: operation not permitted when stream is capturing",
    }
    assert row["torch_us"] == row["grouped_mm_us"] == 100.0 and "bitwise_torch_jax" not in row
    (row,) = run(tmp_path, *arguments, "1e-6")["rows"]
    assert row["not_timed"]["grouped_mm"] == "the time of the cell was spent" and row["torch_us"] == 100.0


@pytest.mark.parametrize(
    ("what", "reason"),
    [
        ("bits", "parity is red: torch and JAX differ in d_x"),
        (
            "values",
            r"parity is red: error to fp32 arithmetic: d_x [\d.]+; at most .*; torch and JAX differ in d_x",
        ),
        ("kernel", "RuntimeError: an illegal memory access"),
    ],
)
def test_red_parity_refuses_the_timing_of_its_cell(
    what: str, reason: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "jax_step" if what == "bits" else "torch_step"
    factor = {"bits": 1 + 2**-7, "values": 2.0}.get(what)
    real = getattr(training_problem, name)

    def wrong(problem: TrainingProblem) -> Step:
        if problem.tokens != 16:
            return real(problem)
        if factor is None:
            raise RuntimeError("an illegal memory access")
        return changed(real(problem), "x", lambda gradient: gradient.float().mul(factor).to(gradient.dtype))

    timer = TracingTimer()
    monkeypatch.setattr(training, name, wrong)
    monkeypatch.setattr(training, "measure", lambda problem, *_: timer.time(lambda: problem.tokens))
    arguments = ("--shapes", "qwen3", "--peers", "none")
    record = run(tmp_path, *arguments, "--tokens", "16,8", timer=timer)
    red, green = record["rows"]
    assert re.fullmatch(reason, red["refused"]) and "refused" not in green and timer.calls == 1
    assert re.search(f"nothing was timed, qwen3 16: {reason}", training.show(record))
    monkeypatch.setattr(training, "GraphTimer", TracingTimer)
    monkeypatch.setattr(
        training, "run", functools.partial(lambda run, chosen, timer, _: run(chosen, timer, "cpu"), training.run)
    )
    assert training.main([*arguments, "--tokens", "16"]) == 1
    assert training.main([*arguments, "--tokens", "8"]) == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--shapes", "llama"], "--shapes must be of qwen3, gptoss20b, got llama"),
        (["--peers", "vllm"], "--peers must be of grouped_mm, ragged_dot, sonicmoe, got vllm"),
        (["--tokens", "4096,x"], "--tokens must be positive numbers with commas between them, got '4096,x'"),
        (["--cell-seconds", "0"], "--cell-seconds must be positive, got 0.0"),
        (["--shapes", "none"], "there is nothing to run; name --shapes"),
    ],
)
def test_refused_options(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        training.parse(arguments)
    assert refused.value.code == 2 and message in capsys.readouterr().err


def test_default_options(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    found = training.parse([])
    assert [shape.name for shape in found.shapes] == ["qwen3", "gptoss120b", "mixtral"]
    assert found.tokens == (4096, 16384) and found.peers == tuple(TRAINING_PEERS.values())
    assert not (found.everywhere or found.breakdown or found.output)


# SonicMoE's figures.


def test_ratios_of_recorded_figures() -> None:
    figures = read_sonicmoe_figures()
    found = {}
    for shape in ("qwen3", "gptoss120b", "mixtral"):
        for tokens in (4096, 16384):
            row = {"shape": shape, "tokens": tokens, "torch_us": 300.0, "forward_us": 100.0}
            add_training_ratios(row, figures)
            assert row["backward_us"] == 200 and "jax_over_torch" not in row
            found[shape, tokens] = (round(row["sonicmoe_over_dense"], 2), row["wanted_over_dense"])
    assert found == {
        ("qwen3", 4096): (2.42, 1.98),
        ("qwen3", 16384): (1.45, 1.36),
        ("gptoss120b", 4096): (2.54, 2.35),
        ("gptoss120b", 16384): (1.51, 1.39),
        ("mixtral", 4096): (1.27, 1.24),
        ("mixtral", 16384): (1.15, 1.13),
    }
    row = {"shape": "dsv3", "tokens": 4096}
    add_training_ratios(row, figures)
    assert set(row) == {"shape", "tokens"}
    assert table([{**row, "torch_us": 5.0}], TRAINING_COLUMNS).splitlines()[0] == "| shape | tokens | torch |"


def test_kept_bytes_of_sonicmoe_are_those_of_the_page() -> None:
    page = (README.parent.parent / "docs" / "user" / "training.md").read_text()
    for name in ("qwen3", "gptoss120b", "mixtral"):
        nothing = torch.empty(0)
        assert f" {TrainingProblem(SHAPES[name], {}, nothing).kept_bytes_of_sonicmoe()} |" in page


@pytest.mark.gpu
def test_a_step_can_be_captured() -> None:
    """The gradients that a replay finds for other tokens are those of an eager step."""
    problem, other = (problem_of("gptoss20b", device="cuda") for _ in range(2))
    other.arrays["x"].neg_()
    found: list[Step] = []
    graph = GraphTimer().capture(lambda: found.append(torch_step(problem)))
    problem.arrays["x"].copy_(other.arrays["x"])
    graph.replay()
    assert differing(torch_step(other), found[-1]) == []
    figures = training.memory(problem)
    assert figures["kept_bytes_per_token"] >= figures["sonicmoe_kept_bytes_per_token"]


def test_a_cell_with_token_rounding_is_checked() -> None:
    shape, row = Shape("small", 16, 24, 6, 2, Activation("silu"), True), dict[str, Any]()
    problem = draw_training_problem(shape, 96, draw_parameters(shape, torch.device("cpu")))
    assert rounding.check(problem, TokenRounding(16), row)
    assert row["padded"]["with"]["64"] > 0 and row["changed_pairs"] > 0 and row["differing_bits"] == []
    assert row["rows"]["with"] % 16 == 0 and row["rows"]["without"] == 192


def test_padding_of_tiles() -> None:
    assert rounding.padded(torch.tensor([128, 0, 1]), 128) == 1 - 129 / 256


def test_red_parity_of_token_rounding_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    shape, row = Shape("small", 16, 24, 6, 2, Activation("silu"), False), dict[str, Any]()
    problem = draw_training_problem(shape, 96, draw_parameters(shape, torch.device("cpu")))
    true = rounding.staged_step

    def wrong(*arguments: Any, limited: bool = True) -> Any:
        output, ids, gradients = true(*arguments, limited=limited)
        return output * (1.1 if limited else 1.0), ids, gradients

    monkeypatch.setattr(rounding, "staged_step", wrong)
    assert not rounding.check(problem, TokenRounding(16), row) and "output 0.1" in row["refused"]
