"""Weights as a quantiser would leave them, for quantised training: the values of their codes, gradients unchanged."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from moe_core.formats import Format, Scheme, quantized_shapes
from moe_core.formats.tensor import QuantizedSpec
from moe_core.layers import MAXTEXT, MoELayerSpec
from moe_core.ops.quantize.reference import SMALLEST_AMAX
from moe_jax.layers.parameters import Parameters, find, leaves, nested

#: Element -> bits of the mantissa, smallest exponent of normal numbers.
_FLOATS = {"e4m3": (3, -6), "e2m1": (1, 0)}


def fake_quantized(parameters: Parameters, spec: MoELayerSpec, scheme: Scheme) -> dict[str, Any]:
    """Parameters whose expert matrices have the values of `quantize_experts`, with straight-through gradients."""
    layout, arrays = spec.storage(MAXTEXT).weight_layout, {}
    every = leaves(spec)
    for leaf in every:
        array = find(parameters, leaf.path)
        if leaf.parameter.name.startswith("experts.") and leaf.parameter.role == "weight":
            quantized_shapes(QuantizedSpec(scheme.weights, layout), array.shape)
            array = fake_quantize(jnp.asarray(array), scheme.weights, layout)
        arrays[leaf.path] = array
    return nested(arrays.items())


@functools.partial(jax.custom_jvp, nondiff_argnums=(1, 2))
def fake_quantize(weight: jax.Array, format: Format, layout: str) -> jax.Array:
    """`dequantize(quantize(weight, format, layout=layout), weight.dtype)` in any program, of a format with one scale in
    each row or group of its columns, and without zero points. Bits are those of the reference."""
    assert format.group_rows == 1 and not format.zero_points
    rows = weight.astype(jnp.float32)
    rows = rows.swapaxes(-1, -2) if layout == "in_out" else rows
    size = format.group_columns or rows.shape[-1]
    groups = rows.reshape(*rows.shape[:-1], rows.shape[-1] // max(size, 1), size)
    amax = jnp.abs(groups).max(axis=-1, keepdims=True, initial=0)
    # XLA's maximum of a row on a CPU may pass over a NaN.
    finite = jnp.isfinite(groups).all(axis=-1, keepdims=True)
    scale = _scale(jnp.where(finite, amax, 1), format)
    values = jnp.where(finite, _rounded(_divided(groups, scale), format) * scale, jnp.nan).reshape(rows.shape)
    return (values.swapaxes(-1, -2) if layout == "in_out" else values).astype(weight.dtype)


@fake_quantize.defjvp
def _straight_through(format: Format, layout: str, primals: Any, tangents: Any) -> Any:
    return fake_quantize(*primals, format, layout), tangents[0]


def _scale(amax: jax.Array, format: Format) -> jax.Array:
    if not format.has_e8m0_scales:
        return _divided(jnp.maximum(amax, SMALLEST_AMAX), jnp.float32(format.own_element.largest))
    assert format.scale_rule == "floor" and format.own_element.top_exponent is not None
    exponent = (_bits(amax) >> 23) - format.own_element.top_exponent
    return jnp.where(amax == 0, 1, _from_bits(jnp.maximum(exponent, 1) << 23))


def _rounded(quotients: jax.Array, format: Format) -> jax.Array:
    element = format.own_element
    if element.name not in _FLOATS:
        zero, most = element.zero_point or 0, element.max_code
        low, high = (-element.largest, element.largest) if most is None else (-zero, most - zero)
        # As integers, among which zero has one sign.
        return jnp.clip(jnp.rint(quotients), low, high).astype(np.int32).astype(np.float32)
    mantissa, least = _FLOATS[element.name]
    quotients = jnp.clip(quotients, -element.largest, element.largest)
    exponent = jnp.maximum((_bits(jnp.abs(quotients)) >> 23) - 127, least)
    step = _from_bits((exponent - mantissa + 127) << 23)
    return jnp.rint(quotients / step) * step


def _divided(values: jax.Array, divisor: jax.Array) -> jax.Array:
    """The quotient rounded once. XLA multiplies by the reciprocal of a divisor that it sees repeated."""
    return values / lax.optimization_barrier(jnp.broadcast_to(divisor, values.shape))


def _bits(values: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(values, np.int32)


def _from_bits(bits: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(bits, np.float32)
