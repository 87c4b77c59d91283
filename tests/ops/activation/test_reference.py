"""The activation reference against scalar float64 formulas, and its rules for NaN, infinities and limits."""

from __future__ import annotations

import math
import warnings

import numpy as np
import pytest
from hypothesis import given

from moe_core.ops.activation.reference import activation, normal_cdf, sigmoid
from moe_core.parity.tolerance import activation_tolerance, assert_close
from moe_core.specs.matmul import Activation
from tests.support import strategies
from tests.support.exact import against_exact, exact, packed

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
