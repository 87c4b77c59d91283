"""The nested parameters of a JAX layer: from and to `LayerWeights`, the canonical form, and prepacked."""

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
    """Nested NumPy parameters, as `spec` stores them, that hold `weights`: the same numbers at other places.

    With num_layers: weights of that many layers, one after the other; each is copied into the stack before the next is
    asked for, so an iterator that reads a checkpoint holds one layer at a time. Arrays whose layout and dtype do not
    change are not copied. Matrices of experts are stored in param_dtype, which must hold their values exactly, and
    quantised ones as they are; gates and biases in the wider of param_dtype and their own. Raises InvalidInput for
    weights of another kind of layer, another number of layers, and where param_dtype would round; Unsupported where
    quantised gate and up would have to move.
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
    """The parameters of a layer as LayerWeights, or of a stack as one LayerWeights per layer; layouts as stored, those
    of prepacked matrices as published.

    Arrays are fetched from their device one by one; those on a CPU are not copied. A stack's arrays are views of it.
    """
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
    """The arrays of a stack by name."""
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
        # Else the loop variable would keep this layer alive while the next is read.
        del layer
    if count != num_layers:
        raise InvalidInput(f"weights must be those of num_layers = {num_layers} layers, got {count}; pass as many")
    return stacked


def _arrays(weights: LayerWeights, spec: MoELayerSpec, every: tuple[Leaf, ...], param_dtype: Any) -> Any:
    """(leaf, array) of one layer, in the layouts of spec and the dtypes to store."""
    _require_same_kind(weights, spec)
    arrays: dict[str, np.ndarray] = {}
    by_name = {leaf.parameter.name: leaf for leaf in every}
    for name, place, array in placements(weights, spec.storage(MAXTEXT)):
        leaf = by_name[name]
        dtype = _stored_dtype(leaf, array, dtypes.canonical(param_dtype))
        if place == (...,):
            arrays[name] = np.ascontiguousarray(array, dtype)
            continue
        if name not in arrays:
            arrays[name] = np.empty(leaf.parameter.shape, dtype)
        arrays[name][place] = array
    return [(by_name[name], array) for name, array in arrays.items()]


def _stored_dtype(leaf: Leaf, array: np.ndarray, param_dtype: str) -> np.dtype:
    own = dtypes.canonical(array.dtype)
    if leaf.is_quantized:
        return dtypes.numpy_dtype(own)
    exact = own == param_dtype or param_dtype == "float32"
    if leaf.is_state:
        return np.dtype(leaf.parameter.dtype or np.float32)
    if not exact and (is_gate(leaf.parameter.name) or leaf.parameter.role == "bias"):
        return dtypes.numpy_dtype(own if own == "float32" else "float32")
    if not exact:
        raise InvalidInput(
            f"{leaf.parameter.name} must be {param_dtype}, the layer's param_dtype, got {own}, which would be rounded; "
            f"make the layer with param_dtype={own} or cast the weights first"
        )
    return dtypes.numpy_dtype(param_dtype)


def _require_same_kind(weights: LayerWeights, spec: MoELayerSpec) -> None:
    """Raise InvalidInput unless the weights make a layer like `spec`, layouts and what no weight depends on aside."""
    if not isinstance(weights, LayerWeights):
        raise InvalidInput(f"weights must be LayerWeights, got {type(weights).__name__}; make one of your arrays")
    storage = spec.storage(MAXTEXT)
    free = {name: getattr(spec, name) for name in FREE_FIELDS}
    own, wanted = dataclasses.replace(weights.layer_spec(), **free).stored_as(storage), spec.stored_as(storage)
    for field in dataclasses.fields(MoELayerSpec):
        got, expected = getattr(own, field.name), getattr(wanted, field.name)
        if got != expected:
            raise InvalidInput(
                f"weights must be those of a layer with {field.name} = {expected}, got {got}; make the layer with "
                "MoE.from_spec(weights.layer_spec()), or load the weights this layer was described by"
            )


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


def quantize_experts(
    parameters: Parameters, spec: MoELayerSpec, scheme: Scheme, num_layers: int | None = None
) -> tuple[dict[str, Any], MoELayerSpec]:
    """(parameters, spec) of the same layer, or stack of num_layers, with its experts quantised to a scheme.

    The matrices of experts become arrays of `scheme.weights`, where they were (`moe_jax.quantize`: eagerly, computed on
    the host); everything else stays. Raises InvalidInput for experts that are quantised already and for sizes that the
    format cannot have, Unsupported inside jit.
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
