"""Independent formulations of quantisation in Python's floats, one group and one element at a time."""

from __future__ import annotations

import itertools
import math

import numpy as np

from moe_core.formats import Format, QuantizedTensor
from moe_core.ops.quantize.codes import e8m0_to_float32

#: Half a step of the element over its largest magnitude, twice where a power-of-two scale wastes up to one bit.
HALF_STEP = {"e4m3": 16 / 448, "e2m1": 1 / 6, "int8": 0.5 / 127, "uint8": 0.5 / 127, "uint4": 0.5 / 7}


def formula(tensor: QuantizedTensor) -> np.ndarray:
    """The value of every element, one at a time, in float64 rounded once to fp32."""
    format, out_in = tensor.format, tensor.layout == "out_in"
    values, scales, points = (
        None if array is None else (array if out_in else array.T)
        for array in (tensor.values, tensor.scales, tensor.zero_points)
    )
    rows, columns = tensor.shape if out_in else tensor.shape[::-1]
    e2m1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    result = np.empty((rows, columns))
    for row, column in itertools.product(range(rows), range(columns)):
        group_row = 0 if format.group_rows is None else row // format.group_rows
        group_column = 0 if format.group_columns is None else column // format.group_columns
        if format.element in ("e2m1", "uint4"):
            code = (int(values[row, column // 2]) >> (4 * (column % 2))) & 15
        else:
            code = values[row, column]
        if format.element == "e2m1":
            number = e2m1[code & 7] * (-1 if code & 8 else 1)
        elif format.element in ("uint4", "uint8"):
            zero = {"uint4": 8, "uint8": 128}[format.element]
            if points is not None:
                packed = format.element == "uint4"
                zero = int(points[row // 2 if packed else row, group_column])
                zero = (zero >> (4 * (row % 2))) & 15 if packed else zero
            number = int(code) - zero
        else:
            number = float(code)
        scale = scales[group_row, group_column]
        if format.has_e8m0_scales:
            scale = math.nan if scale == 255 else math.ldexp(1.0, int(scale) - 127)
        result[row, column] = number * float(scale)
    with np.errstate(over="ignore"):
        return (result if out_in else result.T).astype(np.float32)


def up_to_power_of_two(value: float) -> float:
    mantissa, exponent = math.frexp(value)
    return math.ldexp(1.0, exponent - 1 if mantissa == 0.5 else exponent)


def fp32(value: float) -> float:
    return float(np.float32(value))


def expected_group(format: Format, group: np.ndarray) -> tuple[float, int | None, np.ndarray]:
    """(scale, zero point, elements) of one group, every formula on its own in Python's floats."""
    numbers = [float(value) for value in group.ravel()]
    element = format.element
    largest = {"e4m3": 448.0, "e2m1": 6.0, "int8": 127.0, "uint8": 127.0, "uint4": 7.0}[element]
    amax = max(map(abs, numbers), default=0.0)
    zero = None
    if not math.isfinite(math.fsum(numbers)):
        return math.nan, 0 if format.zero_points else None, np.zeros(group.shape)
    if format.zero_points:
        top = {"uint4": 15, "uint8": 255}[element]
        low, high = min(0.0, *numbers), max(0.0, *numbers)
        scale = fp32(max(high - low, fp32(1e-10)) / top)
        zero = min(max(round(fp32(-low / scale)), 0), top)
        elements = [min(max(round(fp32(number / scale)) + zero, 0), top) - zero for number in numbers]
        return scale, zero, np.array(elements, float).reshape(group.shape)
    if format.scale_rule == "amax":
        scale = fp32(max(amax, fp32(1e-10)) / largest)
    elif format.scale_rule == "power_of_two":
        scale = up_to_power_of_two(fp32(max(amax, fp32(1e-10)) / largest))
    elif amax == 0:
        scale = 1.0
    elif format.scale_rule == "floor":
        scale = 2.0 ** max(math.frexp(amax)[1] - 1 - {"e2m1": 2, "e4m3": 8}[element], -127)
    else:
        scale = 2.0**-126
        while amax / scale > largest:
            scale *= 2
    quotients = np.array([fp32(number / scale) for number in numbers]).clip(-largest, largest).reshape(group.shape)
    if element == "e4m3":
        return scale, zero, nearest(quotients, E4M3)
    if element == "e2m1":
        return scale, zero, nearest(quotients, E2M1)
    return scale, zero, np.array([round(number) for number in quotients.ravel()], float).reshape(group.shape)


def ladder(mantissa_bits: int, exponents: range, largest: float) -> np.ndarray:
    """The non-negative numbers of a small float, ascending: index = code, so that even codes have even mantissas."""
    steps = 2**mantissa_bits
    denormal = [math.ldexp(step, exponents[0] - mantissa_bits) for step in range(steps)]
    normal = [math.ldexp(steps + step, power - mantissa_bits) for power in exponents for step in range(steps)]
    return np.array([number for number in denormal + normal if number <= largest])


E4M3, E2M1 = ladder(3, range(-6, 9), 448.0), ladder(1, range(0, 3), 6.0)


def nearest(values: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    """Half to even on a ladder."""
    distance = np.abs(np.abs(values)[..., None] - numbers)
    closest = distance == distance.min(-1, keepdims=True)
    even = closest & (np.arange(len(numbers)) % 2 == 0)
    index = np.where(closest.sum(-1) > 1, even.argmax(-1), closest.argmax(-1))
    return np.copysign(numbers[index], values)


def expected(format: Format, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(scales, elements x scale) of a matrix `[rows, columns]`, group by group."""
    rows, columns = x.shape
    group_rows, group_columns = format.group_rows or max(rows, 1), format.group_columns or max(columns, 1)
    scales = np.empty((-(-rows // group_rows), -(-columns // group_columns)))
    restored = np.empty(x.shape, np.float32)
    for row, column in np.ndindex(scales.shape):
        place = (
            slice(row * group_rows, (row + 1) * group_rows),
            slice(column * group_columns, (column + 1) * group_columns),
        )
        scales[row, column], _, elements = expected_group(format, x[place])
        with np.errstate(over="ignore", invalid="ignore"):
            restored[place] = (elements * scales[row, column]).astype(np.float32)
    return scales, restored


def scales_of(tensor: QuantizedTensor) -> np.ndarray:
    return e8m0_to_float32(tensor.scales) if tensor.format.has_e8m0_scales else tensor.scales
