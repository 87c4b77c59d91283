"""The forward benchmark from its command line to its record, on a CPU and with a timer that only calls."""

from __future__ import annotations

import dataclasses
import functools
import json
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")
flop_counter = pytest.importorskip("torch.utils.flop_counter")
pytest.importorskip("jax")

import moe_jax
from benchmarks import forward, options, peers, plain
from benchmarks.large import LARGE_SHAPE, LARGE_TOKENS, elements, run_large
from benchmarks.options import parse
from benchmarks.peers import PEERS, ParityIsRed, Peer, check_peer, dense_forwards, time_peer, why_not_importable
from benchmarks.problem import (
    Problem,
    activate,
    checked_tokens,
    draw_problem,
    expected,
    relative_error,
)
from benchmarks.shapes import ALL_TOKENS, SHAPES, Shape
from benchmarks.weights import draw_weights
from moe_core.base.target import Target
from moe_core.ops.activation.reference import activation as reference_activation
from tests.support.benchmarks import TINY, CallingTimer, jax

README = pathlib.Path(forward.__file__).parent / "README.md"
on_shapes = pytest.mark.parametrize("shape", TINY.values(), ids=list(TINY))
EXTERNAL = ("triton_kernels", "tokamax", "sonicmoe", "flashinfer", "deep_gemm", "transformers")
#: Peers of packages that the tests take for not installed.
ABSENT = set(peers._MODULES)


