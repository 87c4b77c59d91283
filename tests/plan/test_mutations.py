"""Plan files that were changed: refused with our own errors, and never a crash."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from typing import Any

import pytest

from moe_core.base import codec
from moe_core.base.arrays import ArraySpec
from moe_core.base.target import Target
from moe_core.errors import InvalidInput
from moe_core.ops.reduction.reduce import plan_scale_rows
from moe_core.plan.registry import decode_plan
from moe_core.plan.steps import KernelLaunch, LaunchPlan
from tests.support.moe import layer_plan
from tests.support.paths import ROOT

#: How many times as many cases as by default; .ci/daily asks for more.
DEPTH = int(os.environ.get("MOEBIUS_DEPTH", "1"))


def test_random_changes_are_refused_with_our_own_errors() -> None:
    """In a process of its own, as plans that were changed and loaded are run there."""
    command = [sys.executable, "-m", "tests.support.runtime.plan_mutations", str(800 * DEPTH), str(DEPTH)]
    finished = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120 * DEPTH)
    assert finished.returncode == 0, finished.stderr
    counts = json.loads(finished.stdout)
    assert counts["refused"] > 700 * DEPTH and counts["run"] > 0, counts


def _plan(target: Target) -> LaunchPlan:
    return plan_scale_rows(ArraySpec((10, 8), "float32"), ArraySpec((10, 1), "float32"), target)


REFERENCE, CUDA = _plan(Target("reference")), _plan(Target("cuda", 90, 132))
(LAUNCH,) = CUDA.steps
assert isinstance(LAUNCH, KernelLaunch)


def _with_output(plan: LaunchPlan, **changes: Any) -> LaunchPlan:
    (output,) = plan.outputs
    return dataclasses.replace(plan, outputs=(dataclasses.replace(output, **changes),))


def _with_step(plan: LaunchPlan, **changes: Any) -> LaunchPlan:
    return dataclasses.replace(plan, steps=(dataclasses.replace(plan.steps[0], **changes),))


def _with_scratch(plan: LaunchPlan, **changes: Any) -> LaunchPlan:
    return dataclasses.replace(plan, scratch=(dataclasses.replace(plan.inputs[0], name="z"),), **changes)


WRONG = {
    "output stride": (_with_output(REFERENCE, spec=ArraySpec((10, 8), "float32", (800, 1))), "must have row-major str"),
    "negative stride": (
        dataclasses.replace(REFERENCE, inputs=tuple(
            dataclasses.replace(one, spec=ArraySpec(one.spec.shape, "float32", (-8, 1))) for one in REFERENCE.inputs
        )),
        "must have no negative strides",
    ),
    "size": (_with_output(REFERENCE, spec=ArraySpec((2**40, 2**20), "float32")), "must have fewer than 2814749767"),
    "same name": (_with_output(REFERENCE, name="x"), "must have names of their own"),
    "unknown buffer": (_with_step(REFERENCE, outputs=("z",)), "must have buffers of the plan"),
    "function": (_with_step(REFERENCE, function="reduction.reduce:plan_reduce"), "must be a NumPy twin below"),
    "foreign function": (_with_step(REFERENCE, function="reduction.reference:np"), "must be a NumPy twin below"),
    "private function": (_with_step(REFERENCE, function="reduction.reference:_sum"), "must be a NumPy twin below"),
    "other folder": (_with_step(REFERENCE, function="..base.threads.reference:count"), "must be a NumPy twin below"),
    "keyword": (_with_step(REFERENCE, constants=(("nothing", 1),)), "must have the arguments"),
    "kernel for the reference": (dataclasses.replace(REFERENCE, steps=CUDA.steps), "as its target is the reference"),
    "twin for a GPU": (dataclasses.replace(CUDA, steps=REFERENCE.steps), "must have a kernel, as its target is cuda"),
    "argument": (_with_step(CUDA, arguments=LAUNCH.arguments[1:]), "must have the arguments"),
    "grid": (_with_step(CUDA, grid=(0, 1, 1)), "must have a grid from 1"),
    "warps": (_with_step(CUDA, num_warps=3), "must have 1 to 32 warps"),
    "lent input": (dataclasses.replace(CUDA, lent=("x",)), "lent memory of a plan must have outputs alone"),
    "output over an input": (dataclasses.replace(CUDA, over=(("y", "x"),)), "must have scratch buffers over inputs"),
    "over an output": (_with_scratch(CUDA, over=(("z", "y"),)), "must have scratch buffers over inputs"),
    "twice over one": (_with_scratch(CUDA, over=(("z", "x"), ("z", "x"))), "must have scratch buffers over inputs"),
    "over itself": (_with_scratch(CUDA, over=(("z", "z"),)), "must have the spec of what it replaces"),
    "over another spec": (_with_scratch(CUDA, over=(("z", "weights"),)), "must have the spec of what it replaces"),
    "type": (dataclasses.replace(REFERENCE, notes=(1,)), "LaunchPlan.notes of a plan must have the type"),
    "true for one": (_with_step(CUDA, num_stages=True), "num_stages of a plan must have the type"),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG)
def test_plans_that_no_planner_makes_are_refused(what: str) -> None:
    plan, message = WRONG[what]
    with pytest.raises(InvalidInput, match=message):
        decode_plan(json.loads(codec.dumps(plan)))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["reference", "interpreter", "cuda"])
def test_plans_of_planners_are_accepted(kind: str, dtype: str) -> None:
    target = Target("cuda", 90, 132) if kind == "cuda" else Target(kind)
    for plan in (layer_plan(None, 8, target, dtype), layer_plan(None, 512, target, dtype, save=True)):
        assert decode_plan(json.loads(codec.dumps(plan))) == plan


def test_text_that_means_the_same_is_refused() -> None:
    """A key is of one text."""
    written = json.loads(codec.dumps(REFERENCE))
    written["inputs"][0]["spec"]["dtype"] = "<f4"
    with pytest.raises(InvalidInput, match=r"must be as export_plans writes it|dtype"):
        decode_plan(written)
