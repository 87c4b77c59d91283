"""NumPy twin of quantisation: pack, unpack, quantise and dequantise by the definition of each format.

Arithmetic is fp32, rounded half to even, one operation at a time, so a kernel can match the bits: amax of the group,
scale, q = x / scale (true division), clamp, round. A group with a NaN or infinity gets scale NaN and zero codes in
every format.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Self

import numpy as np

from moe_core.base import dtypes, require_choice
from moe_core.errors import InvalidInput
from moe_core.formats import Format, QuantizedSpec, QuantizedTensor, quantized_shapes
from moe_core.ops.common.rounding import round_to, to_float32
from moe_core.ops.prepack.prepack import untile
from moe_core.ops.quantize.codes import (
    E8M0_NAN,
    E8M0_ONE,
    MANTISSA_BITS,
    e8m0_to_float32,
    float32_to_e2m1,
    float32_to_e4m3,
    numbers_of_bytes,
    pack_nibbles,
    unpack_nibbles,
)
from moe_core.specs import named_arrays

#: Lower bound of amax for a scale, so that zeros divide.
SMALLEST_AMAX = np.float32(1e-10)
_MANTISSA_MASK = np.uint32(2**MANTISSA_BITS - 1)
_PIECE_ELEMENTS = 2**16
#: The widest groups that are faster to reduce as columns.
_NARROW = 48

Rounding = Callable[[np.ndarray], np.ndarray]


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
        exponent = (_bits(amax) >> np.uint32(MANTISSA_BITS)).astype(np.int32) - top_exponent
    else:
        # If amax / largest is a denormal the bits give 2^-126, the smallest normal exponent.
        exponent = (_up_to_power_of_two(amax / largest) >> np.uint32(MANTISSA_BITS)).astype(np.int32)
    scales = np.maximum(exponent, 0).astype(np.uint8)
    scales[amax == 0] = E8M0_ONE
    scales[~usable] = E8M0_NAN
    return scales


def _encode(quotients: np.ndarray, zero_points: np.ndarray | None, format: Format) -> np.ndarray:
    element = format.own_element
    largest = np.float32(element.largest)
    if element.name == "e4m3":
        return float32_to_e4m3(quotients)
    if element.name == "e2m1":
        return float32_to_e2m1(quotients)
    codes = np.rint(quotients)
    if element.max_code is None:
        return np.clip(codes, -largest, largest, out=codes).astype(np.int8)
    codes += np.float32(element.zero_point) if zero_points is None else zero_points.astype(np.float32)
    return np.clip(codes, 0, element.max_code, out=codes).astype(np.uint8)


def _decode(values: np.ndarray, format: Format, zero: int | None = None) -> np.ndarray:
    """fp32 numbers, in a new array, of stored values with their last axis in order. zero: instead of the format's."""
    element = format.own_element
    zero = (element.zero_point or 0) if zero is None else zero
    if element.name == "e4m3" or element.per_byte == 2:
        return np.take(numbers_of_bytes(element.name, zero), values.view(np.uint8)).view(np.float32)
    numbers = values.astype(np.float32)
    numbers -= np.float32(zero)
    return numbers


def _zeros_behind(matrix: np.ndarray, missing: tuple[int, int]) -> np.ndarray:
    return np.pad(matrix, [(0, size) for size in missing])


