"""Gemma's families: a router with its own norm, parallel to the experts."""

from __future__ import annotations

from dataclasses import replace

from moe_core.checkpoint.config import ModelConfig
from moe_core.checkpoint.families.record import Family, Naming, every_layer, hidden_activation, routing
from moe_core.specs import NormSpec


def _router_norm(config: ModelConfig) -> NormSpec:
    """Rows are normalised and divided by the root of their number of columns."""
    return NormSpec(config.number("rms_norm_eps"), config.integer("hidden_size") ** -0.5)


#: The router scores the residual stream, the experts take normalised rows: pass the former as `gate_inputs`.
_GEMMA4 = Family(
    router=routing(renormalize=True, top_k=("top_k_experts",)),
    layers=every_layer,
    activation=hidden_activation("hidden_activation"),
    router_norm=_router_norm,
    expert_scale=True,
    naming=Naming(("",), router=("router.proj.weight",), per_expert=None),
    requires=(("enable_moe_block", True, "a model without experts"),),
)
GEMMA = {
    "gemma4_text": replace(_GEMMA4, given=("enable_moe_block",)),
    "diffusion_gemma_text": _GEMMA4,
}
