"""Convert a JAX layer's nested parameters from and to `LayerWeights`, prepack and quantise them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from moe_core.base import dtypes
from moe_core.errors import InvalidInput
from moe_core.formats import QuantizedSpec, QuantizedTensor, Scheme
from moe_core.layers import FREE_FIELDS, MAXTEXT, LayerWeights, MoELayerSpec, placements, tiled_specs
from moe_core.specs.operands import named_arrays
from moe_jax.layers.parameters import Leaf, Parameters, find, is_gate, is_prepacked, leaves, nested
from moe_jax.quantize import quantize, tile, untile


def load_weights(
    weights: LayerWeights | Iterable[LayerWeights],
    spec: MoELayerSpec,
    *,
    param_dtype: Any = np.float32,
    num_layers: int | None = None,
) -> dict[str, Any]:
    """Nested NumPy parameters with these weights, in the storage of `spec`.

    num_layers: weights are an iterable of that many layers, read one at a time. Arrays in the right layout and dtype
    are not copied. Experts' matrices get param_dtype, gates and biases the wider of it and their dtype, and quantised
    ones stay. Raises InvalidInput for another kind or number of layers and if param_dtype would round a matrix, and
    Unsupported if quantised gate and up would have to move.
    """
    every = leaves(spec, num_layers)
    if num_layers is None:
        if not isinstance(weights, LayerWeights):
            raise InvalidInput(f"weights must be LayerWeights, got {type(weights).__name__}; pass those of one layer")
        arrays = {leaf.parameter.name: array for leaf, array in _arrays(weights, spec, every, param_dtype)}
    else:
        arrays = _stack(weights, spec, every, param_dtype, num_layers)
    return nested((leaf.path, arrays[leaf.parameter.name]) for leaf in every)


def export_weights(
    parameters: Parameters, spec: MoELayerSpec, num_layers: int | None = None
) -> LayerWeights | list[LayerWeights]:
    """LayerWeights of a layer's parameters, or of each in a stack, in their storage, not copied on a CPU."""
    if is_prepacked(parameters):
        parameters = restore_weights(parameters, spec, num_layers)
    fetched = {leaf.parameter.name: np.asarray(find(parameters, leaf.path)) for leaf in leaves(spec, num_layers)}
    if num_layers is None:
        return LayerWeights.from_named(fetched, spec, MAXTEXT)
    return [
        LayerWeights.from_named({name: array[layer] for name, array in fetched.items()}, spec, MAXTEXT)
        for layer in range(num_layers)
    ]


def _stack(weights: Any, spec: MoELayerSpec, every: tuple[Leaf, ...], param_dtype: Any, num_layers: int) -> Any:
    if isinstance(weights, LayerWeights) or not isinstance(weights, Iterable):
        raise InvalidInput(
            f"weights must be an iterable of {num_layers} LayerWeights, got one {type(weights).__name__}; "
            "pass those of every layer of the stack"
        )
    stacked: dict[str, np.ndarray] = {}
    count = 0
    for layer in weights:
        if count < num_layers:
            for leaf, array in _arrays(layer, spec, every, param_dtype):
                name = leaf.parameter.name
                if count == 0:
                    stacked[name] = np.empty(leaf.shape, array.dtype)
                elif stacked[name].dtype != array.dtype:
                    raise InvalidInput(
                        f"{name} must have one dtype in every layer of the stack, {stacked[name].dtype}, got "
                        f"{array.dtype} in layer {count}; cast the weights to one dtype"
                    )
                stacked[name][count] = array
                del array
        count += 1
        # Otherwise the loop variable keeps this layer while the next is read.
        del layer
    if count != num_layers:
        raise InvalidInput(f"weights must be those of num_layers = {num_layers} layers, got {count}; pass as many")
    return stacked


def _arrays(weights: LayerWeights, spec: MoELayerSpec, every: tuple[Leaf, ...], param_dtype: Any) -> Any:
    """(leaf, array) of one layer, in the layouts and dtypes to store."""
    _require_same_kind(weights, spec)
    arrays: dict[str, np.ndarray] = {}
    by_name = {leaf.parameter.name: leaf for leaf in every}
    for name, index, array in placements(weights, spec.storage(MAXTEXT)):
        leaf = by_name[name]
        dtype = _stored_dtype(leaf, array, dtypes.canonical(param_dtype))
        if index == (...,):
            arrays[name] = np.ascontiguousarray(array, dtype)
            continue
        if name not in arrays:
            arrays[name] = np.empty(leaf.parameter.shape, dtype)
        arrays[name][index] = array
    return [(by_name[name], array) for name, array in arrays.items()]


