"""Quantised operands of every scheme, in sizes that divide nothing they need not."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from moe_core.formats import Format, QuantizedTensor, Scheme, scheme_named, scheme_names
from moe_core.ops.quantize.reference import dequantize, quantize
from moe_core.specs.operands import ExpertWeights
from tests.support.strategies import draw_array

SCHEMES = tuple(scheme_named(name) for name in scheme_names())
LAYOUTS = ("in_out", "out_in")


def reduction_of(scheme: Scheme) -> int:
    """A reduction length of more than one group, the last of them cut short where the format has that."""
    group = scheme.weights.group_columns
    if group is None:
        return 90
    return 200 if scheme.weights.allows_partial_groups else 3 * group if group < 128 else 2 * group


def draw_weight(rng: np.random.Generator, shape: tuple[int, ...], format: Format, layout: str) -> QuantizedTensor:
    """Normal weights of logical `[..., N, D]`, stored in a layout."""
    weight = draw_array(rng, shape, rms=1.5 / np.sqrt(shape[-1]))
    return quantize(
        weight if layout == "out_in" else np.ascontiguousarray(weight.swapaxes(-1, -2)), format, layout=layout
    )


def plain(value: Any, dtype: str = "float32") -> Any:
    """A quantised tensor dequantised, or a bundle with all of them dequantised; anything else as it is."""
    if isinstance(value, QuantizedTensor):
        return dequantize(value, dtype)
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return value
    fields = {field.name: plain(getattr(value, field.name), dtype) for field in dataclasses.fields(value)}
    return dataclasses.replace(value, **fields)


def draw_experts(
    rng: np.random.Generator, lead: tuple[int, ...], d_model: int, d_ff: int, scheme: Scheme, options: Any
) -> ExpertWeights:
    """Quantised experts with biases. lead: `(E,)`, or `(L, E)` beside a layer index; options: a MoESpec."""
    separate = options.activation.gate_layout == "separate"
    columns = d_ff if separate else options.activation.input_width(d_ff)

    def weight(outputs: int, inputs: int) -> QuantizedTensor:
        return draw_weight(rng, (*lead, outputs, inputs), scheme.weights, options.weight_layout)

    return ExpertWeights(
        gate_up=weight(columns, d_model),
        down=weight(d_model, d_ff),
        up=weight(columns, d_model) if separate else None,
        gate_up_bias=draw_array(rng, (*lead, columns), rms=0.1),
        up_bias=draw_array(rng, (*lead, d_ff), rms=0.1) if separate else None,
        down_bias=draw_array(rng, (*lead, d_model), rms=0.1),
    )
