"""Routing traces: the experts that every token visited, layer by layer, for any framework.

`moe_torch.trace` and `moe_jax.trace` record and replay them, also each other's, to compare implementations of a model
without differences of routing. Letters: L layers, T tokens, K top-k, E experts.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from moe_core.base import require_at_least
from moe_core.base.files import file_writer, open_file, path_of
from moe_core.errors import InvalidInput
from moe_core.specs import ExpertWeights, MoESpec, RouterLogits, RouterWeights, TopK

_FORMAT, _VERSION = "moebius.routing_trace", "1"
_ARRAYS = ("ids", "weights")


@dataclass(frozen=True, eq=False)
class LayerRouting:
    """The routing of one layer: ids int32 `[T, K]` (-1 = no expert), weights fp32 `[T, K]`, of any framework.

    num_experts: E, even if the layer holds only some. A scan over layers stacks arrays to `[L, T, K]`.
    """

    ids: Any
    weights: Any
    num_experts: int

    def require_fits(self, layer: int, num_tokens: int, top_k: int, num_experts: int) -> None:
        wanted, shape = (num_tokens, top_k), tuple(self.ids.shape)
        if shape != wanted or tuple(self.weights.shape) != wanted:
            raise InvalidInput(
                f"layer {layer} of the trace must have ids and weights [num_tokens, top_k] = {wanted}, "
                f"got {shape} and {tuple(self.weights.shape)}; replay a trace of the same model and tokens"
            )
        if self.num_experts != num_experts:
            raise InvalidInput(
                f"layer {layer} of the trace must choose among {num_experts} experts, got {self.num_experts}; "
                "replay a trace of the same model"
            )


@dataclass(frozen=True, eq=False)
class RoutingTrace:
    """The routing of every MoE layer that ran, in order, as its own NumPy arrays.

    layers: LayerRouting with arrays NumPy can read. A layer that ran several times has several entries. Raises
    InvalidInput for other shapes or dtypes, ids outside [-1, num_experts), and for no layers.
    """

    layers: tuple[LayerRouting, ...]

    def __post_init__(self) -> None:
        layers = [_in_numpy(number, layer) for number, layer in enumerate(layers_of(self.layers))]
        if not layers:
            raise InvalidInput("layers must hold at least one MoE layer, got none; capture a model that has one")
        object.__setattr__(self, "layers", tuple(layers))

    def __len__(self) -> int:
        return len(self.layers)

    def __iter__(self) -> Iterator[LayerRouting]:
        return iter(self.layers)

    def __getitem__(self, layer: int) -> LayerRouting:
        return self.layers[layer]

    @classmethod
    def from_scan(cls, layers: LayerRouting | Sequence[LayerRouting]) -> RoutingTrace:
        """The trace of a scan with these layers in each step: arrays `[steps, T, K]`, put in the order they ran."""
        stacks = [(np.asarray(layer.ids), np.asarray(layer.weights), layer.num_experts) for layer in layers_of(layers)]
        shapes = [array.shape for ids, weights, _ in stacks for array in (ids, weights)]
        if any(len(shape) != 3 or shape[0] != shapes[0][0] for shape in shapes):
            raise InvalidInput(
                f"layers must have ids and weights [steps, num_tokens, top_k] of one number of steps, got {shapes}; "
                "pass what one scan stacked, or RoutingTrace(layers) for layers that are no stacks"
            )
        steps = range(shapes[0][0])
        return cls(tuple(LayerRouting(ids[i], weights[i], size) for i in steps for ids, weights, size in stacks))

    def for_scan(self, layers_per_step: int = 1) -> tuple[LayerRouting, ...]:
        """The inverse of `from_scan`: one LayerRouting of `[steps, T, K]` for each layer of a step.

        Raises InvalidInput unless the trace is a whole number of equal steps.
        """
        require_at_least("layers_per_step", layers_per_step, 1)
        groups = [self.layers[first::layers_per_step] for first in range(layers_per_step)]
        kinds = [sorted({(*layer.ids.shape, layer.num_experts) for layer in group}) for group in groups]
        if len(self.layers) % layers_per_step or any(len(kind) != 1 for kind in kinds):
            raise InvalidInput(
                f"the trace must be whole steps of layers_per_step = {layers_per_step} layers, all steps of one "
                f"(num_tokens, top_k, num_experts), got {len(self.layers)} layers with {kinds}; take the scanned "
                "ones alone: RoutingTrace(trace.layers[first:last])"
            )
        stacks = [[np.stack([getattr(layer, name) for layer in group]) for name in _ARRAYS] for group in groups]
        sizes = [group[0].num_experts for group in groups]
        return tuple(LayerRouting(*stack, num_experts=size) for stack, size in zip(stacks, sizes, strict=True))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a safetensors file: `layers.0.ids`, `layers.0.weights`, ... and E of each layer in its metadata.

        Raises Unsupported if safetensors is not installed.
        """
        save_file = file_writer("a routing trace")
        layers = enumerate(self.layers)
        arrays = {f"layers.{i}.{name}": getattr(layer, name) for i, layer in layers for name in _ARRAYS}
        sizes = json.dumps([layer.num_experts for layer in self.layers])
        save_file(arrays, path_of(path), {"format": _FORMAT, "version": _VERSION, "num_experts": sizes})

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> RoutingTrace:
        """Read a file of `save`.

        Raises InvalidInput for a missing, damaged or other file, Unsupported if safetensors is not installed.
        """
        with open_file(path_of(path)) as file:
            metadata = file.metadata()
            if (metadata.get("format"), metadata.get("version")) != (_FORMAT, _VERSION):
                raise InvalidInput(
                    f"{path} must hold a {_FORMAT} of version {_VERSION}, got metadata {dict(metadata)!r:.200}; "
                    "save it with RoutingTrace.save"
                )
            sizes = _sizes(metadata.get("num_experts", ""))
            # Stop before too few tensors for a layer.
            numbers = range(min(len(sizes), 1 + len(file.entries)))
            names = [[f"layers.{number}.{name}" for name in _ARRAYS] for number in numbers]
            missing = {name for pair in names for name in pair} - set(file.entries)
            if missing or not sizes:
                raise InvalidInput(
                    f"{path} must hold a whole routing trace, got {len(sizes)} layers and no {sorted(missing)[:4]}; "
                    "save it again"
                )
            pairs = [(file.get_tensor(ids), file.get_tensor(weights)) for ids, weights in names]
        return cls(tuple(LayerRouting(*pair, size) for pair, size in zip(pairs, sizes, strict=True)))