@pytest.fixture(autouse=True)
def on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Tiny shapes; JAX arrays by copy, since it refuses a CPU address that is not aligned to 64 bytes; no compiler.

    Memory is not given back, nor are JAX's programs, which are compiled once for all tests.
    """
    monkeypatch.setattr(options, "SHAPES", TINY)
    monkeypatch.setattr(options, "ALL_SHAPES", TINY)
    monkeypatch.setattr(forward, "free_memory", lambda: None)
    monkeypatch.setattr(jax, "clear_caches", lambda: None)
    monkeypatch.setattr(moe_jax, "from_dlpack", lambda array: jax.dlpack.from_dlpack(array, copy=True))
    traced = functools.cache(lambda: torch.compile(plain.torch_forward, fullgraph=True, backend="eager"))
    monkeypatch.setattr(plain, "compiled", traced)
    # Whether these happen to be installed must not change what is tested.
    real = peers.importlib.util.find_spec
    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda name: None if name in EXTERNAL else real(name))
    with jax.default_device(jax.devices("cpu")[0]):
        yield


def problem_of(shape: Shape, tokens: int = 12) -> Problem:
    weights = draw_weights(shape, torch.Generator("cpu").manual_seed(0))
    return draw_problem(shape, "balanced", tokens, weights)


def fault(problem: Problem) -> Callable[[], Any]:
    """A peer whose second token is wrong."""

    def run() -> Any:
        output = plain.torch_forward(problem.x, problem.logits, plain.in_one_dtype(problem.experts), problem.shape)
        output[1] *= 2
        return output

    return run


# The fp32 arithmetic everything is checked against.


@on_shapes
@pytest.mark.parametrize("layout", ["halves", "interleaved"])
def test_activations_are_the_reference(shape: Shape, layout: str) -> None:
    activation = dataclasses.replace(shape.activation, gate_layout=layout)
    wide = 8 * torch.randn(6, 10, generator=torch.Generator().manual_seed(0))
    wanted = reference_activation(wide.numpy(), activation=activation, out_dtype="float32")
    torch.testing.assert_close(activate(wide, activation), torch.from_numpy(wanted))
    found = plain.jax_activate(jax.numpy.asarray(wide.numpy()), activation)
    torch.testing.assert_close(torch.from_dlpack(found), torch.from_numpy(wanted))


@on_shapes
def test_the_arithmetic_agrees_with_ours_and_shows_a_fault(shape: Shape) -> None:
    problem = problem_of(shape)
    with torch.no_grad():
        output = problem.torch_forward().output
    wanted = expected(problem, slice(None))
    assert relative_error(output, wanted) < forward.TOLERANCE
    # Not bitwise: a BLAS may add in another order for another number of rows.
    assert relative_error(expected(problem, torch.tensor([3, 7])), wanted[[3, 7]]) < 1e-6
    output[1] *= 1.5
    assert relative_error(output, wanted) > forward.TOLERANCE
    output[1] = float("nan")
    assert not relative_error(output, wanted) < forward.TOLERANCE


def test_checked_tokens_reach_both_ends() -> None:
    assert checked_tokens(5).tolist() == [0, 1, 2, 3, 4]
    spread = checked_tokens(4096).tolist()
    assert len(set(spread)) == 48 and (spread[0], spread[-1]) == (0, 4095)


def test_scratch_is_that_of_the_plan() -> None:
    problem = problem_of(TINY["qwen3"])
    assert problem.plan(Target("cuda", 90, 132)).scratch_bytes > 0
    assert problem.allowed_scratch() == 12 * 2 * (24 + 16) * 2 + 2_000_000


# Peers.


@on_shapes
@pytest.mark.parametrize("name", ["grouped_mm", "grouped_mm_compiled", "ragged_dot"])
def test_peers_agree(shape: Shape, name: str) -> None:
    with torch.no_grad():
        _, figures = time_peer(PEERS[name], problem_of(shape), CallingTimer(), 1.0)
    assert figures["us"] == 100.0 and 0 < figures["error"] < peers.TOLERANCE


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_a_red_peer_is_not_timed(framework: str) -> None:
    timer, problem = CallingTimer(), problem_of(TINY["qwen3"])

    def wrong_in_jax(problem: Problem) -> Callable[..., Any]:
        output = jax.numpy.asarray(fault(problem)().float().numpy(), jax.numpy.bfloat16)
        return lambda x, logits, experts: output

    peer = Peer("wrong", fault) if framework == "torch" else Peer("wrong", wrong_in_jax, "jax")
    with pytest.raises(ParityIsRed, match=r"parity of wrong is red: error 0\.\d+, at most 0\.02"):
        time_peer(peer, problem, timer, 1.0)
    assert timer.calls == 0


def test_every_row_times_every_expert_is_left_out_where_it_takes_too_long() -> None:
    reason = PEERS["ragged_dot"].why_left_out(SHAPES["dsv3"], 4096)
    assert reason == "takes 7.4e+14 FLOPs, every row times every expert; timed up to 1.5e+14"
    assert PEERS["ragged_dot"].why_left_out(SHAPES["qwen3"], 4096) is None
    assert PEERS["tokamax"].why_left_out(SHAPES["dsv3"], 4096) is None


def test_a_peer_may_have_an_activation_of_its_own() -> None:
    problem = problem_of(TINY["qwen3"])
    fused = PEERS["triton_kernels"].activation
    peer = Peer("fused", fault, activation=fused)
    output = expected(problem, slice(None), fused)
    assert check_peer(peer, problem, output) == 0
    with pytest.raises(ParityIsRed):
        check_peer(dataclasses.replace(peer, activation=None), problem, output)


def test_what_cannot_be_imported_is_said() -> None:
    assert "PYTHONPATH" in (why_not_importable(PEERS["triton_kernels"]) or "")
    assert why_not_importable(PEERS["tokamax"]) == "tokamax cannot be imported; pip install tokamax"
    assert why_not_importable(PEERS["grouped_mm"]) is None


def test_the_dense_bound_has_the_flops_of_the_layer() -> None:
    shape = TINY["qwen3"]
    found = dense_forwards(shape, 12, "cpu", torch.float16)
    for products in found.values():
        with flop_counter.FlopCounterMode(display=False) as counter:
            assert products().dtype == torch.float16
        assert counter.get_total_flops() == shape.flops(12)
    # The same matrices, stored either way; how a CPU adds up depends on that, too.
    torch.testing.assert_close(found["in_out"](), found["out_in"](), rtol=0.01, atol=0.05)


def test_the_faster_dense_products_are_the_bound() -> None:
    class Timer(CallingTimer):
        def rounds(self, functions: dict[str, Callable[[], Any]], seconds: float = 1.0) -> dict[str, list[float]]:
            assert set(functions) == {"ours", "in_out", "out_in"}
            return {"ours": [30.0, 44.0, 50.0], "in_out": [12.0, 11.0, 10.0], "out_in": [10.0, 11.0, 9.0]}

    found = forward.beside_dense(problem_of(TINY["qwen3"]), Timer())
    assert found == {"dense_us": 10.0, "dense_layout": "out_in", "over_dense": 4.0}


# The command line.


def test_options() -> None:
    found = parse(["--shapes", "qwen3", "--tokens", "1,64", "--routing", "zipf,balanced", "--peers", "grouped_mm"], "")
    assert found.shapes == (TINY["qwen3"],) and found.tokens == (1, 64) and found.routings == ("balanced", "zipf")
    assert [peer.name for peer in found.peers] == ["grouped_mm"] and found.output is None
    defaults = parse([], "")
    assert defaults.shapes == tuple(TINY.values()) and defaults.peers == tuple(PEERS.values())
    assert defaults.tokens == (1, 16, 64, 256, 1024, 4096, 16384) and defaults.routings == ("balanced",)
    layouts = [parse(arguments, "").shapes[0].weight_layout for arguments in ([], ["--weight-layout", "in_out"])]
    assert layouts == ["out_in", "in_out"]
    assert defaults.dtype == "bfloat16" and parse(["--tokens", "all"], "").tokens == ALL_TOKENS
    assert not (defaults.breakdown or defaults.large or defaults.partial or defaults.everywhere)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--shapes", "llama"], "--shapes must be of qwen3, gptoss20b, got llama"),
        (["--routing", "even"], "--routing must be of balanced, zipf, single_hot, got even"),
        (["--peers", "vllm"], "--peers must be of triton_kernels"),
        (["--tokens", "1,x"], "--tokens must be positive numbers with commas between them, got '1,x'"),
        (["--tokens", "0"], "--tokens must be positive"),
        (["--cell-seconds", "0"], "--cell-seconds must be positive, got 0.0"),
        (["--shapes", "none"], "there is nothing to run"),
        (["--output", "x.json"], "every required peer: triton_kernels cannot be imported; put python/triton_kernels"),
        (["--output", "x.json", "--peers", "none"], "add grouped_mm_compiled to --peers; add ragged_dot to --peers"),
    ],
)
def test_refused_options(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        parse(arguments, "")
    assert refused.value.code == 2 and message in capsys.readouterr().err


def test_a_record_of_the_large_case_alone_needs_no_peer() -> None:
    assert parse(["--shapes", "none", "--large", "--output", "x.json"], "").large


# Whole runs.


def run(tmp_path: pathlib.Path, *arguments: str, timer: Any = None) -> dict[str, Any]:
    """The record as it stands in the file."""
    output = tmp_path / "records" / "record.json"
    chosen = parse(["--output", str(output), "--partial", "--cell-seconds", "200", *arguments], "")
    returned = forward.run(chosen, timer or CallingTimer(), "cpu")
    assert json.loads(output.read_text()) == json.loads(json.dumps(returned))
    return returned


def test_a_run(tmp_path: pathlib.Path) -> None:
    arguments = ("--shapes", "all", "--tokens", "64", "--routing", "single_hot", "--breakdown")
    record = run(tmp_path, *arguments)
    assert [row["shape"] for row in record["rows"]] == ["qwen3", "gptoss20b"] and record["partial"]
    assert [found["shape"] for found in record["warmup"]] == ["qwen3", "gptoss20b"]
    for row in record["rows"]:
        assert row["bitwise_torch_jax"] and row["error_fp32_loop"] < forward.TOLERANCE
        assert row["busiest_expert_tokens"] == 64 and row["active_experts"] == 4
        assert set(row["peer_errors"]) == {"grouped_mm", "grouped_mm_compiled", "ragged_dot"}
        assert set(row["not_timed"]) == ABSENT and not row["red_peers"]
        assert row["torch_us"] == row["grouped_mm_us"] == row["ragged_dot_us"] == 100.0
        assert [kernel["kernel"] for kernel in row["breakdown"]["ours"]["kernels"]] == ["route", "product", "product"]
    text = README.read_text()
    fields = {*record, *(name for row in record["rows"] for name in row)}
    assert not [name for name in fields if f"`{name}`" not in text], "fields that the page does not describe"
    shown = forward.show(record)
    assert "| gptoss20b | in_out | bfloat16 | single_hot | 64 | 4 | 100 |" in shown and "between kernels" in shown
    assert "tokamax: tokamax cannot be imported" in shown


def test_peers_that_are_left_out_say_why(tmp_path: pathlib.Path) -> None:
    arguments = ("--shapes", "qwen3", "--tokens", "1", "--peers", "grouped_mm,ragged_dot")
    row = run(tmp_path, *arguments)["rows"][0]
    assert row["not_timed"] == {"ragged_dot": "timed at 64, 1024, 4096 tokens only"} and "grouped_mm_us" in row
    row = run(tmp_path, *arguments, "--everywhere")["rows"][0]
    assert not row["not_timed"] and "ragged_dot_us" in row
    row = run(tmp_path, *arguments, "--cell-seconds", "1e-6")["rows"][0]
    assert row["not_timed"]["grouped_mm"] == "the time of the cell was spent" and row["torch_us"] == 100.0


def test_routings_side_by_side_and_batch_invariant(tmp_path: pathlib.Path) -> None:
    options = ("--shapes", "gptoss20b", "--tokens", "12", "--peers", "none", "--batch-invariant")
    balanced, hot = run(tmp_path, *options, "--routing", "balanced,single_hot")["rows"]
    assert "over_balanced" not in balanced and hot["over_balanced"] == 1.0
    assert balanced["batch_invariant_us"] == hot["batch_invariant_us"] == 100.0
    text = README.read_text()
    assert not [name for name in hot if f"`{name}`" not in text], "fields that the page does not describe"


def test_a_token_that_depends_on_its_batch_is_red(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Problem.torch_forward

    def by_batch(problem: Problem, spec: Any = None, tokens: int | None = None) -> Any:
        found = real(problem, spec, tokens)
        return found if tokens is None else found._replace(output=found.output * (1 + 2**-7))

    monkeypatch.setattr(Problem, "torch_forward", by_batch)
    record = run(tmp_path, "--shapes", "qwen3", "--tokens", "16", "--peers", "none", "--batch-invariant")
    row = record["rows"][0]
    assert row["not_timed"]["batch_invariant"].startswith("parity is red: a token alone bitwise False, error 0.0")
    assert row["red_peers"] == ["batch_invariant"] and "batch_invariant_us" not in row


def test_peers_that_fail_say_why_and_a_red_one_fails_the_run(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(problem: Problem) -> Callable[[], Any]:
        raise RuntimeError("RESOURCE_EXHAUSTED: out of memory\na long story")

    known = {"broken": Peer("broken", broken), "wrong": Peer("wrong", fault)}
    monkeypatch.setattr(options, "PEERS", known)
    monkeypatch.setattr(forward, "GraphTimer", CallingTimer)
    monkeypatch.setattr(
        forward, "run", functools.partial(lambda run, chosen, timer, _: run(chosen, timer, "cpu"), forward.run)
    )
    output = tmp_path / "record.json"
    # A slow machine has time for every peer too.
    arguments = ["--shapes", "qwen3", "--tokens", "16", "--cell-seconds", "100", "--output", str(output)]
    assert forward.main(arguments) == 1
    row = json.loads(output.read_text())["rows"][0]
    assert row["not_timed"]["broken"] == "RuntimeError: RESOURCE_EXHAUSTED: out of memory"
    assert row["not_timed"]["wrong"].startswith("parity of wrong is red") and row["red_peers"] == ["wrong"]
    assert "wrong_us" not in row
    printed = capsys.readouterr()
    assert (
        "parity is red for wrong: not timed there" in printed.err
        and "| qwen3 | out_in | bfloat16 | balanced | 16 |" in printed.out
    )
    del known["wrong"]
    assert forward.main(arguments) == 0


@pytest.mark.parametrize("what", ["bits", "values"])
def test_red_parity_refuses_the_timing(what: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    timer = CallingTimer()
    if what == "bits":
        real = moe_jax.moe

        def one_bit_off(*given: Any) -> Any:
            found = real(*given)
            return found._replace(output=found.output * (1 + 2**-7))

        monkeypatch.setattr(moe_jax, "moe", one_bit_off)
    else:
        monkeypatch.setattr(forward, "expected", lambda *given: 1.5 * expected(*given))
    with pytest.raises(SystemExit, match=r"parity is red for qwen3: .*nothing was timed"):
        run(tmp_path, "--shapes", "qwen3", "--tokens", "16", timer=timer)
    assert timer.calls == 0 and not list(tmp_path.rglob("*.json"))


# The case over 2**31 elements.


def test_the_large_case_is_large() -> None:
    assert min(elements(LARGE_SHAPE, LARGE_TOKENS).values()) > 2**31
    assert LARGE_TOKENS * LARGE_SHAPE.top_k < 2**31
    weights = draw_weights(LARGE_SHAPE, torch.Generator("cpu").manual_seed(0))
    x = torch.empty(LARGE_TOKENS, LARGE_SHAPE.d_model, dtype=torch.bfloat16, device="meta")
    logits = torch.empty(LARGE_TOKENS, LARGE_SHAPE.num_experts, device="meta")
    plan = Problem(LARGE_SHAPE, "balanced", x, logits, weights).plan(Target("cuda", 90, 132))
    assert plan.spec("output").shape == (LARGE_TOKENS, LARGE_SHAPE.d_model) and plan.scratch_bytes > 2**32


def test_the_large_case_in_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.large._CHUNK", 40)
    with torch.no_grad():
        found = run_large("cpu", TINY["qwen3"], 100)
        assert found["bitwise_torch_jax"] and 0 < found["worst_chunk_error_fp32"] < 1e-2
        assert found["elements"] == {"x": 1600, "activations": 4800, "slots": 3200}
        json.dumps(found)
        monkeypatch.setattr("benchmarks.large.TOLERANCE", 1e-9)
        with pytest.raises(SystemExit, match="parity is red for"):
            run_large("cpu", TINY["qwen3"], 100)
