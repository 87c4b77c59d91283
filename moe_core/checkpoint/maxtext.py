"""MaxText parameter trees of a MoE block, to and from the canonical weights.

Names and layouts are MaxText's: `gate/kernel` `[D, E]`, `gate/bias` `[E]`, `wi_0` (gate) and `wi_1` (up) `[E, D, F]`,
`wo` `[E, F, D]`, biases `wi_0_bias`, `wi_1_bias`, `wo_bias`, and `shared_experts/{wi_0,wi_1,wo}/kernel`. Ungated
experts have one `wi`, and so have gated ones with `prefuse_moe_weights`, gate in front. The correction bias of
DeepSeek-V3 is read from `gate/bias` (MaxText) and `gate/correction_bias` (moe_jax).

Arrays may be in Flax's containers: boxes of Linen (`nn.LogicallyPartitioned`), variables of NNX, and the `{"value":
array}` that checkpoints make of either.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from moe_core.base import WEIGHT_LAYOUTS, require_at_least, require_kind
from moe_core.errors import InvalidInput, Unsupported
from moe_core.layers.convert import convert_weights
from moe_core.layers.spec import MAXTEXT, MoELayerSpec, Storage
from moe_core.layers.weights import LayerWeights

_PATHS = {
    "router.weight": "gate/kernel",
    "router.bias": "gate/bias",
    "router.correction_bias": "gate/bias",
    "experts.gate_up": "wi_0",
    "experts.up": "wi_1",
    "experts.down": "wo",
    "experts.gate_up_bias": "wi_0_bias",
    "experts.up_bias": "wi_1_bias",
    "experts.down_bias": "wo_bias",
    "shared_experts.gate_up": "shared_experts/wi_0/kernel",
    "shared_experts.up": "shared_experts/wi_1/kernel",
    "shared_experts.down": "shared_experts/wo/kernel",
    "shared_experts.gate": "shared_experts/gate/kernel",
}
_CORRECTION_BIAS = "gate/correction_bias"
#: fused (gate, then up, along the last axis) -> gate and up apart.
_FUSED = {
    "wi": ("wi_0", "wi_1"),
    "wi_bias": ("wi_0_bias", "wi_1_bias"),
    "shared_experts/wi/kernel": ("shared_experts/wi_0/kernel", "shared_experts/wi_1/kernel"),
}
_ROUTED_BLOCK = "MoeBlock_0"
#: MaxText's `param_scan_axis`.
SCAN_AXIS = 1


def to_maxtext(weights: LayerWeights, *, like: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Nested dicts of NumPy arrays in MaxText's names and layouts.

    like: a block's tree, as `from_maxtext` reads it, leaves maybe abstract. The result has its nesting, boxes,
    variables, `value` keys and fused `wi`. Arrays with an unchanged layout are shared with `weights`; dtypes are kept.
    Raises InvalidInput for another block's tree, and Unsupported for a router with a bias and a correction bias,
    because MaxText has one name for both.
    """
    require_kind("weights", weights, LayerWeights)
    spec, arrays = weights.layer_spec(), convert_weights(weights, MAXTEXT).named()
    if like is not None:
        flat = _flat(like)
        paths = _paths(spec, flat)
        placed = {path: arrays[name] for name, path in paths.items()}
        fused = {path: np.concatenate([placed.pop(part) for part in _FUSED[path]], -1) for path in _fused(flat, spec)}
        _require_paths("like", list(placed | fused), flat)
        tree = _in_form_of(like, placed | fused, "")
        # Flax's own mappings take nested dicts.
        return tree if isinstance(like, dict) else type(like)(tree)  # type: ignore[call-arg]
    if spec.router_bias and spec.correction_bias:
        raise Unsupported(
            "weights must have a router bias or a correction bias for MaxText, which has one name for them, got both; "
            "keep these weights in another form, or pass like= the tree of a layer of moe_jax"
        )
    tree: dict[str, Any] = {}
    for name, array in arrays.items():
        node = tree
        *above, last = _path(name, spec).split("/")
        for key in above:
            node = node.setdefault(key, {})
        node[last] = array
    return tree


def from_maxtext(
    tree: Mapping[str, Any], spec: MoELayerSpec, *, storage: Storage | None = None, layer: int | None = None
) -> LayerWeights:
    """The weights of one layer of a MaxText block. Arrays in host memory are not copied, except for a layer of a scan.

    Args:
        tree: nested dicts of arrays (NumPy, JAX, or restored by orbax), boxed or not. The routed experts may be under
            `MoeBlock_0`, next to `shared_experts`.
        storage: the layout of the arrays: `MAXTEXT` (from `moe_core.layers`) for files of MaxText and moe_jax. None:
            the weight_layout in spec, or else the only layout that fits the shapes. Two fit if d_model = d_ff or
            d_model = num_experts, which is refused.
        layer: the layer to take from scanned layers, which are stacked along axis 1 of every array (`[E, L, D, F]`).

    Raises InvalidInput for missing or unknown names, and for shapes that fit no layout or two.
    """
    require_kind("spec", spec, MoELayerSpec)
    require_kind("storage", storage, Storage, optional=True)
    if storage is not None and spec.gated and storage.gate_layout != "separate":
        raise InvalidInput(
            f"storage.gate_layout must be 'separate', as wi_0 and wi_1 are, got {storage.gate_layout!r}; pass MAXTEXT"
        )
    flat = _flat(tree)
    for path in _fused(flat, spec):
        array = np.atleast_1d(np.asarray(flat.pop(path)))
        half = array.shape[-1] // 2
        flat |= dict(zip(_FUSED[path], (array[..., :half], array[..., half:]), strict=True))
    paths = _paths(spec, flat)
    _require_paths("tree", list(paths.values()), flat)
    arrays = {name: _layer_of(path, flat[path], layer) for name, path in paths.items()}
    if storage is None:
        experts = spec.experts.weight_layout or _only_layout("experts.", "d_model = d_ff", arrays, spec)
        router = _only_layout("router.", "d_model = num_experts", arrays, spec)
        storage = Storage(experts, MAXTEXT.gate_layout, router)
    return LayerWeights.from_named(arrays, spec.stored_as(storage), storage)


