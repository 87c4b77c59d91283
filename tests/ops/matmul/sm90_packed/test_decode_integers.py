"""What Hopper's kernels make of tiled integer codes: their PTX, word by word, against the reference."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

pytest.importorskip("triton")

import moe_core.ops.matmul.sm90_packed.kernels.decode_integers as decode_integers
from moe_core.base import dtypes
from moe_core.formats import QuantizedSpec, QuantizedTensor, format_named, quantized_specs
from moe_core.formats.tiling import block_of
from moe_core.ops.common.rounding import round_to
from moe_core.ops.prepack.prepack import tile
from moe_core.ops.quantize.reference import dequantize
from moe_core.specs.operands import map_arrays
from tests.support.runtime import ptx_numbers

SCALE_DTYPES = ("float32", "bfloat16", "float16")
TEXTS = {
    ("bfloat16", 0): decode_integers._BFLOAT16_LOW,
    ("bfloat16", 1): decode_integers._BFLOAT16_HIGH,
    ("float16", 0): decode_integers._FLOAT16_LOW,
    ("float16", 1): decode_integers._FLOAT16_HIGH,
    ("float32", 0): decode_integers._FLOAT32_LOW,
    ("float32", 1): decode_integers._FLOAT32_HIGH,
}
RESULTS = 16


def of_two(values: np.ndarray) -> list[np.ndarray]:
    """Operands of 16 bits, `[8, ...]` numbers: two share a word."""
    bits = values.astype(ml_dtypes.bfloat16).view(np.uint16).astype(np.uint32)
    return list(bits[0::2] | (bits[1::2] << np.uint32(16)))


def decoded(words: np.ndarray, zero_points: np.ndarray, scales: np.ndarray, half: int | None) -> np.ndarray:
    """bfloat16 numbers `[16, 2, ...]` of a thread's words `[8, ...]` uint32. zero_points, scales: of each word; half:
    which 64 columns of four bits, None of eight."""
    with np.errstate(invalid="ignore"):
        wide = scales.astype(np.float32)
        if half is None:
            text = decode_integers._UINT8
            operands = [*words, *(zero_points.astype(np.float32) + np.float32(2**23)).view(np.uint32)]
            operands += list(wide.view(np.uint32))
        else:
            text = TEXTS[dtypes.canonical(scales.dtype), half]
            operands = [*words, *of_two(zero_points.astype(np.float32) + 128)]
            if scales.dtype == np.float32:
                operands += list(wide.view(np.uint32))
            else:
                upper = wide.astype(ml_dtypes.bfloat16)
                operands += of_two(upper)
            if scales.dtype == np.float16:
                rest = wide - upper.astype(np.float32)
                operands += of_two(np.where(np.isnan(rest), np.float32(0), rest))
    found = ptx_numbers.run(text.value, dict(enumerate(operands, RESULTS)), RESULTS)
    pairs = np.stack([np.stack([word & np.uint32(0xFFFF), word >> np.uint32(16)]) for word in found])
    return pairs.astype(np.uint16).view(ml_dtypes.bfloat16)


def draw_scales(dtype: str, count: int) -> np.ndarray:
    """Any bits, without those whose numbers bfloat16 has no last bits for; an infinity and a NaN."""
    random = np.random.default_rng(1)
    kind = dtypes.numpy_dtype(dtype)
    bits = random.integers(0, 2 ** (8 * kind.itemsize), 2 * count).astype(f"uint{8 * kind.itemsize}").view(kind)
    with np.errstate(invalid="ignore"):
        size = np.abs(bits.astype(np.float64))
    chosen = bits[(size > 2.0**-110) & (size < 2.0**110)][: count - 2]
    return np.concatenate([chosen, np.array([np.inf, np.nan], kind)])


@pytest.mark.parametrize("dtype", SCALE_DTYPES)
def test_every_code_of_four_bits(dtype: str) -> None:
    """With every zero point, to the bit of (q - z) s in fp32, then rounded."""
    scales = draw_scales(dtype, 250)
    ordered, others = np.uint32(0x76543210), np.uint32(0xFEDCBA98)
    words = np.array([ordered, others, others, ordered, others, ordered, ordered, others])
    codes = (words[:, None] >> np.arange(0, 32, 4, dtype=np.uint32)) & np.uint32(15)
    zero_points = np.arange(16)[:, None]
    shape = (16, len(scales))
    every, points, factors = (
        np.broadcast_to(array, (8, *shape)) for array in (words[:, None, None], zero_points, scales)
    )
    for half in range(2):
        found = decoded(every, points, factors, half).astype(np.float32)
        for row, q, pair, b in np.ndindex(2, 2, 4, 2):
            number = codes[4 * row + 2 * half + q, 4 * b + pair].astype(np.float32) - zero_points.astype(np.float32)
            with np.errstate(invalid="ignore"):
                expected = round_to(number * scales.astype(np.float32), "bfloat16").astype(np.float32)
            np.testing.assert_array_equal(found[4 * pair + 2 * row + q, b], expected)


@pytest.mark.parametrize("dtype", SCALE_DTYPES)
def test_every_code_of_eight_bits(dtype: str) -> None:
    scales, zero_points = draw_scales(dtype, 60), np.array([0, 1, 127, 128, 200, 255])[:, None]
    shape = (6, len(scales))
    for first in range(0, 256, 32):
        codes = np.arange(first, first + 32, dtype=np.uint8).reshape(8, 4)
        words = np.broadcast_to(codes.view(np.uint32)[:, :, None], (8, *shape))
        every = [np.broadcast_to(array, (8, *shape)) for array in (zero_points, scales)]
        found = decoded(words, every[0], every[1], None).astype(np.float32)
        for row, q, p, b in np.ndindex(2, 4, 2, 2):
            number = codes[4 * row + q, 2 * p + b].astype(np.float32) - zero_points.astype(np.float32)
            with np.errstate(invalid="ignore"):
                expected = round_to(number * scales.astype(np.float32), "bfloat16").astype(np.float32)
            np.testing.assert_array_equal(found[4 * (2 * (q % 2) + p) + 2 * row + q // 2, b], expected)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("int4_g32_zp", "float16"), ("int4_g64", "bfloat16"), ("int4_row_zp", "float32"), ("int8_g32_zp", "bfloat16"),
     ("int8_g128", "float32"), ("int8_channel", "float32")],
)  # fmt: skip
def test_a_block_becomes_the_matrix(name: str, dtype: str) -> None:
    """Every lane's words, scales and zero points of a tiled block, decoded and put where the tensor cores have them."""
    format, random = format_named(name), np.random.default_rng(2)
    kind = dtypes.numpy_dtype(dtype)

    def draw(spec: object) -> np.ndarray:
        if spec.dtype == dtype:  # pyright: ignore[reportAttributeAccessIssue]
            return random.standard_normal(spec.shape).astype(kind)  # pyright: ignore[reportAttributeAccessIssue]
        return random.integers(0, 256, spec.shape).astype(np.uint8).view(spec.dtype)  # pyright: ignore

    tensor: QuantizedTensor = map_arrays(quantized_specs(QuantizedSpec(format), (64, 256), dtype), draw)
    expected = dequantize(tensor, "bfloat16").astype(np.float32)
    tiled, block = tile(tensor, "rows"), block_of(format)
    four = format.own_element.per_byte == 2
    stored = 128 if format.element == "int8" else format.own_element.zero_point
    for step in range(256 // block.columns):
        record = 0 if block.repeat is None else step // block.repeat
        # [side, row, t, q] words; [side, row, groups] of a record, for each of a row's words.
        words = tiled.values[0, step].view(np.uint32).reshape(2, 32, 4, 4)
        groups = np.arange(4) * block.groups // 4

        def of_words(array: np.ndarray, record: int = record, groups: np.ndarray = groups) -> np.ndarray:
            each = array[0, record].reshape(2, 32, 1, block.groups)[..., groups]
            return np.broadcast_to(each, (2, 32, 4, 4)).transpose(0, 3, 1, 2).reshape(8, 32, 4)

        zero_points = np.full((8, 32, 4), stored) if tiled.zero_points is None else of_words(tiled.zero_points)
        given = words.transpose(0, 3, 1, 2).reshape(8, 32, 4), zero_points, of_words(tiled.scales)
        for half in range(2 if four else 1):
            found = decoded(*given, half if four else None).astype(np.float32)
            # [pair, side, unit, b, row, t] to [side, row, unit, pair, t, b].
            found = found.reshape(4, 2, 2, 2, 32, 4).transpose(1, 4, 2, 0, 5, 3).reshape(64, 64)
            first = step * block.columns + 64 * half
            np.testing.assert_array_equal(found, expected[:, first : first + 64])
