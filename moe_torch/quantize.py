"""Quantise, dequantise and prepack tensors on their device, one matrix at a time, with the references' bits."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch.nn.functional import pad

from moe_core.base import dtypes
from moe_core.errors import InvalidInput
from moe_core.formats import Format, QuantizedSpec, QuantizedTensor, quantized_shapes
from moe_core.ops.prepack import prepack as core
from moe_core.ops.quantize.reference import Grid, spread
from moe_core.specs import MoESpec
from moe_core.specs.operands import ExpertWeights, map_arrays, named_arrays
from moe_torch.bridge.arrays import array_spec, require_memory
from moe_torch.bridge.options import TORCH_DTYPES, dtype_name, require_instance
from moe_torch.operators.stages import QUANTIZE_ROWS

Weights = TypeVar("Weights", QuantizedTensor, ExpertWeights)
_TORCH = core.ArrayFunctions(torch.permute, torch.stack, lambda array, rows, columns: pad(array, (0, columns, 0, rows)))
_MANTISSA_BITS, _MANTISSA_MASK = 23, 2**23 - 1
_E8M0_ONE, _E8M0_NAN = 127, 255
#: Scales are chosen for at least this amax, so that zeros divide.
_SMALLEST_AMAX = 1e-10
#: Magnitudes of e2m1 codes 0..7. Bit 3 of a code is the sign.
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def quantize_rows(
    x: torch.Tensor, format: Format, *, scales: torch.Tensor | None = None, used_by: torch.Tensor | None = None
) -> QuantizedTensor:
    """Quantise rows to a format of activations with one operator, also in compiled and exported programs and CUDA
    graphs.

    Args:
        x: bf16, fp16 or fp32 `[R, D]`. Rows may be strided.
        format: e4m3, e2m1 or int8, with one scale per row, per group of columns in a row, or for all of x (`FP8_TOKEN`,
            `FP8_GROUP`, `INT8_TOKEN`, `MXFP8`, `MXFP4`, `FP8_TENSOR`, ...).
        scales: fp32 `[1]`, a static scale, for formats with one per tensor. None: computed from x.
        used_by: int32 `[R * n]`, a layout's row_of_slot for tokens, slot_of_row for its rows. Rows with only negative
            entries become zeros.

    Returns:
        the rows, `out_in`, with the bits of `moe_core.ops.quantize.reference.quantize_rows`, without a gradient.
    """
    require_instance("format", format, Format)
    values, scales = QUANTIZE_ROWS.call(x=x, static_scale=scales, used_by=used_by, format=format)
    # A check would fix a symbolic number of rows.
    return QuantizedTensor.unchecked(QuantizedSpec(format), values, scales)


@torch.no_grad()
def quantize(weight: torch.Tensor, format: Format, *, layout: str = "out_in") -> QuantizedTensor:
    """Quantise a weight on its device, with the bits of `moe_core.ops.quantize.reference.quantize` and without a
    gradient.

    It takes a few times the memory of one matrix in fp32.

    Args:
        weight: bf16, fp16 or fp32 `[..., N, D]` (layout `out_in`) or `[..., D, N]` (`in_out`).

    Raises:
        InvalidInput: another weight, or a shape that the format's padding rule refuses.
    """
    require_instance("format", format, Format)
    _require_matmul_dtype("weight", array_spec("weight", weight).dtype)
    require_memory("weight", weight)
    spec, element = QuantizedSpec(format, layout), format.own_element
    shapes, dtype = quantized_shapes(spec, weight.shape), TORCH_DTYPES[element.dtype]
    scales = weight.new_empty(shapes.scales, dtype=TORCH_DTYPES[format.scale_dtypes[0]])
    points = None if shapes.zero_points is None else weight.new_empty(shapes.zero_points, dtype=dtype)
    tensor = QuantizedTensor(spec, weight.new_empty(shapes.values, dtype=dtype), scales, points)
    for matrix, values, own_scales, *own_points in _matrices(tensor, weight):
        codes, scales, zero_points = _quantize_matrix(matrix.float(), format)
        values.copy_(_packed(codes, 1) if element.per_byte == 2 else codes)
        own_scales.copy_(scales)
        if zero_points is not None:
            own_points[0].copy_(_packed(zero_points, 0) if element.per_byte == 2 else zero_points)
    return tensor


@torch.no_grad()
def dequantize(tensor: QuantizedTensor, dtype: torch.dtype | str = torch.float32) -> torch.Tensor:
    """Return the numbers of a quantised tensor in its layout: code x scale, or (code - zero point) x scale, in fp32.

    A NaN scale gives NaN. No gradient flows through.

    Args:
        tensor: of torch tensors.
        dtype: bf16, fp16 or fp32, cast to once at the end.
    """
    require_instance("tensor", tensor, QuantizedTensor)
    _check_arrays("tensor", tensor)
    name = dtype_name("dtype", dtype)
    if name is None:
        raise InvalidInput("dtype must be a torch dtype or its name, got None; leave it out for float32")
    _require_matmul_dtype("dtype", name)
    format, tensor = tensor.format, restore_weights(tensor)
    result = tensor.values.new_empty(tensor.shape, dtype=TORCH_DTYPES[name])
    for matrix, codes, scales, *points in _matrices(tensor, result):
        zero_points = points[0] if points else None
        if format.own_element.per_byte == 2:
            codes = _unpacked(codes, 1)
            zero_points = None if zero_points is None else _unpacked(zero_points, 0)[: matrix.shape[0]]
        grid = Grid.of(matrix.shape, format)
        numbers = _decode(
            grid.split(codes, _zeros_behind), None if zero_points is None else spread(zero_points), format
        )
        factors = _e8m0_to_float32(scales) if format.has_e8m0_scales else scales.float()
        matrix.copy_(grid.join(numbers * spread(factors)))
    return result


def _check_arrays(name: str, tensor: QuantizedTensor) -> None:
    for field, array in named_arrays(tensor):
        array_spec(f"{name}.{field}", array)
        require_memory(f"{name}.{field}", array)
        if array.device != tensor.values.device:
            raise InvalidInput(
                f"{name}.{field} must be on {tensor.values.device} like {name}.values, got {array.device}; move it "
                f"with .to({str(tensor.values.device)!r})"
            )


def _require_matmul_dtype(name: str, dtype: str) -> None:
    if dtype not in dtypes.MATMUL_DTYPES:
        raise InvalidInput(f"{name} must be one of {', '.join(dtypes.MATMUL_DTYPES)}, got {dtype}; cast it")


def _matrices(tensor: QuantizedTensor, logical: torch.Tensor) -> Iterator[tuple[Any, ...]]:
    """(logical, values, scales[, zero points]) of each matrix of a stack, as views `[rows, columns]`."""
    arrays = [logical, *[array for _, array in named_arrays(tensor)]]
    for index in itertools.product(*[range(size) for size in logical.shape[:-2]]):
        yield tuple(array[index] if tensor.layout == "out_in" else array[index].mT for array in arrays)


def _zeros_behind(matrix: torch.Tensor, missing: tuple[int, int]) -> torch.Tensor:
    raw = matrix.view(torch.uint8) if matrix.dtype == torch.float8_e4m3fn else matrix
    return pad(raw, (0, missing[1], 0, missing[0])).view(matrix.dtype)


def _like(tensor: torch.Tensor, number: float) -> torch.Tensor:
    """A divisor as a tensor: torch multiplies with the reciprocal of a Python number on a GPU, which rounds twice."""
    return tensor.new_full((), number)


def _quantize_matrix(matrix: torch.Tensor, format: Format) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """(codes, scales, zero points) of fp32 `[rows, columns]`, not packed."""
    grid = Grid.of(matrix.shape, format)
    groups = grid.split(matrix, _zeros_behind)
    amax = groups.abs().amax(dim=(1, 3))
    finite, zero_points = amax.isfinite(), None
    if format.zero_points:
        scales, zero_points = _group_zero_points(groups, finite, format)
    else:
        scales = _choose_scales(amax, finite, format)
    divisor = _e8m0_to_float32(scales) if format.has_e8m0_scales else scales
    quotients = torch.where(spread(finite & (divisor > 0)), groups / spread(divisor), 0.0)
    codes = _encode(quotients, None if zero_points is None else spread(zero_points), format)
    return grid.join(codes), scales, zero_points


def _up_to_power_of_two(values: torch.Tensor) -> torch.Tensor:
    """fp32 bits of the smallest power of two at or above positive normal values, in the exponent field only."""
    return (values.view(torch.int32) + _MANTISSA_MASK) & ~_MANTISSA_MASK


def _choose_scales(amax: torch.Tensor, finite: torch.Tensor, format: Format) -> torch.Tensor:
    """Scales of groups with the largest magnitude amax in fp32, NaN if that is not finite."""
    element = format.own_element
    amax = torch.where(finite, amax, 1.0)
    if not format.has_e8m0_scales:
        scales = amax.clamp(min=_SMALLEST_AMAX) / _like(amax, element.largest)
        if format.scale_rule == "power_of_two":
            scales = _up_to_power_of_two(scales).view(torch.float32)
        return torch.where(finite, scales, torch.nan)
    if format.scale_rule == "floor":
        assert element.top_exponent is not None
        exponent = (amax.view(torch.int32) >> _MANTISSA_BITS) - element.top_exponent
    else:
        # If amax / largest is a denormal, the bits give 2^-126, the smallest exponent of a normal fp32 number.
        exponent = _up_to_power_of_two(amax / _like(amax, element.largest)) >> _MANTISSA_BITS
    exponent = torch.where(amax == 0, _E8M0_ONE, exponent.clamp(min=0))
    return torch.where(finite, exponent, _E8M0_NAN).to(torch.uint8)


def _group_zero_points(groups: torch.Tensor, finite: torch.Tensor, format: Format) -> tuple[torch.Tensor, torch.Tensor]:
    """(scales fp32, zero points uint8) per group: low <= 0 <= high map onto the codes 0 and max_code."""
    max_code = format.own_element.max_code
    assert max_code is not None
    # In float64 high - low cannot overflow. It is rounded to fp32 once.
    high = torch.where(finite, groups.amax(dim=(1, 3)).clamp(min=0), 0.0).double()
    low = torch.where(finite, groups.amin(dim=(1, 3)).clamp(max=0), 0.0).double()
    least = torch.full((), _SMALLEST_AMAX, dtype=torch.float32).item()
    scales = ((high - low).clamp(min=least) / _like(high, max_code)).float()
    zero_points = (-low.float() / scales).round().clamp(0, max_code).to(torch.uint8)
    return torch.where(finite, scales, torch.nan), zero_points


def _encode(quotients: torch.Tensor, zero_points: torch.Tensor | None, format: Format) -> torch.Tensor:
    """Codes of x / scale. zero_points: codes that broadcast, None: the default."""
    element = format.own_element
    if element.name == "e4m3":
        return quotients.clamp(-element.largest, element.largest).to(torch.float8_e4m3fn)
    if element.name == "e2m1":
        magnitude = quotients.abs().clamp(max=element.largest)
        # Codes are 1/2 apart up to 2 (code 4), 1 apart up to 4 (code 6), then 2. Offsets follow the rounding.
        upper = torch.where(magnitude < 4, magnitude.round() + 2, (magnitude * 0.5).round() + 4)
        codes = torch.where(magnitude < 2, (magnitude * 2).round(), upper).to(torch.uint8)
        return codes + quotients.signbit().to(torch.uint8) * 8
    if element.max_code is None:
        return quotients.round().clamp(-element.largest, element.largest).to(torch.int8)
    zero: Any = element.zero_point if zero_points is None else zero_points.float()
    return (quotients.round() + zero).clamp(0, element.max_code).to(torch.uint8)


def _decode(codes: torch.Tensor, zero_points: torch.Tensor | None, format: Format) -> torch.Tensor:
    element = format.own_element
    if element.name == "e2m1":
        numbers = torch.tensor((*_E2M1, *[-number for number in _E2M1]), device=codes.device)
        return numbers[codes.int()]
    if element.max_code is None:
        return codes.float()
    zero: Any = element.zero_point if zero_points is None else zero_points.float()
    return codes.float() - zero


def _e8m0_to_float32(scales: torch.Tensor) -> torch.Tensor:
    """fp32 2^(b - 127) of uint8 b: 0 is 2^-127 (a denormal), 255 is NaN (OCP MX 1.0, section 5.4.1)."""
    bits = scales.int() << _MANTISSA_BITS
    values = torch.where(scales == 0, 1 << (_MANTISSA_BITS - 1), bits).view(torch.float32)
    return torch.where(scales == _E8M0_NAN, torch.nan, values)


def _packed(codes: torch.Tensor, axis: int) -> torch.Tensor:
    """Pack uint8 codes below 16, two per byte along an axis, the even index in the low nibble. An odd end leaves 0."""
    if codes.shape[axis] % 2:
        codes = pad(codes, (0, 0, 0, 1) if axis == 0 else (0, 1))
    low, high = (codes.unflatten(axis, (-1, 2)).select(axis + 1, parity) for parity in (0, 1))
    return low + high * 16


def _unpacked(packed: torch.Tensor, axis: int) -> torch.Tensor:
    return torch.stack((packed % 16, packed // 16), axis + 1).flatten(axis, axis + 1)


@torch.no_grad()
def prepack_weights(weights: Weights, spec: MoESpec | None = None, *, gate_layout: str | None = None) -> Weights:
    """Put quantised weights into the order that Hopper's kernels for bf16 rows read.

    Do this once, when weights are loaded. It runs on the weights' device, one matrix at a time. `restore_weights` is
    the exact inverse. Prepacked weights come back as they are, and work wherever published ones do, except in gradients
    (docs/user/quantization.md).

    Args:
        weights: a `QuantizedTensor` `[..., N, D]`, or an `ExpertWeights` of them (one layer or a stack), in mxfp4,
            mxfp4_ceil, or 4- or 8-bit integers with a scale per row or per 32, 64, 128, ... columns. `in_out` tensors
            are transposed exactly.
        spec: with ExpertWeights, their MoESpec, for the layout of gate and up.
        gate_layout: with a tensor, `interleaved` or `halves` if its rows are gate and up, else None.

    Returns:
        the weights, `out_in`, to use with the same `MoESpec.weight_layout`.

    Raises:
        InvalidInput: other formats and types, gate_layout `separate`, sizes that do not divide into blocks
            (`moe_core.formats.Tiling`), and weights prepacked for another gate_layout.
    """
    return core.prepack_weights(weights, spec, gate_layout=gate_layout, tile=tile)


@torch.no_grad()
def restore_weights(weights: Weights) -> Weights:
    """Restore the published layout, `out_in`, of prepacked weights. Other weights are returned as they are."""
    return core.restore_weights(weights, untile)


def tile(tensor: QuantizedTensor, order: str) -> QuantizedTensor:
    """See `moe_core.ops.prepack.prepack.tile`."""
    return _by_matrix(tensor, lambda matrix: core.tile(matrix, order, _TORCH))


def untile(tensor: QuantizedTensor) -> QuantizedTensor:
    """See `moe_core.ops.prepack.prepack.untile`."""
    return _by_matrix(tensor, lambda matrix: core.untile(matrix, _TORCH))


def _by_matrix(tensor: QuantizedTensor, change: Callable[[QuantizedTensor], QuantizedTensor]) -> QuantizedTensor:
    _check_arrays("weights", tensor)
    lead = tuple(tensor.shape[:-2])
    if not lead or 0 in lead:
        return map_arrays(change(tensor), torch.Tensor.contiguous)
    made = None
    for index in itertools.product(*(range(size) for size in lead)):
        matrix = map_arrays(tensor, lambda array, index=index: array[index])
        changed = change(matrix)
        if changed is matrix:
            return tensor
        if made is None:
            made = map_arrays(changed, lambda array: array.new_empty((*lead, *array.shape)))
        for (_, target), (_, array) in zip(named_arrays(made), named_arrays(changed), strict=True):
            target[index].copy_(array)
    assert made is not None
    return made
