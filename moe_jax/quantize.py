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
from moe_jax.bridge.layouts import on_every_device
from moe_jax.bridge.mesh import over_rows

Weights = TypeVar("Weights", QuantizedTensor, ExpertWeights)
_JAX = core.ArrayFunctions(jnp.transpose, jnp.stack, core.pad_with(jnp.pad))
# Jitted, so that intermediate results use no memory.
_tile = jax.jit(lambda tensor, order: core.tile(tensor, order, _JAX), static_argnums=1)
_untile = jax.jit(lambda tensor: core.untile(tensor, _JAX))


def quantize_rows(
    x: Array, format: Format, *, scales: Array | None = None, used_by: Array | None = None
) -> QuantizedTensor:
    """Quantise rows `[R, D]` with one custom call, under every transformation, as `moe_torch.quantize_rows`."""
    require_type("format", format, Format)
    run = _quantize_each_row if format.group_rows == 1 else _quantize_all_rows
    return run(x, format, scales, used_by)


def _quantize_rows(x: Array, format: Format, scales: Array | None, used_by: Array | None) -> QuantizedTensor:
    call = OpCall("quantize_rows")
    rows = call.array("x", x)
    static = None if scales is None else call.array("static_scale", scales, "scales")
    values, chosen = call.run(
        plan_quantize_rows, rows, format, scales=static, used_by=call.optional("used_by", used_by)
    )
    return QuantizedTensor(QuantizedSpec(format), values, chosen)


_quantize_all_rows = on_every_device("use a format with scales of each row, or reshard it")(_quantize_rows)
_quantize_each_row = over_rows("x", "used_by")(_quantize_rows)


def quantize(weight: Array, format: Format, *, layout: str = "out_in") -> QuantizedTensor:
    """Quantise a weight `[..., N, D]` (layout `out_in`) or `[..., D, N]` (`in_out`) to a format, on its device.

    NumPy computes on the host, exactly as `moe_core.ops.quantize.reference.quantize`. Raises Unsupported while tracing.
    """
    require_type("format", format, Format)
    to_device, array = _on_host("quantize", "weight", weight)
    return map_arrays(reference.quantize(array, format, layout=layout), to_device)


def dequantize(tensor: QuantizedTensor, dtype: Any = jnp.float32) -> jax.Array:
    """The numbers of a quantised tensor in its layout: code x scale in fp32, cast to dtype. Computes as `quantize`."""
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
    """Put quantised weights into the order of Hopper's kernels, as `moe_torch.prepack_weights`, in any program."""
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
