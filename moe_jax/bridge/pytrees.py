"""Register operand bundles as JAX pytrees, for jit, scan, vmap and shard_map."""

from __future__ import annotations

from typing import Any

import jax

from moe_core.formats import QuantizedTensor
from moe_core.specs.operands import BUNDLES, RaggedLayout, array_fields


def _keyed(tensor: QuantizedTensor) -> list[tuple[Any, Any]]:
    return [(jax.tree_util.GetAttrKey(name), getattr(tensor, name)) for name, _ in array_fields(QuantizedTensor)]


for _bundle in (*BUNDLES, RaggedLayout):
    _arrays, _static = [name for name, _ in array_fields(_bundle)], ["spec"] if _bundle is RaggedLayout else []
    jax.tree_util.register_dataclass(_bundle, data_fields=_arrays, meta_fields=_static)
jax.tree_util.register_pytree_with_keys(
    QuantizedTensor,
    lambda tensor: (_keyed(tensor), tensor.spec),
    # Transformations replace arrays with axis numbers, tangents or stacked shapes.
    lambda spec, leaves: QuantizedTensor.unchecked(spec, *leaves),
    lambda tensor: (tuple(leaf for _, leaf in _keyed(tensor)), tensor.spec),
)
