"""Routing traces: the experts that every token visited, layer by layer, for any framework.

`moe_torch.trace` and `moe_jax.trace` record and replay them, also each other's. L layers, T tokens, K top-k.
"""

from __future__ import annotations

import base64
import io
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from moe_core.base import as_integer, require_at_least
from moe_core.base.files import file_writer, open_file, path_of
from moe_core.base.sizes import INT32_LIMIT
from moe_core.errors import InvalidInput, Unsupported
from moe_core.specs import ExpertWeights, MoESpec, RouterLogits, RouterWeights, TopK

_FORMAT, _VERSION = "moebius.routing_trace", "1"
_ARRAYS = ("ids", "weights")


@dataclass(frozen=True, eq=False)
class LayerRouting:
    """The routing of one layer: ids int32 `[T, K]` (-1 = no expert), weights fp32 `[T, K]`, of any framework.

    weights: None: a replay weighs the ids by the live logits. A token then has K distinct experts, or -1 K times.
    num_experts: E, even if the layer holds only some. A scan over layers stacks arrays to `[L, T, K]`.
    """

    ids: Any
    weights: Any
    num_experts: int

    @property
    def arrays(self) -> tuple[Any, ...]:
        return tuple(array for _, array in self.named())

    def named(self) -> Iterator[tuple[str, Any]]:
        yield "ids", self.ids
        if self.weights is not None:
            yield "weights", self.weights

    def require_fits(self, layer: int, num_tokens: int, top_k: int, num_experts: int) -> None:
        wanted, shapes = (num_tokens, top_k), [tuple(array.shape) for array in self.arrays]
        if shapes != [wanted] * len(shapes):
            raise InvalidInput(
                f"layer {layer} of the trace must have ids and weights [num_tokens, top_k] = {wanted}, "
                f"got {' and '.join(map(str, shapes))}; replay a trace of the same model and tokens (with "
                "token_rounding, ids of training are wider than top_k)"
            )
        if self.num_experts != num_experts:
            raise InvalidInput(
                f"layer {layer} of the trace must choose among {num_experts} experts, got {self.num_experts}; "
                "replay a trace of the same model"
            )


