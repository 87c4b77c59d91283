"""The benchmark of torch's host time, on a CPU, with a tiny layer and few calls."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import moe_torch
from benchmarks import torch_host_time
from moe_core.runtime import cuda

README = pathlib.Path(torch_host_time.__file__).parent / "README.md"
NAMES = ["moe/x", "moe/logits", "moe/ids", "layer/[T, D]", "layer/[B, S, D]", "launcher/x", "launcher/logits"]
NAMES += ["launcher/ids", "dispatcher/x", "launches"]


@pytest.fixture(autouse=True)
def little_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    small = {"TOKENS": 4, "D_MODEL": 16, "D_FF": 8, "NUM_EXPERTS": 4, "TOP_K": 2, "WARM_UP": 1, "CALLS": 2}
    for name, value in small.items():
        monkeypatch.setattr(torch_host_time, name, value)
    monkeypatch.setenv("MOEBIUS_COMMIT", "0123456789abcdef")


def test_a_run() -> None:
    waits: list[None] = []
    record = torch_host_time.run(2, "cpu", lambda: waits.append(None))
    assert list(record["per_call"]) == NAMES and set(record) == {"provenance", "per_call"}
    assert len(waits) == (2 + 1) * len(NAMES), "before each turn, and at the end"
    for figures in record["per_call"].values():
        assert 0 < figures["best_us"] <= figures["median_us"]
    assert record["provenance"]["command"].startswith("python -m benchmarks.torch_host_time")


def test_a_figure_is_of_one_call() -> None:
    calls: list[None] = []
    figures = torch_host_time.measure(lambda: calls.append(None), 4, lambda: None)
    assert len(calls) == 1 + 4 * 2 and set(figures) == {"best_us", "median_us"}


def test_a_run_without_a_driver_leaves_nothing_behind() -> None:
    layer = moe_torch.MoE(16, 8, 4, 2).requires_grad_(False)
    x = torch.randn(4, 16)
    expected = layer(x)
    record = torch_host_time.run(2, "cpu", lambda: None, idle=True)
    assert list(record["per_call"]) == NAMES
    assert torch.equal(layer(x), expected)


def test_without_a_driver_a_gpu_s_kernels_are_launched() -> None:
    layer = moe_torch.MoE(16, 8, 4, 2).requires_grad_(False)
    with torch_host_time.no_driver():
        launched: list[int] = []
        driver: Any = cuda.driver()
        driver.launch = lambda *arguments: launched.append(len(arguments)) or 0
        for _ in range(3):
            layer(torch.randn(4, 16))
    assert len(launched) >= 9 and set(launched) == {4}


def test_the_launches_are_those_of_the_op() -> None:
    """They write into buffers of their own: poisoned, they hold afterwards what the op returns."""
    layer = moe_torch.MoE(16, 8, 4, 2).requires_grad_(False)
    x = torch.randn(6, 16)
    spec = layer.spec.moe_spec(torch_host_time.HUGGING_FACE)
    router = moe_torch.RouterWeights(layer.router.weight)
    experts = moe_torch.ExpertWeights(layer.experts.gate_up, layer.experts.down)
    operator, arrays, options = torch_host_time.moe_request(x, experts, router, spec, None, None, None)
    arguments = (*arrays, options)
    ready = operator.ready(arguments)
    launches = torch_host_time.Launches(ready, arguments, x.device)
    launches.buffers[0].fill_(torch.nan)
    launches()
    assert torch.equal(launches.buffers[0], moe_torch.moe(x, experts, router, spec).output)


def test_red_parity_refuses_the_timing(monkeypatch: pytest.MonkeyPatch) -> None:
    real = moe_torch.prepare_moe
    monkeypatch.setattr(moe_torch, "prepare_moe", lambda *given: lambda x: 2 * real(*given)(x))
    with pytest.raises(SystemExit, match="parity is red for launcher; nothing was timed"):
        torch_host_time.calls("cpu")
    monkeypatch.setattr(torch_host_time.eager, "plain_key", lambda arguments: None)
    with pytest.raises(SystemExit, match="no plain eager call"):
        torch_host_time.calls("cpu")


def test_the_record_is_printed_and_written(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    record = {"per_call": {"moe/x": {"best_us": 1.0, "median_us": 2.0}}}
    asked: list[tuple[int, str, bool]] = []
    monkeypatch.setattr(
        torch_host_time, "run", lambda turns, device, wait, idle: asked.append((turns, device, idle)) or record
    )
    output = tmp_path / "records" / "host.json"
    monkeypatch.setattr("sys.argv", ["torch_host_time.py", "--turns", "7", "--output", str(output)])
    torch_host_time.main()
    assert json.loads(output.read_text()) == json.loads(capsys.readouterr().out) == record
    assert asked == [(7, "cuda", False)]
    monkeypatch.setattr("sys.argv", ["torch_host_time.py", "--driver", "none"])
    torch_host_time.main()
    assert asked[1:] == [(100, "cpu", True)]


def test_the_page_names_the_command() -> None:
    assert "`python -m benchmarks.torch_host_time`" in README.read_text()
