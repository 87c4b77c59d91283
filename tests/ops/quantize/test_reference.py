"""Quantisation in NumPy: every code point against ml_dtypes, every format against a formulation in float64."""

from __future__ import annotations

import itertools
import math

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_core.base import dtypes
from moe_core.errors import InvalidInput
from moe_core.formats import MXFP4, MXFP8, Format, format_named, format_names
from moe_core.ops.quantize.codes import (
    e2m1_to_float32,
    e8m0_to_float32,
    float32_to_e2m1,
    float32_to_e4m3,
    pack_nibbles,
    unpack_nibbles,
)
from moe_core.ops.quantize.reference import dequantize, quantize
from tests.support.quantized.codes import all_codes, quantization_error
from tests.support.quantized.formulas import E2M1, E4M3, HALF_STEP, expected, formula, scales_of

FORMATS = [format_named(name) for name in format_names()]


# Codes


def test_e2m1_codes():
    codes = np.arange(16, dtype=np.uint8)
    oracle = codes.view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    np.testing.assert_array_equal(e2m1_to_float32(codes).view(np.uint32), oracle.view(np.uint32))
    np.testing.assert_array_equal(float32_to_e2m1(oracle), codes)


def test_e2m1_rounding():
    """Every midpoint, its neighbours, and a sweep: the nearest code, ties to the even one, saturation at 6."""
    magnitudes = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
    middles = (magnitudes[1:] + magnitudes[:-1]) / 2
    around = [np.nextafter(middles, np.float32(way)) for way in (-np.inf, np.inf)]
    values = np.concatenate([magnitudes, middles, *around, np.linspace(0, 8, 4001), [1e30, 1e-45, np.inf]])
    values = np.concatenate([values, -values]).astype(np.float32)
    for value, code in zip(values.tolist(), float32_to_e2m1(values).tolist(), strict=True):
        distance = [abs(abs(value) - float(magnitude)) for magnitude in magnitudes]
        nearest = [index for index in range(8) if distance[index] == min(distance)] if abs(value) < 6 else [7]
        assert code & 7 == next(index for index in nearest if len(nearest) == 1 or index % 2 == 0), value
        assert code >> 3 == (math.copysign(1, value) < 0), value
    finite = values[np.abs(values) < 6]
    np.testing.assert_array_equal(float32_to_e2m1(finite), finite.astype(ml_dtypes.float4_e2m1fn).view(np.uint8))


def test_e4m3_rounding():
    """Every exponent, sign and seven bits, with the bits below that decide: the codes of a cast of what fits."""
    for below in (0, 1, 0x7FFF, 0x8000, 0xFFFF):
        values = (np.arange(2**16, dtype=np.uint32) << 16 | below).view(np.float32)
        with np.errstate(all="ignore"):
            wanted = np.clip(values, -448, 448).astype(ml_dtypes.float8_e4m3fn)
        np.testing.assert_array_equal(float32_to_e4m3(values).view(np.uint8), wanted.view(np.uint8))


def test_e8m0_codes():
    codes = np.arange(256, dtype=np.uint8)
    values = e8m0_to_float32(codes)
    np.testing.assert_array_equal(values, codes.view(ml_dtypes.float8_e8m0fnu).astype(np.float32))
    assert values[0] == 2.0**-127 and values[127] == 1 and values[254] == 2.0**127 and np.isnan(values[255])


