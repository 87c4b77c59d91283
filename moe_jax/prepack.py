"""Prepacked weights on JAX arrays: quantised weights put into the order of a kernel, and back, in any program."""

from __future__ import annotations

from typing import TypeVar

import jax
import jax.numpy as jnp

from moe_core.errors import InvalidInput
from moe_core.formats import QuantizedTensor
from moe_core.ops.prepack import prepack as core
from moe_core.specs.descriptions import described
from moe_core.specs.moe import MoESpec
from moe_core.specs.operands import ExpertWeights, map_arrays, named_arrays
from moe_jax.bridge.calls import OpCall

Weights = TypeVar("Weights", QuantizedTensor, ExpertWeights)


_JAX = core.ArrayFunctions(jnp.transpose, jnp.stack, core.pad_with(jnp.pad))
# Jitted, so that intermediate results take no memory.
_tile = jax.jit(lambda tensor, order: core.tile(tensor, order, _JAX), static_argnums=1)
_untile = jax.jit(lambda tensor: core.untile(tensor, _JAX))


@described
def prepack_weights(weights: Weights, spec: MoESpec | None = None, *, gate_layout: str | None = None) -> Weights:
    """Put quantised weights into the order in which the kernels of bf16 rows on Hopper read and decode them."""
    return core.prepack_weights(weights, spec, gate_layout=gate_layout, tile=tile)


def restore_weights(weights: Weights) -> Weights:
    """Put prepacked weights back into the published layout, `out_in`: the inverse of `prepack_weights`, bit by bit.

    Weights that are not prepacked come back as they are. Raises InvalidInput.
    """
    return core.restore_weights(weights, untile)


def tile(tensor: QuantizedTensor, order: str) -> QuantizedTensor:
    """See `moe_core.ops.prepack.prepack.tile`."""
    return _tile(_of_jax("prepack_weights", tensor), order)


def untile(tensor: QuantizedTensor) -> QuantizedTensor:
    """See `moe_core.ops.prepack.prepack.untile`."""
    return _untile(_of_jax("restore_weights", tensor))


def _of_jax(op: str, tensor: QuantizedTensor) -> QuantizedTensor:
    """The tensor checked, NumPy arrays in it as JAX's. Raises InvalidInput, also for shapes without numbers."""
    call = OpCall(op)
    for name, array in named_arrays(tensor, "weights."):
        call.array(name, array)
        if isinstance(array, jax.ShapeDtypeStruct):
            raise InvalidInput(f"{name} must be an array, got {array}; load the weights first")
    return map_arrays(tensor, jnp.asarray)
