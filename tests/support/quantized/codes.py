"""Every code of a format, and rows that are hard to quantise."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from moe_core.base import dtypes
from moe_core.formats import Format, QuantizedSpec, QuantizedTensor, format_named, format_names, quantized_shapes
from moe_core.ops.quantize.reference import ErrorSum, dequantize


def all_codes(format: Format, layout: str, rows: int) -> QuantizedTensor:
    """A tensor `[rows, 256]` in which every code occurs, and with 32 rows every scale of e8m0."""
    spec = QuantizedSpec(format, layout)
    shapes = quantized_shapes(spec, (rows, 256) if layout == "out_in" else (256, rows))
    bytes_of_values = np.resize(np.arange(256, dtype=np.uint8), shapes.values)
    values = bytes_of_values.view(dtypes.numpy_dtype(format.own_element.dtype))
    if format.has_e8m0_scales:
        scales = np.resize(np.arange(256, dtype=np.uint8), shapes.scales)
    else:
        scales = np.resize(np.array([1, np.nan, 2.0**-130, 0.3, 0, 448, 1e30], np.float32), shapes.scales)
    points = None if shapes.zero_points is None else np.resize(np.arange(256, dtype=np.uint8), shapes.zero_points)
    return QuantizedTensor(spec, values, scales, points)


ROW_FORMATS = [
    name
    for name in format_names()
    if format_named(name).element in ("e4m3", "e2m1", "int8") and format_named(name).group_rows in (None, 1)
]


def hard_rows(rows: int, d: int, dtype: str, whole: bool = False) -> np.ndarray:
    """Every magnitude; zeros, denormals, ties of every element, NaN and infinity (not where all share a scale)."""
    random = np.random.default_rng(rows)
    x = random.standard_normal((rows, d)) * np.exp2(random.integers(-30, 30, (rows, 1)))
    if rows > 8:
        x[0] = 0
        x[1] = -0.0
        x[2] = 2.0**-149 * random.integers(0, 9, d)
        x[3] *= 1e-37
        x[4] = np.linspace(-448, 448, d)
        x[5] = np.resize(np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, 6]), d) * random.choice([-1, 1], d)
        x[6] = np.resize(np.array([127, 0.5, 1.5, 2.5, -63.5, -126.5]), d)
        if not whole:
            x[7, d // 2], x[8, d - 1] = np.nan, np.inf
    return x.astype(np.dtype(getattr(ml_dtypes, dtype, dtype)))


def quantization_error(original: np.ndarray, tensor: QuantizedTensor) -> float:
    """Relative Frobenius error of a quantised tensor, one matrix of a stack at a time."""
    total = ErrorSum()
    restored = dequantize(tensor)
    for index in np.ndindex(restored.shape[:-2]):
        total.add(np.asarray(original)[index], restored[index])
    return total.relative_frobenius
