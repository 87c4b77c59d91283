"""Parts around the experts of some families."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moe_core.checkpoint.config import ModelConfig
from moe_core.checkpoint.families.record import routing
from moe_core.layers.around import LatentSpec, OutputSpec
from moe_core.specs import NormSpec, RouterSpec


def phi_router(config: ModelConfig) -> RouterSpec:
    """Two experts, whatever num_experts_per_tok says."""
    config.require("num_experts_per_tok", 2, "sparsemixer routing to another number of experts")
    return RouterSpec(2)


def phi_mixer(config: ModelConfig) -> Mapping[str, Any]:
    config.require("input_jitter_noise", 0.0, "noise on the input")
    return {"sparse_mixer": config.number("router_jitter_noise", default=0.01)}


def normalised_sum(config: ModelConfig) -> Mapping[str, Any]:
    return {"output": OutputSpec(NormSpec(config.number("rms_norm_eps", default=1e-6)))}


def muse_router(config: ModelConfig) -> RouterSpec:
    """Sigmoid of scaled logits, renormalised with a small number in the divisor."""
    scale = config.number("output_multiplier")
    return routing("sigmoid", scale=("routed_scaling_factor",), logit_scale=scale, epsilon=1e-15)(config)


def muse_around(config: ModelConfig) -> Mapping[str, Any]:
    before = NormSpec(config.number("rms_norm_eps"), centred=True)
    each = NormSpec(config.number("post_norm_eps"), centred=True, weight_first=True)
    width = config.integer("moe_hidden_size")
    return {"latent": LatentSpec(width, before), "output": OutputSpec(each, "experts")}


def latent_size(config: ModelConfig) -> Mapping[str, Any]:
    if config.settings.get("moe_latent_size") is None:
        return {}
    return {"latent": LatentSpec(config.integer("moe_latent_size"))}


def cohere2_around(config: ModelConfig) -> Mapping[str, Any]:
    if config.integer("num_shared_experts", least=0, null=0, default=0) == 0:
        return {}
    if config.settings.get("shared_expert_combination_strategy") in (None, "average"):
        return {"output": OutputSpec(scale=0.5)}
    config.require("shared_expert_combination_strategy", "sum", "another combination of routed and shared experts")
    return {}
