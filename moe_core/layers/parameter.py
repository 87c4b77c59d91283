"""A layer's arrays: names, shapes, initial values."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from moe_core.formats import QuantizedSpec, quantized_shapes

_E8M0_ONE = 127


@dataclass(frozen=True)
class Parameter:
    """One array of a layer.

    Args:
        name: dotted (`experts.gate_up`; of a quantised matrix `experts.gate_up.values`, `.scales`, `.zero_points`).
        role: `weight` (drawn from a distribution scaled by fan_in), `bias` (starts at zero), `factor` (starts at fill),
            `buffer` (fp32, starts at zero, never trained), `table` (starts as `first_table`, never trained or cast) or
            `quantized` (starts at fill, never trained or cast).
        fan_in: terms of the sum a weight takes part in, 0 for others.
        axes: of each axis or groups of it: `experts`, `d_model`, `d_ff` or None (size 1, or a latent width).
        dtype: None: the layer's.
    """

    name: str
    shape: tuple[int, ...]
    role: str
    fan_in: int
    axes: tuple[str | None, ...]
    dtype: str | None = None
    fill: int = 0


def table(name: str, rows: int, top_k: int, num_experts: int) -> Parameter:
    """Ids of top_k experts for each row."""
    return Parameter(name, (rows, top_k), "table", 0, (None, None), "int32", fill=num_experts)


def first_table(parameter: Parameter) -> np.ndarray:
    """Distinct experts in every row, covering all."""
    rows, top_k = parameter.shape
    return (np.arange(rows, dtype=np.int32)[:, None] + np.arange(top_k, dtype=np.int32)) % parameter.fill


def matrix(
    name: str, layout: str, inside: tuple[str | None, int], outside: tuple[str | None, int], lead: tuple[int, ...] = ()
) -> Parameter:
    """A weight from `inside` to `outside` features, (axis, size) each."""
    first, second = (inside, outside) if layout == "in_out" else (outside, inside)
    axes = (*("experts" for _ in lead), first[0], second[0])
    return Parameter(name, (*lead, first[1], second[1]), "weight", inside[1], axes)


def quantized_parts(matrix: Parameter, spec: QuantizedSpec) -> list[Parameter]:
    """They start at exact zeros, with scales of 1."""
    shapes, element = quantized_shapes(spec, matrix.shape), spec.format.own_element
    # Both codes in a byte are the zero.
    zero = (element.zero_point or 0) * (17 if element.per_byte == 2 else 1)
    one = _E8M0_ONE if spec.format.has_e8m0_scales else 1
    parts = []
    for name, shape in shapes._asdict().items():
        if shape is not None:
            dtype, fill = (spec.format.scale_dtypes[0], one) if name == "scales" else (element.dtype, zero)
            axes = tuple(None if size == 1 else axis for size, axis in zip(shape, matrix.axes, strict=True))
            parts.append(Parameter(f"{matrix.name}.{name}", shape, "quantized", 0, axes, dtype, fill))
    return parts
