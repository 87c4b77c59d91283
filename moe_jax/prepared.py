"""Prepared weights on JAX arrays: quantised weights put into the order of a kernel, and back, in any program."""

from __future__ import annotations

from typing import TypeVar

import jax
import jax.numpy as jnp

from moe_core import prepared
from moe_core.errors import InvalidInput
from moe_core.formats import QuantizedTensor
from moe_core.operands import ExpertWeights, map_arrays, named_arrays
from moe_core.specs import MoESpec
from moe_jax.calls import OpCall

Weights = TypeVar("Weights", QuantizedTensor, ExpertWeights)


def _pad(array: jax.Array, rows: int, columns: int) -> jax.Array:
    return jnp.pad(array, [(0, 0)] * (array.ndim - 2) + [(0, rows), (0, columns)])


_JAX = prepared.ArrayFunctions(jnp.transpose, jnp.stack, _pad)
# Jitted, so that intermediate results take no memory.
_tile = jax.jit(lambda tensor, order: prepared.tile(tensor, order, _JAX), static_argnums=1)
_untile = jax.jit(lambda tensor: prepared.untile(tensor, _JAX))


def prepare_weights(weights: Weights, spec: MoESpec | None = None, *, gate_layout: str | None = None) -> Weights:
    """Quantised weights in the order in which Hopper's kernels of bf16 rows read and decode them; once, at load.

    weights: a `QuantizedTensor` `[..., N, D]` in mxfp4, mxfp4_ceil, or integers of 4 or 8 bits with a scale for each
    row or for 32, 64, 128, ... columns of it, or an `ExpertWeights` of such (one layer or a stack). gate_layout, of a
    tensor: `interleaved` or `halves` where its rows are gate and up, else None. spec, of ExpertWeights: the MoESpec
    that they are used with, whose activation says how gate and up lie. Biases, plain matrices and the logical shape
    stay what they are; prepared weights go wherever the published ones go, except into
    derivatives (docs/quantization.md). `in_out` tensors are transposed, exactly: what comes back is `out_in`, as
    `MoESpec.weight_layout` then must be.

    Works eagerly and in any program. No number changes, and `restore_weights` is the inverse. What is prepared already
    comes back as it is. Raises InvalidInput for other formats and types, gate_layout `separate`, sizes that do not
    divide into blocks (`moe_core.formats.Tiling`), and weights prepared for another gate_layout.
    """
    return prepared.prepare(weights, spec, gate_layout, tile)


def restore_weights(weights: Weights) -> Weights:
    """The inverse of `prepare_weights`: the published layout, `out_in`, bit by bit. Weights that are not prepared come
    back as they are. Raises InvalidInput."""
    return prepared.restore(weights, untile)


def tile(tensor: QuantizedTensor, order: str) -> QuantizedTensor:
    """See `moe_core.reference.tiling.tile`."""
    return _tile(_of_jax("prepare_weights", tensor), order)


def untile(tensor: QuantizedTensor) -> QuantizedTensor:
    """See `moe_core.reference.tiling.untile`."""
    return _untile(_of_jax("restore_weights", tensor))


def _of_jax(op: str, tensor: QuantizedTensor) -> QuantizedTensor:
    """The tensor checked, NumPy arrays in it as JAX's. Raises InvalidInput, also for shapes without numbers."""
    call = OpCall(op)
    for name, array in named_arrays(tensor, "weights."):
        call.array(name, array)
        if isinstance(array, jax.ShapeDtypeStruct):
            raise InvalidInput(f"{name} must be an array, got {array}; load the weights first")
    return map_arrays(tensor, jnp.asarray)