@dataclass(frozen=True, eq=False)
class RoutingTrace:
    """The routing of every MoE layer that ran, in order, as its own NumPy arrays.

    layers: LayerRouting with arrays NumPy can read, all with weights or none. A layer that ran several times has
    several entries. Raises InvalidInput for other shapes or dtypes, ids outside [-1, num_experts), and for no layers.
    """

    layers: tuple[LayerRouting, ...]

    def __post_init__(self) -> None:
        layers = [_in_numpy(number, layer) for number, layer in enumerate(layers_of(self.layers))]
        if not layers:
            raise InvalidInput("layers must hold at least one MoE layer, got none; capture a model that has one")
        if len({layer.weights is None for layer in layers}) > 1:
            raise InvalidInput("layers must all have weights or none, got some with; replace the others' by None")
        object.__setattr__(self, "layers", tuple(layers))

    @classmethod
    def from_routed_experts(
        cls,
        routed_experts: Any,
        num_experts: int,
        *,
        layers: Sequence[int] | None = None,
        num_tokens: int | None = None,
        shape: tuple[int, int] | None = None,
    ) -> RoutingTrace:
        """The experts that a serving engine chose for a sequence, or for several in a row: a trace without weights.

        Args:
            routed_experts: vLLM's integers `[tokens, layers, K]`, or the base64 text of their .npy file, or SGLang's
                base64 text of int32. A list: of each sequence.
            num_experts: E.
            layers: indices of the layers with experts, such as `checkpoint.moe_layers`: both engines return rows of
                dense layers, too. None: all.
            num_tokens: of each sequence. Missing rows at the end get -1, as the last token's, which no engine runs.
                None: as many as there are.
            shape: (layers, K) of SGLang's text, which has none.

        Raises InvalidInput for other arrays and texts.
        """
        first: Any = next(iter(routed_experts), None) if isinstance(routed_experts, (list, tuple)) else None
        several = isinstance(first, (str, bytes)) or getattr(first, "ndim", 0) == 3
        sequences = [_engine_ids(one, shape) for one in (routed_experts if several else [routed_experts])]
        if len(shapes := {one.shape[1:] for one in sequences}) > 1:
            raise InvalidInput(f"routed_experts must be of one model, got layers and top_k {shapes}; pass such arrays")
        ids = np.concatenate([_filled_up(one, num_tokens) for one in sequences])
        chosen = range(ids.shape[1]) if layers is None else layers
        for layer in chosen:
            as_integer("layers", layer, 0, ids.shape[1])
        return cls(tuple(LayerRouting(ids[:, layer], None, num_experts) for layer in chosen))

    def __len__(self) -> int:
        return len(self.layers)

    def __iter__(self) -> Iterator[LayerRouting]:
        return iter(self.layers)

    def __getitem__(self, layer: int) -> LayerRouting:
        return self.layers[layer]

    @classmethod
    def from_scan(cls, layers: LayerRouting | Sequence[LayerRouting]) -> RoutingTrace:
        """The trace of a scan with these layers in each step: arrays `[steps, T, K]`, put in the order they ran."""
        stacks = [([np.asarray(array) for array in layer.arrays], layer.num_experts) for layer in layers_of(layers)]
        shapes = [array.shape for arrays, _ in stacks for array in arrays]
        if any(len(shape) != 3 or shape[0] != shapes[0][0] for shape in shapes):
            raise InvalidInput(
                f"layers must have ids and weights [steps, num_tokens, top_k] of one number of steps, got {shapes}; "
                "pass what one scan stacked, or RoutingTrace(layers) for layers that are no stacks"
            )
        steps = range(shapes[0][0])
        return cls(tuple(_layer([array[i] for array in arrays], size) for i in steps for arrays, size in stacks))

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
        stacks = [map(np.stack, zip(*[layer.arrays for layer in group], strict=True)) for group in groups]
        return tuple(_layer(stack, group[0].num_experts) for stack, group in zip(stacks, groups, strict=True))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a safetensors file: `layers.0.ids`, `layers.0.weights` ... Raises Unsupported without safetensors."""
        save_file = file_writer("a routing trace")
        layers = enumerate(self.layers)
        arrays = {f"layers.{i}.{name}": one for i, layer in layers for name, one in layer.named()}
        metadata = {"num_experts": json.dumps([layer.num_experts for layer in self.layers])}
        if self.layers[0].weights is None:
            metadata["arrays"] = _ARRAYS[0]
        save_file(arrays, path_of(path), {"format": _FORMAT, "version": _VERSION, **metadata})

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> RoutingTrace:
        """Read a file of `save`. Raises InvalidInput for a damaged or other file, Unsupported without safetensors."""
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
            stored = _ARRAYS[:1] if metadata.get("arrays") == _ARRAYS[0] else _ARRAYS
            names = [[f"layers.{number}.{name}" for name in stored] for number in numbers]
            known, held = {name for pair in names for name in pair}, set(file.entries)
            if known != held or not sizes:
                raise InvalidInput(
                    f"{path} must hold a whole routing trace and nothing else, got {len(sizes)} layers and no "
                    f"{sorted(known - held)[:4]}, but {sorted(held - known)[:4]}; save it again"
                )
            arrays = [[file.get_tensor(name) for name in names_of_layer] for names_of_layer in names]
        return cls(tuple(_layer(of_layer, size) for of_layer, size in zip(arrays, sizes, strict=True)))


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
        self._layers, self._next, self._column = layers, 0, 0

    def peek(self, num_tokens: int, top_k: int, num_experts: int) -> LayerRouting:
        """The next layer's routing. Raises InvalidInput if there is none or it does not fit."""
        number = self._next
        if number >= len(self._layers):
            raise InvalidInput(
                f"the trace must hold every MoE layer that runs, got {len(self._layers)}, and layer {number} (top-k "
                f"{top_k} of {num_experts} experts, {num_tokens} tokens) is missing; replay a trace of the same model, "
                "with the same number of calls"
            )
        self._layers[number].require_fits(number, num_tokens, top_k, num_experts)
        return self._layers[number]

    def next(self, num_tokens: int, top_k: int, num_experts: int) -> LayerRouting:
        """`peek`, and go on to the layer behind."""
        layer = self.peek(num_tokens, top_k, num_experts)
        self._next += 1
        return layer

    def choice(self, num_tokens: int, top_k: int, num_experts: int) -> Any:
        """ids `[T, K]` for the next layer's router (of a sparse_mixer column by column), or None. Raises as `peek`."""
        if top_k == 1 and self.fits(num_tokens, 2, num_experts):
            column, self._column = self._column, 1 - self._column
            return self._layers[self._next].ids[:, column : column + 1]
        if self.lacks_weights or self.fits(num_tokens, top_k, num_experts):
            return self.peek(num_tokens, top_k, num_experts).ids
        return None

    def require_weights(self) -> None:
        """Raise Unsupported for a trace of ids alone, where token rounding chooses."""
        if self.lacks_weights:
            raise Unsupported(
                "token_rounding needs a trace with weights, captured in training, got ids alone; evaluate the layer, "
                "or make it without token_rounding"
            )

    @property
    def lacks_weights(self) -> bool:
        """Return True if the trace has ids alone."""
        return any(layer.weights is None for layer in self._layers)

    def fits(self, *sizes: int) -> bool:
        """Return True if the next layer has this (num_tokens, top_k, num_experts)."""
        following = self._layers[self._next : self._next + 1]
        return [(*layer.ids.shape, layer.num_experts) for layer in following] == [sizes]

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
    arrays = [np.array(array, order="C") for array in layer.arrays]
    ids = arrays[0]
    for name, array, dtype in zip(_ARRAYS, arrays, ("int32", "float32"), strict=False):
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
    if layer.weights is None:
        ordered = np.sort(ids, axis=1)
        bad = ~(ids < 0).all(axis=1) & ((ordered[:, 1:] == ordered[:, :-1]).any(axis=1) | (ids < 0).any(axis=1))
        if bad.any():
            raise InvalidInput(
                f"ids of layer {number} must be distinct experts, or -1 for all of a token, where weights are None, "
                f"got {ids[bad][0].tolist()}; pass the weights, too"
            )
    return _layer(arrays, layer.num_experts)