class Grid(NamedTuple):
    """The groups of a matrix of any framework. Partial groups are filled up with zeros."""

    shape: tuple[int, int]
    counts: tuple[int, int]
    group: tuple[int, int]

    @classmethod
    def of(cls, shape: Sequence[int], format: Format) -> Self:
        extents = (format.group_rows, format.group_columns)
        group = [max(size, 1) if extent is None else extent for size, extent in zip(shape, extents, strict=True)]
        counts = [1 if extent is None else -(-size // extent) for size, extent in zip(shape, extents, strict=True)]
        return cls((shape[0], shape[1]), (counts[0], counts[1]), (group[0], group[1]))

    def split(self, matrix: Any, pad: Callable[[Any, tuple[int, int]], Any] = _zeros_behind) -> Any:
        """`[row groups, group rows, column groups, group columns]`. pad: adds so many rows and columns."""
        rows, columns = (count * group for count, group in zip(self.counts, self.group, strict=True))
        if (rows, columns) != self.shape:
            matrix = pad(matrix, (rows - self.shape[0], columns - self.shape[1]))
        return matrix.reshape(self.counts[0], self.group[0], self.counts[1], self.group[1])

    def join(self, groups: Any) -> Any:
        matrix = groups.reshape(self.counts[0] * self.group[0], self.counts[1] * self.group[1])
        return matrix[: self.shape[0], : self.shape[1]]


def spread(per_group: Any) -> Any:
    """`[row groups, column groups]` for broadcasting against `Grid.split`."""
    return per_group[:, None, :, None]


def _group_zero_points(groups: np.ndarray, usable: np.ndarray, format: Format) -> tuple[np.ndarray, np.ndarray]:
    """(scales fp32, zero points uint8): low <= 0 <= high map onto the codes 0 and max_code."""
    max_code = format.own_element.max_code
    assert max_code is not None
    high = np.where(usable, _extreme(groups, np.maximum), 0).astype(np.float64)
    low = np.where(usable, _extreme(groups, np.minimum), 0).astype(np.float64)
    # high - low cannot overflow in float64. One rounding.
    scales = (np.maximum(high - low, np.float64(SMALLEST_AMAX)) / max_code).astype(np.float32)
    zero_points = np.clip(np.rint(-low.astype(np.float32) / scales), 0, max_code).astype(np.uint8)
    return np.where(usable, scales, np.float32(np.nan)), zero_points


def _extreme(groups: np.ndarray, of_two: np.ufunc) -> np.ndarray:
    """The maximum or minimum of zero and each group of `[groups, rows, groups, columns]`."""
    width, zero = groups.shape[-1], np.zeros((), groups.dtype)
    if groups.size == 0:
        return np.zeros(groups.shape[::2], groups.dtype)
    if width <= _NARROW:
        rows = of_two.reduce(np.ascontiguousarray(groups.reshape(-1, width).T), 0)
    else:
        rows = of_two.reduceat(np.ascontiguousarray(groups).reshape(-1), np.arange(0, groups.size, width))
    return of_two.reduce(rows.reshape(groups.shape[:3]), 1, initial=zero)


def _quantize_matrix(
    matrix: np.ndarray, format: Format, given: np.ndarray | None, rounded: Rounding | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    grid = Grid.of(matrix.shape, format)
    groups = grid.split(matrix)
    zero_points = None
    with np.errstate(all="ignore"):
        magnitudes = np.abs(groups)
        finite = np.isfinite(magnitudes.max(initial=0))
        if given is None or not finite:
            amax = _extreme(magnitudes, np.maximum)
            finite = np.isfinite(amax)
        if given is not None:
            scales = given
        elif format.zero_points:
            scales, zero_points = _group_zero_points(groups, finite, format)
        else:
            scales = _choose_scales(amax, format)
            scales = scales if rounded is None else rounded(scales)
        divisor = e8m0_to_float32(scales) if format.has_e8m0_scales else to_float32(scales)
        usable = finite & (divisor > 0)
        quotients = np.divide(groups, spread(divisor), out=magnitudes)
        if not usable.all():
            quotients = np.where(spread(usable), quotients, np.float32(0))
    codes = _encode(quotients, None if zero_points is None else spread(zero_points), format)
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
    if scales is not None and format.zero_points:
        raise InvalidInput(f"scales must be None for {format.name}, got an array; its zero points follow from x too")
    if scales is not None:
        scales = np.asarray(scales)
        if scales.shape != shapes.scales or dtypes.canonical(scales.dtype) not in format.scale_dtypes:
            raise InvalidInput(
                f"scales of {format.name} must be {format.scale_dtypes[0]}{list(shapes.scales)}, got "
                f"{scales.dtype}{list(scales.shape)}; pass those of this tensor"
            )
    return _quantized(x, spec, scales, None)


def quantize_rounded(matrix: np.ndarray, format: Format, rounded: Rounding) -> QuantizedTensor:
    """`quantize` of a matrix `[N, D]` without zero points, where chosen scales are rounded before they divide."""
    return _quantized(matrix, QuantizedSpec(format), None, rounded)


def _quantized(
    x: np.ndarray, spec: QuantizedSpec, scales: np.ndarray | None, rounded: Rounding | None
) -> QuantizedTensor:
    format, shapes = spec.format, quantized_shapes(spec, x.shape)
    element = format.own_element
    tensor = QuantizedTensor(
        spec,
        np.empty(shapes.values, dtypes.numpy_dtype(element.dtype)),
        np.empty(shapes.scales, dtypes.numpy_dtype(format.scale_dtypes[0])) if scales is None else scales.copy(),
        None if shapes.zero_points is None else np.empty(shapes.zero_points, np.uint8),
    )
    packed = element.per_byte == 2
    for piece, values, own_scales, *own_points in _pieces(tensor, x):
        given = None if scales is None else own_scales
        codes, chosen, zero_points = _quantize_matrix(to_float32(piece), format, given, rounded)
        values[...] = pack_nibbles(codes) if packed else codes
        own_scales[...] = chosen
        if zero_points is not None:
            own_points[0][...] = pack_nibbles(zero_points, 0) if packed else zero_points
    return tensor


def group_maxima(matrix: np.ndarray, format: Format) -> np.ndarray:
    """The largest magnitudes of the groups of a matrix `[N, D]`, in a format with a group per row or less."""
    step = max(1, _PIECE_ELEMENTS // max(1, matrix.shape[1]))
    pieces = [matrix[start : start + step] for start in range(0, max(1, len(matrix)), step)]
    split = [Grid.of(piece.shape, format).split(to_float32(piece)) for piece in pieces]
    return np.concatenate([_extreme(np.abs(groups), np.maximum) for groups in split])


def dequantize(tensor: QuantizedTensor, dtype: str = "float32") -> np.ndarray:
    """The logical tensor in the same layout: (code - zero point) x scale in fp32, cast to `dtype`.

    tensor: of NumPy arrays. dtype: `float32`, `bfloat16` or `float16`. A NaN scale gives NaN.
    """
    require_choice("dtype", dtype, dtypes.MATMUL_DTYPES)
    if not all(isinstance(array, np.ndarray) for _, array in named_arrays(tensor)):
        raise InvalidInput(
            f"tensor must hold NumPy arrays, got {type(tensor.values).__name__}; convert them (map_arrays) first"
        )
    tensor = untile(tensor)
    result = np.empty(tensor.shape, dtypes.numpy_dtype(dtype))
    for piece, numbers in _dequantized(tensor, result):
        piece[...] = round_to(numbers, dtype)
    return result


def _dequantized(tensor: QuantizedTensor, logical: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Pieces of `logical`, and the fp32 numbers of the tensor there."""
    format = tensor.format
    for piece, codes, scales, *points in _pieces(tensor, logical):
        grid = Grid.of(piece.shape, format)
        groups = grid.split(_decode(codes, format, 0 if points else None))
        with np.errstate(all="ignore"):
            if points:
                packed = format.own_element.per_byte == 2
                groups -= spread(unpack_nibbles(points[0], 0, len(piece)) if packed else points[0])
            groups *= spread(e8m0_to_float32(scales) if format.has_e8m0_scales else to_float32(scales))
        yield piece, grid.join(groups)


def codes_and_scales(tensor: QuantizedTensor) -> tuple[np.ndarray, np.ndarray]:
    """(codes `[rows, columns]`, scales `[rows, column groups]`) of a matrix without zero points, in fp32."""
    tensor = untile(tensor)
    values, scales = tensor.values, tensor.scales
    if tensor.layout == "in_out":
        values, scales = values.T, scales.T
    format = tensor.format
    codes = _decode(values, format)
    factors = e8m0_to_float32(scales) if format.has_e8m0_scales else to_float32(scales)
    if format.group_rows is not None and format.group_rows > 1:
        factors = np.repeat(factors, format.group_rows, axis=0)[: len(codes)]
    return codes, factors


def quantize_rows(
    x: np.ndarray, static_scale: np.ndarray | None = None, used_by: np.ndarray | None = None, *, format: Format
) -> tuple[np.ndarray, np.ndarray]:
    """values, scales of `plan_quantize_rows`. With a static scale elements are independent: NaN stays NaN in e4m3 and
    becomes 0 elsewhere, infinity becomes the largest number, and a scale of zero or NaN gives zero codes.
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

    def add(self, original: np.ndarray, restored: np.ndarray | QuantizedTensor) -> None:
        """restored: numbers, or what they are dequantised from."""
        if tuple(original.shape) != tuple(restored.shape):
            raise InvalidInput(f"restored must be {original.shape} like original, got {restored.shape}; pass a pair")
        pairs = _dequantized(restored, original) if isinstance(restored, QuantizedTensor) else [(original, restored)]
        difference, whole, same = 0.0, 0.0, restored is original
        for piece, numbers in pairs:
            one, other = piece.reshape(-1), numbers.reshape(-1)
            for start in range(0, one.size, _AT_ONCE):
                before = one[start : start + _AT_ONCE].astype(np.float64)
                whole += float(np.einsum("i,i", before, before))
                if not same:
                    np.subtract(other[start : start + _AT_ONCE].astype(np.float64), before, out=before)
                    difference += float(np.einsum("i,i", before, before))
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
