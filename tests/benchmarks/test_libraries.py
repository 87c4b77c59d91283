"""What the benchmarks give to other libraries, judged by stand-ins for these on a CPU."""

from __future__ import annotations

import dataclasses

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("jax")

import moe_torch
from benchmarks import training
from benchmarks.libraries import flashinfer, hugging_face, sonicmoe
from benchmarks.libraries.recorded import add_recorded, read_recorded
from benchmarks.libraries.weights import alternate, in_halves
from benchmarks.peers import PEERS, add_peer, time_peer
from benchmarks.problem import Problem, draw_problem
from benchmarks.shapes import ALL_SHAPES, Shape
from benchmarks.timing import paired_spread
from benchmarks.training_peers import TRAINING_PEERS, sample
from benchmarks.training_problem import draw_parameters, draw_training_problem, torch_step
from benchmarks.weights import draw_weights
from moe_core.specs.matmul import Activation
from tests.support.benchmarks import TINY, CallingTimer, libraries

SILU = Shape("silu", 16, 32, 4, 2, Activation("silu"), False)
LIBRARIES = ("sonicmoe", "sonicmoe_experts", "flashinfer", "flashinfer_experts", "deepgemm")


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    libraries.install(monkeypatch)


def problem_of(shape: Shape, tokens: int = 12) -> Problem:
    return draw_problem(shape, "balanced", tokens, draw_weights(shape, torch.Generator("cpu").manual_seed(0)))


@pytest.mark.parametrize("name", LIBRARIES)
@pytest.mark.parametrize("layout", ["out_in", "in_out"])
def test_libraries_get_the_layer(name: str, layout: str) -> None:
    shape = dataclasses.replace(SILU, weight_layout=layout)
    assert PEERS[name].unsuited(shape) is None
    with torch.no_grad():
        _, figures = time_peer(PEERS[name], problem_of(shape), CallingTimer(), 1.0)
    assert 0 < figures["error"] < 2e-2


@pytest.mark.parametrize("shape", [TINY["gptoss20b"], TINY["qwen3"], SILU], ids=["gpt-oss", "qwen3", "silu"])
@pytest.mark.parametrize("layout", ["out_in", "in_out"])
def test_transformers_gets_the_layer(shape: Shape, layout: str) -> None:
    pytest.importorskip("transformers")
    problem = problem_of(dataclasses.replace(shape, weight_layout=layout))
    assert hugging_face.why_unsuited(shape) is None
    with torch.no_grad():
        _, figures = time_peer(PEERS["transformers"], problem, CallingTimer(), 1.0)
    assert 0 < figures["error"] < 2e-2


def test_experts_alone_are_ours_from_given_routing() -> None:
    problem = problem_of(SILU)
    with torch.no_grad(), moe_torch.cpu_engine("reference"):
        alone, whole = problem.experts_forward()(), problem.torch_forward()
    torch.testing.assert_close(alone.output, whole.output)
    assert torch.equal(problem.top_k[0], whole.ids)


def test_what_stands_beside_each_other_is_in_the_row() -> None:
    class Timer(CallingTimer):
        def rounds(self, functions, seconds: float = 1.0):  # type: ignore[no-untyped-def]
            assert set(functions) == {"ours", "sonicmoe"}
            return {"ours": [8.0, 9.0, 10.0], "sonicmoe": [10.0, 10.0, 10.0]}

    row = {"peer_errors": {}, "red_peers": [], "turns_us": {"other": {}}}
    with torch.no_grad():
        reason = add_peer(row, PEERS["sonicmoe"], problem_of(SILU), Timer(), 100.0, {"ours": lambda: None})
    assert reason is None and row["over_sonicmoe"] == 0.9 and row["sonicmoe_us"] == 100.0
    assert row["turns_us"] == {"other": {}, "sonicmoe": {"ours": 9.0, "sonicmoe": 10.0}}
    assert row["turns_spread"]["sonicmoe"] == pytest.approx(0.05 / 0.9)
    assert paired_spread({"a": [1.0], "b": [2.0]}, "a", "b") == 0


@pytest.mark.parametrize(
    ("reason", "message"),
    [
        (sonicmoe.why_unsuited(ALL_SHAPES["gptoss120b"]), "SonicMoE is timed with silu and without biases; add"),
        (flashinfer.why_unsuited(TINY["qwen3"]), "FlashInfer needs F to be a multiple of 32, got 24"),
        (sonicmoe.why_no_step(ALL_SHAPES["llama4"]), "SonicMoE's step is timed with weights stored out_in"),
        (hugging_face.why_unsuited(dataclasses.replace(SILU, biased=True)), "transformers has no silu experts with b"),
    ],
)
def test_shapes_that_a_library_does_not_have_are_named(reason: str | None, message: str) -> None:
    assert reason is not None and reason.startswith(message)


def test_recorded_figures_stand_in_scaled_by_dense_products() -> None:
    recorded = read_recorded()
    figures = recorded["forward"]["flashinfer"]["qwen3"]
    row = {"shape": "qwen3", "mode": "forward", "routing": "balanced", "tokens": 4096, "torch_us": 1000.0}
    row |= {"dense_us": 2 * figures["4096"]["dense_us"], "over_sonicmoe": 0.9}
    add_recorded(row, recorded)
    assert row["recorded_us"] == {"flashinfer": 2 * figures["4096"]["us"]} and row["recorded_scale"]["flashinfer"] == 2
    assert row["over_recorded"]["flashinfer"] == 1000 / (2 * figures["4096"]["us"])
    few = {**row, "tokens": 1}
    add_recorded(few, recorded)
    assert few["recorded_us"] == {"flashinfer": figures["1"]["us"]} and few["recorded_scale"]["flashinfer"] == 1
    for other in ({"routing": "zipf"}, {"weight_layout": "in_out"}, {"dtype": "float16"}, {"shape": "olmoe"}):
        plain = {"shape": "qwen3", "mode": "forward", "routing": "balanced", "tokens": 1, "torch_us": 1.0, **other}
        before = dict(plain)
        add_recorded(plain, recorded)
        assert plain == before


def test_rows_by_turns() -> None:
    gate_up = torch.arange(8)[None, :, None]
    assert alternate(gate_up, 1).flatten().tolist() == [0, 4, 1, 5, 2, 6, 3, 7]
    assert alternate(gate_up, 2, up_first=True).flatten().tolist() == [4, 5, 0, 1, 6, 7, 2, 3]
    assert torch.equal(in_halves(alternate(gate_up, 1)), gate_up)


def test_a_training_step_of_sonicmoe() -> None:
    with moe_torch.cpu_engine("reference"):
        problem = draw_training_problem(SILU, 24, draw_parameters(SILU, "cpu"))
        wanted = sample(torch_step(problem).gradients)
        peer, timer = TRAINING_PEERS["sonicmoe"], CallingTimer()
        found = training.time_training_peer(peer, problem, wanted, timer, 1.0)
        assert 0 < found["error"] < 3e-2 and found["over"] == 1.0 and found["turns"] == {"ours": 100, "sonicmoe": 100}
        as_stored = dataclasses.replace(peer, as_ours=lambda name, gradient: gradient)
        with pytest.raises(training.ParityIsRed, match=r"d_experts\.gate_up"):
            training.time_training_peer(as_stored, problem, wanted, timer, 1.0)
