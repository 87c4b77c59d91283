"""`moebius-doctor`: healthy, sick and incomplete installations in processes of their own; its parts in this one."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest

from moe_core.base import threads
from moe_core.base.arrays import ArraySpec
from moe_core.base.target import Target
from moe_core.errors import Unsupported
from moe_core.ops.matmul.sm90.plan import SM90_MATMUL_OGS
from moe_core.ops.routing.topk import plan_routing
from moe_core.parity.case import Case
from moe_core.parity.devices import INTERPRETER
from moe_core.parity.engines import EngineRun
from moe_core.parity.report import AGREE, DIFFER, NOT_TESTED, StageRow
from moe_core.runtime.cuda import CudaPrepared, cuda_available
from moe_core.runtime.prepare import prepare
from moe_core.runtime.prepared import HostPrepared, Prepared
from moe_core.specs.routing import RouterSpec
from moe_core.tools.doctor import cli, main, self_test
from moe_core.tools.doctor.kernels import kernels_of
from moe_core.tools.doctor.machine import PACKAGES, Gpu, Package, packages
from moe_core.tools.doctor.poison import Poisoned, poisoned
from moe_core.tools.doctor.self_test import (
    FAIL,
    OPS,
    PASS,
    UNTESTED,
    BackwardTest,
    EqualBits,
    ForwardTest,
    Outcome,
    Result,
    SelfTest,
    run_self_tests,
)
from tests.support.paths import ROOT
from tests.support.runtime.isolation import BLOCKER

#: What the cases of BackwardTest have between them.
GRADIENTS = (
    "d_x",
    *(f"d_experts.{name}" for name in ("gate_up", "down", "gate_up_bias", "down_bias")),
    *("d_routing.weight", "d_routing.bias"),
)
FRONT_ENDS = [name for name in ("torch", "jax") if find_spec(name) is not None]
DEVICE = "cuda sm_" if cuda_available() else INTERPRETER
#: A doctor of one front-end, in a process that begins with BLOCKER.
#: What a process does before it imports torch, which imports Triton.
PREPARE = "from moe_core.parity.devices import prefer_interpreter\nprefer_interpreter()\n"
#: One forward of every op in the place of all, which the healthy machine has.
FEW = "from moe_core.tools.doctor.self_test import ForwardTest\nForwardTest.CASES = ForwardTest.CASES[-1:]\n"
DOCTOR = "from moe_core.tools.doctor import main\nsys.exit(main(['--json']))\n"
JAX = ("jax", "jaxlib", "flax", "tvm_ffi", "jax_tvm_ffi")


def examine(blocked: tuple[str, ...], fault: str = "", few: str = FEW, **variables: str) -> tuple[int, dict[str, Any]]:
    """(exit status, JSON report) of the doctor in a fresh process without `blocked` packages, after `fault` has run."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | variables
    done = subprocess.run(
        [sys.executable, "-c", BLOCKER + (PREPARE + fault if fault else "") + few + DOCTOR, json.dumps(blocked)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


def without(*front_ends: str) -> tuple[str, ...]:
    return tuple(package for name in front_ends for package in (("torch",) if name == "torch" else JAX))


def verdicts(report: dict[str, Any], front_end: str) -> dict[str, set[str]]:
    """op -> its verdicts over all cases."""
    found: dict[str, set[str]] = {}
    for result in report["self_test"]:
        if result["front_end"] == front_end:
            found.setdefault(result["op"], set()).add(result["verdict"])
    return found


def test_this_machine_is_healthy() -> None:
    before = os.times()
    status, report = examine((), few="")
    after = os.times()
    assert (status, report["status"]) == (0, 0), report["not_to_be_trusted"]
    assert report["conclusion"].startswith("healthy")
    for name in FRONT_ENDS:
        assert verdicts(report, name) == {op: {PASS} for op in (*OPS, *GRADIENTS)}
    assert set(report["absent"]) == {"torch", "jax"} - set(FRONT_ENDS)
    assert all(result["device"].startswith(DEVICE) for result in report["self_test"])
    if len(FRONT_ENDS) == 2:
        assert [row["equal"] for row in report["bitwise"]] == [True] * len(ForwardTest.CASES + BackwardTest.CASES)
    # Every stage op and the composed op of every case has outputs, and sorting into groups needs a workspace.
    assert report["poisoned"]["outputs"] >= len(FRONT_ENDS) * len(OPS) * len(ForwardTest.CASES)
    assert report["poisoned"]["workspaces"] > 0
    versions = {package["name"]: package["version"] for package in report["packages"]}
    assert versions["numpy"] == np.__version__
    assert not any("gradients" in line for line in report["not_to_be_trusted"])
    if not cuda_available():
        assert any("there is no GPU" in line for line in report["not_to_be_trusted"])
        # Processor seconds, which other work on the machine does not stretch.
        used = after.children_user + after.children_system - before.children_user - before.children_system
        assert used < 20, f"{used:.1f} s"


@pytest.mark.skipif("torch" not in FRONT_ENDS, reason="the faults are planted in the torch front-end")
def test_a_corrupted_op_and_a_corrupted_gradient_turn_it_red_and_are_named() -> None:
    fault = """
import moe_torch.autograd.moe as gradients
import moe_torch.ops as ops
reduce, call = ops.reduce, gradients.call
ops.reduce = lambda *arguments, **options: reduce(*arguments, **options) * 1.1
def corrupted(operator, *arguments):
    results = call(operator, *arguments)
    if "backward" in operator.name:
        results[0] = results[0] * 1.1
    return results
gradients.call = corrupted
"""
    status, report = examine(without("jax"), fault)
    assert (status, report["status"]) == (1, 1)
    assert verdicts(report, "torch") == {op: {PASS} for op in (*OPS, *GRADIENTS)} | {"reduce": {FAIL}, "d_x": {FAIL}}
    for text, output in (("reduce", "output"), ("d_x", "d_x")):
        (named,) = [line for line in report["not_to_be_trusted"] if line.startswith(f"torch {text}")]
        assert f"{output}: differ" in named
    assert "jax is blocked" in report["absent"]["jax"] or "is not installed" in report["absent"]["jax"]
    assert any(line.startswith("moe_jax was not tested") for line in report["not_to_be_trusted"])


@pytest.mark.skipif("jax" not in FRONT_ENDS, reason="the environment under test has JAX alone")
def test_jax_alone_is_enough() -> None:
    status, report = examine(without("torch"))
    assert status == 0, report["not_to_be_trusted"]
    assert set(verdicts(report, "jax")) == {*OPS, *GRADIENTS} and not verdicts(report, "torch")
    assert any(line.startswith("moe_torch was not tested, it does not start") for line in report["not_to_be_trusted"])
    assert {package["version"] for package in report["packages"] if package["name"] == "torch"} == {None}


class RaisingEngine:
    """A front-end that starts and then fails."""

    name = "raising"

    def why_unsupported(self, case: Case) -> str | None:
        return None

    def run(self, case: Case, progress: Any) -> EngineRun:
        raise ValueError("broken on purpose")

    gradients = run


def absent_engine() -> None:
    raise Unsupported("not here")


def test_a_front_end_that_raises_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    places = {"torch": f"{__name__}:RaisingEngine", "jax": f"{__name__}:absent_engine", "x": f"{__name__}:nothing"}
    monkeypatch.setattr(self_test, "FRONT_ENDS", places)
    outcome = run_self_tests(lambda line: None)
    assert outcome.absent == {"jax": "not here"} and not outcome.healthy
    assert [result.note.partition(": ")[0] for result in outcome.failures] == ["ValueError"] * 2 + ["AttributeError"]
    assert outcome.failures[0].note == "ValueError: broken on purpose"


class OtherTest:
    """A direction of the computation besides the forward."""

    direction = "backward"
    CASES = (("gpt_oss", "bfloat16", 6),)

    def __init__(self, equal: bool | None) -> None:
        self.equal = equal

    def run(self, name: str, engine: Any, progress: Any) -> Iterator[Result]:
        yield Result(self.direction, name, INTERPRETER, "gpt_oss", "moe", PASS)

    def bitwise(self) -> Iterator[EqualBits]:
        yield EqualBits(self.direction, "gpt_oss", self.equal, "gradients")


@pytest.mark.parametrize("equal", [True, False, None])
def test_another_direction_joins_with_its_results_and_its_bits(
    monkeypatch: pytest.MonkeyPatch, equal: bool | None
) -> None:
    tests: tuple[SelfTest, ...] = (ForwardTest(), OtherTest(equal))
    monkeypatch.setattr(self_test, "self_tests", lambda: tests)
    monkeypatch.setattr(self_test, "FRONT_ENDS", {"torch": f"{__name__}:RaisingEngine"})
    outcome = run_self_tests(lambda line: None)
    assert [result.direction for result in outcome.results] == ["forward", "backward"]
    assert outcome.bitwise == (EqualBits("backward", "gpt_oss", equal, "gradients"),)
    alone = dataclasses.replace(outcome, results=outcome.results[1:])
    assert alone.healthy == (equal is not False)
    found = cli.Diagnosis((), (), "none", (), alone, 1.0)
    assert found.as_dict()["bitwise"] == [
        {"direction": "backward", "case": "gpt_oss", "equal": equal, "note": "gradients"}
    ]
    answer = {True: "yes", False: "NO", None: "not compared"}[equal]
    assert f"torch and JAX bitwise equal, backward gpt_oss: {answer} (gradients)" in str(found)
    assert ("do not give the same bits (backward, gpt_oss)" in str(found)) == (equal is False)
    assert "gradients: none was tested" not in str(found)


def test_a_wrong_routing_fails_although_none_of_its_weights_can_be_compared() -> None:
    rows = (StageRow("ids", DIFFER), StageRow("weights", NOT_TESTED, note="other experts"), StageRow("output", AGREE))
    assert self_test._judge(list(rows[:2]), rows)[0] == FAIL
    assert self_test._judge([rows[1]], rows) == (UNTESTED, "other experts")
    assert self_test._judge([rows[2]], rows) == (PASS, "")
    assert self_test._judge([], (StageRow("all", NOT_TESTED, note="reference"),)) == (UNTESTED, "reference")


def test_without_a_front_end_nothing_is_tested() -> None:
    status, report = examine(without("torch", "jax"))
    assert (status, report["conclusion"].split(":")[0]) == (2, "NOTHING WAS TESTED")
    assert set(report["absent"]) == {"torch", "jax"} and report["self_test"] == []


@pytest.mark.skipif("torch" not in FRONT_ENDS, reason="the front-end without Triton is torch")
def test_the_reference_is_not_taken_for_a_test() -> None:
    status, report = examine((*without("jax"), "triton"), CUDA_VISIBLE_DEVICES="")
    assert status == 2
    assert verdicts(report, "torch") == {op: {UNTESTED} for op in (*OPS, *GRADIENTS)}
    assert any("kernels of moe_torch were not tested" in line for line in report["not_to_be_trusted"])
    assert report["kernels"][0]["target"] == "reference"


def plan_of_a_router() -> tuple[Any, dict[str, np.ndarray]]:
    plan = plan_routing(ArraySpec((3, 8), "float32"), RouterSpec(top_k=2), Target("reference"))
    arrays = {buffer.name: np.zeros(buffer.spec.shape, buffer.spec.dtype) for buffer in (*plan.inputs, *plan.outputs)}
    return plan, arrays


def test_what_a_plan_does_not_write_is_poison(monkeypatch: pytest.MonkeyPatch) -> None:
    plan, arrays = plan_of_a_router()
    run = Prepared.__call__
    with poisoned() as found, monkeypatch.context() as patch:
        patch.setattr(HostPrepared, "_run", lambda *_: None)
        prepare(plan)([array.ctypes.data for array in arrays.values()])
    assert (arrays["ids"] == -1).all() and np.isnan(arrays["weights"]).all() and not arrays["logits"].any()
    assert (found.outputs, found.workspaces) == (2, 0)
    assert Prepared.__call__ is run
    prepare(plan)([array.ctypes.data for array in arrays.values()])
    assert (arrays["ids"] == [0, 1]).all() and found.outputs == 2


def test_every_way_to_run_a_plan_is_poisoned() -> None:
    """Also that of GPUs, which checks and packs addresses itself."""
    kinds = [kind for kind in (Prepared, HostPrepared, CudaPrepared) if "__call__" in vars(kind)]
    runs = [kind.__call__ for kind in kinds]
    assert {Prepared, CudaPrepared} <= set(kinds)
    with poisoned():
        assert all(kind.__call__ is not run for kind, run in zip(kinds, runs, strict=True))
    assert [kind.__call__ for kind in kinds] == runs


def test_a_run_in_two_parts_is_poisoned_once() -> None:
    plan, arrays = plan_of_a_router()
    prepared, pointers = prepare(plan), [array.ctypes.data for array in arrays.values()]
    with poisoned() as found:
        prepared(pointers, 0, slice(1))
        prepared(pointers, 0, slice(1, None))
    assert (arrays["ids"] == [0, 1]).all() and (found.outputs, found.workspaces) == (2, 0)


#: Kernels that multiply, alone or with other stages.
PRODUCTS = (":matmul_ogs", ":chained", ":multiply_and_reduce")


@pytest.mark.parametrize("arch", [80, 89, 90, 100])
def test_kernels_of_a_gpu_nobody_has_here(arch: int) -> None:
    found = kernels_of(Target("cuda", arch, 100))
    assert len(found.workloads) == 6
    for workload in found.workloads:
        assert workload.refused or any(kernel.endswith(PRODUCTS) for kernel, _ in workload.launches)
    reasons = " ".join(reason for _, reason in found.refused)
    assert ("shared memory of sm_89" in reasons) == (arch == 89)
    sm90 = {text for one in found.workloads for kernel, text in one.launches if kernel == SM90_MATMUL_OGS.name}
    assert sm90 == ({"4 warps, 4 stages"} if arch == 90 else set()), "the kernel's own stages, not the compiler's"
    json.dumps(found.as_dict())


def test_the_table_of_versions_is_that_of_the_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *(one for extra in project["optional-dependencies"].values() for one in extra)]
    for name, (_, least, below) in PACKAGES.items():
        ranges = {line.partition(";")[0].strip() for line in wanted if line.startswith(f"{name}>=")}
        if ranges:
            assert f"{name}>={least}{f',<{below}' if below else ''}" in ranges


def test_versions_outside_the_range_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: {"triton": "3.10.0+git"}.get(name, "1.9"))
    monkeypatch.setitem(PACKAGES, "nothing", ("there_is_no_such_module", "1", None))
    found = {package.name: package for package in packages()}
    assert "must be below 3.10" in found["triton"].problem
    assert found["numpy"].problem == "numpy 1.9 is older than 2, the oldest that is supported"
    assert found["nothing"] == Package("nothing", None)


