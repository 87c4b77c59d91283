"""Families routed as DeepSeek: sigmoid scores and a correction bias (V3) or softmax scores (V2)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from moe_core.checkpoint.config import ModelConfig
from moe_core.checkpoint.families.record import (
    NO_BIAS,
    Activations,
    Family,
    Layers,
    Naming,
    Shared,
    dense_first,
    every_layer,
    hidden_activation,
    limited,
    limited_silu,
    mlp_names,
    routing,
    silu,
)
from moe_core.errors import InvalidInput, Unsupported
from moe_core.layers.around import LatentSpec, OutputSpec
from moe_core.specs import Activation, NormSpec, RouterSpec

_SCALE, _NORM, _GROUPS = ("routed_scaling_factor",), ("norm_topk_prob",), (("n_group",), ("topk_group",))
_EXPERTS = ("n_routed_experts", "num_local_experts", "num_experts")
_SHARED = Shared(copies=("n_shared_experts",))

#: A correction bias chooses within the best groups.
_V3 = Family(
    router=routing("sigmoid", renormalize=_NORM, scale=_SCALE, groups=_GROUPS),
    layers=dense_first(),
    experts=_EXPERTS,
    shared=_SHARED,
    correction_bias=True,
)


def _deepseek_v2_router(config: ModelConfig) -> RouterSpec:
    config.require("scoring_func", "softmax", "another score")
    method = config.find("topk_method")
    if method not in ("greedy", "group_limited_greedy"):
        raise Unsupported(
            f"topk_method must be 'greedy' or 'group_limited_greedy' for {config.model_type}, got {method!r}; this "
            "variant cannot be computed"
        )
    groups = None if method == "greedy" else _GROUPS
    return routing(renormalize=False, scale=_SCALE, groups=groups)(config)


_V2 = replace(
    _V3,
    router=_deepseek_v2_router,
    correction_bias=False,
    requires=(("norm_topk_prob", False, "renormalisation, which transformers' block leaves out,"), NO_BIAS),
)
#: Some families have a width setting for shared experts. hy_v3's files name the gate differently.
_HY_V3 = Naming(
    router=("gate.weight", "router.gate.weight"),
    correction_bias=("e_score_correction_bias", "expert_bias"),
    shared=(mlp_names("shared_experts"), mlp_names("shared_mlp")),
)
_FUSED = Naming(per_expert=None)
#: One tensor for all gates and one for all ups.
_STEP = Naming(
    ("mlp", "moe"),
    correction_bias=("gate.e_score_correction_bias", "router_bias"),
    fused=(("experts.gate_up_proj", "experts.down_proj"), ("gate_proj.weight", "up_proj.weight", "down_proj.weight")),
    per_expert=None,
    shared=(mlp_names("shared_experts"), mlp_names("/share_expert")),
    nested_prefixes=("model.language_model.", "model."),
)
_KIMI = Naming(("mlp", "block_sparse_moe"), per_expert=("w1", "w3", "w2"))
_KIMI_ROUTER = routing(
    "sigmoid",
    renormalize=("moe_renormalize", "norm_topk_prob"),
    scale=_SCALE,
    groups=(("num_expert_group", "n_group"), ("topk_group",)),
    top_k=("num_experts_per_token", "num_experts_per_tok"),
)
_KIMI_SHARED = Shared(copies=("num_shared_experts", "n_shared_experts"))


def _nemotron_layers(config: ModelConfig) -> Layers:
    kinds = config.strings("layers_block_type")
    if kinds:
        return Layers(len(kinds), tuple(n for n, kind in enumerate(kinds) if kind == "moe"), "layers_block_type")
    pattern = config.find("layers_block_type", "hybrid_override_pattern")
    if not isinstance(pattern, str):
        raise InvalidInput(
            f"hybrid_override_pattern in config.json must be a string of layer kinds, got {pattern!r}; restore the "
            "original config.json"
        )
    return Layers(len(pattern), tuple(n for n, kind in enumerate(pattern) if kind == "E"), "hybrid_override_pattern")


def _scored_router(config: ModelConfig) -> RouterSpec:
    scores = {"sqrtsoftplus": "sqrt_softplus", "sigmoid": "sigmoid"}
    name = config.find("scoring_func")
    if not isinstance(name, str) or name not in scores:
        raise Unsupported(
            f"scoring_func in config.json must be one of {', '.join(scores)}, got {name!r}; this score cannot be "
            "computed"
        )
    return routing(scores[name], scale=("routed_scaling_factor", "route_scale"))(config)


def _laguna_router(config: ModelConfig) -> RouterSpec:
    """A soft cap of 0 means none."""
    cap = config.number("moe_router_logit_softcapping", default=0.0)
    return routing("sigmoid", scale=("moe_routed_scaling_factor",), softcap=cap or None)(config)


def _deepseek_v4_layers(config: ModelConfig) -> Layers:
    count, kinds = config.num_layers(), config.strings("mlp_layer_types")
    if not kinds:
        return every_layer(config)
    moe = tuple(layer for layer in range(count) if kinds[layer : layer + 1] in (("hash_moe",), ("moe",)))
    return Layers(count, moe, "mlp_layer_types")


def _deepseek_v4_tables(config: ModelConfig) -> tuple[int, ...]:
    kinds = config.strings("mlp_layer_types")
    if kinds:
        return tuple(layer for layer, kind in enumerate(kinds[: config.num_layers()]) if kind == "hash_moe")
    return tuple(range(min(config.num_layers(), config.integer("num_hash_layers", least=0, null=3, default=3))))


def _step3p5_layers(config: ModelConfig) -> Layers:
    layers = dense_first(3)(config)
    chosen = config.settings.get("moe_layers_enum")
    if isinstance(chosen, str) and not config.strings("mlp_layer_types"):
        numbers = {int(number) for number in chosen.split(",") if number.strip().isdecimal() and len(number) < 10}
        moe = tuple(layer for layer in range(layers.count) if layer in numbers)
        return Layers(layers.count, moe, f"moe_layers_enum = {chosen}")
    return layers


def _step3p5_activations(config: ModelConfig) -> Mapping[int, Activations]:
    """Layers with a limit in swiglu_limits or swiglu_limits_shared; 0 and null mean none."""
    plain, limits = silu(config), [config.limits(f"swiglu_limits{end}") for end in ("", "_shared")]
    by_layer = {}
    for layer in range(config.num_layers()):
        pair = [next(iter(numbers[layer : layer + 1]), None) for numbers in limits]
        if any(pair):
            by_layer[layer] = Activations(*(Activation("clamped_silu", limit=one) if one else plain for one in pair))
    return by_layer


def _muse_router(config: ModelConfig) -> RouterSpec:
    """Sigmoid of scaled logits, renormalised with a small number in the divisor."""
    scale = config.number("output_multiplier")
    return routing("sigmoid", scale=("routed_scaling_factor",), logit_scale=scale, epsilon=1e-15)(config)


def _muse_around(config: ModelConfig) -> Mapping[str, Any]:
    before = NormSpec(config.number("rms_norm_eps"), centred=True)
    each = NormSpec(config.number("post_norm_eps"), centred=True, weight_first=True)
    width = config.integer("moe_hidden_size")
    return {"latent": LatentSpec(width, before), "output": OutputSpec(each, "experts")}


def _latent_size(config: ModelConfig) -> Mapping[str, Any]:
    if config.settings.get("moe_latent_size") is None:
        return {}
    return {"latent": LatentSpec(config.integer("moe_latent_size"))}


DEEPSEEK = {
    "deepseek_v3": replace(
        _V3, requires=(("scoring_func", "sigmoid", "another score"), ("topk_method", "noaux_tc", "another selection"))
    ),
    # The models below do not read scoring_func and topk_method.
    "deepseek_v32": _V3,
    "glm4_moe": _V3,
    "glm4_moe_lite": replace(_V3, layers=dense_first(1)),
    "glm4v_moe_text": replace(_V3, alone=_FUSED),
    "glm_moe_dsa": _V3,
    "dots1": _V3,
    "dots3_note_text": replace(
        _V3, layers=dense_first(1), shared=Shared(("n_shared_experts",), ("shared_experts_intermediate_size",))
    ),
    # No groups: its block scores other groups 0, which may win over a negative score.
    "axk2": replace(
        _V3,
        router=routing("sigmoid", renormalize=_NORM, scale=_SCALE),
        layers=dense_first(1),
        requires=(("n_group", 1, "groups in which experts outside of the best have the score 0"),),
    ),
    # Files keep the norm of the sum outside the block.
    "axk1": replace(
        _V3,
        layers=dense_first(1),
        around=lambda config: {"output": OutputSpec(NormSpec(config.number("rms_norm_eps", default=1e-6)))},
        naming=Naming(around={"output.norm": ("post_mlp_layernorm.weight", "/post_mlp_layernorm.weight")}),
    ),
    "muse_spark_text": replace(
        _V3,
        router=_muse_router,
        layers=dense_first(0),
        experts=("num_local_experts", "num_experts"),
        shared=None,
        around=_muse_around,
        naming=Naming(
            per_expert=None,
            around={
                "before.weight": ("pre_expert_proj.weight",),
                "before.norm": ("pre_expert_norm.weight",),
                "after.weight": ("post_expert_proj.weight",),
                "output.norm": ("experts.post_expert_norm.weight",),
            },
        ),
    ),
    "solar_open": replace(_V3, layers=every_layer),
    "mimo_v2_flash": replace(_V3, layers=dense_first(1), shared=None),
    "beam": replace(_V3, layers=dense_first(3), shared=None),
    "exaone_moe": replace(
        _V3,
        shared=Shared(("num_shared_experts",)),
        naming=Naming(correction_bias=("gate.e_score_correction_bias", "e_score_correction_bias")),
    ),
    "bailing_hybrid": replace(
        _V3,
        router=_KIMI_ROUTER,
        experts=("num_experts",),
        shared=_KIMI_SHARED,
        naming=Naming(correction_bias=("gate.e_score_correction_bias", "gate.expert_bias")),
    ),
    "kimi_linear": replace(
        _V3, router=_KIMI_ROUTER, layers=dense_first(1), experts=("num_experts",), shared=_KIMI_SHARED, naming=_KIMI
    ),
    "hy_v3": replace(
        _V3,
        router=routing("sigmoid", scale=("router_scaling_factor",)),
        layers=dense_first(1),
        experts=("num_experts",),
        shared=Shared(("num_shared_experts",)),
        naming=_HY_V3,
        requires=(NO_BIAS,),
    ),
    "hy_v4": replace(
        _V3,
        layers=dense_first(1),
        activation=limited_silu,
        shared_activation=hidden_activation(),
        # transformers saves every gate_proj as linear_gate.
        naming=replace(_FUSED, shared=(mlp_names("shared_experts"), mlp_names("shared_experts", gate="linear_gate"))),
    ),
    "afmoe": replace(
        _V3,
        router=routing("sigmoid", scale=("route_scale",)),
        layers=dense_first(1, "num_dense_layers"),
        experts=("num_experts",),
        shared=Shared(("num_shared_experts",)),
        naming=Naming(router=("router.gate.weight",), correction_bias=("expert_bias",)),
    ),
    "laguna": replace(
        _V3,
        router=_laguna_router,
        layers=dense_first(1),
        experts=("num_experts",),
        shared=Shared(width=("shared_expert_intermediate_size",)),
        naming=Naming(
            correction_bias=("gate.e_score_correction_bias", "experts.e_score_correction_bias"),
            shared=(mlp_names("shared_experts"), mlp_names("shared_expert")),
        ),
        requires=(
            ("moe_apply_router_weight_on_input", False, "router weights on the input with several experts per token"),
        ),
    ),
    "kolibri1": replace(
        _V3,
        router=routing("sigmoid", renormalize=_NORM, bias_on="logits"),
        layers=every_layer,
        experts=("num_experts", "num_local_experts"),
        shared=Shared(width=("shared_expert_intermediate_size",)),
        naming=Naming(correction_bias=("gate.e_score_correction_bias", "/moe.router.expert_bias")),
    ),
    "nemotron_h": replace(
        _V3,
        layers=_nemotron_layers,
        activation=hidden_activation("mlp_hidden_act", gated=False),
        shared=Shared(width=("moe_shared_expert_intermediate_size",)),
        naming=Naming(
            blocks=("mixer",),
            fused=(("experts.up_proj", "experts.down_proj"),),
            per_expert=("up_proj", "down_proj"),
            shared=(mlp_names("shared_experts")[1:],),
            prefixes=("model.", "backbone."),
            around={"before.weight": ("fc1_latent_proj.weight",), "after.weight": ("fc2_latent_proj.weight",)},
        ),
        around=_latent_size,
        requires=(NO_BIAS,),
    ),
    "mistral4": replace(
        _V3,
        router=routing(renormalize=_NORM, scale=_SCALE, groups=_GROUPS, group_score="pair"),
        correction_bias=False,
        naming=_FUSED,
    ),
    "mistral_large4_text": replace(
        _V3,
        router=routing(scale=_SCALE, groups=_GROUPS, group_score="pair"),
        layers=dense_first(1),
        correction_bias=False,
        naming=Naming(
            ("mlp", ""),
            per_expert=("w1", "w3", "w2"),
            shared=(mlp_names("shared_experts"), mlp_names("shared_experts", "w1", "w3", "w2")),
            nested_prefixes=("model.language_model.", ""),
        ),
        alone=Naming(("mlp", ""), per_expert=("w1", "w3", "w2"), prefixes=("",)),
    ),
    "deepseek_v4": replace(
        _V3,
        router=_scored_router,
        layers=_deepseek_v4_layers,
        tables=_deepseek_v4_tables,
        activation=limited,
        shared=Shared(),
        naming=Naming(
            ("mlp", "ffn"),
            correction_bias=("gate.e_score_correction_bias", "gate.bias"),
            per_expert=("w1", "w3", "w2"),
            shared=(mlp_names("shared_experts"), mlp_names("shared_experts", "w1", "w3", "w2")),
            prefixes=("model.", ""),
        ),
        requires=(NO_BIAS,),
    ),
    "glm5_next_text": replace(_V3, layers=dense_first(3), activation=limited_silu, shared_activation=limited),
    "inkling2_text": replace(
        _V3,
        router=_scored_router,
        layers=every_layer,
        activation=lambda config: Activation(
            "softcapped_silu", alpha=config.number("mlp_gate_softcap"), limit=config.number("mlp_up_softcap")
        ),
        shared=None,
        naming=Naming(
            correction_bias=("gate.e_score_correction_bias", "gate.bias"),
            fused=(("experts.gate_up_proj", "experts.down_proj"), ("experts.w13_weight", "experts.w2_weight")),
            per_expert=None,
            prefixes=("model.", "model.llm."),
            nested_prefixes=("model.language_model.", "model.llm."),
            interleaved=True,
        ),
    ),
    "step3p5": replace(
        _V3,
        router=routing("sigmoid", scale=("moe_router_scaling_factor",), top_k=("num_experts_per_tok", "moe_top_k")),
        layers=_step3p5_layers,
        layer_activations=_step3p5_activations,
        experts=("n_routed_experts", "moe_num_experts"),
        shared=Shared(width=("share_expert_dim", "share_expert_dims")),
        naming=_STEP,
        alone=_FUSED,
        requires=(NO_BIAS, ("hidden_act", "silu", "another activation, which transformers replaces by silu,")),
        activation=silu,
    ),
    # The correction bias changes only the choice.
    "longcat_flash": replace(
        _V3,
        router=routing(renormalize=False, scale=_SCALE, top_k=("moe_topk",)),
        layers=lambda config: every_layer(config, "num_layers"),
        width=("expert_ffn_hidden_size",),
        experts=("n_routed_experts",),
        shared=None,
        naming=Naming(router=("router.classifier.weight",), correction_bias=("router.e_score_correction_bias",)),
        requires=(
            ("zero_expert_num", 0, "experts that return their input (zero experts)"),
            ("router_bias", False, "the bias of the classifier, which transformers' block leaves out,"),
        ),
        given=("zero_expert_num",),
    ),
    "deepseek_v2": _V2,
    "deepseek_ocr2_text": replace(_V2, alone=_FUSED),
    "unlimited_ocr_text": replace(_V2, layers=dense_first(1)),
}
