"""Routing of a model in place of a draw: `--routing trace:FILE`, which moe_torch.trace or moe_jax.trace recorded.

`trace:FILE` is the first layer that ran, `trace:FILE@7` the eighth. A cell with T tokens takes the first T of that
layer. The logits are such that the top K of them and the softmax over these are the ids and weights of the trace.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from moe_core.errors import InvalidInput
from moe_core.trace import LayerRouting, RoutingTrace

PREFIX = "trace:"
#: How far the other experts' logits lie below the smallest of a token's own.
_BELOW = 10.0


def is_trace(routing: str) -> bool:
    return routing.startswith(PREFIX)


def traced_layer(routing: str) -> LayerRouting:
    """The layer that `trace:FILE` or `trace:FILE@NUMBER` names; raises InvalidInput where there is none."""
    path, at, number = routing.removeprefix(PREFIX).rpartition("@")
    if not at or not number.isdecimal():
        path, number = routing.removeprefix(PREFIX), "0"
    trace = RoutingTrace.load(Path(path))
    if int(number) >= len(trace):
        raise InvalidInput(f"{routing} must name a layer below {len(trace)}, got {number}; leave out @{number}")
    return trace[int(number)]


def traced_logits(routing: str, num_tokens: int, num_experts: int, top_k: int) -> np.ndarray:
    """Logits fp32 `[T, E]` of a layer's first tokens.

    A token's ids have the logarithms of their weights, the others `_BELOW` less than the smallest. Raises InvalidInput
    for a layer of other sizes, with fewer tokens, or with a token that has no expert in a place of its top K.
    """
    layer = traced_layer(routing)
    ids, weights = np.asarray(layer.ids), np.asarray(layer.weights)
    if (layer.num_experts, ids.shape[1]) != (num_experts, top_k):
        raise InvalidInput(
            f"{routing} must have {num_experts} experts and top_k {top_k}, got {layer.num_experts} and {ids.shape[1]}; "
            "choose the shape whose model it is of"
        )
    if len(ids) < num_tokens:
        raise InvalidInput(f"{routing} must have {num_tokens} tokens, got {len(ids)}; give smaller --tokens")
    ids, weights = ids[:num_tokens], weights[:num_tokens]
    if not (ids >= 0).all() or not (weights > 0).all():
        raise InvalidInput(
            f"{routing} must have an expert with a positive weight in every place, got none for token "
            f"{int(np.flatnonzero(((ids < 0) | ~(weights > 0)).any(axis=1))[0])}; take a trace without masked tokens"
        )
    own = np.log(weights.astype(np.float64))
    logits = np.repeat(own.min(axis=1, keepdims=True) - _BELOW, num_experts, axis=1)
    np.put_along_axis(logits, ids.astype(np.int64), own, axis=1)
    return logits.astype(np.float32)