def sizes_of(
    experts: ExpertWeights, routing: RouterWeights | RouterLogits | TopK, spec: MoESpec, expert_map: Any
) -> tuple[int, int]:
    """(K, E) of a whole MoE forward, E even if the process holds only some."""
    if isinstance(routing, TopK):
        if expert_map is not None:
            return routing.ids.shape[1], expert_map.shape[0]
        return routing.ids.shape[1], experts.gate_up.shape[0 if experts.layer_index is None else 1]
    if spec.router is None:
        raise InvalidInput("router of spec must be a RouterSpec, got None; pass one, or ids and weights as a TopK")
    if isinstance(routing, RouterLogits):
        return spec.router.require_top_k(), routing.logits.shape[1]
    return spec.router.require_top_k(), routing.weight.shape[1 if spec.router_weight_layout == "in_out" else 0]


class Playback:
    """Hand out a trace's layers once, one by one."""

    def __init__(self, layers: Sequence[LayerRouting]) -> None:
        self._layers, self._next = layers, 0

    def next(self, num_tokens: int, top_k: int, num_experts: int) -> LayerRouting:
        """The next layer's routing. Raises InvalidInput if there is none or it does not fit."""
        number = self._next
        if number >= len(self._layers):
            raise InvalidInput(
                f"the trace must hold every MoE layer that runs, got {len(self._layers)} and one more call; "
                "replay a trace of the same model, with the same number of calls"
            )
        self._layers[number].require_fits(number, num_tokens, top_k, num_experts)
        self._next = number + 1
        return self._layers[number]

    def finish(self) -> None:
        if self._next != len(self._layers):
            raise InvalidInput(
                f"all {len(self._layers)} layers of the trace must be used, got {self._next} MoE layers that ran; "
                "replay the whole model that was captured, and nothing that runs its layers unseen"
            )


def layers_of(trace: Any) -> tuple[LayerRouting, ...]:
    """The layers of a RoutingTrace, LayerRouting or a sequence. Raises InvalidInput."""
    if isinstance(trace, RoutingTrace):
        return trace.layers
    layers = tuple(trace) if isinstance(trace, (tuple, list)) else (trace,)
    if not all(isinstance(layer, LayerRouting) for layer in layers):
        raise InvalidInput(
            f"trace must be a RoutingTrace or a sequence of LayerRouting, got {type(trace).__name__}; "
            "pass what capture recorded or RoutingTrace.load(path)"
        )
    return layers


def _sizes(text: str) -> list[int]:
    try:
        sizes = json.loads(text)
    except (ValueError, RecursionError):
        return []
    return sizes if isinstance(sizes, list) else []


def _in_numpy(number: int, layer: LayerRouting) -> LayerRouting:
    require_at_least(f"num_experts of layer {number}", layer.num_experts, 1)
    ids, weights = np.array(layer.ids), np.array(layer.weights)
    for name, array, dtype in (("ids", ids, "int32"), ("weights", weights, "float32")):
        if array.dtype != dtype or array.ndim != 2 or array.shape != ids.shape:
            raise InvalidInput(
                f"{name} of layer {number} must be {dtype} [num_tokens, top_k], ids and weights alike, got "
                f"{array.dtype}{list(array.shape)}; pass what was captured (RoutingTrace.from_scan for a scan)"
            )
    wrong = ids[(ids < -1) | (ids >= layer.num_experts)]
    if wrong.size:
        raise InvalidInput(
            f"ids of layer {number} must be in [-1, {layer.num_experts}), -1 for no expert, got {wrong[0]} among "
            f"{wrong.size} wrong ones; give the layer such ids (moe counts others in invalid_ids), or the num_experts "
            "they count in"
        )
    return LayerRouting(ids, weights, layer.num_experts)
