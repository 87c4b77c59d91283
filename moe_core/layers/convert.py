"""Exact permutations between storages: views of a source, and their places in the target's arrays."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from moe_core.base import require_kind
from moe_core.errors import InvalidInput, Unsupported
from moe_core.formats import QuantizedSpec, Tiling
from moe_core.layers.spec import MoELayerSpec, Storage
from moe_core.layers.weights import LayerWeights
from moe_core.ops.prepack.prepack import order_for

Place = tuple[Any, ...]
WHOLE: Place = (...,)


class Placement(NamedTuple):
    """`target[name][place] = array`. array: maybe strided."""

    name: str
    place: Place
    array: np.ndarray


def gate_place(gate_layout: str, is_up: bool, width: int) -> slice:
    """Gate or up on an axis of 2 * width columns: halves 0:width and width:, interleaved 0::2 and 1::2."""
    assert gate_layout in ("halves", "interleaved"), gate_layout
    if gate_layout == "interleaved":
        return slice(int(is_up), None, 2)
    return slice(width, None) if is_up else slice(0, width)


def placements(weights: LayerWeights, storage: Storage) -> Iterator[Placement]:
    """The writes that fill arrays of `storage` with `weights`, every element exactly once.

    An ungated layer ignores gate_layout. Arrays of a quantised matrix change their weight_layout like plain ones.
    Raises Unsupported for another gate_layout of a quantised one.
    """
    require_kind("storage", storage, Storage)
    source, spec = weights.storage, weights.spec
    same_gate = not spec.activation.gated or source.gate_layout == storage.gate_layout
    transpose = source.weight_layout != storage.weight_layout
    arrays = weights.named()
    for name, array in arrays.items():
        prefix, _, field = name.partition(".")
        is_bias = field.endswith("bias")
        if prefix == "router":
            flip = field == "weight" and source.router_weight_layout != storage.router_weight_layout
        else:
            flip = transpose and not is_bias and array.ndim > 1
        # A bias has only the output axis.
        axis = -1 if is_bias or storage.weight_layout == "in_out" else -2
        view = array.swapaxes(-1, -2) if flip else array
        if not same_gate and field.startswith(("gate_up.", "up.")):
            raise Unsupported(
                f"gate_layout must stay {source.gate_layout!r} for quantised experts, whose groups may hold rows of "
                f"gate and up, got {storage.gate_layout!r}; make the layer with ExpertsSpec(gate_layout="
                f"{source.gate_layout!r}) or from these weights, or dequantise them"
            )
        if same_gate or prefix == "router" or field not in ("gate_up", "up", "gate_up_bias", "up_bias"):
            yield Placement(name, WHOLE, view)
            continue
        yield from _regated(name, view, axis, source.gate_layout, storage.gate_layout)


def _regated(name: str, array: np.ndarray, axis: int, source: str, target: str) -> Iterator[Placement]:
    prefix, _, field = name.partition(".")
    suffix = "_bias" if field.endswith("_bias") else ""
    if source == "separate":
        parts, width = {field.startswith("up"): array}, array.shape[axis]
    else:
        width = array.shape[axis] // 2
        parts = {is_up: array[_at(axis, gate_place(source, is_up, width))] for is_up in (False, True)}
    for is_up, part in parts.items():
        name = "up" if is_up and target == "separate" else "gate_up"
        place = WHOLE if target == "separate" else _at(axis, gate_place(target, is_up, width))
        yield Placement(f"{prefix}.{name}{suffix}", place, part)


def _at(axis: int, columns: slice) -> Place:
    return (..., columns, *[slice(None)] * (-1 - axis))


def convert_weights(weights: LayerWeights, storage: Storage) -> LayerWeights:
    """The same layer stored as `storage`, row-major. Arrays with an unchanged layout are shared with `weights`."""
    require_kind("storage", storage, Storage)
    spec = weights.layer_spec().stored_as(storage)
    shapes = {parameter.name: parameter.shape for parameter in spec.parameters(storage)}
    arrays: dict[str, np.ndarray] = {}
    for name, place, array in placements(weights, storage):
        if place == WHOLE:
            arrays[name] = np.ascontiguousarray(array)
            continue
        if name not in arrays:
            arrays[name] = np.empty(shapes[name], array.dtype)
        arrays[name][place] = array
    return LayerWeights.from_named(arrays, spec, storage)


def tiled_specs(spec: MoELayerSpec, storage: Storage) -> dict[str, QuantizedSpec]:
    """Specs of `experts.gate_up` and `experts.down`, prepacked. Raises InvalidInput if they cannot be tiled."""
    scheme = spec.experts.scheme
    if scheme is None or storage.weight_layout != "out_in":
        raise InvalidInput(
            f"prepack_weights takes layers of quantised experts stored out_in, got scheme {scheme} and "
            f"{storage.weight_layout}; make it with ExpertsSpec(scheme=..., weight_layout='out_in')"
        )
    order = order_for(storage.gate_layout if spec.gated else None, "experts.gate_up")
    rows = 2 * spec.d_ff if spec.gated else spec.d_ff
    gate_up, down = Tiling(rows, spec.d_model, order), Tiling(spec.d_model, spec.d_ff, "rows")
    tilings = {"experts.gate_up": gate_up, "experts.down": down}
    return {name: QuantizedSpec(scheme.weights, tiling=tiling) for name, tiling in tilings.items()}
