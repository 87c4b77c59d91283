"""The forward of a layer in NumPy, with the parts around the op."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np

from moe_core.layers.weights import LayerWeights
from moe_core.ops.activation.reference import sigmoid
from moe_core.ops.common.rounding import plain_name, round_to, to_float32
from moe_core.ops.matmul.reference.forward import matmul_ogs
from moe_core.ops.moe.reference.forward import moe_stages, routing_stages, shared_output
from moe_core.ops.norm.reference import rms_norm
from moe_core.ops.routing.reference import route
from moe_core.specs import MatmulSpec, RouterSpec
from moe_core.specs.operands import MatmulOperands, TopK


def layer_stages(
    weights: LayerWeights,
    x: np.ndarray,
    token_mask: np.ndarray | None = None,
    input_ids: np.ndarray | None = None,
) -> dict[str, np.ndarray]:
    """`moe_stages` of a layer on x `[T, D]`, with the output of the whole layer.

    input_ids `[T]`: token ids, for a layer with a table. Ids outside the table visit no expert. If each expert's result
    is normalised, matmul2 has no router weight. Raises the errors of `moe_stages`.
    """
    layer, spec = weights.layer_spec(), weights.spec
    plain_router = input_ids is None and layer.sparse_mixer is None
    if layer.latent is None and layer.norm_of_experts is None and plain_router:
        stages = moe_stages(x, weights.experts, weights.router, spec, token_mask=token_mask, shared=weights.shared)
        return stages | {"output": _finished(stages["output"], weights)}
    ids, table = input_ids, getattr(weights.router, "table", None)
    if ids is not None and table is not None:
        inside = (ids >= 0) & (ids < len(table))
        ids = np.where(inside[:, None], table[np.where(inside, ids, 0)], -1)
    stages = routing_stages(x, weights.router, spec, token_mask, ids)
    if layer.sparse_mixer is not None:
        stages |= _sparse_mixed(stages["logits"], layer.sparse_mixer, token_mask)
    routing = TopK(stages["ids"], stages["weights"])
    product = MatmulSpec(spec.weight_layout, allow_tf32=spec.allow_tf32)
    rows, plain = x, dataclasses.replace(spec, router=None, shared_activation=None)
    if layer.latent is not None and weights.before is not None:
        rows = matmul_ogs(MatmulOperands(rows, weights.before.weight), product)
        rows = rows if layer.latent.norm is None else rms_norm(rows, weights.before.norm, spec=layer.latent.norm)
    if layer.norm_of_experts is None or weights.output is None:
        stages |= moe_stages(rows, weights.experts, routing, plain)
        routed = stages["output"]
    else:
        stages |= moe_stages(rows, weights.experts, TopK(routing.ids, np.ones_like(routing.weights)), plain)
        normed = rms_norm(stages["matmul2"], weights.output.norm, spec=layer.norm_of_experts)
        slots = to_float32(normed).reshape(*routing.ids.shape, -1) * routing.weights[..., None]
        routed = round_to(functools.reduce(np.add, slots.swapaxes(0, 1)), plain_name(x))
    if weights.after is not None:
        routed = matmul_ogs(MatmulOperands(routed, weights.after.weight), product)
    if weights.shared is not None:
        visited, gate = shared_output(x, weights.shared, spec, None)
        visited = to_float32(round_to(visited if gate is None else visited * sigmoid(gate), plain_name(x)))
        routed = round_to(to_float32(routed) + visited, plain_name(x))
    return stages | {"weights": routing.weights, "output": _finished(routed, weights)}


def _sparse_mixed(logits: np.ndarray, epsilon: float, token_mask: np.ndarray | None) -> dict[str, np.ndarray]:
    """ids and weights `[T, 2]`; see `MoELayerSpec.sparse_mixer`."""
    left, found = logits, []
    for _ in range(2):
        largest = left.max(axis=-1, keepdims=True)
        with np.errstate(all="ignore"):
            far = (largest - logits) / np.maximum(np.abs(logits), largest) > 2 * epsilon
        near = np.where(far, -np.inf, left).astype(logits.dtype)
        found.append(route(near, None, token_mask, spec=RouterSpec(1)))
        left = np.where(np.arange(logits.shape[1]) == found[-1][0], -np.inf, left).astype(logits.dtype)
    ids, weights = (np.concatenate(parts, axis=1) for parts in zip(*found, strict=True))
    return {"ids": ids, "weights": weights}


def _finished(rows: np.ndarray, weights: LayerWeights) -> np.ndarray:
    """Apply the operations after the sum of the experts."""
    layer, part = weights.layer_spec(), weights.output
    spec = layer.output
    if part is None or spec is None:
        return rows
    if spec.norm is not None and not spec.of_experts:
        rows = rms_norm(rows, part.norm, spec=spec.norm)
    total = to_float32(rows)
    total = total * total.dtype.type(spec.scale)
    if part.bias is not None:
        total = total + to_float32(part.bias)
    return round_to(total, plain_name(rows))