@pytest.mark.parametrize("length", [0, 1, 2, 7, 16, 33])
@pytest.mark.parametrize("axis", [0, 1, 2, -1])
def test_nibbles(length, axis):
    shape = [2, 3, 4]
    shape[axis] = length
    codes = np.random.default_rng(length).integers(0, 16, shape, np.uint8)
    packed = pack_nibbles(codes, axis)
    assert packed.shape[axis] == -(-length // 2)
    np.testing.assert_array_equal(unpack_nibbles(packed, axis, length), codes)
    moved, packed = np.moveaxis(codes, axis, -1), np.moveaxis(packed, axis, -1)
    for index in range(length):
        nibble = (packed[..., index // 2] >> (4 * (index % 2))) & 15
        np.testing.assert_array_equal(nibble, moved[..., index])
    assert length % 2 == 0 or not (packed[..., -1] >> 4).any()


def test_every_byte_is_two_codes():
    both = np.array(list(itertools.product(range(16), repeat=2)), np.uint8)
    np.testing.assert_array_equal(pack_nibbles(both)[:, 0], both[:, 0] + 16 * both[:, 1])
    every = np.arange(256, dtype=np.uint8)
    np.testing.assert_array_equal(pack_nibbles(unpack_nibbles(every)), every)


def test_nibbles_that_cannot_be():
    with pytest.raises(InvalidInput, match="codes must be uint8 below 16, got uint8"):
        pack_nibbles(np.array([0, 16], np.uint8))
    with pytest.raises(InvalidInput, match="codes must be uint8 below 16, got int64"):
        pack_nibbles(np.array([1]))
    with pytest.raises(InvalidInput, match="packed must be uint8, got int8"):
        unpack_nibbles(np.array([1], np.int8))
    with pytest.raises(InvalidInput, match="length must be what 2 bytes hold, got 5"):
        unpack_nibbles(np.zeros(2, np.uint8), length=5)


# Every code of every format


@pytest.mark.parametrize("layout", ["out_in", "in_out"])
@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_every_code_means_what_the_formula_says(format, layout):
    tensor = all_codes(format, layout, 7)
    np.testing.assert_array_equal(dequantize(tensor), formula(tensor))


@pytest.mark.parametrize("layout", ["out_in", "in_out"])
@pytest.mark.parametrize("format", [MXFP4, MXFP8], ids=str)
def test_every_code_and_scale_of_mx(format, layout):
    tensor = all_codes(format, layout, 32)
    found = dequantize(tensor)
    np.testing.assert_array_equal(found, formula(tensor))
    assert np.isnan(found).any() and np.isinf(found).any() and (found[np.isfinite(found)] != 0).any()


@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_codes_survive_a_round_trip(format):
    """Quantising what a tensor reads as, with the same scales, gives the same bits: nothing is lost twice."""
    if format.zero_points:
        return
    generator = np.random.default_rng(3)
    x = generator.standard_normal((6, 256)).astype(np.float32)
    first = quantize(x, format)
    again = quantize(dequantize(first), format, scales=first.scales)
    assert again.values.tobytes() == first.values.tobytes()
    assert again.scales.tobytes() == first.scales.tobytes()


# Quantisers against float64


def test_the_ladders_are_the_formats():
    for numbers, dtype in ((E4M3, ml_dtypes.float8_e4m3fn), (E2M1, ml_dtypes.float4_e2m1fn)):
        codes = np.arange(len(numbers), dtype=np.uint8).view(dtype).astype(float)
        np.testing.assert_array_equal(numbers, codes)


#: Numbers that meet every rule: zeros, denormals, ties of every element, powers of two, the ends of fp32.
SPECIAL = [0.0, -0.0, 1e-45, -1e-40, 1e-38, 2e-11, 1e-10, 0.25, 0.75, 1.25, 2.5, 3.5, 5.0, 6.0, 7.0, 448.0, 464.0, 1e30]


@st.composite
def matrices(draw: st.DrawFn, format: Format) -> np.ndarray:
    """fp32 `[rows, columns]` of sizes the format takes, from wide or special numbers."""
    rows = draw(st.integers(1, 5))
    unit = 1 if format.allows_partial_groups else format.group_columns or format.own_element.per_byte
    columns = unit * draw(st.integers(1, 150 if unit <= 2 else 2))
    generator = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    kind = draw(st.sampled_from(["normal", "wide", "special", "ties"]))
    if kind == "special":
        chosen = generator.choice(np.array(SPECIAL, np.float32), (rows, columns))
        return (chosen * generator.choice(np.array([1, -1], np.float32), (rows, columns))).astype(np.float32)
    x = generator.standard_normal((rows, columns))
    if kind == "wide":
        x *= np.exp2(generator.integers(-140, 120, (rows, columns)))
    if kind == "ties":
        x = generator.integers(-28, 29, (rows, columns)) / 4
    return x.astype(np.float32)


@pytest.mark.parametrize("format", FORMATS, ids=str)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_quantisers_against_float64(format, data):
    x = data.draw(matrices(format))
    scales, restored = expected(format, x)
    tensor = quantize(x, format)
    np.testing.assert_array_equal(scales_of(tensor), scales.astype(np.float32))
    np.testing.assert_array_equal(dequantize(tensor), restored)
    flipped = quantize(np.ascontiguousarray(x.T), format, layout="in_out")
    for one, other in ((tensor.values, flipped.values), (tensor.scales, flipped.scales)):
        assert np.ascontiguousarray(one.T).tobytes() == other.tobytes()
    if tensor.zero_points is not None:
        np.testing.assert_array_equal(tensor.zero_points.T, flipped.zero_points)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_narrow_inputs_are_widened_and_narrow_outputs_rounded_once(format, dtype):
    x = np.random.default_rng(5).standard_normal((2, 3, 256)).astype(dtypes.numpy_dtype(dtype))
    tensor = quantize(x, format)
    wide = quantize(x.astype(np.float32), format)
    assert tensor.values.tobytes() == wide.values.tobytes() and tensor.scales.tobytes() == wide.scales.tobytes()
    np.testing.assert_array_equal(dequantize(tensor, dtype), dequantize(wide).astype(dtypes.numpy_dtype(dtype)))


@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_stacks_are_matrices_by_themselves(format):
    """Leading axes never share a scale, and pieces of large matrices never change a result."""
    x = np.random.default_rng(6).standard_normal((2, 2, 640, 256)).astype(np.float32)
    x[1] *= 100
    tensor = quantize(x, format)
    whole = dequantize(tensor)
    for index in np.ndindex(2, 2):
        one = quantize(x[index], format)
        assert tensor.values[index].tobytes() == one.values.tobytes()
        assert tensor.scales[index].tobytes() == one.scales.tobytes()
        np.testing.assert_array_equal(whole[index], dequantize(one))
    error = quantization_error(x, tensor)
    assert 0 < error < 2 * HALF_STEP[format.element]
    assert error == pytest.approx(
        np.linalg.norm(whole.astype(float) - x.astype(float)) / np.linalg.norm(x.astype(float)), rel=1e-9
    )