def _stored_dtype(leaf: Leaf, array: np.ndarray, param_dtype: str) -> np.dtype:
    dtype = dtypes.canonical(array.dtype)
    if leaf.is_quantized:
        return dtypes.numpy_dtype(dtype)
    exact = dtype == param_dtype or param_dtype == "float32"
    if leaf.is_state:
        return np.dtype(leaf.parameter.dtype or np.float32)
    if not exact and (is_gate(leaf.parameter.name) or leaf.parameter.role == "bias"):
        return dtypes.numpy_dtype(dtype if dtype == "float32" else "float32")
    if not exact:
        raise InvalidInput(
            f"{leaf.parameter.name} must be {param_dtype}, the layer's param_dtype, got {dtype}, which would be "
            f"rounded; make the layer with param_dtype={dtype} or cast the weights first"
        )
    return dtypes.numpy_dtype(param_dtype)


def _require_same_kind(weights: LayerWeights, spec: MoELayerSpec) -> None:
    """Raise InvalidInput unless the weights make a layer like `spec`."""
    if not isinstance(weights, LayerWeights):
        raise InvalidInput(f"weights must be LayerWeights, got {type(weights).__name__}; make one of your arrays")
    storage = spec.storage(MAXTEXT)
    free = {name: getattr(spec, name) for name in FREE_FIELDS}
    loaded, wanted = dataclasses.replace(weights.layer_spec(), **free).stored_as(storage), spec.stored_as(storage)
    for field in dataclasses.fields(MoELayerSpec):
        got, expected = getattr(loaded, field.name), getattr(wanted, field.name)
        if got != expected:
            raise InvalidInput(
                f"weights must be those of a layer with {field.name} = {expected}, got {got}; make the layer with "
                "MoE.from_spec(weights.layer_spec()), or load the weights this layer was described by"
            )


def prepack_weights(parameters: Parameters, spec: MoELayerSpec, num_layers: int | None = None) -> dict[str, Any]:
    """Parameters with the experts' quantised matrices in the order of Hopper's kernels.

    `wi/values` and `wi/scales` become `wi/tiled_values` and `wi/tiled_scales`, also in checkpoints. Results stay,
    without gradients. Works inside jit. Prepacked parameters come back as they are. Raises InvalidInput for experts
    that are not quantised, not stored `out_in`, or that cannot be tiled.
    """
    specs = tiled_specs(spec, spec.storage(MAXTEXT))

    def change(matrix: str, tensor: QuantizedTensor) -> QuantizedTensor:
        tiling = specs[matrix].tiling
        assert tiling is not None
        return tile(tensor, tiling.order)

    return _changed(parameters, spec, num_layers, False, change)


def restore_weights(parameters: Parameters, spec: MoELayerSpec, num_layers: int | None = None) -> dict[str, Any]:
    """Undo `prepack_weights`. Other parameters stay as they are."""
    return _changed(parameters, spec, num_layers, True, lambda _, tensor: untile(tensor))


def quantize_experts(
    parameters: Parameters, spec: MoELayerSpec, scheme: Scheme, num_layers: int | None = None
) -> tuple[dict[str, Any], MoELayerSpec]:
    """(parameters, spec) of a layer, or stack of num_layers, with its experts quantised to a scheme.

    Computed on the host, stored on the matrices' devices. Raises InvalidInput for quantised experts and impossible
    sizes, and Unsupported inside jit.
    """
    if spec.experts.scheme is not None:
        raise InvalidInput(f"experts must be plain to be quantised, got {spec.experts.scheme}; quantise them once")
    quantized = dataclasses.replace(spec, experts=dataclasses.replace(spec.experts, scheme=scheme))
    layout, arrays = spec.storage(MAXTEXT).weight_layout, {}
    for leaf in leaves(spec, num_layers):
        name, array = leaf.parameter.name, find(parameters, leaf.path)
        if name.startswith("experts.") and leaf.parameter.role == "weight":
            arrays |= dict(named_arrays(quantize(array, scheme.weights, layout=layout), f"{name}."))
        else:
            arrays[name] = array
    return nested((leaf.path, arrays[leaf.parameter.name]) for leaf in leaves(quantized, num_layers)), quantized


def matrix_specs(spec: MoELayerSpec, is_tiled: bool) -> dict[str, QuantizedSpec]:
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