def _layer(arrays: Iterable[Any], num_experts: int) -> LayerRouting:
    ids, *weights = arrays
    return LayerRouting(ids, weights[0] if weights else None, num_experts)


def _engine_ids(routed: Any, shape: tuple[int, int] | None) -> np.ndarray:
    """int32 `[tokens, layers, K]` of one sequence, see `RoutingTrace.from_routed_experts`."""
    try:
        if isinstance(routed, (str, bytes)):
            data = base64.b64decode(routed, validate=True)
            if data.startswith(b"\x93NUMPY"):
                routed = np.load(io.BytesIO(data), allow_pickle=False)
            elif shape is not None:
                routed = np.frombuffer(data, "<i4").reshape(-1, *shape)
        array = np.asarray(routed)
    except ValueError as error:
        raise InvalidInput(
            f"routed_experts must be integers [tokens, layers, top_k], base64 of a .npy file or of int32 of shape "
            f"{shape}, got others ({error!s:.200}); pass what the engine returned"
        ) from error
    if array.ndim != 3 or array.dtype.kind not in "iu":
        got = "text" if array.dtype.kind in "US" else f"{array.dtype}{list(array.shape)}"
        raise InvalidInput(
            f"routed_experts must be integers [tokens, layers, top_k], or base64 text, got {got}; pass shape=(layers, "
            "top_k) with SGLang's text"
        )
    return np.clip(array, -2, INT32_LIMIT - 1).astype(np.int32)


def _filled_up(ids: np.ndarray, num_tokens: int | None) -> np.ndarray:
    if num_tokens is None:
        return ids
    require_at_least("num_tokens", num_tokens, len(ids))
    return np.pad(ids, ((0, num_tokens - len(ids)), (0, 0), (0, 0)), constant_values=-1)
