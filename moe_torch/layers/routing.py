"""What a layer computes around the composed operator, or instead of it: its stages one by one."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from moe_core.layers import MoELayerSpec
from moe_core.specs.operands import MoEOutput, RaggedLayout, TopK
from moe_torch import ops
from moe_torch.layers.parameters import has_own_call, own_part


def run_stages(layer: Any, x: torch.Tensor, token_mask: torch.Tensor | None) -> MoEOutput:
    """One forward of a layer with a capacity limit, or whose parts have calls of their own: router, route, experts.

    x `[T, D]`, token_mask bool `[T]`. ids are -1 where a slot was dropped, tokens_per_expert counts the slots before.
    Where neither the experts nor the shared experts have a call of their own, both are one operator.
    """
    spec = layer.spec
    rows = x
    if token_mask is not None and torch.is_grad_enabled():
        # The router's backward multiplies every row by its gradient, which is zero for masked tokens.
        rows = x.masked_fill(~token_mask[:, None], 0)
    logits = layer.router(rows).float()
    correction_bias = own_part(layer.router, "router").correction_bias if spec.correction_bias else None
    ids, weights = ops.route(logits, layer.moe_spec.router, correction_bias=correction_bias, token_mask=token_mask)
    layout = ops.make_layout(ids, spec.num_experts)
    kept = ids if spec.capacity_factor is None else _within_capacity(ids, layout, spec)
    experts, shared = layer.experts, layer.shared_experts
    if has_own_call(experts) or (shared is not None and has_own_call(shared)):
        output = experts(x, kept, weights)
        if shared is not None:
            output = (output.float() + shared(x).float()).to(output.dtype)
    else:
        moe_spec = dataclasses.replace(layer.moe_spec, router=None)
        dense = None if shared is None else shared.operands()
        output = ops.moe(x, experts.operands(), TopK(kept, weights), moe_spec, shared=dense).output
    return MoEOutput(output, kept, weights, logits, layout.group_sizes, layout.invalid_ids)


def _within_capacity(ids: torch.Tensor, layout: RaggedLayout, spec: MoELayerSpec) -> torch.Tensor:
    """ids, -1 where an expert was full.

    An expert keeps the first C = `spec.capacity(T)` slots in slot order, those that `make_layout(max_rows=C)` keeps. C
    is compared with each slot's place in a layout of all slots instead of being the layout's max_rows: that is a
    constant of its kernels, and a changing number of tokens would compile them again.
    """
    ratio = spec.capacity_ratio()
    assert ratio is not None
    numerator, denominator = ratio
    capacity, flat = -(-ids.shape[0] * numerator // denominator), ids.view(-1)
    # -1 for every slot behind the first of its expert.
    place = layout.row_of_slot - layout.group_start[flat.clamp(min=0)]
    return torch.where(place < capacity, flat, -1).view(ids.shape)
