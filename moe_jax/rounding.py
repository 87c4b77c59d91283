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
    """Route logits fp32 `[T, E]`, then round each expert's number of tokens, as `moe_torch.route_rounded`."""
    call = OpCall("route_rounded")
    require_type("spec", spec, RouterSpec)
    require_type("rounding", rounding, TokenRounding)
    array = call.array("logits", logits)
    bias, mask = call.optional("correction_bias", correction_bias), call.optional("token_mask", token_mask)
    options = {"correction_bias": bias, "token_mask": mask}
    return RoundedRouting(*run_stage(call, plan_route_rounded, array, spec, rounding, **options)[:3])
