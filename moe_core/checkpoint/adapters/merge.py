"""Merge an adapter into a layer's weights, plain or quantised, and back."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from moe_core.base import dtypes
from moe_core.base.checks import require_kind
from moe_core.checkpoint.adapters.form import Adapter, ExpertAdapter
from moe_core.errors import InvalidInput
from moe_core.formats import QuantizedTensor
from moe_core.layers.convert import gate_place
from moe_core.layers.weights import LayerWeights
from moe_core.ops.common.rounding import round_to, to_float32
from moe_core.ops.quantize.reference import dequantize, quantize
from moe_core.specs.operands import map_arrays, named_arrays

#: Of another library's merge: its roundings, and a wrong order of B is off by 1.4.
_MOST_ROUNDINGS, _MOST_APART = 4.0, 0.01


@dataclass(frozen=True, eq=False)
class Merged:
    """weights: of the merged layer. base: the weights it came from, unchanged.

    errors: of quantised matrices, float64 `[E]`: the norm of (requantised - exact) over the norm of the change
    scale a b. 0: the expert has no change, and keeps its bytes. 1: requantising loses as much as the adapter adds.
    """

    weights: LayerWeights
    base: LayerWeights
    errors: dict[str, np.ndarray]


def merge_adapter(weights: LayerWeights, adapter: ExpertAdapter, *, allow_losses: bool = False) -> Merged:
    """W + scale a b of every expert and the router, in float32 with one rounding. `Merged.base` undoes it, bit for bit.

    weights: in any storage, their experts plain or quantised. Quantised experts are quantised again in their format.
    allow_losses: accept an error of 1 or more. Raises InvalidInput otherwise, for shapes of another layer, and
    for factors that are not finite.
    """
    require_kind("weights", weights, LayerWeights)
    require_kind("adapter", adapter, ExpertAdapter)
    fields: dict[str, Any] = {}
    errors: dict[str, np.ndarray] = {}
    for name, product, columns in _matrices(weights, adapter):
        matrix = getattr(weights.experts, name)
        pair = adapter.pairs()[product]
        changes = (pair.change(expert)[:, columns] for expert in range(len(pair.a)))
        fields[name], lost = _changed(matrix, weights.spec.weight_layout == "out_in", changes, name)
        if isinstance(matrix, QuantizedTensor):
            errors[name], worst = lost, int(np.argmax(lost))
            if lost[worst] >= 1 and not allow_losses:
                raise InvalidInput(
                    f"allow_losses must be True where requantising {name} to {matrix.format} loses as much as the "
                    f"adapter adds, got False and the error {lost[worst]:.2f} of expert {worst}; merge into bf16 "
                    "weights, or keep the adapter apart"
                )
    merged, pair, router = replace(weights, experts=replace(weights.experts, **fields)), adapter.router, weights.router
    if pair is not None:
        turn, shape = weights.spec.router_weight_layout == "out_in", (pair.a.shape[1], pair.b.shape[2])
        if shape[:: -1 if turn else 1] != router.weight.shape:
            raise InvalidInput(
                f"router of the adapter must have the inputs and outputs of router.weight {router.weight.shape}, got "
                f"{shape}; merge the adapter of this layer"
            )
        weight, _ = _changed(router.weight[None], turn, iter([pair.change(0)]), "router")
        merged = replace(merged, router=replace(router, weight=weight[0]))
    return Merged(merged, weights, errors)


def _matrices(weights: LayerWeights, adapter: ExpertAdapter) -> Iterator[tuple[str, str, slice]]:
    """(field of the experts, product, columns of the product's b), with shapes checked."""
    layer, separate = weights.layer_spec(), weights.storage.gate_layout == "separate"
    gated = layer.experts.activation.gated
    width = layer.experts.activation.input_width(layer.d_ff)
    sizes = {"gate_up": (layer.d_model, width), "down": (layer.d_ff, layer.d_model)}
    if gated and not separate and adapter.gate_layout != weights.storage.gate_layout:
        raise InvalidInput(
            f"gate_layout of the adapter must be {weights.storage.gate_layout} like the weights', got "
            f"{adapter.gate_layout}; call adapter.with_gate_layout"
        )
    for product, pair in adapter.pairs().items():
        shape = (len(pair.a), pair.a.shape[1], pair.b.shape[2])
        if shape != (layer.num_experts, *sizes[product]):
            raise InvalidInput(
                f"{product} of the adapter must have experts, inputs and outputs {(layer.num_experts, *sizes[product])}"
                f", got {shape}; merge the adapter of this layer"
            )
        if product == "gate_up" and gated and separate:
            for is_up, name in enumerate(("gate_up", "up")):
                yield name, product, gate_place(adapter.gate_layout, bool(is_up), width // 2)
        else:
            yield product, product, slice(None)


def _changed(matrix: Any, turn: bool, changes: Iterator[np.ndarray], name: str) -> tuple[Any, np.ndarray]:
    """A copy of all experts' matrices with their changes, and what requantising lost of each."""
    packed, errors = isinstance(matrix, QuantizedTensor), np.zeros(matrix.shape[0])
    merged = map_arrays(matrix, np.array) if packed else np.array(matrix)
    for expert, change in enumerate(changes):
        if not np.isfinite(change).all():
            raise InvalidInput(f"the factors of {name} must be finite, got others for expert {expert}; train again")
        if not change.any():
            continue
        change = change.T if turn else change
        if not packed:
            merged[expert] = round_to(to_float32(merged[expert]) + change, dtypes.canonical(merged.dtype))
            continue
        before = map_arrays(matrix, lambda array, expert=expert: array[expert])
        exact = dequantize(before) + change
        after = quantize(exact, matrix.format, layout=matrix.layout)
        for (_, target), (_, values) in zip(named_arrays(merged), named_arrays(after), strict=True):
            target[expert] = values
        lost = np.linalg.norm((dequantize(after) - exact).astype(np.float64))
        errors[expert] = lost / np.linalg.norm(change.astype(np.float64))
    return merged, errors


def verify_adapter(adapter: Adapter, layer: int | str, before: LayerWeights, after: LayerWeights) -> None:
    """Compare with weights that another library merged, which tells every packing from every other.

    before, after: plain weights of one layer, without and with the adapter. Raises InvalidInput if their difference is
    another than scale a b, beyond the roundings of their dtype.
    """
    part = adapter.layer(layer)
    if before.storage.gate_layout in ("halves", "interleaved"):
        part = part.with_gate_layout(before.storage.gate_layout)
    merged = merge_adapter(before, part).weights
    for name, product, columns in _matrices(before, part):
        exact, theirs = getattr(merged.experts, name), getattr(after.experts, name)
        start = to_float32(getattr(before.experts, name))
        for expert in range(len(start)):
            change = part.pairs()[product].change(expert)[:, columns].astype(np.float64)
            change = change.T if before.spec.weight_layout == "out_in" else change
            whole = start[expert] + change
            lost = np.linalg.norm(to_float32(exact[expert]) - whole)
            apart = np.linalg.norm(to_float32(theirs[expert]) - whole)
            if not apart <= _MOST_ROUNDINGS * lost + _MOST_APART * np.linalg.norm(change):
                raise InvalidInput(
                    f"verify must agree with the adapter, got weights of {name}, layer {layer}, expert {expert} that "
                    f"are {apart / np.linalg.norm(change):.2f} times the change apart; name another packing, or "
                    "correct r and lora_alpha"
                )
