"""FLOPs and bytes of a layer's call, counted from its spec."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from moe_core.base import dtypes
from moe_core.errors import InvalidInput
from moe_core.layers.spec import MoELayerSpec, Storage


class LayerCost(NamedTuple):
    """flops: of matrix products (multiplications and additions) and of norms. bytes: the least memory traffic, with
    every input or output array read or written once."""

    flops: int
    bytes: int


def layer_cost(
    spec: MoELayerSpec, default: Storage, tokens: int | Sequence[int], param_dtype: str, *, training: bool = False
) -> LayerCost:
    """The cost of a forward; with training, of a forward and its backward.

    Each token runs K experts, the router and the shared experts; a capacity limit bounds the slots. At most T * K
    experts are read. A backward has two more products for each product (quantised experts: one). A norm takes 4
    operations per element, and its backward 8. `recompute` repeats the experts' first product.

    tokens: their number, or the shape `[..., D]` of x. param_dtype: of x, y and every parameter without a dtype of its
    own. Raises InvalidInput.
    """
    T, (D, F, E) = count_tokens(tokens, spec.d_model), (spec.d_model, spec.d_ff, spec.num_experts)
    slots, width = min(T * spec.top_k, E * spec.capacity(T)), spec.expert_width
    first = 2 * slots * width * F * (2 if spec.gated else 1)
    routed, dense = first + 2 * slots * F * width, 2 * T * D * E
    if spec.shared_experts is not None:
        dense += 2 * T * D * (spec.shared_experts.d_ff * (3 if spec.gated else 2) + spec.shared_experts.gate)
    if spec.latent is not None:
        dense += 4 * T * D * width
    dense += 4 * sum(rows * columns for rows, columns in _normalised(spec, T, slots))
    experts = others = 0
    for parameter in spec.parameters(default):
        size = math.prod(parameter.shape) * dtypes.itemsize(parameter.dtype or param_dtype)
        if parameter.name.startswith("experts."):
            experts += size
        else:
            others += size
    weights = experts * min(E, T * spec.top_k) // E + others
    hidden = T * D * dtypes.itemsize(param_dtype)
    if not training:
        return LayerCost(routed + dense, weights + 2 * hidden)
    # A trained parameter also has a gradient to write.
    is_trained = spec.experts.scheme is None
    again = first if spec.recompute else 0
    written = weights if is_trained else others
    return LayerCost((3 if is_trained else 2) * routed + 3 * dense + again, 2 * weights + written + 5 * hidden)


def _normalised(spec: MoELayerSpec, tokens: int, slots: int) -> list[tuple[int, int]]:
    normalised = [(tokens, spec.d_model)] if spec.router_norm is not None else []
    if spec.latent is not None and spec.latent.norm is not None:
        normalised.append((tokens, spec.expert_width))
    if spec.norm_of_experts is not None:
        normalised.append((slots, spec.expert_width))
    elif spec.output is not None and spec.output.norm is not None:
        normalised.append((tokens, spec.d_model))
    return normalised


def count_tokens(tokens: int | Sequence[int], d_model: int) -> int:
    """A number of tokens, from it or the shape of x."""
    if not isinstance(tokens, int):
        if tuple(tokens)[-1:] != (d_model,):
            raise InvalidInput(
                f"tokens must be a number of tokens or a shape that ends in d_model = {d_model}, got {tuple(tokens)}; "
                "pass x.shape"
            )
        tokens = math.prod(tuple(tokens)[:-1])
    if tokens < 0:
        raise InvalidInput(f"tokens must be at least 0, got {tokens}; pass x.shape")
    return tokens
