"""NumPy twin of quantisation: pack, unpack, quantise and dequantise by the definition of each format.

Arithmetic is fp32, rounded half to even, one operation at a time, so a kernel can match the bits: amax of the group,
scale, q = x / scale (true division), clamp, round. A group with a NaN or infinity gets scale NaN and zero codes in
every format.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import NamedTuple

import ml_dtypes
import numpy as np

from moe_core.base import dtypes, require_choice
from moe_core.errors import InvalidInput
from moe_core.formats import Format, QuantizedSpec, QuantizedTensor, quantized_shapes
from moe_core.ops.common.rounding import round_to, to_float32
from moe_core.ops.prepack.prepack import untile
from moe_core.specs import named_arrays

#: Lower bound of amax for a scale, so that zeros divide.
SMALLEST_AMAX = np.float32(1e-10)
#: Magnitudes of codes 0..7; bit 3 is the sign.
_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
_MANTISSA_BITS = 23
_MANTISSA_MASK = np.uint32(2**_MANTISSA_BITS - 1)
_E8M0_ONE, _E8M0_NAN = 127, 255
_PIECE_ELEMENTS = 2**17


def pack_nibbles(codes: np.ndarray, axis: int = -1) -> np.ndarray:
    """uint8 codes below 16 (else InvalidInput), two per byte along `axis`, even index low, padded with 0."""
    codes = np.asarray(codes)
    if codes.dtype != np.uint8 or (codes.size and codes.max() > 15):
        raise InvalidInput(f"codes must be uint8 below 16, got {codes.dtype}; mask them with 15")
    moved = np.moveaxis(codes, axis, -1)
    low, high = moved[..., 0::2], moved[..., 1::2]
    packed = low.copy()
    packed[..., : high.shape[-1]] |= high << np.uint8(4)
    return np.ascontiguousarray(np.moveaxis(packed, -1, axis))


def unpack_nibbles(packed: np.ndarray, axis: int = -1, length: int | None = None) -> np.ndarray:
    """The inverse of `pack_nibbles`. length: number of codes along `axis`, None: two per byte."""
    packed = np.asarray(packed)
    if packed.dtype != np.uint8:
        raise InvalidInput(f"packed must be uint8, got {packed.dtype}; view it as bytes")
    moved = np.moveaxis(packed, axis, -1)
    total = 2 * moved.shape[-1] if length is None else length
    if not 2 * moved.shape[-1] - 1 <= total <= 2 * moved.shape[-1]:
        raise InvalidInput(f"length must be what {moved.shape[-1]} bytes hold, got {length}; pass the unpacked length")
    codes = np.empty((*moved.shape[:-1], 2 * moved.shape[-1]), np.uint8)
    codes[..., 0::2] = moved & np.uint8(15)
    codes[..., 1::2] = moved >> np.uint8(4)
    return np.ascontiguousarray(np.moveaxis(codes[..., :total], -1, axis))


def e2m1_to_float32(codes: np.ndarray) -> np.ndarray:
    """fp32 values of e2m1 codes 0..15: 0 .5 1 1.5 2 3 4 6 and, with bit 3 set, their negatives."""
    return np.concatenate([_E2M1, -_E2M1])[codes]


def float32_to_e2m1(values: np.ndarray) -> np.ndarray:
    """e2m1 codes of fp32 values without NaN: half to even, saturating at 6, the sign of zero kept."""
    magnitude = np.minimum(np.abs(values), _E2M1[-1])
    # Codes are spaced 1/2 up to 2 (code 4), 1 up to 4 (code 6), then 2. Ties go to the even code. Offsets are added
    # last, because the addition would round.
    upper = np.where(magnitude < 4, np.rint(magnitude) + np.float32(2), np.rint(magnitude / 2) + np.float32(4))
    codes = np.where(magnitude < 2, np.rint(magnitude * 2), upper).astype(np.uint8)
    return codes | (np.signbit(values).astype(np.uint8) << np.uint8(3))


def e8m0_to_float32(scales: np.ndarray) -> np.ndarray:
    """fp32 2^(b - 127) of uint8 b. 255 is NaN (OCP MX 1.0, section 5.4.1)."""
    bits = scales.astype(np.uint32) << np.uint32(_MANTISSA_BITS)
    bits[scales == 0] = 1 << (_MANTISSA_BITS - 1)
    values = bits.view(np.float32)
    values[scales == _E8M0_NAN] = np.nan
    return values


def _bits(values: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(values, np.float32).view(np.uint32)


def _up_to_power_of_two(values: np.ndarray) -> np.ndarray:
    """fp32 bits of positive normal values rounded up to a power of two."""
    return (_bits(values) + _MANTISSA_MASK) & ~_MANTISSA_MASK


def _choose_scales(amax: np.ndarray, format: Format) -> np.ndarray:
    largest = np.float32(format.own_element.largest)
    usable = np.isfinite(amax)
    amax = np.where(usable, amax, np.float32(1))
    if not format.has_e8m0_scales:
        scales = np.maximum(amax, SMALLEST_AMAX) / largest
        if format.scale_rule == "power_of_two":
            scales = _up_to_power_of_two(scales).view(np.float32)
        return np.where(usable, scales, np.float32(np.nan))
    if format.scale_rule == "floor":
        top_exponent = format.own_element.top_exponent
        assert top_exponent is not None
        exponent = (_bits(amax) >> np.uint32(_MANTISSA_BITS)).astype(np.int32) - top_exponent
    else:
        # If amax / largest is a denormal the bits give 2^-126, the smallest normal exponent.
        exponent = (_up_to_power_of_two(amax / largest) >> np.uint32(_MANTISSA_BITS)).astype(np.int32)
    scales = np.maximum(exponent, 0).astype(np.uint8)
    scales[amax == 0] = _E8M0_ONE
    scales[~usable] = _E8M0_NAN
    return scales


def _encode(quotients: np.ndarray, zero_points: np.ndarray | None, format: Format) -> np.ndarray:
    element = format.own_element
    largest = np.float32(element.largest)
    if element.name == "e4m3":
        return np.clip(quotients, -largest, largest).astype(ml_dtypes.float8_e4m3fn)
    if element.name == "e2m1":
        return float32_to_e2m1(quotients)
    if element.max_code is None:
        return np.clip(np.rint(quotients), -largest, largest).astype(np.int8)
    zero = np.float32(element.zero_point) if zero_points is None else zero_points.astype(np.float32)
    return np.clip(np.rint(quotients) + zero, 0, element.max_code).astype(np.uint8)


@functools.cache
def _numbers(dtype: np.dtype) -> np.ndarray:
    """The number of each byte: several times as fast as a cast."""
    return np.arange(256, dtype=np.uint8).view(dtype).astype(np.float32)


def _decode(codes: np.ndarray, zero_points: np.ndarray | None, format: Format) -> np.ndarray:
    element = format.own_element
    if element.name == "e2m1":
        return e2m1_to_float32(codes)
    if element.max_code is None:
        return _numbers(codes.dtype)[codes.view(np.uint8)]
    values = codes.astype(np.float32)
    return values - (np.float32(element.zero_point) if zero_points is None else zero_points.astype(np.float32))


class _Grid(NamedTuple):
    shape: tuple[int, int]
    counts: tuple[int, int]
    group: tuple[int, int]

    @classmethod
    def of(cls, shape: tuple[int, ...], format: Format) -> _Grid:
        extents = (format.group_rows, format.group_columns)
        group = [max(size, 1) if extent is None else extent for size, extent in zip(shape, extents, strict=True)]
        counts = [1 if extent is None else -(-size // extent) for size, extent in zip(shape, extents, strict=True)]
        return cls((shape[0], shape[1]), (counts[0], counts[1]), (group[0], group[1]))

    def split(self, matrix: np.ndarray) -> np.ndarray:
        padded = self.counts[0] * self.group[0], self.counts[1] * self.group[1]
        if padded != matrix.shape:
            whole = np.zeros(padded, matrix.dtype)
            whole[: self.shape[0], : self.shape[1]] = matrix
            matrix = whole
        return matrix.reshape(self.counts[0], self.group[0], self.counts[1], self.group[1])

    def join(self, groups: np.ndarray) -> np.ndarray:
        matrix = groups.reshape(self.counts[0] * self.group[0], self.counts[1] * self.group[1])
        return matrix[: self.shape[0], : self.shape[1]]


def _spread(per_group: np.ndarray) -> np.ndarray:
    return per_group[:, None, :, None]


def _group_zero_points(groups: np.ndarray, usable: np.ndarray, format: Format) -> tuple[np.ndarray, np.ndarray]:
    """(scales fp32, zero points uint8): low <= 0 <= high map onto the codes 0 and max_code."""
    max_code = format.own_element.max_code
    assert max_code is not None
    high = np.where(usable, groups.max(axis=(1, 3), initial=0), 0).astype(np.float64)
    low = np.where(usable, groups.min(axis=(1, 3), initial=0), 0).astype(np.float64)
    # high - low cannot overflow in float64. One rounding.
    scales = (np.maximum(high - low, np.float64(SMALLEST_AMAX)) / max_code).astype(np.float32)
    zero_points = np.clip(np.rint(-low.astype(np.float32) / scales), 0, max_code).astype(np.uint8)
    return np.where(usable, scales, np.float32(np.nan)), zero_points


def _quantize_matrix(
    matrix: np.ndarray, format: Format, given: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    grid = _Grid.of(matrix.shape, format)
    groups = grid.split(matrix)
    zero_points = None
    with np.errstate(all="ignore"):
        amax = np.abs(groups).max(axis=(1, 3), initial=0)
        finite = np.isfinite(amax)
        if given is not None:
            scales = given
        elif format.zero_points:
            scales, zero_points = _group_zero_points(groups, finite, format)
        else:
            scales = _choose_scales(amax, format)
        divisor = e8m0_to_float32(scales) if format.has_e8m0_scales else to_float32(scales)
        quotients = np.where(_spread(finite & (divisor > 0)), groups / _spread(divisor), np.float32(0))
    codes = _encode(quotients, None if zero_points is None else _spread(zero_points), format)
    return grid.join(codes), scales, zero_points


def _pieces(tensor: QuantizedTensor, logical: np.ndarray) -> Iterator[tuple[np.ndarray, ...]]:
    """(logical, values, scales[, zero points]) views of whole row groups that fit a cache."""
    group, per_byte = tensor.format.group_rows, tensor.format.own_element.per_byte
    arrays, unit = [array for _, array in named_arrays(tensor)], math.lcm(group or 1, per_byte)
    for index in np.ndindex(logical.shape[:-2]):
        matrices = [array[index] if tensor.layout == "out_in" else array[index].T for array in (logical, *arrays)]
        rows, columns = matrices[0].shape
        step = max(1, rows) if group is None else max(1, _PIECE_ELEMENTS // max(1, columns * unit)) * unit
        for start in range(0, max(1, rows), step):
            stop = min(start + step, rows)
            spans = [slice(start, stop)] * 2
            spans.append(slice(None) if group is None else slice(start // group, -(-stop // group)))
            spans.append(slice(start // per_byte, -(-stop // per_byte)))
            yield tuple(matrix[span] for matrix, span in zip(matrices, spans, strict=False))


def quantize(
    x: np.ndarray, format: Format, *, layout: str = "out_in", scales: np.ndarray | None = None
) -> QuantizedTensor:
    """`x` in a format: weights `[..., N, D]` (`out_in`) or `[..., D, N]` (`in_out`), activations `[T, D]` (`out_in`).

    x: fp32, bf16 or fp16; leading axes are separate matrices. scales: static scales; zero or NaN gives zero codes.
    Raises InvalidInput for shapes that the format's padding rule refuses, static scales of a wrong shape, and static
    scales in a format with zero points.
    """
    x = np.asarray(x)
    require_choice("x's dtype", dtypes.canonical(x.dtype), dtypes.MATMUL_DTYPES)
    spec = QuantizedSpec(format, layout)
    shapes = quantized_shapes(spec, x.shape)
    element = format.own_element
    if scales is not None and format.zero_points:
        raise InvalidInput(f"scales must be None for {format.name}, got an array; its zero points follow from x too")
    if scales is not None:
        scales = np.asarray(scales)
        if scales.shape != shapes.scales or dtypes.canonical(scales.dtype) not in format.scale_dtypes:
            raise InvalidInput(
                f"scales of {format.name} must be {format.scale_dtypes[0]}{list(shapes.scales)}, got "
                f"{scales.dtype}{list(scales.shape)}; pass those of this tensor"
            )
    tensor = QuantizedTensor(
        spec,
        np.empty(shapes.values, dtypes.numpy_dtype(element.dtype)),
        np.empty(shapes.scales, dtypes.numpy_dtype(format.scale_dtypes[0])) if scales is None else scales.copy(),
        None if shapes.zero_points is None else np.empty(shapes.zero_points, np.uint8),
    )
    packed = element.per_byte == 2
    for piece, values, own_scales, *own_points in _pieces(tensor, x):
        codes, chosen, zero_points = _quantize_matrix(to_float32(piece), format, None if scales is None else own_scales)
        values[...] = pack_nibbles(codes) if packed else codes
        own_scales[...] = chosen
        if zero_points is not None:
            own_points[0][...] = pack_nibbles(zero_points, 0) if packed else zero_points
    return tensor


def choose_scales(matrix: np.ndarray, format: Format) -> np.ndarray:
    """The scales `quantize` chooses for a matrix `[N, D]`, in a format without zero points."""
    groups = _Grid.of(matrix.shape, format).split(to_float32(matrix))
    with np.errstate(all="ignore"):
        return _choose_scales(np.abs(groups).max(axis=(1, 3), initial=0), format)


def dequantize(tensor: QuantizedTensor, dtype: str = "float32") -> np.ndarray:
    """The logical tensor in the same layout: (code - zero point) x scale in fp32, cast to `dtype`.

    tensor: of NumPy arrays. dtype: `float32`, `bfloat16` or `float16`. A NaN scale gives NaN.
    """
    require_choice("dtype", dtype, dtypes.MATMUL_DTYPES)
    format = tensor.format
    if not all(isinstance(array, np.ndarray) for _, array in named_arrays(tensor)):
        raise InvalidInput(
            f"tensor must hold NumPy arrays, got {type(tensor.values).__name__}; convert them (map_arrays) first"
        )
    tensor = untile(tensor)
    result = np.empty(tensor.shape, dtypes.numpy_dtype(dtype))
    packed = format.own_element.per_byte == 2
    for piece, codes, scales, *points in _pieces(tensor, result):
        grid = _Grid.of(piece.shape, format)
        zero_points = None
        if points:
            zero_points = _spread(unpack_nibbles(points[0], 0, len(piece)) if packed else points[0])
        groups = grid.split(unpack_nibbles(codes) if packed else codes)
        factor = _spread(e8m0_to_float32(scales) if format.has_e8m0_scales else to_float32(scales))
        with np.errstate(all="ignore"):
            piece[...] = round_to(grid.join(_decode(groups, zero_points, format) * factor), dtype)
    return result


def codes_and_scales(tensor: QuantizedTensor) -> tuple[np.ndarray, np.ndarray]:
    """(codes `[rows, columns]`, scales `[rows or 1, column groups]`) of a matrix without zero points, in fp32.

    Rows are outputs or tokens in either layout. A scale of several rows is repeated for each.
    """
    tensor = untile(tensor)
    values, scales = tensor.values, tensor.scales
    if tensor.layout == "in_out":
        values, scales = values.T, scales.T
    format = tensor.format
    codes = _decode(unpack_nibbles(values) if format.own_element.per_byte == 2 else values, None, format)
    factors = e8m0_to_float32(scales) if format.has_e8m0_scales else to_float32(scales)
    if format.group_rows is not None and format.group_rows > 1:
        factors = np.repeat(factors, format.group_rows, axis=0)[: len(codes)]
    return codes, factors


def quantize_rows(
    x: np.ndarray, static_scale: np.ndarray | None = None, used_by: np.ndarray | None = None, *, format: Format
) -> tuple[np.ndarray, np.ndarray]:
    """The results of `plan_quantize_rows`: values, scales.

    With a static scale elements are independent: NaN stays NaN in e4m3 and becomes 0 elsewhere, infinity becomes the
    largest number, and a scale of zero or NaN gives zero codes.
    """
    if used_by is not None:
        used = np.any(used_by.reshape(len(x), len(used_by) // max(1, len(x))) >= 0, axis=1)
        x = np.where(used[:, None], x, np.zeros((), x.dtype))
    if static_scale is None:
        tensor = quantize(x, format)
        return tensor.values, tensor.scales
    with np.errstate(all="ignore"):
        quotients = np.where(static_scale > 0, to_float32(x) / static_scale, np.float32(0))
        # Use one NaN: a computed NaN's sign depends on its origin.
        unknown = np.float32(np.nan if format.element == "e4m3" else 0)
        codes = _encode(np.where(np.isnan(quotients), unknown, quotients), None, format)
    return pack_nibbles(codes) if format.own_element.per_byte == 2 else codes, static_scale.reshape(1, 1).copy()


#: Elements whose errors fit in a core's cache.
_AT_ONCE = 1 << 15


class ErrorSum:
    """The relative Frobenius error |restored - original| / |original| over pairs of arrays, in float64."""

    def __init__(self) -> None:
        self._difference = self._original = 0.0

    def add(self, original: np.ndarray, restored: np.ndarray) -> None:
        if original.shape != restored.shape:
            raise InvalidInput(f"restored must be {original.shape} like original, got {restored.shape}; pass a pair")
        original, restored = original.reshape(-1), restored.reshape(-1)
        difference = whole = 0.0
        for start in range(0, original.size, _AT_ONCE):
            before = original[start : start + _AT_ONCE].astype(np.float64)
            apart = restored[start : start + _AT_ONCE] - before
            difference += float(np.square(apart, out=apart).sum())
            whole += float(np.square(before, out=before).sum())
        self._difference += difference
        self._original += whole

    @property
    def sums(self) -> tuple[float, float]:
        """The squares of differences and of originals."""
        return self._difference, self._original

    @sums.setter
    def sums(self, sums: tuple[float, float]) -> None:
        self._difference, self._original = sums

    @property
    def relative_frobenius(self) -> float:
        """0 without any difference, infinite if only restored arrays are nonzero."""
        if self._original == 0:
            return 0.0 if self._difference == 0 else float("inf")
        return float(np.sqrt(self._difference / self._original))
