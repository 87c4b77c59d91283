"""Weights and rows are quantised as by the reference: codes, scales and zero points, bit by bit."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from moe_core.formats import format_named
from moe_core.ops.quantize import reference
from tests.support.frontends import Frontend
from tests.support.frontends.small import on_engines

FORMATS = ("fp8_block", "fp8_channel_pow2", "int8_channel", "int8_g32_zp", "int4_g32_zp", "mxfp4", "mxfp8_ceil")


def require_same(found: Any, expected: Any, label: str) -> None:
    """Equal bits; any NaN is any other."""
    assert found.dtype == expected.dtype, label
    if found.dtype.name in ("float32", "bfloat16", "float16"):
        np.testing.assert_array_equal(found.astype(np.float32), expected.astype(np.float32), label)
    else:
        np.testing.assert_array_equal(found.view(np.uint8), expected.view(np.uint8), label)


def require_same_tensor(found: Any, expected: Any) -> None:
    assert found.spec == expected.spec
    for field in ("values", "scales", "zero_points"):
        want, got = getattr(expected, field), getattr(found, field)
        assert (want is None) == (got is None)
        if want is not None:
            require_same(got, want, field)


@pytest.mark.parametrize("name", FORMATS)
def test_weights_are_quantised_as_by_the_reference(frontend: Frontend, name: str) -> None:
    """Denormals, infinities, NaN, zeros of both signs, ties, cut groups, stacks, both layouts."""
    format = format_named(name)
    random = np.random.default_rng(0)
    shape = (2, 37, 200) if format.allows_partial_groups else (2, 37, 64)
    weight = (random.standard_normal(shape) * np.exp(random.uniform(-30, 20, shape))).astype(np.float32)
    weight[0, 3], weight[0, 4, 5], weight[1, 7, 9] = 0, np.nan, np.inf
    weight[1, 8] *= 1e-38
    weight[1, 9], weight[0, 20:30] = 3e38, random.standard_normal((10, shape[-1]))
    weight[0, 30], weight[0, 31, ::2] = np.float32(1e-45), -0.0
    weight[0, 32] = np.round(random.standard_normal(shape[-1]) * 4) / 2
    for layout, dtype in (("out_in", np.float32), ("in_out", ml_dtypes.bfloat16)):
        with np.errstate(all="ignore"):
            given = (weight if layout == "out_in" else weight.swapaxes(1, 2)).astype(dtype)
        expected = reference.quantize(given, format, layout=layout)
        with frontend.running_on("reference"):
            found = frontend.ops.quantize(frontend.arrays(given), format, layout=layout)
            require_same_tensor(frontend.numpy(found), expected)
            for target in ("float32", "bfloat16", "float16"):
                got = frontend.numpy(frontend.ops.dequantize(found, frontend.dtype(target)))
                require_same(got, reference.dequantize(expected, target), target)


@on_engines
@pytest.mark.parametrize("name", ["fp8_token", "fp8_group", "fp8_tensor", "int8_token", "mxfp8", "mxfp4"])
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16], ids=["float32", "bfloat16"])
def test_rows_are_quantised_as_by_the_reference(frontend: Frontend, engine: str, name: str, dtype: Any) -> None:
    format, x = format_named(name), np.random.default_rng(2).standard_normal((6, 128)).astype(dtype)
    given = np.array([0.01], np.float32)
    with frontend.running_on(engine):
        rows, scale = frontend.arrays((x, given))
        found = frontend.call(lambda rows: frontend.ops.quantize_rows(rows, format), rows)
        assert tuple(found.shape) == x.shape
        require_same_tensor(frontend.numpy(found), reference.quantize(x, format))
        if name == "fp8_tensor":
            found = frontend.numpy(frontend.ops.quantize_rows(rows, format, scales=scale))
            for got, want in zip(
                (found.values, found.scales), reference.quantize_rows(x, given, format=format), strict=True
            ):
                require_same(got, want, "given scales")
