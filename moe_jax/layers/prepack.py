"""Layers whose quantised experts lie in the order of Hopper's kernels: their parameters, there and back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from moe_core.formats import QuantizedSpec, QuantizedTensor
from moe_core.layers import MAXTEXT, MoELayerSpec, tiled_specs
from moe_core.specs.operands import named_arrays
from moe_jax.layers.parameters import Parameters, find, is_prepacked, leaves, nested
from moe_jax.prepack import tile, untile


def prepack_weights(parameters: Parameters, spec: MoELayerSpec, num_layers: int | None = None) -> dict[str, Any]:
    """The parameters of a layer, or of a stack of num_layers, with the experts' quantised matrices in the order of
    Hopper's kernels: `wi/tiled_values`, `wi/tiled_scales` in the place of `wi/values`, `wi/scales`; the rest as it is.

    Their names tell the functions of this package how they lie, and keep checkpoints of both kinds apart. Forwards give
    what they gave; there are no gradients beside prepacked experts. Works in any program. Prepared parameters come back
    as they are. Raises InvalidInput for experts that are not quantised, not stored `out_in`, or that cannot be tiled.
    """
    specs = tiled_specs(spec, spec.storage(MAXTEXT))

    def change(matrix: str, tensor: QuantizedTensor) -> QuantizedTensor:
        tiling = specs[matrix].tiling
        assert tiling is not None
        return tile(tensor, tiling.order)

    return _changed(parameters, spec, num_layers, False, change)


def restore_weights(parameters: Parameters, spec: MoELayerSpec, num_layers: int | None = None) -> dict[str, Any]:
    """The inverse of `prepack_weights`; parameters that are not prepacked stay as they are. Raises InvalidInput."""
    return _changed(parameters, spec, num_layers, True, lambda _, tensor: untile(tensor))


def matrix_specs(spec: MoELayerSpec, is_tiled: bool) -> dict[str, QuantizedSpec]:
    """What the arrays of each quantised matrix mean, by name (`experts.down`)."""
    scheme, storage = spec.experts.scheme, spec.storage(MAXTEXT)
    assert scheme is not None
    if is_tiled:
        return tiled_specs(spec, storage)
    names = ("experts.gate_up", "experts.up", "experts.down")
    return dict.fromkeys(names, QuantizedSpec(scheme.weights, storage.weight_layout))


def _changed(
    parameters: Parameters,
    spec: MoELayerSpec,
    num_layers: int | None,
    is_tiled: bool,
    change: Callable[[str, QuantizedTensor], QuantizedTensor],
) -> dict[str, Any]:
    """The parameters after `change` of every quantised matrix, by name; is_tiled: whether it takes tiled ones."""
    before = is_prepacked(parameters)
    every = leaves(spec, num_layers, before)
    arrays = {leaf.parameter.name: find(parameters, leaf.path) for leaf in every}
    if before != is_tiled:
        return nested((leaf.path, arrays[leaf.parameter.name]) for leaf in every)
    parts: dict[str, dict[str, Any]] = {}
    for leaf in every:
        if leaf.is_quantized:
            matrix, _, part = leaf.parameter.name.rpartition(".")
            parts.setdefault(matrix, {})[part] = arrays[leaf.parameter.name]
    specs = matrix_specs(spec, is_tiled) if parts else {}
    for matrix, fields in parts.items():
        arrays |= dict(named_arrays(change(matrix, QuantizedTensor(specs[matrix], **fields)), f"{matrix}."))
    return nested((leaf.path, arrays[leaf.parameter.name]) for leaf in leaves(spec, num_layers, not before))
