"""Ctrl-C, lack of memory, a full disk or a kill anywhere: the next call's result is that of a fresh process."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec

import pytest

from moe_core.base.arrays import ArraySpec
from moe_core.base.target import Target
from moe_core.ops.reduction.reduce import plan_scale_rows
from moe_core.runtime import prepare as prepares
from moe_core.runtime import prepared
from tests.support.paths import ROOT

#: How many times as many trials as by default, drawn by another seed; .ci/daily asks for more.
DEPTH = int(os.environ.get("MOEBIUS_DEPTH", "1"))
#: (package, what is broken off, how, in how many trials), by TRITON_INTERPRET. The suite presses Ctrl-C during launches
#: in the interpreter below. Processes are forked before frameworks have threads.
RUNS = {
    "0": [
        ("numpy", "plan", "interrupt", 10),
        ("safetensors", "checkpoint", "interrupt", 8),
        ("safetensors", "checkpoint", "kill", 5),
        ("safetensors", "checkpoint", "full_disk", 5),
        ("triton", "compiled", "kill", 6),
        ("torch", "torch_layer", "interrupt", 10),
        ("torch", "torch_layer", "allocation", 4),
        ("torch", "torch_arena", "arena", 1),
        ("jax", "jax_layer", "interrupt", 1),
        ("jax", "jax_arena", "arena", 1),
        ("triton", "compiled", "interrupt", 4),
    ],
    "1": [("torch", "torch_layer", "interrupt", 10)],
}


@pytest.mark.parametrize("interpret", RUNS if DEPTH > 1 else ["0"])
def test_a_call_that_is_broken_off_leaves_nothing(interpret: str) -> None:
    runs = [(what, how, trials * DEPTH) for package, what, how, trials in RUNS[interpret] if find_spec(package)]
    arguments = [str(word) for run in runs for word in run]
    finished = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.support.runtime.stopped", str(DEPTH), *arguments],
        env={**os.environ, "JAX_PLATFORMS": "cpu", "TRITON_INTERPRET": interpret},
        cwd=ROOT, capture_output=True, text=True, timeout=300 * DEPTH,
    )  # fmt: skip
    assert finished.returncode == 0, finished.stdout + finished.stderr
    broken_off = [int(count) for count in finished.stdout.splitlines()[-1].split()]
    for (what, how, trials), count in zip(runs, broken_off, strict=True):
        assert 3 * count >= trials, f"{what} by {how}: {count} of {trials} trials broke off"


@pytest.mark.parametrize(
    "error", [RuntimeError("loading failed with CUDA error 2: out of memory"), KeyboardInterrupt()]
)
def test_a_kernel_that_fails_to_load_is_loaded_by_the_next_call(
    error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = 23 if isinstance(error, RuntimeError) else 29  # not yet prepared
    plan = plan_scale_rows(ArraySpec((rows, 8), "float32"), ArraySpec((rows, 1), "float32"), Target("reference"))

    def fail(name: str) -> None:
        raise error

    with monkeypatch.context() as patched, pytest.raises(type(error)):
        patched.setattr(prepared, "load_kernel", fail)
        prepares.prepare(plan)
    assert prepares.prepare(plan) is prepares.prepare(plan)


def _trials(module: str, *arguments: object, timeout: float = 120) -> str:
    """Run trials in a process of their own and return what it printed; its failure fails the test."""
    finished = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", f"tests.support.runtime.{module}", *map(str, arguments)],
        env={**os.environ, "TRITON_INTERPRET": "1", "JAX_PLATFORMS": "cpu"},
        cwd=ROOT, capture_output=True, text=True, timeout=timeout * DEPTH,
    )  # fmt: skip
    assert finished.returncode == 0, finished.stdout + finished.stderr
    return finished.stdout.splitlines()[-1]


def test_an_interrupted_launch_leaves_the_interpreter_free() -> None:
    pytest.importorskip("triton")
    trials = 200 * DEPTH
    assert int(_trials("interrupted", "launches", trials)) > trials // 3


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_process_forked_during_a_launch_can_launch() -> None:
    pytest.importorskip("triton")
    trials = 20 * DEPTH
    assert int(_trials("interrupted", "forks", trials)) > trials // 3