def _path(name: str, spec: MoELayerSpec) -> str:
    if name not in _PATHS:
        raise Unsupported(f"MaxText has no name for {name}, which the layer has; keep these weights in another form")
    path = _PATHS[name]
    return path if spec.gated else path.replace("wi_0", "wi")


def _paths(spec: MoELayerSpec, flat: Mapping[str, Any]) -> dict[str, str]:
    paths = {one.name: _path(one.name, spec) for one in spec.stored_as(MAXTEXT).parameters(MAXTEXT)}
    if spec.correction_bias and (spec.router_bias or _CORRECTION_BIAS in flat):
        paths["router.correction_bias"] = _CORRECTION_BIAS
    return paths


def _fused(flat: Mapping[str, Any], spec: MoELayerSpec) -> list[str]:
    if not spec.gated or spec.experts.gate_layout == "interleaved":
        return []
    return [path for path, parts in _FUSED.items() if path in flat and not flat.keys() & set(parts)]


def _require_paths(argument: str, paths: list[str], flat: Mapping[str, Any]) -> None:
    missing, unknown = [path for path in paths if path not in flat], sorted(set(flat) - set(paths))
    if missing or unknown:
        problem = f"lacks {', '.join(missing)}" if missing else f"also has {', '.join(unknown)}"
        raise InvalidInput(
            f"{argument} must hold {', '.join(paths)} by spec, got one that {problem}; pass one block's parameters and "
            "the spec that belongs to them"
        )


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """path -> array without its box. MoeBlock_0 and a single `value` add nothing to the path."""
    require_kind("tree", tree, Mapping)
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if not isinstance(value, Mapping):
            flat[f"{prefix}{key}"] = _unboxed(value)
        elif set(value) == {"value"} and not isinstance(value["value"], Mapping):
            flat[f"{prefix}{key}"] = _unboxed(value["value"])
        else:
            flat |= _flat(value, prefix if key == _ROUTED_BLOCK else f"{prefix}{key}/")
    return flat


def _unboxed(leaf: Any) -> Any:
    """The array in Flax's boxes and variables, recognised by their methods without Flax."""
    while hasattr(leaf, "get_value") or hasattr(leaf, "replace_boxed"):
        leaf = leaf.get_value() if hasattr(leaf, "get_value") else leaf.value
    return leaf


def _in_form_of(form: Any, arrays: Mapping[str, Any], path: str) -> Any:
    if isinstance(form, Mapping):
        below = {key: path if key in (_ROUTED_BLOCK, "value") else f"{path}/{key}".lstrip("/") for key in form}
        return {key: _in_form_of(value, arrays, below[key]) for key, value in form.items()}
    if hasattr(form, "replace_boxed"):
        return form.replace_boxed(_in_form_of(form.value, arrays, path))
    if hasattr(form, "get_value"):
        return form.replace(_in_form_of(form.get_value(), arrays, path))
    if tuple(form.shape) != arrays[path].shape:
        raise InvalidInput(
            f"{path} of like must be {list(arrays[path].shape)} as weights have it, got {list(form.shape)}; pass the "
            "tree of one layer of that size"
        )
    return arrays[path]


def _layer_of(path: str, value: Any, layer: int | None) -> np.ndarray:
    array = np.asarray(value)
    if layer is None:
        return array
    require_at_least("layer", layer, 0)
    if array.ndim <= SCAN_AXIS or layer >= array.shape[SCAN_AXIS]:
        raise InvalidInput(
            f"{path} must have more than {layer} layers along axis {SCAN_AXIS}, got {array.shape}; leave layer out for "
            "arrays of one layer"
        )
    return array.take(layer, axis=SCAN_AXIS)


def _only_layout(part: str, ambiguous: str, arrays: Mapping[str, np.ndarray], spec: MoELayerSpec) -> str:
    """ambiguous: equal sizes that allow two layouts."""
    shapes = {name: array.shape for name, array in arrays.items() if name.startswith(part)}
    fitting = []
    for layout in WEIGHT_LAYOUTS:
        storage = Storage(layout, MAXTEXT.gate_layout, layout)
        wanted = {one.name: one.shape for one in spec.stored_as(storage).parameters(storage)}
        if all(wanted[name] == shape for name, shape in shapes.items()):
            fitting.append(layout)
    if len(fitting) == 1:
        return fitting[0]
    listed = ", ".join(f"{name} {list(shape)}" for name, shape in shapes.items())
    if not fitting:
        raise InvalidInput(f"arrays of tree must have the sizes of spec, got {listed}; pass the layer's own spec")
    raise InvalidInput(
        f"storage must be given where {ambiguous}, got None for {listed}, which may be {' or '.join(fitting)}; pass "
        "storage=MAXTEXT for what MaxText wrote"
    )
