"""The activation's kernels beside its reference, and the reference beside formulas in float64."""

from __future__ import annotations

import math
import warnings

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_core import InvalidInput
from moe_core.base import dtypes
from moe_core.base.arrays import ArraySpec
from moe_core.ops.activation import reference
from moe_core.ops.activation.forward import plan_activation
from moe_core.ops.activation.reference import activation, normal_cdf, sigmoid
from moe_core.parity.tolerance import activation_tolerance, assert_close
from moe_core.specs.matmul import Activation
from tests.support import strategies
from tests.support.exact import against_exact, exact, packed
from tests.support.harness import engine_target, run_plan

EVERY = strategies.all_activations()


def run_both(x: np.ndarray, up: np.ndarray | None, activation: Activation, out_dtype: str | None = None):
    """(actual, expected)."""
    up_spec = None if up is None else ArraySpec(up.shape, up.dtype.name)
    plan = plan_activation(
        ArraySpec(x.shape, x.dtype.name), activation, engine_target(), up=up_spec, out_dtype=out_dtype
    )
    actual = run_plan(plan, {"x": x} | ({} if up is None else {"up": up}))["y"]
    return actual, reference.activation(x, up, activation=activation, out_dtype=out_dtype or x.dtype.name)


@pytest.mark.parametrize("activation", EVERY, ids=str)
def test_every_activation(activation: Activation) -> None:
    random = np.random.default_rng(0)
    x = 4 * random.standard_normal(
        (7, 2 * 33 if activation.gate_layout in ("halves", "interleaved") else 33), np.float32
    )
    x[0, :8] = [np.nan, np.inf, -np.inf, 0.0, -0.0, 1e4, -1e4, 1e-30]
    up = random.standard_normal((7, 33), np.float32) if activation.gate_layout == "separate" else None
    actual, expected = run_both(x, up, activation)
    assert_close(actual, expected, activation_tolerance("float32"), label=str(activation))


@given(
    rows=st.sampled_from([0, 1, 5, 70]),
    width=st.sampled_from([1, 16, 33]),
    dtype=st.sampled_from(dtypes.MATMUL_DTYPES),
    out_dtype=st.sampled_from([None, *dtypes.MATMUL_DTYPES]),
    activation=st.sampled_from(EVERY),
    seed=st.integers(0, 9),
)
def test_shapes_and_dtypes(rows, width, dtype, out_dtype, activation, seed) -> None:
    random = np.random.default_rng(seed)
    columns = 2 * width if activation.gate_layout in ("halves", "interleaved") else width
    x = random.standard_normal((rows, columns), np.float32).astype(dtypes.numpy_dtype(dtype))
    up = x[:, ::-1].copy() if activation.gate_layout == "separate" else None
    actual, expected = run_both(x, up, activation, out_dtype)
    assert actual.dtype == dtypes.numpy_dtype(out_dtype or dtype)
    assert_close(actual, expected, activation_tolerance(out_dtype or dtype), label="y")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Activation("swish"), "activation must be one of silu, .*got 'swish'"),
        (lambda: Activation("silu", gate_layout="up_first"), "gate_layout must be one of halves, .*got 'up_first'"),
        (lambda: Activation("silu", alpha=1.702), "alpha belongs to swiglu_oai and .*, got 1.702 for silu; leave it"),
        (lambda: Activation("silu", False, limit=7.0), "limit must be None where gated=False, got 7.0; leave it out"),
        (lambda: Activation("silu", limit=0.0), "limit must be positive, got 0.0; leave it out"),
        (lambda: Activation("clamped_silu", limit=None), "limit must be a number for clamped_silu, got None"),
        (lambda: Activation("softcapped_silu", alpha=None), "alpha must be a number for softcapped_silu, got None"),
        (lambda: Activation("softcapped_silu", alpha=-4.0), "alpha must be positive, got -4.0"),
        (lambda: Activation("clamped_silu", gated=False), "gated must be True for clamped_silu"),
        (lambda: Activation("swiglu_oai", gated=False), "gated must be True for swiglu_oai"),
        (lambda: Activation("swiglu_oai", limit=-1.0), "limit must be positive, got -1.0"),
    ],
)
def test_bad_activation(make, message) -> None:
    with pytest.raises(InvalidInput, match=message):
        make()


F32 = np.float32


