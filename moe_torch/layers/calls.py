"""The operator of a layer's forward, for x of any rank."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from moe_core.errors import InvalidInput
from moe_torch.bridge.arrays import require_dense
from moe_torch.bridge.operator import call_first
from moe_torch.bridge.ready import dense
from moe_torch.bridge.seen import SeenCalls
from moe_torch.layers.parameters import ParameterGroup, is_overridden

_seen = SeenCalls()

#: A part's arrays: (dictionary, name) of its own, (module, name) of buffers one module deeper.
Held = tuple[str, tuple[tuple[str, str], ...], tuple[tuple[str, str], ...]]


def held_arrays(modules: Any, places: Sequence[tuple[Any, ...]]) -> tuple[tuple[Held, ...], tuple[int, ...]]:
    """Each part with its arrays, and their positions in the order of `tensors_of`. places: (position, part, names)."""
    held, order = [], [0]
    for part in dict.fromkeys(part for _, part, *_ in places):
        flat = [(position, path[0]) for position, other, *path in places if other == part and len(path) == 1]
        deep = [(position, tuple(path)) for position, other, *path in places if other == part and len(path) == 2]
        kinds = ["_parameters" if name in modules[part]._parameters else "_buffers" for _, name in flat]
        named = zip(kinds, [name for _, name in flat], strict=True)
        held.append((part, tuple(named), tuple(path for _, path in deep)))
        order += [position for position, _ in (*flat, *deep)]
    return tuple(held), tuple(order)


def tensors_of(layer: Any, x: Any) -> list[Any] | None:
    """Return x and the layer's arrays, or None unless the layer is one operator with plain parameters."""
    if torch.compiler.is_compiling() or layer._in_stages or (layer._rounds and layer.training):
        return None
    modules, tensors = layer._modules, [x]
    try:
        for part, held, deep in layer._held:
            group = modules[part]
            attributes = group.__dict__
            if attributes["_forward_pre_hooks"] or attributes["_forward_hooks"] or attributes["_backward_hooks"]:
                return None
            if attributes["_backward_pre_hooks"] or "forward" in attributes or not isinstance(group, ParameterGroup):
                return None
            if "exchange" in attributes or is_overridden(type(group)):
                return None
            for kind, name in held:
                tensors.append(attributes[kind][name])
            for matrix, name in deep:
                tensors.append(attributes["_modules"][matrix].__dict__["_buffers"][name])
    except KeyError:
        return None
    return tensors


def seen_output(key: str, tensors: list[Any]) -> torch.Tensor | None:
    """The output of a call that `output_of` remembered, or None."""
    outputs = _seen.run(key, tensors)
    return None if outputs is None else outputs[0]


def output_of(layer: Any, x: torch.Tensor, arrays: list[Any], key: str, tensors: list[Any] | None) -> torch.Tensor:
    """The operator's first output, shaped like x, finished by the layer. tensors None: do not remember this call."""
    operator, options, finish = layer._operator, layer._options, layer.output
    output = call_first(operator, (*arrays, options))
    if tensors is not None and not output.requires_grad:
        ready = operator.known((*arrays, options))
        # Copied rows have another address in each call.
        if ready is not None and (x.is_contiguous() or arrays[0] is x):
            selection = tuple(layer._held_places.index(position) for position in ready.selection)
            outputs = (dense(tuple(x.shape), output.dtype),)
            _seen.remember(key, tensors, dataclasses.replace(ready, selection=selection, outputs=outputs))
    output = output if finish is None else finish(output)
    return output if x.dim() == 2 else output.view_as(x)


def rows_of(x: torch.Tensor, d_model: int, dtype: torch.dtype) -> torch.Tensor:
    """Return x as `[T, D]` with dense rows."""
    require_dense("x", x)
    shape = x.shape
    if not shape or shape[-1] != d_model:
        raise InvalidInput(f"x must be [..., d_model] with d_model = {d_model}, got {tuple(shape)}; pass such an array")
    if x.dtype != dtype:
        raise InvalidInput(f"x must be {dtype} like the layer's parameters, got {x.dtype}; cast x or the layer")
    if not x.is_contiguous():
        # Rows may be slices of wider rows, but not strided inside, and must not overlap.
        apart = x.dim() == 2 and x.stride(1) == 1 and x.stride(0) >= d_model
        x = x if apart else x.contiguous()
    return x if x.dim() == 2 else x.view(-1, d_model)
