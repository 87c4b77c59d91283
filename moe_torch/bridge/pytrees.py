"""Operand bundles of the core as torch pytrees, for exported and transformed programs."""

from __future__ import annotations

from typing import Any

import torch

from moe_core.base import codec
from moe_core.formats import QuantizedTensor
from moe_core.specs.operands import BUNDLES, array_fields
from moe_torch.bridge import private


def register_pytrees() -> None:
    for bundle in BUNDLES:
        torch.export.register_dataclass(bundle)
    private.register_pytree(
        QuantizedTensor,
        lambda tensor: ([array for _, array in _keyed(tensor)], tensor.spec),
        # Transformations replace the arrays by other objects.
        lambda arrays, spec: QuantizedTensor.unchecked(spec, *arrays),
        serialized_type_name="moe_core.formats.QuantizedTensor",
        to_dumpable_context=codec.dumps,
        from_dumpable_context=codec.loads,
        flatten_with_keys_fn=lambda tensor: (_keyed(tensor), tensor.spec),
    )


def _keyed(tensor: QuantizedTensor) -> list[tuple[Any, Any]]:
    return [(private.attribute_key(name), getattr(tensor, name)) for name, _ in array_fields(QuantizedTensor)]