@pytest.mark.parametrize("spec", strategies.all_activations(), ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_formulas(spec: Activation, dtype: str):
    rng = np.random.default_rng(0)
    gate = strategies.draw_array(rng, (13, 40), dtype, rms=4)
    up = strategies.draw_array(rng, (13, 40), dtype, rms=4) if spec.gated else None
    pairs = zip(gate.ravel(), [None] * gate.size if up is None else up.ravel(), strict=True)
    wanted = [exact(float(g), None if u is None else float(u), spec) for g, u in pairs]
    x, second = packed(gate, up, spec)
    for out_dtype in (None, "float32"):
        y = activation(x, second, activation=spec, out_dtype=out_dtype)
        name = out_dtype or dtype
        assert y.dtype == strategies.numpy_dtype(name)
        tolerance = against_exact(activation_tolerance(name), name)
        assert_close(y, np.reshape(wanted, gate.shape), tolerance, str(spec))


def test_worked_examples():
    x = np.array([[10.0, 9.0, -10.0, -9.0]], F32)
    clamped = activation(x, activation=Activation("swiglu_oai", True, "interleaved"))
    # gate 10 -> 7, up 9 -> 7; gate -10 stays (no lower clamp), up -9 -> -7.
    wanted = [7 / (1 + math.exp(-1.702 * 7)) * 8, -10 / (1 + math.exp(17.02)) * -6]
    np.testing.assert_allclose(clamped[0], wanted, rtol=1e-6)
    for name, limited in (("silu", 7 / (1 + math.exp(-7))), ("clamped_silu", 7.0)):
        y = activation(x, activation=Activation(name, True, "interleaved", limit=7.0))
        np.testing.assert_allclose(y[0], [7 * limited, -10 / (1 + math.exp(10)) * -7], rtol=1e-6)
    capped = activation(x[:, :2], activation=Activation("softcapped_silu"))
    np.testing.assert_allclose(
        capped[0], [4 * math.tanh(2.5) / (1 + math.exp(-10)) * 25 * math.tanh(9 / 25)], rtol=1e-6
    )
    assert activation(np.array([[-1.0, 0.0, 3.0]], F32), activation=Activation("relu2", False)).tolist() == [[0, 0, 9]]
    assert activation(np.array([[0.0, 5.0]], F32), activation=Activation("silu")).tolist() == [[0.0]]


@pytest.mark.parametrize("spec", strategies.all_activations(), ids=str)
def test_nan_passes_every_clamp(spec: Activation):
    nan, one = np.full((1, 2), np.nan, F32), np.ones((1, 2), F32)
    x, up = packed(nan, one if spec.gated else None, spec)
    assert np.isnan(activation(x, up, activation=spec)).all()
    if spec.gated:
        x, up = packed(one, nan, spec)
        assert np.isnan(activation(x, up, activation=spec)).all()


@pytest.mark.parametrize("spec", strategies.all_activations(), ids=str)
def test_zero_rows_stay_exact_zeros(spec: Activation):
    zeros = np.zeros((3, 4), F32)
    x, up = packed(zeros, zeros if spec.gated else None, spec)
    assert not activation(x, up, activation=spec).any()


def test_large_arguments_neither_warn_nor_overflow():
    x = np.array([[-np.inf, -3e38, -200.0, 200.0, 1e18, np.inf]], F32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for name in ("silu", "gelu", "gelu_tanh"):
            y = activation(x, activation=Activation(name, False))[0]
            assert np.isnan(y[0]), name  # -inf * 0
            assert (y[1:3] == 0).all(), name
            assert y[3:].tolist() == x[0, 3:].tolist(), name
        assert sigmoid(x).tolist() == [[0, 0, 0, 1, 1, 1]]
        assert activation(x, activation=Activation("relu2", False), out_dtype="float16")[0, -1] == np.inf


def test_normal_cdf_is_accurate_in_both_tails():
    x = np.linspace(-14, 14, 5001).astype(F32)
    wanted = np.array([0.5 * math.erfc(-float(value) / math.sqrt(2)) for value in x])
    np.testing.assert_allclose(normal_cdf(x), wanted, rtol=1e-11)
    assert normal_cdf(np.array([-np.inf, -40.0, 40.0, np.inf], F32)).tolist() == [0, 0, 1, 1]
    assert np.isnan(normal_cdf(np.array([np.nan], F32))).all()


@given(strategies.activations(), strategies.matmul_dtypes(), strategies.seeds())
def test_gate_layouts_agree_bitwise_and_inputs_are_left_alone(spec: Activation, dtype: str, seed: int):
    rng = np.random.default_rng(seed)
    gate, up = (strategies.draw_array(rng, (5, 17), dtype, rms=3) for _ in range(2))
    x, second = packed(gate, up if spec.gated else None, spec)
    x.flags.writeable = False
    y = activation(x, second, activation=spec)
    if spec.gated:
        separate = Activation(spec.name, True, "separate", spec.alpha, spec.limit)
        assert np.array_equal(y, activation(gate, up, activation=separate))
