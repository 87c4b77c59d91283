"""The benchmarks of parts of models, tiny and on a CPU, with timers that only call."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("jax")
pytest.importorskip("transformers")

import moe_torch
from benchmarks.models import inference, training
from benchmarks.models.blocks import MODELS
from benchmarks.timing import EagerTimer
from tests.support.benchmarks import CallingTimer

README = pathlib.Path(inference.__file__).parents[1] / "README.md"
SMALL = {
    "qwen3-30b-a3b": {"hidden_size": 32, "moe_intermediate_size": 16, "num_experts": 8, "num_experts_per_tok": 2},
    "gpt-oss-120b": {"hidden_size": 32, "intermediate_size": 16, "num_local_experts": 8, "num_experts_per_tok": 2},
}


class Timer(CallingTimer):
    def capture(self, function: Any) -> None:
        function()


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> Any:
    for name, sizes in SMALL.items():
        monkeypatch.setitem(MODELS, name, dataclasses.replace(MODELS[name], sizes={**MODELS[name].sizes, **sizes}))
    with moe_torch.cpu_engine("reference"):
        yield


def run(*arguments: str, output: pathlib.Path | None = None) -> dict[str, Any]:
    given = [*arguments, *(("--output", str(output)) if output else ())]
    return inference.run(inference.parse(given), (CallingTimer(), Timer()), "cpu")


def test_a_run_of_layers_in_transformers(tmp_path: pathlib.Path) -> None:
    output = tmp_path / "records" / "models.json"
    record = run("--tokens", "1,300", "--layers", "2", output=output)
    assert json.loads(output.read_text()) == json.loads(json.dumps(record))
    timed = [row for row in record["rows"] if "us_per_layer" in row]
    found = {(row["model"], row["tokens"], row["mode"], row["implementation"]) for row in timed}
    for model in SMALL:
        assert {name for *_, name in found if (model, 1, "eager", name) in found} >= {"moebius", "grouped_mm", "eager"}
        assert (model, 1, "eager", "batched_mm") in found and (model, 300, "eager", "batched_mm") not in found
        assert (model, 300, "graph", "grouped_mm") in found and (model, 300, "graph", "eager") not in found
    first = timed[0]
    assert first["us_per_layer"] == 50 and first["tokens_per_s"] == pytest.approx(1e6 / 50 / 48)
    assert first["over"] == 1 and first["error"] == 0 and first["phase"] == "decode"
    reasons = {row["implementation"]: row["not_timed"] for row in record["rows"] if "not_timed" in row}
    assert "batched_mm" in reasons and {"sonicmoe", "deepgemm"} <= set(reasons)
    text = README.read_text()
    assert not [name for row in record["rows"] for name in row if f"`{name}`" not in text]
    assert "batched_mm: ValueError: copies the weights of every slot" in inference.show(record["rows"])


def test_red_parity_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inference, "relative_error", lambda found, wanted: 0.5)
    record = run(
        "--models", "qwen3-30b-a3b", "--tokens", "4", "--implementations", "moebius,grouped_mm", "--layers", "1"
    )
    assert {row["not_timed"] for row in record["rows"]} == {
        "ValueError: parity is red: error 0.5, at most 0.02 is allowed"
    }


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--implementations", "grouped_mm"], "--implementations must have moebius, which the others"),
        (["--implementations", "vllm,moebius"], "--implementations must be of moebius, grouped_mm"),
        (["--layers", "0"], "--layers and --seconds must be positive, got 0 and 1.0"),
        (["--models", "llama"], "--models must be of qwen3-30b-a3b, gpt-oss-120b, got llama"),
    ],
)
def test_refused_options(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        inference.parse(arguments)
    assert message in capsys.readouterr().err


TINY_MODEL = {
    "hidden_size": 32, "intermediate_size": 32, "moe_intermediate_size": 16, "num_experts": 8, "num_experts_per_tok": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 64, "norm_topk_prob": True,
}  # fmt: skip


def test_training_a_model(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "SIZES", TINY_MODEL)
    output = tmp_path / "records" / "model.json"
    given = ["--layers", "2", "--tokens", "32", "--length", "16", "--output", str(output)]
    record = training.run(training.parse(given), CallingTimer(), "cpu")
    assert json.loads(output.read_text()) == json.loads(json.dumps(record))
    # Attention, router and two of eight experts of each layer, the head, and no embedding.
    attention, router, expert, head = 32 * 8 * (4 + 2 + 2 + 4), 32 * 8, 3 * 32 * 16, 64 * 32
    active = 2 * (attention + router + 2 * expert) + head
    assert record["flops_per_token"] == 6 * active + 6 * 2 * 16 * 32
    ours, theirs = record["rows"]
    assert ours["implementation"] == "moebius" and theirs["implementation"] == "grouped_mm"
    for row in record["rows"]:
        assert row["step_us"] == 100 and row["tokens_per_s"] == pytest.approx(32 / 100e-6) and row["over"] == 1
        assert row["mfu"] == pytest.approx(record["flops_per_token"] * row["tokens_per_s"] / 989.4e12)
    assert abs(ours["loss"] - theirs["loss"]) < 1e-2 * ours["loss"]
    text = README.read_text()
    assert not [name for name in (*record, *ours) if f"`{name}`" not in text]
    assert "2 layers" in training.show(record)


def test_losses_that_differ_are_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "SIZES", TINY_MODEL)
    monkeypatch.setattr(training, "TOLERANCE", -1.0)
    record = training.run(training.parse(["--layers", "1", "--tokens", "8", "--length", "8"]), CallingTimer(), "cpu")
    assert all(row["not_timed"].startswith("parity is red: loss 4.") for row in record["rows"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tokens", "10", "--length", "4"], "--tokens must be a multiple of --length, got 10 and 4"),
        (["--implementations", "grouped_mm"], "--implementations must have moebius"),
    ],
)
def test_refused_options_of_training(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        training.parse(arguments)
    assert message in capsys.readouterr().err


def test_eager_calls_are_timed_by_turns() -> None:
    order: list[str] = []
    rounds = EagerTimer().rounds({"a": lambda: order.append("a"), "b": lambda: order.append("b")}, seconds=0.0)
    assert "".join(order) == "ab" + "ab" + "ba" + "ab" + "ba" + "ab" and all(
        len(times) == 5 for times in rounds.values()
    )
