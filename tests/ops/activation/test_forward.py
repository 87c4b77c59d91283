"""The activation op against its NumPy twin."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_core import InvalidInput
from moe_core.base import dtypes
from moe_core.base.arrays import ArraySpec
from moe_core.ops.activation import reference
from moe_core.ops.activation.forward import plan_activation
from moe_core.parity.tolerance import activation_tolerance, assert_close
from moe_core.specs.matmul import Activation
from tests.support import strategies
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
