"""Makes the core's operand bundles JAX pytrees, so that they pass through jit, scan, vmap and shard_map."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax

from moe_core.formats import QuantizedSpec, QuantizedTensor
from moe_core.specs.operands import (
    ExpertWeights,
    MatmulOperands,
    RaggedLayout,
    RouterLogits,
    RouterWeights,
    SharedExpert,
    TopK,
    array_fields,
)


def _register() -> None:
    for bundle in (ExpertWeights, MatmulOperands, RaggedLayout, RouterLogits, RouterWeights, SharedExpert, TopK):
        arrays = [name for name, _ in array_fields(bundle)]
        static = ["spec"] if bundle is RaggedLayout else []
        jax.tree_util.register_dataclass(bundle, data_fields=arrays, meta_fields=static)
    jax.tree_util.register_pytree_with_keys(
        QuantizedTensor, lambda tensor: (_keyed(tensor), tensor.spec), _unflatten, _flatten
    )


def _flatten(tensor: QuantizedTensor) -> tuple[tuple[Any, ...], QuantizedSpec]:
    return tuple(leaf for _, leaf in _keyed(tensor)), tensor.spec


def _keyed(tensor: QuantizedTensor) -> list[tuple[Any, Any]]:
    """The leaves of a quantised tensor, in order; its spec is static."""
    return [(jax.tree_util.GetAttrKey(name), getattr(tensor, name)) for name, _ in array_fields(QuantizedTensor)]


def _unflatten(spec: QuantizedSpec, leaves: Iterable[Any]) -> QuantizedTensor:
    """Transformations put axis numbers, tangents and shapes of stacks in the place of the arrays: nothing is checked
    here, but where an op takes the tensor."""
    return QuantizedTensor.unchecked(spec, *leaves)


_register()
