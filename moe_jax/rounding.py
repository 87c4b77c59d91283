"""Token rounding on JAX arrays."""

from __future__ import annotations

from moe_core.ops.routing.rounding import plan_route_rounded
from moe_core.specs.operands import RoundedRouting
from moe_core.specs.routing import RouterSpec, TokenRounding
from moe_jax.autodiff.stages import run_stage
from moe_jax.bridge.calls import Array, OpCall, require_type


def route_rounded(
    logits: Array,
    spec: RouterSpec,
    rounding: TokenRounding,
    *,
    correction_bias: Array | None = None,
    token_mask: Array | None = None,
) -> RoundedRouting:
    """Route, then round the number of tokens of each expert, see `TokenRounding`. For training only
    (docs/user/routing.md).

    A chosen expert keeps its weight from `route`. An added one's weight is its score times `spec.scale`, not
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
    call = OpCall("route_rounded")
    require_type("spec", spec, RouterSpec)
    require_type("rounding", rounding, TokenRounding)
    array = call.array("logits", logits)
    bias, mask = call.optional("correction_bias", correction_bias), call.optional("token_mask", token_mask)
    options = {"correction_bias": bias, "token_mask": mask}
    return RoundedRouting(*run_stage(call, plan_route_rounded, array, spec, rounding, **options)[:3])
