"""The command `moe-parity`: exit status, report, JSON, options and every refusal."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moe_core import Unsupported
from moe_core.parity import cli, engines
from moe_core.parity.builtin_cases import BUILT_IN
from moe_core.runtime.cuda import cuda_available
from moe_torch.parity import triton_kernels as triton_kernels_engine
from tests.support.checkpoint_files import FAMILIES, MOE_LAYERS, D, write_family
from tests.support.faults.kernel_copies import OpFault, plant
from tests.support.parity import AlteredEngine, FaultyEngine, run_json
from tests.support.paths import ROOT

#: A run of a few seconds.
QUICK = ("--case", "llama4", "--dtype", "float32", "--tokens", "5")


def in_subprocess(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """`python -m moe_core.parity` in a fresh process, TRITON_INTERPRET as given or unset."""
    variables = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | environment
    return subprocess.run(
        [sys.executable, "-m", "moe_core.parity", *arguments], cwd=ROOT, env=variables, capture_output=True, text=True
    )


def only_engines(monkeypatch: pytest.MonkeyPatch, **values: str) -> None:
    """Register these engines and no others."""
    points = {name: importlib.metadata.EntryPoint(name, value, engines.GROUP) for name, value in values.items()}
    monkeypatch.setattr(engines, "registered_engines", lambda: points)


def test_torch_and_jax_agree_in_a_fresh_process(tmp_path: Path) -> None:
    """No variable is set: without a GPU the tool itself chooses the interpreter."""
    path = tmp_path / "report.json"
    done = in_subprocess(*QUICK, "--json", str(path))
    assert done.returncode == 0, done.stdout + done.stderr
    device = "cuda sm_" if cuda_available() else "triton interpreter (cpu)"
    assert f"torch on {device}" in done.stdout and f"jax on {device}" in done.stdout
    assert "torch and jax bitwise equal: yes" in done.stdout
    assert done.stdout.rstrip().splitlines()[-1].startswith("moe-parity: 1 case agrees with the reference")
    assert done.stderr.startswith("moe-parity: cases: 1; starting torch, jax")
    assert "== [1/1] llama4, float32, T=5 " in done.stdout and len(done.stdout.splitlines()) == 9, done.stdout
    document = json.loads(path.read_text())
    assert document["exit_status"] == 0 and document["error"] is None
    (case,) = document["cases"]
    assert case["agrees"] and case["sizes"]["T"] == 5
    assert [engine["engine"] for engine in case["engines"]] == ["torch", "jax"]
    (bits,) = case["bitwise"]
    assert bits["engines"] == ["torch", "jax"] and bits["equal"] and bits["device"] == case["engines"][0]["device"]


def test_gradients_are_compared(capsys: pytest.CaptureFixture[str]) -> None:
    status, document = run_json(capsys, *QUICK, "--backward")
    assert status == 0, document["conclusion"]
    forward, backward = document["cases"]
    assert (forward["case"], backward["case"]) == ("llama4", "llama4 backward")
    for engine in backward["engines"]:
        stages = [stage["stage"] for stage in engine["stages"]]
        assert stages[:3] == ["d_x", "d_experts.gate_up", "d_experts.down"] and "d_routing.weight" in stages
        assert all(stage["worst"]["tolerance"] < 1e-2 for stage in engine["stages"])
    assert [row["equal"] for row in backward["bitwise"]] == [True]


def test_gradients_of_one_case_are_compared_unless_cases_are_named() -> None:
    def asked(*arguments: str) -> list[str]:
        steps = cli._steps(cli._parser().parse_args(arguments))
        return list(dict.fromkeys(step.label.split()[0] for step in steps if step.make is None))

    assert asked() == ["deepseek_v3"]
    assert asked("--no-backward") == [] and asked("--case", "deepseek_v3") == []
    assert asked("--backward") == list(BUILT_IN)


def test_a_fault_in_a_backward_kernel_turns_it_red(tmp_path: Path) -> None:
    faults = {
        "activation.kernels.formulas": OpFault("share * (1.0 + bounded * (1.0 - share))", "share"),
        "routing.kernels.backward": OpFault(
            'return expert_scores(-x, "sigmoid")', 'return expert_scores(x, "sigmoid")'
        ),
    }
    for kernel_file, fault in faults.items():
        plant(kernel_file, fault, tmp_path / kernel_file)
    plan = [[str(tmp_path / kernel_file), [*QUICK, "--backward", "--engines", "torch"]] for kernel_file in faults]
    command = [sys.executable, "-m", "tests.support.faults.forward", json.dumps(plan)]
    subprocess.run(command, cwd=ROOT, env=os.environ | {"TRITON_INTERPRET": "1"}, check=True)
    for kernel_file in faults:
        log = (tmp_path / kernel_file / "log").read_text()
        assert (tmp_path / kernel_file / "status").read_text() == "1", log
        assert "1 of 2 cases DIFFER: llama4 backward float32" in log
        assert "DIFFERS: first divergent stage is d_" in log


@pytest.mark.skipif(cuda_available(), reason="on a GPU machine the engines run on the GPU")
def test_forcing_the_reference_on_the_cpu_is_not_tested() -> None:
    done = in_subprocess(*QUICK, "--engines", "reference,torch", TRITON_INTERPRET="off")
    assert done.returncode == 2
    assert "torch on numpy reference (cpu): NOT TESTED" in done.stdout
    assert "NOT TESTED: torch ran the NumPy reference itself" in done.stdout


def test_the_json_report_holds_every_row(capsys: pytest.CaptureFixture[str]) -> None:
    status, document = run_json(capsys, *QUICK, "--engines", "reference,torch")
    assert status == 0
    assert set(document) == {
        *("tool", "format", "moebius", "python", "versions", "exit_status", "conclusion", "error", "cases")
    }
    (case,) = document["cases"]
    assert set(case) == {"case", "dtype", "scheme", "sizes", "description", "agrees", "engines", "bitwise", "repeat"}
    assert case["scheme"] is None
    (engine,) = case["engines"]
    assert set(engine) == {"engine", "device", "verdict", "skipped", "first_divergent_stage", "stages", "flips"}
    names = [row["stage"] for row in engine["stages"]]
    wanted = ["logits", "ids", "weights", "matmul1", "activation", "matmul2", "output"]
    assert [name for name in names if name in wanted] == wanted
    assert names[-1] == "moe (composed)"
    for row in engine["stages"]:
        assert row["engine"] == "torch" and row["device"] == engine["device"] and row["verdict"] == "agree"
        assert row["relative_error"] <= row["relative_tolerance"]
        assert row["worst"]["error"] <= row["worst"]["tolerance"]


def test_the_reference_alone_is_not_tested(capsys: pytest.CaptureFixture[str]) -> None:
    status, document = run_json(capsys, *QUICK, "--engines", "reference")
    assert status == 2
    assert document["cases"][0]["engines"][0]["verdict"] == "not tested"
    assert document["conclusion"].startswith("NOT TESTED: reference ran the NumPy reference itself")


def test_a_fault_exits_with_1_and_names_the_stage(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    only_engines(monkeypatch, faulty="tests.support.parity:FaultyEngine")
    status, document = run_json(capsys, *QUICK, "--engines", "reference,faulty")
    assert status == 1
    assert document["cases"][0]["engines"][0]["first_divergent_stage"] == "activation"
    assert document["conclusion"] == "1 of 1 cases DIFFER: llama4 float32"


def test_an_engine_that_skips_every_case_could_not_run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    only_engines(monkeypatch, faulty="tests.support.parity:FaultyEngine")
    status, document = run_json(capsys, "--case", "mixtral", "--dtype", "float16", "--engines", "faulty")
    assert status == 2
    assert document["cases"][0]["engines"][0]["skipped"] == "float16 is left out"
    assert "faulty supports none of these cases" in document["conclusion"]


def test_the_last_line_counts_the_cases_of_an_engine_that_skips_some(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    only_engines(monkeypatch, torch="moe_torch.parity.torch:TorchEngine", altered="tests.support.parity:AlteredEngine")
    reasons = iter((None, "one dtype is left out"))
    monkeypatch.setattr(AlteredEngine, "why_unsupported", lambda self, case: next(reasons))
    status, document = run_json(capsys, "--case", "llama4", "--tokens", "5", "--engines", "torch,altered")
    assert status == 0, document["conclusion"]
    assert document["conclusion"].startswith("all 2 cases agree with the reference: torch (")
    assert document["conclusion"].endswith("), altered (a test, 1 of 2)")


def test_an_engine_that_fails_could_not_run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    only_engines(monkeypatch, faulty="tests.support.parity:FaultyEngine")

    def fail(self: Any, case: Any, progress: Any) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(FaultyEngine, "run", fail)
    assert cli.main([*QUICK, "--engines", "faulty"]) == 2
    captured = capsys.readouterr()
    assert "moe-parity: could not run: RuntimeError: out of memory" in captured.err
    assert "Traceback" in captured.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--engines", "torch,nonesuch"], "engines must be registered under 'moebius.engines' (jax, reference, torch"),
        (["--engines", ","], "engines must name at least one engine, got none"),
        (["--case", "gpt2"], "case must be one of mixtral, qwen3_moe"),
        (["--case", "mixtral", "--tokens", "0"], "tokens must be at least 1, got 0"),
        (["--seed", "-1"], "--seed must be an integer of at least 0, got -1"),
        (["--ranks", "0"], "--ranks must be an integer of at least 1, got 0"),
        (["--layer", "0"], "--layer must come with --checkpoint"),
        (["--hidden-states", "x.npy"], "--hidden-states must come with --checkpoint"),
        (["--dequantize"], "--dequantize must come with --checkpoint"),
        (["--checkpoint", "/nonexistent"], "path must be a checkpoint directory, got /nonexistent"),
    ],
)
def test_bad_options_could_not_run(
    arguments: Sequence[str], message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "report.json"
    assert cli.main([*arguments, "--json", str(path)]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and f"moe-parity: could not run: {message}" in captured.err
    assert "Traceback" not in captured.err
    assert json.loads(path.read_text())["error"].startswith(message)


def test_two_reports_in_one_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = str(tmp_path / "report")
    assert cli.main(["--json", path, "--html", path]) == 2
    assert f"--html must be another file than --json, got {path} twice" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["--dtype", "int8"], ["--case", "mixtral", "--checkpoint", "x"], ["--nonesuch"]])
def test_the_parser_refuses_with_2(arguments: Sequence[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    assert caught.value.code == 2


def test_a_missing_engine_is_an_error_that_names_the_way_out(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    only_engines(monkeypatch, torch="no_such_module:Engine", jax="no_such_module:Engine")
    assert cli.main([*QUICK, "--engines", "reference,torch,jax"]) == 2
    text = capsys.readouterr().err
    assert "engine 'torch' cannot start: No module named 'no_such_module'" in text
    assert "install it, or leave it out with --engines reference,jax" in text


def test_the_default_runs_what_is_installed_and_says_what_is_not(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    only_engines(monkeypatch, torch="tests.support.parity:FaultyEngine", jax="no_such_module:Engine")
    assert cli.main(QUICK) == 1
    captured = capsys.readouterr()
    assert "left out: jax, which needs no_such_module: install moebius with its extra `jax`" in captured.err
    assert captured.out.splitlines()[-1].endswith("with its extra `jax`")
    assert "DIFFERS: first divergent stage is activation" in captured.out, "a failure is told in full"
    only_engines(monkeypatch, torch="no_such_module:Engine", jax="no_such_module:Engine")
    assert cli.main(QUICK) == 2
    assert "torch, jax or another engine must be installed, got none" in capsys.readouterr().err


def test_an_installed_engine_that_does_not_start_is_an_error(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    only_engines(monkeypatch, torch="tests.support.parity:NoSuchEngine", jax="tests.support.parity:FaultyEngine")
    monkeypatch.setattr("tests.support.parity.NoSuchEngine", broken, raising=False)
    assert cli.main(QUICK) == 2
    assert "engine 'torch' cannot start: a library does not load" in capsys.readouterr().err


def broken() -> None:
    """What a damaged installation does."""
    raise ImportError("a library does not load")


@pytest.mark.skipif(cuda_available(), reason="says what is missing on a machine without a GPU")
def test_triton_kernels_without_a_gpu_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*QUICK, "--engines", "triton_kernels"]) == 2
    assert "engine 'triton_kernels' cannot start: upstream triton_kernels needs a CUDA GPU" in capsys.readouterr().err


def test_an_absent_triton_kernels_names_upstream_and_the_unrelated_distribution(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("triton_kernels", "triton_kernels.matmul_ogs"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setattr(triton_kernels_engine, "use_gpu", lambda: True)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    with pytest.raises(Unsupported, match=r"triton-lang/triton.*triton-kernels on the package index is an unrelated"):
        triton_kernels_engine.TritonKernelsEngine()


def test_the_listing_names_cases_and_engines(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--list"]) == 0
    text = capsys.readouterr().out
    for name in (*BUILT_IN, "reference", "torch", "jax", "triton_kernels"):
        assert f"  {name} " in text
    assert "moe_torch.parity.torch:TorchEngine" in text
    assert ("MISSING here: upstream triton_kernels needs a CUDA GPU" in text) is not cuda_available()


def test_verbose_prints_every_stage(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*QUICK, "--engines", "torch", "--verbose"]) == 0
    assert "\n  matmul1  " in capsys.readouterr().out


@pytest.mark.parametrize("family", FAMILIES)
def test_a_checkpoint_layer_is_compared(family: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    layer = MOE_LAYERS[family][-1]
    write_family(tmp_path / "model", family)
    x = np.random.default_rng(0).standard_normal((7, D)).astype(np.float32)
    np.save(tmp_path / "x.npy", x)
    status, document = run_json(
        capsys,
        *("--checkpoint", str(tmp_path / "model"), "--layer", str(layer), "--engines", "reference,torch"),
        *("--hidden-states", str(tmp_path / "x.npy"), "--tokens", "6"),
    )
    assert status == 0, document
    (case,) = document["cases"]
    assert case["case"] == f"{family} layer {layer}" and case["dtype"] == "bfloat16" and case["sizes"]["T"] == 6
    assert "x.npy" in case["description"]


def test_a_checkpoint_can_be_cast_and_its_input_drawn(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    write_family(tmp_path, "gpt_oss")
    arguments = ("--checkpoint", str(tmp_path), "--dtype", "float32", "--engines", "torch", "--seed", "5")
    status, document = run_json(capsys, *arguments)
    assert status == 0, document
    (case,) = document["cases"]
    assert case["case"] == "gpt_oss layer 0" and case["dtype"] == "float32" and case["sizes"]["T"] == 16
    assert case["description"].endswith("hidden states drawn with seed 5")