RESULT = Result("forward", "torch", "cuda sm_90 NVIDIA H200", "gpt_oss", "reduce", PASS)


def diagnosis(*results: Result, gpus: tuple[Gpu, ...] = (), **changes: Any) -> cli.Diagnosis:
    outcome = Outcome(results, {"jax": "jax is not installed"}, (), Poisoned(2, 1))
    outcome = dataclasses.replace(outcome, **changes)
    return cli.Diagnosis((Package("triton", "3.99", "too new"),), gpus, "" if gpus else "none", (), outcome, 1.0)


def test_the_report_names_a_blas_whose_threads_cannot_be_set(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "NumPy's BLAS" not in str(diagnosis(RESULT))
    monkeypatch.setattr(threads, "_CONTROLS", ())
    threads._blas.cache_clear()
    try:
        assert "speed of the NumPy engine: NumPy's BLAS (" in str(diagnosis(RESULT))
        with threads.one_blas_thread():
            pass
    finally:
        threads._blas.cache_clear()


def test_what_the_report_says_of_gpus() -> None:
    found = diagnosis(
        RESULT,
        gpus=(
            Gpu(0, "A100", Target("cuda", 80, 108)),
            Gpu(1, "H200", Target("cuda", 90, 132)),
            Gpu(2, "T4", None, "T4 is sm_75; kernels need sm_80 or newer"),
        ),
    )
    text = str(found)
    assert found.status == 0
    assert "speed on A100: tile configurations are tuned for sm_90 only" in text
    assert "GPU 1 was not tested" in text and "GPU 2 cannot be used: T4 is sm_75" in text
    assert "too new" in text and "moe_jax was not tested, it does not start: jax is not installed" in text
    assert json.loads(json.dumps(found.as_dict()))["gpus"][2]["refused"].startswith("T4")
    interpreted = diagnosis(dataclasses.replace(RESULT, device=INTERPRETER), gpus=found.gpus[:1])
    assert "there is a GPU, but the kernels ran in the interpreter" in str(interpreted)


def test_unequal_bits_and_clean_memory_are_told() -> None:
    unequal = diagnosis(RESULT, bitwise=(EqualBits("forward", "gpt_oss", False, "first difference in output"),))
    assert unequal.status == 1
    assert "do not give the same bits (forward, gpt_oss): first difference in output" in str(unequal)
    assert "memory was not poisoned" in str(diagnosis(RESULT, poisoned=Poisoned()))
    untested = diagnosis(dataclasses.replace(RESULT, verdict=UNTESTED, note="the reference ran"))
    assert untested.status == 2 and "kernels of moe_torch were not tested: the reference ran" in str(untested)


def test_the_command_is_installed_and_prints_text(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "diagnose", lambda progress: diagnosis(dataclasses.replace(RESULT, verdict=FAIL)))
    assert main([]) == 1
    out = capsys.readouterr().out
    assert out.startswith("Versions") and out.rstrip().endswith("(1.0 s)") and "moebius-doctor: FAILED" in out
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["scripts"]["moebius-doctor"] == "moe_core.tools.doctor:main"
