"""The normalisation of rows and its backward: the kernels against the twins, the twins against float64 differences."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from moe_core import InvalidInput
from moe_core.base.arrays import ArraySpec
from moe_core.base.dtypes import MATMUL_DTYPES, numpy_dtype
from moe_core.base.target import Target
from moe_core.ops.norm import reference
from moe_core.ops.norm.backward import NORM_GRADIENTS, plan_rms_norm_backward
from moe_core.ops.norm.forward import plan_rms_norm
from moe_core.parity.tolerance import assert_close, matmul_tolerance
from moe_core.specs import NormSpec
from tests.support.harness import H200, engine_target, run_plan

SPEC, FIRST = NormSpec(1e-5, 0.3), NormSpec(1e-5, 0.3, centred=True, weight_first=True)


def drawn(rows: int, width: int, dtype: str, weight_dtype: str) -> dict[str, np.ndarray]:
    random = np.random.default_rng(rows + width)
    x, d_y, weight = (random.standard_normal(shape, np.float32) for shape in ((rows, width), (rows, width), width))
    return {"d_y": d_y, "x": x.astype(numpy_dtype(dtype)), "weight": weight.astype(numpy_dtype(weight_dtype))}


@pytest.mark.parametrize("dtype", MATMUL_DTYPES)
@pytest.mark.parametrize(
    ("rows", "width", "spec"),
    [(0, 16, SPEC), (1, 3, SPEC), (37, 40, SPEC), (18, 600, SPEC), (1, 3, FIRST), (18, 600, FIRST)],
)
def test_kernels_match_the_twins(rows: int, width: int, spec: NormSpec, dtype: str) -> None:
    """Rows and columns past a block, and widths of several blocks; not of one column, whose gradient cancels."""
    arrays = drawn(rows, width, dtype, "float32")
    specs = {name: ArraySpec(array.shape, array.dtype.name) for name, array in arrays.items()}
    given = {name: arrays[name] for name in ("x", "weight")}
    plan = plan_rms_norm(specs["x"], specs["weight"], spec, engine_target())
    tolerance = matmul_tolerance("float32", dtype, width)
    assert_close(run_plan(plan, given)["y"], reference.rms_norm(**given, spec=spec), tolerance, label="y")
    for wanted in (NORM_GRADIENTS, ("d_x",), ("d_weight",)):
        plan = plan_rms_norm_backward(*specs.values(), spec, engine_target(), wanted=wanted)
        found = run_plan(plan, arrays)
        expected = reference.rms_norm_backward(**arrays, spec=spec, wanted=wanted)
        allowed = {"d_x": tolerance, "d_weight": matmul_tolerance("float32", "float32", max(rows, width))}
        for name, array in zip(wanted, expected, strict=True):
            assert_close(found[name], array, allowed[name], label=name)


@pytest.mark.parametrize("spec", [SPEC, FIRST, NormSpec(centred=True)])
def test_the_backward_is_the_derivative(spec: NormSpec) -> None:
    arrays = {name: array.astype(np.float64) for name, array in drawn(5, 7, "float32", "float32").items()}
    d_y = arrays.pop("d_y")

    def loss(**given: Any) -> float:
        return float((reference.rms_norm(**given, spec=spec) * d_y).sum())

    found = reference.rms_norm_backward(d_y, **arrays, spec=spec, wanted=NORM_GRADIENTS)
    for (name, array), gradient in zip(arrays.items(), found, strict=True):
        for place in np.ndindex(array.shape):
            step = np.zeros_like(array)
            step[place] = 1e-6
            slope = (loss(**arrays | {name: array + step}) - loss(**arrays | {name: array - step})) / 2e-6
            assert abs(slope - gradient[place]) < 1e-7, (name, place)


def test_formulas() -> None:
    """Of centred weights and of weights that multiply before the norm, written out."""
    arrays = {name: array.astype(np.float64) for name, array in drawn(5, 7, "float32", "float32").items()}
    x, weight = arrays["x"], arrays["weight"]
    plain, first = x, x * (1 + weight)
    normed = [rows / np.sqrt((rows**2).mean(-1, keepdims=True) + 1e-6) for rows in (plain, first)]
    for spec, wanted in (
        (NormSpec(centred=True), normed[0] * (1 + weight)),
        (NormSpec(centred=True, weight_first=True), normed[1]),
    ):
        np.testing.assert_allclose(reference.rms_norm(x, weight, spec=spec), wanted, rtol=1e-12)


def test_rows_that_overflow_become_zeros_and_nan_without_a_warning() -> None:
    x = np.array([[1e30, 1], [np.inf, 1], [3, 4]], np.float32)
    found = reference.rms_norm(x, np.full(2, 1e30, np.float32), spec=NormSpec(scale=1e30))
    np.testing.assert_array_equal(found, [[0, 0], [np.nan, 0], [np.inf, np.inf]])


def test_rows_may_lie_apart() -> None:
    arrays = drawn(9, 40, "float32", "float32")
    wide = np.full((9, 64), np.nan, np.float32)
    wide[:, :40] = arrays["x"]
    plan = plan_rms_norm(ArraySpec((9, 40), "float32", (64, 1)), ArraySpec((40,), "float32"), SPEC, engine_target())
    y = run_plan(plan, {"x": wide[:, :40], "weight": arrays["weight"]})["y"]
    wanted = reference.rms_norm(arrays["x"], arrays["weight"], spec=SPEC)
    assert_close(y, wanted, matmul_tolerance("float32", "float32", 40), label="y")


@pytest.mark.parametrize(
    ("target", "order"), [(H200, "16 partial sums in order"), (Target("reference"), "NumPy's pairwise sums")], ids=str
)
def test_plans_say_how_they_sum(target: Target, order: str) -> None:
    x, weight = ArraySpec((4, 8), "float32"), ArraySpec((8,), "float32")
    assert order in plan_rms_norm(x, weight, SPEC, target).explain()
    assert order in plan_rms_norm_backward(x, x, weight, SPEC, target, wanted=("d_x",)).explain()


def test_bad_arguments() -> None:
    x, weight, target = ArraySpec((4, 8), "float32"), ArraySpec((8,), "float32"), engine_target()
    with pytest.raises(InvalidInput, match=r"epsilon must be above 0, got 0\.0"):
        NormSpec(epsilon=0)
    with pytest.raises(InvalidInput, match=r"weight must be .*\[8\].*got"):
        plan_rms_norm(x, ArraySpec((4,), "float32"), SPEC, target)
    with pytest.raises(InvalidInput, match=r"weight must be .*\[8\].*got"):
        plan_rms_norm_backward(x, x, ArraySpec((4,), "float32"), SPEC, target, wanted=("d_x",))
    with pytest.raises(InvalidInput, match=r"d_y must be "):
        plan_rms_norm_backward(ArraySpec((4, 9), "float32"), x, weight, SPEC, target, wanted=("d_x",))
