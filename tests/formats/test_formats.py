"""Formats, schemes and QuantizedTensor: what is legal, which shapes follow, and what a wrong array is told."""

from __future__ import annotations

import dataclasses
import re

import ml_dtypes
import numpy as np
import pytest

from moe_core import formats
from moe_core.base import codec
from moe_core.base.arrays import ArraySpec
from moe_core.errors import InvalidInput
from moe_core.formats import (
    FP8_BLOCK,
    FP8_CHANNEL,
    FP8_GROUP,
    FP8_TENSOR,
    FP8_TOKEN,
    INT8_CHANNEL,
    MXFP4,
    MXFP8,
    Format,
    QuantizedSpec,
    QuantizedTensor,
    Scheme,
    format_named,
    format_names,
    int4_grouped,
    int8_grouped,
    quantized_shapes,
    quantized_specs,
    register_format,
    register_scheme,
    scheme_named,
    scheme_names,
    why_not_tileable,
)
from moe_core.ops.quantize.reference import dequantize, quantize
from moe_core.specs.operands import map_arrays, named_arrays
from tests.support.harness import spec_of

FORMATS = [format_named(name) for name in format_names()]


def test_every_required_format_and_scheme_has_a_name():
    assert {"fp8_tensor", "fp8_channel", "fp8_token", "fp8_block", "fp8_group", "int8_channel", "int8_token"} <= set(
        format_names()
    )
    assert {"fp8_block_pow2", "int8_g128", "int8_g128_zp", "int4_g128", "int4_g128_zp", "mxfp4", "mxfp8"} <= set(
        format_names()
    )
    assert {"int8_w8a8", "int8_w8a16", "int4_w4a16", "int4_w4a16_zp", "mxfp4_w4a16", "mxfp4_w4a8", "mxfp4_w4a4"} <= set(
        scheme_names()
    )
    assert scheme_named("mxfp4_w4a8") == Scheme("mxfp4_w4a8", MXFP4, MXFP8)
    assert scheme_named("fp8_block").activations is FP8_GROUP


@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_formats_are_values_that_plans_can_carry(format):
    for layout in ("out_in", "in_out"):
        spec = QuantizedSpec(format, layout)
        assert codec.loads(codec.dumps(spec)) == spec
        assert hash(codec.loads(codec.dumps(spec))) == hash(spec)
    with pytest.raises(dataclasses.FrozenInstanceError):
        format.name = "other"


def test_schemes_are_values_that_plans_can_carry():
    for name in scheme_names():
        assert codec.loads(codec.dumps(scheme_named(name))) == scheme_named(name)


def test_a_format_of_ones_own_is_one_object():
    """Declared and registered, a format is quantised, packed and described by what is there."""
    own = register_format(Format("fp8_rows_of_64", "e4m3", 1, 64))
    try:
        assert format_named("fp8_rows_of_64") is own and register_format(own) is own
        x = np.random.default_rng(0).standard_normal((5, 130)).astype(np.float32)
        tensor = quantize(x, own)
        assert tensor.scales.shape == (5, 3)
        assert np.abs(dequantize(tensor) - x).max() < 2**-4 * np.abs(x).max()
        with pytest.raises(InvalidInput, match="unique among formats, got 'fp8_rows_of_64' again"):
            register_format(Format("fp8_rows_of_64", "e4m3", 1, 32))
    finally:
        formats.format._FORMATS.pop("fp8_rows_of_64")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("a b", "e4m3", 1, 1), "name must be an identifier, got 'a b'"),
        (("x", "e5m2", 1, 1), "element must be one of e4m3, e2m1, int8, uint8, uint4, got 'e5m2'"),
        (("x", "e4m3", 0, 1), "group_rows must be an integer of at least 1, got 0"),
        (("x", "e4m3", 1, True), "group_columns must be an integer of at least 1, got True"),
        (("x", "e4m3", 1, 1, "round"), "scale_rule must be one of amax, power_of_two, floor, ceil, got 'round'"),
        (("x", "int8", 1, 32, "floor"), "scale_rule must be amax or power_of_two for int8, got 'floor'"),
        (("x", "e4m3", 1, 1, "amax", True), "zero_points must be False for e4m3, got True"),
        (("x", "int8", 1, 1, "amax", True), "zero_points must be False for int8, got True"),
        (("x", "uint8", 8, 16, "amax", True), "group_rows must be 1 with zero_points"),
        (("x", "uint4", 1, 31), "group_columns must be a multiple of 2 for uint4, got 31"),
    ],
)
def test_formats_that_cannot_be(arguments, message):
    with pytest.raises(InvalidInput, match=re.escape(message)):
        Format(*arguments)


