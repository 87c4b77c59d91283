"""Routing with token rounding on torch tensors."""

from __future__ import annotations

import torch

from moe_core.specs.operands import RoundedRouting
from moe_core.specs.routing import RouterSpec, TokenRounding
from moe_torch.bridge.options import require_instance
from moe_torch.operators.stages import ROUTE_ROUNDED


def route_rounded(
    logits: torch.Tensor,
    spec: RouterSpec,
    rounding: TokenRounding,
    *,
    correction_bias: torch.Tensor | None = None,
    token_mask: torch.Tensor | None = None,
) -> RoundedRouting:
    """Route, then round the number of tokens of each expert, see `TokenRounding`. For training only
    (docs/user/routing.md).

    A chosen expert keeps its weight from `route`. An added expert's weight is its score times `spec.scale`, not
    renormalised.

    Args:
        logits: fp32 `[T, E]`. T is 0 or at least `rounding.tile`.
        spec: the rules of the top-K choice, with slot_order `score` and a scale above 0.
        rounding: tile, mode and candidates.
        correction_bias: fp32 `[E]`, added to the scores for the selection only.
        token_mask: bool `[T]`. False tokens get ids -1 and weights 0, and are never added.

    Returns:
        ids int32 and weights fp32 `[T, W]`, W = `rounding.width(K, E)`: a token's W best experts in order, with -1 and
            0 for those not visited. tokens_per_expert int32 `[E]`, before rounding.

    Raises:
        InvalidInput: K > E, fewer tokens than a tile, or candidates outside [K, E].
        Unsupported: slot_order `expert`, or topk_then_softmax with groups.
    """
    require_instance("spec", spec, RouterSpec)
    require_instance("rounding", rounding, TokenRounding)
    results = ROUTE_ROUNDED.call(
        logits=logits, correction_bias=correction_bias, token_mask=token_mask, spec=spec, rounding=rounding
    )
    return RoundedRouting(*results[:3])
