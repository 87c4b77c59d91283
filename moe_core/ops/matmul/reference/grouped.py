"""NumPy twins of grouped matmuls of rows in the order of their groups."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from moe_core.formats import QuantizedSpec
from moe_core.ops.common.bundles import bundle_of, quantized_from
from moe_core.ops.matmul.reference.backward import weight_gradient
from moe_core.ops.matmul.reference.forward import Product, take_rows
from moe_core.ops.matmul.reference.rows import Rows, dense_rows
from moe_core.specs import LayoutSpec, MatmulOperands, MatmulSpec


def grouped_rows(arrays: Mapping[str, np.ndarray], count: int, num_rows: int, ends: bool) -> tuple[slice, Rows]:
    """The rows that lie in one of `count` groups, and these as a layout without gaps."""
    values = np.clip(arrays["offs" if ends else "sizes"].astype(np.int64), 0, num_rows)
    bounds = np.minimum([0, *(np.maximum.accumulate(values) if ends else np.cumsum(values))], num_rows)
    first = int(np.clip(arrays["first_group"][0], 0, len(values))) if "first_group" in arrays else 0
    bounds = bounds[first : first + count + 1]
    bounds = [*bounds.tolist(), *[int(bounds[-1])] * (count + 1 - len(bounds))]
    base = bounds[0]
    parts = [(group, slice(bounds[group] - base, bounds[group + 1] - base)) for group in range(count)]
    filled = bounds[-1] - base
    of_rows = np.repeat(np.arange(count), np.diff(bounds))
    index = dense_rows(filled).index
    kept = [(group, part) for group, part in parts if part.stop > part.start]
    return slice(base, bounds[-1]), Rows(LayoutSpec(filled, 1, count), filled, index, of_rows, kept)


def grouped_mm_plan(
    arrays: Mapping[str, np.ndarray],
    *,
    spec: MatmulSpec,
    ends: bool,
    tensors: tuple[tuple[str, QuantizedSpec], ...],
    places: tuple[np.ndarray, ...],
) -> tuple[np.ndarray, ...]:
    operands, (y,) = bundle_of(MatmulOperands, quantized_from(arrays, tensors)), places
    filled, rows = grouped_rows(arrays, operands.weight.shape[0], len(y), ends)
    y[: filled.start], y[filled.stop :] = 0, 0
    operands = MatmulOperands(take_rows(operands.x, filled), operands.weight, bias=operands.bias)
    Product(operands, spec, rows, y[filled]).run()
    return places


def grouped_contraction_plan(
    arrays: Mapping[str, np.ndarray], *, ends: bool, places: tuple[np.ndarray, ...]
) -> tuple[np.ndarray, ...]:
    left, right, (y,) = arrays["left"], arrays["right"], places
    filled, rows = grouped_rows(arrays, len(y), len(left), ends)
    weight_gradient(left[filled], right[filled], rows, out_dtype=y.dtype.name, place=y)
    return places