def test_schemes_that_cannot_be():
    with pytest.raises(
        InvalidInput, match="activations must have groups of 128 columns, like weights, or None, got 32"
    ):
        Scheme("x", FP8_BLOCK, MXFP8)
    assert Scheme("x", int4_grouped(128), FP8_TOKEN).activations is FP8_TOKEN
    for weights, activations in ((FP8_BLOCK, "fp8_token"), ("fp8_block", None)):
        with pytest.raises(InvalidInput, match=r"(weights|activations) must be .*Format"):
            Scheme("x", weights, activations)
    with pytest.raises(InvalidInput, match="unique among schemes, got 'mxfp8' again"):
        register_scheme(Scheme("mxfp8", MXFP8))
    with pytest.raises(InvalidInput, match=r"format must be one of fp8_tensor, .*, got 'fp7'"):
        format_named("fp7")


E, N, D = 3, 300, 256


@pytest.mark.parametrize(
    ("format", "values", "scales", "zero_points"),
    [
        (FP8_TENSOR, (E, N, D), (E, 1, 1), None),
        (FP8_CHANNEL, (E, N, D), (E, N, 1), None),
        (FP8_BLOCK, (E, N, D), (E, 3, 2), None),
        (FP8_GROUP, (E, N, D), (E, N, 2), None),
        (INT8_CHANNEL, (E, N, D), (E, N, 1), None),
        (int8_grouped(64), (E, N, D), (E, N, 4), None),
        (int8_grouped(64, True), (E, N, D), (E, N, 4), (E, N, 4)),
        (int4_grouped(128), (E, N, D // 2), (E, N, 2), None),
        (int4_grouped(128, True), (E, N, D // 2), (E, N, 2), (E, N // 2, 2)),
        (int4_grouped(None), (E, N, D // 2), (E, N, 1), None),
        (MXFP4, (E, N, D // 2), (E, N, 8), None),
        (MXFP8, (E, N, D), (E, N, 8), None),
    ],
    ids=str,
)
def test_shapes(format, values, scales, zero_points):
    assert quantized_shapes(QuantizedSpec(format), (E, N, D)) == (values, scales, zero_points)
    swapped = [None if shape is None else (shape[0], shape[2], shape[1]) for shape in (values, scales, zero_points)]
    assert quantized_shapes(QuantizedSpec(format, "in_out"), (E, D, N)) == tuple(swapped)
    tensor = quantized_specs(QuantizedSpec(format), (E, N, D))
    assert tensor.shape == (E, N, D) and tensor.values == ArraySpec(values, format.own_element.dtype)
    assert tensor.nbytes == sum(array.nbytes for _, array in named_arrays(tensor))


@pytest.mark.parametrize(
    ("format", "shape", "message"),
    [
        (MXFP4, (4, 80), "the input axis must be a multiple of 32 for mxfp4 (groups of 32), got 80 in (4, 80)"),
        (MXFP8, (4, 33), "the input axis must be a multiple of 32 for mxfp8"),
        (int4_grouped(128), (4, 64), "the input axis must be a multiple of 128 for int4_g128 (groups of 128), got 64"),
        (
            int4_grouped(None),
            (4, 7),
            "the input axis must be a multiple of 2 for int4_row (2 elements to a byte), got 7",
        ),
        (int8_grouped(32), (4, 48), "the input axis must be a multiple of 32 for int8_g32"),
        (FP8_BLOCK, (4,), "shape must have at least 2 axes, got (4,)"),
    ],
)
def test_sizes_that_do_not_fit(format, shape, message):
    with pytest.raises(InvalidInput, match=re.escape(message)):
        quantized_shapes(QuantizedSpec(format), shape)


def test_blocks_may_be_cut_short():
    assert quantized_shapes(QuantizedSpec(FP8_BLOCK), (129, 1))[:2] == ((129, 1), (2, 1))
    assert quantized_shapes(QuantizedSpec(FP8_GROUP), (0, 129))[:2] == ((0, 129), (0, 2))
    assert quantized_shapes(QuantizedSpec(FP8_TENSOR), (0, 5))[:2] == ((0, 5), (1, 1))


def test_odd_outputs_leave_half_a_byte_of_zero_points():
    assert quantized_shapes(QuantizedSpec(int4_grouped(32, True)), (7, 64)).zero_points == (4, 2)


@pytest.mark.parametrize(
    ("format", "rows", "expected"),
    [
        (FP8_BLOCK, 256, True), (FP8_BLOCK, 100, False), (FP8_TENSOR, 128, False), (FP8_CHANNEL, 3, True),
        (int4_grouped(32, True), 3, False), (int4_grouped(32), 3, True), (int8_grouped(32, True), 3, True),
    ],
)  # fmt: skip
def test_where_two_tensors_can_be_one(format, rows, expected):
    assert format.splits_rows(rows) is expected


def make(format=FP8_BLOCK, **changes):
    fields = dict(named_arrays(quantized_specs(QuantizedSpec(format), (E, N, D)))) | {"spec": QuantizedSpec(format)}
    return QuantizedTensor(**(fields | changes))


@pytest.mark.parametrize(
    ("format", "changes", "message"),
    [
        (FP8_BLOCK, {"spec": FP8_BLOCK}, "spec must be a QuantizedSpec, got Format"),
        (FP8_BLOCK, {"values": None}, "values must be an array, got NoneType"),
        (FP8_BLOCK, {"scales": 1.0}, "scales must be an array, got float"),
        (FP8_BLOCK, {"values": ArraySpec((E, N, D), "uint8")},
            "values of fp8_block must be float8_e4m3fn, got uint8; pass the arrays of that format"),
        (FP8_BLOCK, {"scales": ArraySpec((E, 3, 2), "bfloat16")}, "scales of fp8_block must be float32, got bfloat16"),
        (FP8_BLOCK, {"scales": ArraySpec((E, 2, 2), "float32")},
            "scales of fp8_block[3, 300, 256] out_in must be (3, 3, 2), got (3, 2, 2); check the layout and the group"),
        (FP8_BLOCK, {"values": ArraySpec((D,), "float8_e4m3fn")}, "values must have at least 2 axes, got (256,)"),
        (FP8_BLOCK, {"zero_points": ArraySpec((E, 3, 2), "uint8")}, "zero_points must be None for fp8_block"),
        (int4_grouped(128, True), {"zero_points": None}, "zero_points must be an array for int4_g128_zp, got None"),
        (int4_grouped(128, True), {"zero_points": ArraySpec((E, N, 2), "uint8")},
            "zero_points of int4_g128_zp[3, 300, 256] out_in must be (3, 150, 2), got (3, 300, 2)"),
        (MXFP4, {"scales": ArraySpec((E, N, 8), "float32")}, "scales of mxfp4 must be uint8, got float32"),
        (MXFP4, {"values": np.zeros((2, 2), np.complex64)}, "values of mxfp4 must be uint8, got complex64"),
    ],
)  # fmt: skip
def test_arrays_that_disagree_with_the_format(format, changes, message):
    with pytest.raises(InvalidInput, match=re.escape(message)):
        make(format, **changes)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_scales_of_grouped_integers_keep_the_dtype_they_are_stored_in(dtype):
    tensor = quantized_specs(QuantizedSpec(int4_grouped(128)), (E, N, D), dtype)
    assert tensor.scales.dtype == dtype
    with pytest.raises(InvalidInput, match="must be float32, got float16"):
        quantized_specs(QuantizedSpec(FP8_BLOCK), (E, N, D), "float16")


def to_torch(array):
    torch = pytest.importorskip("torch")
    if array.dtype == ml_dtypes.float8_e4m3fn:
        return torch.from_numpy(array.view(np.uint8)).view(torch.float8_e4m3fn)
    return torch.from_numpy(array)


def to_jax(array):
    return pytest.importorskip("jax").numpy.asarray(array)


@pytest.mark.parametrize("convert", [spec_of, to_torch, to_jax])
@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_arrays_of_every_library(format, convert):
    x = np.random.default_rng(1).standard_normal((2, 4, 256)).astype(np.float32)
    tensor = quantize(x, format)
    converted = map_arrays(tensor, convert)
    assert converted.shape == x.shape and converted.format is format
    assert [name for name, _ in named_arrays(converted)] == [name for name, _ in named_arrays(tensor)]
    assert converted.nbytes == tensor.nbytes and str(converted) == str(tensor)
    with pytest.raises(InvalidInput, match=r"tensor must hold NumPy arrays, got \w+; convert them"):
        dequantize(converted)


def test_unchecked_takes_the_leaves_of_a_transformation():
    tensor = make()
    rebuilt = QuantizedTensor.unchecked(tensor.spec, 0, 1)
    assert (rebuilt.spec, rebuilt.values, rebuilt.scales, rebuilt.zero_points) == (tensor.spec, 0, 1, None)
    assert str(rebuilt) == f"{tensor.format.name} {tensor.layout} of int"
    one = np.float32(1)
    assert str(QuantizedTensor.unchecked(tensor.spec, None, one)).endswith("of NoneType")
    assert str(QuantizedTensor.unchecked(tensor.spec, one, one)).endswith("of float32")


SEVERAL = [name for name in format_names() if len(format_named(name).scale_dtypes) > 1]


@pytest.mark.parametrize("name", SEVERAL)
def test_scales_are_of_the_first_dtype_unless_another_is_named(name: str) -> None:
    format = format_named(name)
    spec, last = QuantizedSpec(format, "out_in"), format.scale_dtypes[-1]
    assert quantized_specs(spec, (2, 128, 256)).scales.dtype == format.scale_dtypes[0]
    assert quantized_specs(spec, (2, 128, 256), last).scales.dtype == last != format.scale_dtypes[0]


@pytest.mark.parametrize("group", [None, 16, 32, 48, 96, 128, 256])
def test_integers_can_be_tiled_with_scales_for_rows_or_for_powers_of_two_of_columns(group: int | None) -> None:
    for made in (int4_grouped(group), int8_grouped(group, zero_points=True)):
        assert (why_not_tileable(made) is None) == (group in (None, 32, 128, 256))
