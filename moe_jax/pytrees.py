"""Makes the core's operand bundles JAX pytrees, so that they pass through jit, scan, vmap and shard_map."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import jax

from moe_core.formats import QuantizedSpec, QuantizedTensor
from moe_core.operands import (
    ExpertWeights,
    MatmulOperands,
    RaggedLayout,
    RouterLogits,
    RouterWeights,
    SharedExpert,
    TopK,
)


def _register() -> None:
    for bundle in (ExpertWeights, MatmulOperands, RaggedLayout, RouterLogits, RouterWeights, SharedExpert, TopK):
        names = [field.name for field in dataclasses.fields(bundle)]
        static = [name for name in names if name == "spec"]
        arrays = [name for name in names if name != "spec"]
        jax.tree_util.register_dataclass(bundle, data_fields=arrays, meta_fields=static)
    jax.tree_util.register_pytree_with_keys(QuantizedTensor, _flatten_with_names, _unflatten, _flatten)


#: The leaves of a quantised tensor, in order; its spec is static.
_LEAVES = ("values", "scales", "zero_points")


def _flatten(tensor: QuantizedTensor) -> tuple[tuple[Any, ...], QuantizedSpec]:
    return tuple(getattr(tensor, name) for name in _LEAVES), tensor.spec


def _flatten_with_names(tensor: QuantizedTensor) -> tuple[tuple[Any, ...], QuantizedSpec]:
    leaves, spec = _flatten(tensor)
    names = (jax.tree_util.GetAttrKey(name) for name in _LEAVES)
    return tuple(zip(names, leaves, strict=True)), spec


def _unflatten(spec: QuantizedSpec, leaves: Iterable[Any]) -> QuantizedTensor:
    """Transformations put axis numbers, tangents and shapes of stacks in the place of the arrays: nothing is checked
    here, but where an op takes the tensor."""
    return QuantizedTensor.unchecked(spec, *leaves)


_register()
