"""The harness itself: a kernel that misbehaves must not go unseen."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import ml_dtypes
import numpy as np
import pytest

from moe_core.base.arrays import ArraySpec
from moe_core.base.target import Target
from moe_core.plan.builder import PlanBuilder
from moe_core.plan.steps import Constant, Kernel, LaunchPlan, Pointer, ReferenceCall, Scalar
from tests.support import harness_faults
from tests.support.harness import engine_target, run_plan, span_bytes

SIZE, COPY = 20, Kernel("harness_faults:copy_kernel")


@pytest.fixture(autouse=True)
def _faults_are_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(sys.modules, "moe_core.ops.harness_faults", harness_faults)
    yield


def copy_plan(
    first: int, last: int, into: str = "y", strides: tuple[int, ...] | None = None, shift: int = 0
) -> LaunchPlan:
    """Copies elements first..last of x to `into` through scratch; shift: each is written so many places too far."""
    builder = PlanBuilder("copy", engine_target())
    builder.input("x", ArraySpec((SIZE,), "bfloat16", strides))
    builder.output("y", ArraySpec((SIZE,), "bfloat16"))
    builder.scratch("held", ArraySpec((SIZE,), "bfloat16"))
    for source, target in (("x", "held"), ("held", into)):
        arguments = {
            "source_pointer": Pointer(source),
            "target_pointer": Pointer(target),
            "first": Scalar(first),
            "last": Scalar(last),
            "STRIDE": Constant(builder.spec(source).stride[0]),
            "BLOCK": Constant(64),
            "SHIFT": Constant(shift),
        }
        builder.launch(COPY, (1,), arguments)
    return builder.build()


X = np.arange(SIZE).astype(ml_dtypes.bfloat16)


def test_a_good_kernel_passes() -> None:
    outputs = run_plan(copy_plan(0, SIZE), {"x": X})
    assert list(outputs) == ["y"]
    assert outputs["y"].dtype == ml_dtypes.bfloat16
    assert np.array_equal(outputs["y"], X)


def test_strided_inputs_are_placed_as_planned() -> None:
    assert span_bytes(ArraySpec((SIZE,), "bfloat16", (3,))) == (19 * 3 + 1) * 2
    outputs = run_plan(copy_plan(0, SIZE, strides=(3,)), {"x": X})
    assert np.array_equal(outputs["y"], X)


def test_unwritten_elements_are_poison() -> None:
    outputs = run_plan(copy_plan(0, SIZE - 1), {"x": X})
    assert np.isnan(outputs["y"][-1]) and np.array_equal(outputs["y"][:-1], X[:-1])


@pytest.mark.parametrize(("shift", "byte"), [(1, 40), (-1, -2)])
def test_writes_out_of_bounds_are_seen(shift: int, byte: int) -> None:
    plan = copy_plan(0, SIZE, shift=shift)
    with pytest.raises(AssertionError, match=f"out-of-bounds bytes were overwritten, the first at byte {byte} of"):
        run_plan(plan, {"x": X})


@pytest.mark.skipif(engine_target().kind != "interpreter", reason="a GPU's own checker (make memcheck) sees them")
@pytest.mark.parametrize(("first", "last", "byte"), [(0, SIZE + 1, 40), (-1, SIZE, -2)])
def test_reads_out_of_bounds_are_seen(first: int, last: int, byte: int) -> None:
    plan = copy_plan(first, last)
    with pytest.raises(AssertionError, match=f"read out of bounds at byte {byte} of 40 of x"):
        run_plan(plan, {"x": X})


def test_writes_into_an_input_are_seen() -> None:
    builder = PlanBuilder("spoil", engine_target())
    builder.input("x", ArraySpec((SIZE,), "int32"))
    builder.output("y", ArraySpec((SIZE,), "int32"))
    arguments = {"source_pointer": Pointer("y"), "target_pointer": Pointer("x"), "first": Scalar(3), "last": Scalar(4)}
    constants = {"STRIDE": Constant(1), "BLOCK": Constant(64), "SHIFT": Constant(0)}
    builder.launch(COPY, (1,), {**arguments, **constants})
    with pytest.raises(AssertionError, match=r"x int32\[20\]: 4 input bytes were overwritten, the first at byte 12"):
        run_plan(builder.build(), {"x": np.zeros(SIZE, np.int32)})


def test_wrong_arrays_are_refused() -> None:
    with pytest.raises(AssertionError, match=r"copy takes \['x'\], got \['z'\]"):
        run_plan(copy_plan(0, SIZE), {"z": X})
    with pytest.raises(AssertionError, match=r"x must be bfloat16\[20\], got float32\[20\]"):
        run_plan(copy_plan(0, SIZE), {"x": X.astype(np.float32)})


def test_reference_plans_run_too() -> None:
    builder = PlanBuilder("negate", Target("reference"))
    builder.input("x", ArraySpec((3, 0), "float32"))
    builder.input("z", ArraySpec((4,), "float32"))
    builder.output("y", ArraySpec((4,), "float32"))
    builder.add_reference(ReferenceCall("harness_faults:negate", (("x", "z"),), (("offset", 2),), ("y",)))
    outputs = run_plan(builder.build(), {"x": np.zeros((3, 0), np.float32), "z": np.arange(4, dtype=np.float32)})
    assert outputs["y"].tolist() == [2, 1, 0, -1]
