"""The rules of quantisation, one by one: zeros, NaN, saturation, scales, zero points, padding, refusals."""

from __future__ import annotations

import math
import re

import ml_dtypes
import numpy as np
import pytest

from moe_core.errors import InvalidInput
from moe_core.formats import (
    FP8_BLOCK,
    FP8_CHANNEL,
    FP8_GROUP,
    FP8_TENSOR,
    FP8_TOKEN,
    INT8_CHANNEL,
    MXFP4,
    MXFP4_CEIL,
    MXFP8,
    MXFP8_CEIL,
    QuantizedSpec,
    QuantizedTensor,
    format_named,
    format_names,
    int4_grouped,
    int8_grouped,
)
from moe_core.ops.quantize.reference import ErrorSum, dequantize, quantize
from tests.support.quantized.formulas import E4M3, HALF_STEP, scales_of

FORMATS = [format_named(name) for name in format_names()]


@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_zeros(format):
    tensor = quantize(np.zeros((3, 256), np.float32), format)
    assert not dequantize(tensor).any()
    if format.has_e8m0_scales:
        assert (tensor.scales == 127).all() and not tensor.values.view(np.uint8).any()
    elif not format.zero_points and format.scale_rule == "amax":
        np.testing.assert_array_equal(tensor.scales, np.float32(1e-10) / np.float32(format.own_element.largest))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_a_group_with_nan_or_infinity_is_nan(format, value):
    x = np.ones((2, 256), np.float32)
    x[1, 200] = value
    tensor = quantize(x, format)
    found = dequantize(tensor)
    group = np.zeros(x.shape, bool)
    columns = format.group_columns or 256
    rows = slice(None) if format.group_rows != 1 else slice(1, 2)
    group[rows, 200 // columns * columns : (200 // columns + 1) * columns] = True
    np.testing.assert_array_equal(np.isnan(found), group)
    np.testing.assert_allclose(found[~group], 1, rtol=2 * HALF_STEP[format.element])
    # What the codes of such a group are does not depend on what broke it.
    clean = x.copy()
    clean[1, 200] = np.nan
    assert quantize(clean, format).values.tobytes() == tensor.values.tobytes()


@pytest.mark.parametrize("format", [format for format in FORMATS if not format.zero_points], ids=str)
def test_numbers_beyond_the_largest_saturate(format):
    """Under a given scale, as static quantisation has it. Scales that are found leave nothing beyond, but for those of
    the rule `floor`; with zero points none can be given."""
    shape = quantize(np.zeros((3, 256), np.float32), format).scales.shape
    scales = np.full(shape, 127, np.uint8) if format.has_e8m0_scales else np.ones(shape, np.float32)
    x = np.resize(np.array([1e4, -1e4, 3e38, -3e38], np.float32), (3, 256))
    found = dequantize(quantize(x, format, scales=scales))
    lowest, highest = {"uint4": (-8, 7), "uint8": (-128, 127)}.get(format.element, (None, format.own_element.largest))
    assert set(found.ravel()) == {highest, -highest if lowest is None else lowest}


def test_fp8_saturates_under_given_scales():
    x = np.array([[1000, -1000, 448, 464, 465, 1]], np.float32)
    tensor = quantize(x, FP8_TENSOR, scales=np.ones((1, 1), np.float32))
    np.testing.assert_array_equal(dequantize(tensor), [[448, -448, 448, 448, 448, 1]])


def test_int8_saturates_at_127_on_both_sides():
    x = np.array([[300, -300, -128, 0.5, 1.5, -2.5]], np.float32)
    tensor = quantize(x, INT8_CHANNEL, scales=np.ones((1, 1), np.float32))
    np.testing.assert_array_equal(tensor.values, [[127, -127, -127, 0, 2, -2]])


def test_true_division_differs_from_a_reciprocal():
    """Multiples of the scale that lie on ties: x / s finds the tie, x * (1 / s) a neighbour of it."""
    generator = np.random.default_rng(4)
    scales = generator.uniform(0.5, 1, (500, 1)).astype(np.float32)
    middles = ((E4M3[1:] + E4M3[:-1]) / 2).astype(np.float32)
    x = np.concatenate([middles * scales, np.float32(448) * scales], axis=1)
    tensor = quantize(x, FP8_TOKEN)
    by_reciprocal = (x * (np.float32(1) / tensor.scales)).clip(-448, 448).astype(ml_dtypes.float8_e4m3fn)
    by_division = (x / tensor.scales).clip(-448, 448).astype(ml_dtypes.float8_e4m3fn)
    assert tensor.values.tobytes() == by_division.tobytes()
    assert (by_division.view(np.uint8) != by_reciprocal.view(np.uint8)).any()


@pytest.mark.parametrize("amax", [1.0, 447.0, 448.0, np.nextafter(np.float32(448), np.float32(449)), 900.0])
@pytest.mark.parametrize("name", ["fp8_tensor_pow2", "fp8_channel_pow2", "fp8_block_pow2", "fp8_group_pow2"])
def test_power_of_two_scales_are_rounded_up(name, amax):
    x = np.full((2, 128), np.float32(amax))
    tensor = quantize(x, format_named(name))
    scale = float(tensor.scales.max())
    assert math.frexp(scale)[0] == 0.5 and scale / 2 < float(np.float32(amax)) / 448 <= scale
    np.testing.assert_allclose(dequantize(tensor), x, rtol=2**-4)


@pytest.mark.parametrize(
    ("amax", "floor", "ceil"),
    [
        (4.0, 127, 127), (6.0, 127, 127), (np.nextafter(np.float32(6), np.float32(7)), 127, 128), (7.0, 127, 128),
        (7.9, 127, 128), (8.0, 128, 128), (1.0, 125, 125), (1.5, 125, 125), (1.6, 125, 126), (2.0**-125, 0, 1),
        (2.0**-126, 0, 1), (1e-45, 0, 0), (1e-40, 0, 1), (3e38, 252, 253),
    ],
)  # fmt: skip
def test_mxfp4_scales(amax, floor, ceil):
    """The exponent of amax less 2, or the smallest power of two at or above amax / 6, found on fp32's bits."""
    x = np.zeros((1, 32), np.float32)
    x[0, 3] = amax
    assert quantize(x, MXFP4).scales[0, 0] == floor
    assert quantize(-x, MXFP4_CEIL).scales[0, 0] == ceil


def test_mxfp4_floor_clips_what_ceil_keeps():
    x = np.full((1, 32), 7.5, np.float32)
    assert (dequantize(quantize(x, MXFP4)) == 6).all() and (dequantize(quantize(x, MXFP4_CEIL)) == 8).all()


@pytest.mark.parametrize(("amax", "floor", "ceil"), [(448.0, 127, 127), (449.0, 127, 128), (256.0, 127, 127)])
def test_mxfp8_scales(amax, floor, ceil):
    x = np.full((1, 32), amax, np.float32)
    assert quantize(x, MXFP8).scales[0, 0] == floor
    assert quantize(x, MXFP8_CEIL).scales[0, 0] == ceil
    assert (dequantize(quantize(x, MXFP8)) == min(amax, 448)).all()


def test_zero_points_shift_a_one_sided_group():
    x = np.linspace(10, 25, 32, dtype=np.float32)[None]
    tensor = quantize(x, int4_grouped(32, zero_points=True))
    assert tensor.zero_points.tolist() == [[0]]
    np.testing.assert_allclose(tensor.scales, 25 / 15, rtol=1e-6)
    below = quantize(-x, int4_grouped(32, zero_points=True))
    assert below.zero_points.tolist() == [[15]]
    np.testing.assert_array_equal(dequantize(below), -dequantize(tensor))


def test_zero_points_are_packed_along_the_output_axis():
    x = np.random.default_rng(8).standard_normal((5, 64)).astype(np.float32) + np.arange(5)[:, None].astype(np.float32)
    packed = quantize(x, int4_grouped(32, zero_points=True)).zero_points
    assert packed.shape == (3, 2) and not (packed[2] >> 4).any()
    for row in range(5):
        alone = quantize(x[row : row + 1], int4_grouped(32, zero_points=True)).zero_points[0]
        np.testing.assert_array_equal((packed[row // 2] >> (4 * (row % 2))) & 15, alone)


def test_partial_blocks_count_what_is_missing_as_zero():
    x = np.random.default_rng(9).standard_normal((130, 200)).astype(np.float32)
    padded = np.zeros((256, 256), np.float32)
    padded[:130, :200] = x
    tensor, whole = quantize(x, FP8_BLOCK), quantize(padded, FP8_BLOCK)
    np.testing.assert_array_equal(tensor.scales, whole.scales)
    assert tensor.values.tobytes() == np.ascontiguousarray(whole.values[:130, :200]).tobytes()


@pytest.mark.parametrize("format", [FP8_TENSOR, FP8_TOKEN, FP8_GROUP, MXFP8, INT8_CHANNEL], ids=str)
@pytest.mark.parametrize("shape", [(0, 256), (128, 0)], ids=str)
def test_no_rows_or_columns(format, shape):
    tensor = quantize(np.empty(shape, np.float32), format)
    assert tensor.shape == shape and dequantize(tensor).shape == shape
    assert np.isfinite(scales_of(tensor)).all()


def test_given_scales():
    x = np.random.default_rng(10).standard_normal((4, 64)).astype(np.float32)
    scales = np.array([[2.0], [0.0], [np.nan], [1.0]], np.float32)
    tensor = quantize(x, FP8_CHANNEL, scales=scales)
    assert tensor.scales is not scales
    np.testing.assert_array_equal(tensor.scales, scales)
    assert not tensor.values[1:3].view(np.uint8).any()
    assert (dequantize(tensor)[1] == 0).all() and np.isnan(dequantize(tensor)[2]).all()
    mx = quantize(x, MXFP4, scales=np.full((4, 2), 127, np.uint8))
    assert (mx.scales == 127).all() and np.abs(dequantize(mx)).max() <= 6


@pytest.mark.parametrize(
    ("x", "format", "scales", "message"),
    [
        (np.zeros((2, 2)), FP8_TENSOR, None, "x's dtype must be one of bfloat16, float16, float32, got 'float64'"),
        (np.zeros((2, 40), np.float32), MXFP4, None, "the input axis must be a multiple of 32 for mxfp4"),
        (np.zeros((2, 2), np.float32), FP8_TENSOR, np.ones(1, np.float32),
            "scales of fp8_tensor must be float32[1, 1]"),
        (np.zeros((2, 2), np.float32), FP8_TENSOR, np.ones((1, 1)), "got float64[1, 1]; pass those of this tensor"),
        (np.zeros((2, 32), np.float32), int8_grouped(32, True), np.ones((2, 1), np.float32),
            "scales must be None for int8_g32_zp"),
    ],
)  # fmt: skip
def test_inputs_that_are_refused(x, format, scales, message):
    with pytest.raises(InvalidInput, match=re.escape(message)):
        quantize(x, format, scales=scales)


def test_dequantised_dtypes():
    tensor = quantize(np.ones((2, 32), np.float32), MXFP4)
    with pytest.raises(InvalidInput, match="dtype must be one of bfloat16, float16, float32, got 'int8'"):
        dequantize(tensor, "int8")


def test_fp32_range_whatever_the_compute_dtype():
    """A scale beyond fp16's range and a value below it make a number that fp16 has."""
    spec = QuantizedSpec(MXFP4)
    values = np.full((1, 16), 0x11, np.uint8)
    for exponent, expected_value in ((127 + 16, 2.0**15), (127 - 20, 2.0**-21)):
        tensor = QuantizedTensor(spec, values, np.full((1, 1), exponent, np.uint8))
        assert (dequantize(tensor, "float16") == np.float16(expected_value)).all()


def test_error_sums():
    total = ErrorSum()
    assert total.relative_frobenius == 0
    total.add(np.zeros(2), np.array([0.0, 1.0]))
    assert total.relative_frobenius == math.inf
    total.add(np.array([3.0, 4.0]), np.array([3.0, 4.0]))
    assert total.relative_frobenius == pytest.approx(0.2) and type(total.relative_frobenius) is float
    total.add(np.array([1.0]), np.array([math.nan]))
    assert math.isnan(total.relative_frobenius)
    with pytest.raises(InvalidInput, match=r"restored must be \(1,\) like original, got \(2,\)"):
        total.add(np.zeros(1), np.zeros(2))
