"""Quantise JAX arrays (rows in any program, weights eagerly), and prepack them in any program."""

from __future__ import annotations

from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from moe_core.base import dtypes
from moe_core.errors import InvalidInput, Unsupported
from moe_core.formats import Format, QuantizedSpec, QuantizedTensor
from moe_core.ops.prepack import prepack as core
from moe_core.ops.quantize import reference
from moe_core.ops.quantize.rows import plan_quantize_rows
from moe_core.specs import MoESpec
from moe_core.specs.operands import ExpertWeights, map_arrays, named_arrays
from moe_jax.bridge.calls import Array, OpCall, require_type

Weights = TypeVar("Weights", QuantizedTensor, ExpertWeights)
_JAX = core.ArrayFunctions(jnp.transpose, jnp.stack, core.pad_with(jnp.pad))
# Jitted, so that intermediate results use no memory.
_tile = jax.jit(lambda tensor, order: core.tile(tensor, order, _JAX), static_argnums=1)
_untile = jax.jit(lambda tensor: core.untile(tensor, _JAX))


def quantize_rows(
    x: Array, format: Format, *, scales: Array | None = None, used_by: Array | None = None
) -> QuantizedTensor:
    """Quantise rows to a format of activations with one custom call, under every transformation the ops support.

    Args:
        x: bf16, fp16 or fp32 `[R, D]`.
        format: e4m3, e2m1 or int8, with one scale per row, per group of columns in a row, or for all of x (`FP8_TOKEN`,
            `FP8_GROUP`, `INT8_TOKEN`, `MXFP8`, `MXFP4`, `FP8_TENSOR`, ...).
        scales: fp32 `[1]`, a static scale, for formats with one per tensor. None: computed from x.
        used_by: int32 `[R * n]`, a layout's row_of_slot for tokens, slot_of_row for its rows. Rows with only negative
            entries become zeros.

    Returns:
        the rows, `out_in`, with the bits of `moe_core.ops.quantize.reference.quantize_rows`, without a gradient.
    """
    call = OpCall("quantize_rows")
    require_type("format", format, Format)
    rows = call.array("x", x)
    static = None if scales is None else call.array("static_scale", scales, "scales")
    values, chosen = call.run(
        plan_quantize_rows, rows, format, scales=static, used_by=call.optional("used_by", used_by)
    )
    return QuantizedTensor(QuantizedSpec(format), values, chosen)


def quantize(weight: Array, format: Format, *, layout: str = "out_in") -> QuantizedTensor:
    """Quantise a weight `[..., N, D]` (layout `out_in`) or `[..., D, N]` (`in_out`) to a format, on its device.

    NumPy computes on the host, exactly as `moe_core.ops.quantize.reference.quantize`. Raises Unsupported while tracing.
    """
    require_type("format", format, Format)
    to_device, array = _on_host("quantize", "weight", weight)
    return map_arrays(reference.quantize(array, format, layout=layout), to_device)


def dequantize(tensor: QuantizedTensor, dtype: Any = jnp.float32) -> jax.Array:
    """The numbers of a quantised tensor in its layout: code x scale in fp32, cast to dtype (bf16, fp16 or fp32).

    Computes as `quantize` does.
    """
    require_type("tensor", tensor, QuantizedTensor)
    to_device, _ = _on_host("dequantize", "tensor.values", tensor.values)
    on_host = map_arrays(tensor, lambda array: _on_host("dequantize", "an array of tensor", array)[1])
    return to_device(reference.dequantize(on_host, dtypes.canonical(dtype)))


def _on_host(op: str, name: str, array: Any) -> tuple[Any, np.ndarray]:
    """(a function that puts a NumPy array on its device, `array` in NumPy)."""
    if isinstance(array, Tracer):
        raise Unsupported(
            f"{op} computes on the host, got {name} inside jit or another transformation; call it outside and pass the "
            "result in (rows are quantised anywhere by quantize_rows)"
        )
    OpCall(op).array(name, array)
    if not isinstance(array, jax.Array):
        return jnp.asarray, np.asarray(array)
    sharding = array.sharding
    if len(sharding.device_set) > 1 and not sharding.is_fully_replicated:
        raise Unsupported(
            f"{op} takes arrays of one device, got {name} split over several ({sharding}); call it before placing them"
        )
    if not array.committed:
        return jnp.asarray, np.asarray(array)
    return lambda result: jax.device_put(result, sharding), np.asarray(array)


def prepack_weights(weights: Weights, spec: MoESpec | None = None, *, gate_layout: str | None = None) -> Weights:
    """Put quantised weights into the order in which Hopper's kernels for bf16 rows read and decode them.

    Do this once, when weights are loaded, eagerly or in any program. `restore_weights` is the exact inverse. Prepacked
    weights come back as they are, and work wherever published ones do, except in gradients (docs/user/quantization.md).

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


def restore_weights(weights: Weights) -> Weights:
    """Put prepacked weights back into the published layout, `out_in`. Others come back as they are."""
    return core.restore_weights(weights, untile)


def tile(tensor: QuantizedTensor, order: str) -> QuantizedTensor:
    """See `moe_core.ops.prepack.prepack.tile`."""
    return _tile(_of_jax("prepack_weights", tensor), order)


def untile(tensor: QuantizedTensor) -> QuantizedTensor:
    """See `moe_core.ops.prepack.prepack.untile`."""
    return _untile(_of_jax("restore_weights", tensor))


def _of_jax(op: str, tensor: QuantizedTensor) -> QuantizedTensor:
    call = OpCall(op)
    for name, array in named_arrays(tensor, "weights."):
        call.array(name, array)
        if isinstance(array, jax.ShapeDtypeStruct):
            raise InvalidInput(f"{name} must be an array, got {array}; load the weights first")
    return map_arrays(tensor, jnp.asarray)
