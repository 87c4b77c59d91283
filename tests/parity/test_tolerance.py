"""The tolerance table lets other summation orders pass and catches planted faults."""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_core.errors import InvalidInput
from moe_core.ops.activation.reference import activation
from moe_core.ops.common.rounding import round_to
from moe_core.ops.moe.reference.forward import moe_stages
from moe_core.parity.tolerance import (
    EXACT,
    UNIT_ROUNDOFF,
    Tolerance,
    activation_tolerance,
    assert_close,
    matmul_tolerance,
    measure,
    router_tolerance,
    routing_weights_tolerance,
    stage_tolerances,
)
from moe_core.specs import Activation, MoESpec, RouterSpec
from moe_core.specs.operands import ExpertWeights, RouterWeights
from tests.support import strategies
from tests.support.exact import against_exact, reduce_tolerance
from tests.support.strategies import draw_array, numpy_dtype

F32 = np.float32
OUT_DTYPES = ("float32", "float16", "bfloat16")


def sequential(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """x . weight with the terms added one after the other in fp32: the worst order."""
    total = np.zeros((len(x), weight.shape[1]), F32)
    for k in range(x.shape[1]):
        total += x[:, k : k + 1].astype(F32) * weight[k].astype(F32)
    return total


def truncated(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """x . weight as a tensor core sums: 16 exact products at a time, the fp32 sum cut off instead of rounded."""
    total = np.zeros((len(x), weight.shape[1]), F32)
    wide_x, wide_weight = x.astype(np.float64), weight.astype(np.float64)
    for k in range(0, x.shape[1], 16):
        exact = total + wide_x[:, k : k + 16] @ wide_weight[k : k + 16]
        nearest = exact.astype(F32)
        total = np.where(np.abs(nearest) > np.abs(exact), np.nextafter(nearest, F32(0)), nearest)
    return total


def tf32(array: np.ndarray) -> np.ndarray:
    """fp32 with the last 13 bits cut off."""
    return (array.view(np.uint32) & np.uint32(0xFFFFE000)).view(F32)


def operands(length: int, in_dtype: str = "float32", rows: int = 48) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(length)
    return draw_array(rng, (rows, length), in_dtype), draw_array(rng, (length, 80), in_dtype)


def product(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    return x.astype(F32) @ weight.astype(F32)


@pytest.mark.parametrize("length", [1, 16, 100, 1024, 4096])
@pytest.mark.parametrize("out_dtype", OUT_DTYPES)
def test_other_summation_orders_pass(length: int, out_dtype: str):
    for in_dtype, order in (("float32", sequential), ("bfloat16", sequential), ("bfloat16", truncated)):
        x, weight = operands(length, in_dtype)
        tolerance = matmul_tolerance(in_dtype, out_dtype, length)
        expected, actual = product(x, weight), order(x, weight)
        assert_close(round_to(actual, out_dtype), round_to(expected, out_dtype), tolerance, order.__name__)
        exact = x.astype(np.float64) @ weight.astype(np.float64)
        assert_close(round_to(actual, out_dtype), exact, against_exact(tolerance, out_dtype), "float64")


@pytest.mark.parametrize("spec", strategies.all_activations(), ids=str)
@pytest.mark.parametrize("rms", [1.0, 20.0])
def test_other_summation_orders_pass_through_activations(spec: Activation, rms: float):
    rng = np.random.default_rng(3)
    columns = 64 if spec.gate_layout == "separate" else spec.input_width(64)
    x, weight, up = (draw_array(rng, shape) for shape in ((128, 512), (512, columns), (512, columns)))
    weight, up = (array * F32(rms / 512**0.5) for array in (weight, up))
    for out_dtype in OUT_DTYPES:
        sides = []
        for order in (product, sequential):
            second = order(x, up) if spec.gate_layout == "separate" else None
            sides.append(activation(order(x, weight), second, activation=spec, out_dtype=out_dtype))
        assert_close(
            sides[1], sides[0], matmul_tolerance("float32", out_dtype, 512, activation=spec), f"{spec} {out_dtype}"
        )


@pytest.mark.parametrize("out_dtype", OUT_DTYPES)
@pytest.mark.parametrize("length", [64, 1024])
def test_planted_faults_in_a_matmul_are_caught(out_dtype: str, length: int):
    x, weight = operands(length)
    tolerance = matmul_tolerance("float32", out_dtype, length)
    right = product(x, weight)
    expected = round_to(right, out_dtype)

    def caught(values: np.ndarray, label: str) -> None:
        with pytest.raises(AssertionError, match=f"^{label}: "):
            assert_close(round_to(values, out_dtype), expected, tolerance, label)

    one_off = right.copy()
    one_off[7, 9] += 4 * tolerance.worst * max(abs(right[7, 9]), float(np.sqrt(np.mean(right[7] ** 2))))
    caught(one_off, "one element")
    swapped = right.copy()
    swapped[[3, 4]] = right[[4, 3]]
    caught(swapped, "swapped rows")
    caught(right[:, np.r_[1, 0, 2:80]], "swapped columns")
    caught(product(x[:, :-1], weight[:-1]), "dropped tail")
    caught(right * F32(1 + 3 * max(UNIT_ROUNDOFF[out_dtype], tolerance.relative_frobenius)), "scaled")


@pytest.mark.parametrize("length", [64, 1024, 4096])
def test_tf32_where_ieee_was_asked_for_is_caught(length: int):
    x, weight = operands(length)
    actual, expected = product(tf32(x), tf32(weight)), product(x, weight)
    assert_close(actual, expected, matmul_tolerance("float32", "float32", length, allow_tf32=True), "tf32")
    with pytest.raises(AssertionError, match="relative Frobenius error"):
        assert_close(actual, expected, matmul_tolerance("float32", "float32", length), "ieee")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_one_rounding_too_many_is_caught(dtype: str):
    x, weight = operands(256, dtype)
    acc, row_weight = product(x, weight), np.linspace(0.1, 1, 48, dtype=F32)[:, None]
    expected = round_to(acc * row_weight, dtype)
    twice = round_to(round_to(acc, dtype).astype(F32) * row_weight, dtype)
    tolerance = matmul_tolerance(dtype, dtype, 256)
    assert_close(round_to(truncated(x, weight) * row_weight, dtype), expected, tolerance, "one rounding")
    with pytest.raises(AssertionError, match="two roundings"):
        assert_close(twice, expected, tolerance, "two roundings")
    low = np.zeros_like(expected)
    for k in range(0, 256, 64):
        low = round_to(low.astype(F32) + product(x[:, k : k + 64], weight[k : k + 64]), dtype)
    with pytest.raises(AssertionError, match="low accumulator"):
        assert_close(round_to(low.astype(F32) * row_weight, dtype), expected, tolerance, "low accumulator")


def test_truncating_instead_of_rounding_is_caught():
    x, weight = operands(256, "bfloat16")
    acc = product(x, weight)
    cut = (acc.view(np.uint32) & np.uint32(0xFFFF0000)).view(F32).astype(numpy_dtype("bfloat16"))
    with pytest.raises(AssertionError, match="truncated cast"):
        assert_close(cut, round_to(acc, "bfloat16"), matmul_tolerance("bfloat16", "bfloat16", 256), "truncated cast")


def layer(dtype: str) -> tuple[np.ndarray, ExpertWeights, RouterWeights, MoESpec]:
    rng = np.random.default_rng(6)
    D, F, E = 96, 80, 8
    experts = ExpertWeights(
        draw_array(rng, (E, D, 2 * F), dtype, 1.5 / D**0.5), draw_array(rng, (E, F, D), dtype, F**-0.5)
    )
    router = RouterWeights(draw_array(rng, (D, E), "float32", 0.2))
    return draw_array(rng, (200, D), dtype), experts, router, MoESpec(Activation("silu"), RouterSpec(3))


@pytest.mark.parametrize("dtype", OUT_DTYPES)
def test_a_whole_forward_in_another_order_passes_and_faults_do_not(dtype: str):
    x, experts, router, spec = layer(dtype)
    expected = moe_stages(x, experts, router, spec)
    rng = np.random.default_rng(1)
    wide, narrow = rng.permutation(96), rng.permutation(80)
    mixed = ExpertWeights(
        experts.gate_up[:, wide][:, :, np.concatenate([narrow, 80 + narrow])], experts.down[:, narrow]
    )
    actual = moe_stages(x[:, wide], mixed, RouterWeights(router.weight[wide]), spec)
    back = np.argsort(narrow)
    actual |= {
        "activation": actual["activation"][:, back],
        "matmul1": actual["matmul1"][:, np.concatenate([back, 80 + back])],
    }
    tolerances = stage_tolerances(spec, dtype, d_model=96, d_ff=80, top_k=3, num_experts=8)
    assert list(tolerances) == list(expected)
    for stage, tolerance in tolerances.items():
        assert_close(actual[stage], expected[stage], tolerance, stage)

    faults = {
        "weights": lambda a: a[:, [1, 0, 2]],
        "matmul1": lambda a: a[:, np.r_[80:160, :80]],
        "activation": lambda a: np.where(np.arange(len(a))[:, None] == 11, 0, a),
        "matmul2": lambda a: a[np.r_[1, 0, 2 : len(a)]],
        "output": lambda a: a * (1 + 4 * tolerances["output"].worst * (np.arange(200)[:, None] == 17)),
        "tokens_per_expert": lambda a: a + (np.arange(8) == 3),
        "ids": lambda a: a[:, ::-1],
        "logits": lambda a: a.astype(numpy_dtype("bfloat16")).astype(F32),
    }
    for stage, fault in faults.items():
        wrong = fault(expected[stage].astype(np.float64)).astype(expected[stage].dtype)
        assert measure(wrong, expected[stage]).complaint(tolerances[stage]), stage


def test_tolerances_of_the_small_ops_are_a_few_roundings():
    for dtype in OUT_DTYPES:
        unit = UNIT_ROUNDOFF[dtype]
        for tolerance in (activation_tolerance(dtype), reduce_tolerance(dtype, 8)):
            assert 2 * unit <= tolerance.worst < 2 * unit + 2e-5
            assert tolerance.relative_frobenius < max(unit, 2e-6)
    assert routing_weights_tolerance(128).worst < 1e-5
    assert router_tolerance(2880).worst < 5e-5


@given(st.sampled_from((16, 64, 1024)), strategies.matmul_dtypes(), strategies.matmul_dtypes())
def test_more_terms_and_coarser_types_never_tighten(length: int, in_dtype: str, out_dtype: str):
    here, longer = (matmul_tolerance(in_dtype, out_dtype, n) for n in (length, 4 * length))
    assert here.relative_frobenius < longer.relative_frobenius and here.worst < longer.worst
    fine = matmul_tolerance("float32", "float32", length)
    assert fine.relative_frobenius <= here.relative_frobenius and fine.worst <= here.worst


def test_nan_and_infinity_must_stand_in_the_same_places():
    expected = np.array([[1.0, np.nan, np.inf, -np.inf]], F32)
    assert_close(expected.copy(), expected, EXACT, "same")
    loose = Tolerance(1.0, 1.0)
    for column, value in ((0, np.nan), (1, 1.0), (2, 3e38), (2, -np.inf), (3, np.nan), (0, np.inf)):
        wrong = expected.copy()
        wrong[0, column] = value
        with pytest.raises(AssertionError, match=rf"^stage: 1 elements differ in NaN or infinity, .* \(0, {column}\)"):
            assert_close(wrong, expected, loose, "stage")


def test_rows_of_zeros_must_be_exact_and_small_rows_count_by_themselves():
    expected = np.concatenate([np.ones((3, 64)), np.zeros((1, 64)), np.full((1, 64), 1e-4)]).astype(F32)
    tolerance = matmul_tolerance("bfloat16", "bfloat16", 64)
    assert_close(expected, expected, EXACT, "same")
    for row, change in ((3, 1e-30), (4, 1e-4 * 4 * tolerance.worst)):
        wrong = expected.copy()
        wrong[row, 5] += F32(change)
        with pytest.raises(AssertionError, match=rf"worst element at \({row}, 5\)"):
            assert_close(wrong, expected, tolerance, "rows")


def test_message_names_label_place_values_errors_and_tolerance():
    expected = np.ones((2, 20), F32)
    wrong = expected.copy()
    wrong[1, 3] = 1.5
    text = "y: worst element at (1, 3): got 1.5, expected 1.0, error 0.5 of its scale (tolerance 0.001); "
    with pytest.raises(AssertionError, match="^" + re.escape(text) + "relative Frobenius error 0.0791 "):
        assert_close(wrong, expected, Tolerance(0.001, 0.001), "y")
    with pytest.raises(AssertionError, match=r"^y: shape \(2, 20\), expected \(20,\)$"):
        assert_close(wrong, expected[0], EXACT, "y")


def test_many_small_errors_are_caught_by_the_norm():
    rng = np.random.default_rng(0)
    expected = draw_array(rng, (100, 64))
    wrong = expected + F32(1e-3) * draw_array(rng, (100, 64))
    with pytest.raises(AssertionError, match=r"relative Frobenius error 0\.001"):
        assert_close(wrong, expected, Tolerance(2e-4, 1e-2), "drift")


def test_a_scale_replaces_the_rms_of_small_arrays():
    x, weight = np.array([[1e4, 1.0, -1e4]], F32), np.ones((3, 1), F32)
    expected, actual = product(x, weight), np.array([[1.0 + 2.0**-12]], F32)
    tolerance = matmul_tolerance("float32", "float32", 3)
    with pytest.raises(AssertionError):
        assert_close(actual, expected, tolerance, "cancelled")
    assert_close(actual, expected, tolerance, "cancelled", scale=np.sqrt(x**2 @ weight**2))


def test_empty_arrays_and_integers():
    assert_close(np.zeros((0, 4), F32), np.zeros((0, 4), F32), EXACT, "empty")
    counts = np.array([3, 0, 2**31 - 1], np.int64)
    assert_close(counts.astype(np.int32), counts, EXACT, "counts")
    with pytest.raises(AssertionError, match=r"worst element at \(1,\): got 1.0, expected 0.0"):
        assert_close(counts + np.array([0, 1, 0]), counts, EXACT, "counts")
    assert_close(np.array([True]), np.array([1]), EXACT, "booleans")


def test_bad_arguments_are_refused():
    with pytest.raises(InvalidInput, match="in_dtype must be one of bfloat16, float16, float32, got 'int8'; "):
        matmul_tolerance("int8", "float32", 3)
    with pytest.raises(InvalidInput, match="reduction_length must be an integer of at least 0, got -1; "):
        matmul_tolerance("float32", "float32", -1)
    with pytest.raises(InvalidInput, match="worst must be finite and at least 0, got nan; "):
        Tolerance(0.0, float("nan"))
    with pytest.raises(InvalidInput, match="routed_from must be one of x, logits, ids, got 'y'; "):
        stage_tolerances(
            MoESpec(Activation("silu")), "float32", d_model=1, d_ff=1, top_k=1, num_experts=1, routed_from="y"
        )
