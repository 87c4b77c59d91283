"""Families routed like Qwen-MoE: softmax over all experts, then top-k."""

from __future__ import annotations

from dataclasses import replace

from moe_core.checkpoint.config import ModelConfig
from moe_core.checkpoint.families.around import cohere2_around
from moe_core.checkpoint.families.record import (
    Family,
    Layers,
    Naming,
    Shared,
    dense_first,
    every_layer,
    mlp_names,
    routing,
    silu,
    sparse_step,
)
from moe_core.errors import Unsupported
from moe_core.specs import RouterSpec

#: The largest moe_norm_min of ernie4_5_moe that counts as none.
_MOST_NORM_MIN = 1e-6
_EXPERTS, _NORM = ("num_experts", "num_local_experts"), ("norm_topk_prob",)
_GATED = Shared(width=("shared_expert_intermediate_size",), gate=True)
_SHARED_EXPERT = Naming(shared=(mlp_names("shared_expert"),))

_QWEN3 = Family(router=routing(renormalize=_NORM), layers=sparse_step, experts=_EXPERTS)
_QWEN2 = replace(_QWEN3, shared=_GATED, naming=_SHARED_EXPERT)
_OLMOE = replace(_QWEN3, layers=every_layer, width=("intermediate_size",))


def _ernie_layers(config: ModelConfig) -> Layers:
    """moe_layer_start_index to moe_layer_end_index (-1 = the last), one in moe_layer_interval."""
    count, step = config.num_layers(), config.integer("moe_layer_interval", null=1, default=1)
    first = config.integer("moe_layer_start_index", least=0, null=0, default=1)
    last = config.integer("moe_layer_end_index", least=-1, null=-1, default=-1)
    last = count - 1 if last == -1 else last
    moe = tuple(n for n in range(first, min(last + 1, count)) if (n + 1) % step == 0)
    return Layers(count, moe, f"layers {first} to {last}, moe_layer_interval = {step}")


def _ernie_router(config: ModelConfig) -> RouterSpec:
    """The lower bound moe_norm_min of the sum is too small to matter, or refused."""
    least = config.settings.get("moe_norm_min")
    if least is not None and config.number("moe_norm_min") > _MOST_NORM_MIN:
        raise Unsupported(
            f"moe_norm_min in config.json must be at most {_MOST_NORM_MIN} for {config.model_type}, got {least!r}; a "
            "larger bound of the sum that divides the weights cannot be computed"
        )
    return routing(renormalize=True, top_k=("moe_k", "num_experts_per_tok"))(config)


def _flint_layers(config: ModelConfig) -> Layers:
    if config.settings.get("mlp_only_layers") is None:
        config = replace(config, settings={**config.settings, "mlp_only_layers": [0, 1]})
    return sparse_step(config)


def _jamba_layers(config: ModelConfig) -> Layers:
    count, period = config.num_layers(), config.integer("expert_layer_period")
    offset = config.integer("expert_layer_offset", least=0)
    moe = tuple(n for n in range(count) if n % period == offset)
    return Layers(count, moe, f"expert_layer_period = {period}, expert_layer_offset = {offset}")


def _cohere2_router(config: ModelConfig) -> RouterSpec:
    """Only sigmoid weights may be renormalised."""
    if config.find("expert_selection_fn") == "sigmoid":
        return routing("sigmoid", renormalize=_NORM)(config)
    config.require("expert_selection_fn", "softmax", "another score")
    return routing(order="topk_then_softmax", renormalize=False)(config)


def _lfm2_router(config: ModelConfig) -> RouterSpec:
    epsilon = 1e-6 if config.boolean(*_NORM) else 0.0
    return routing("sigmoid", renormalize=_NORM, scale=("routed_scaling_factor",), epsilon=epsilon)(config)


QWEN = {
    "qwen3_moe": _QWEN3,
    "qwen3_omni_moe_text": replace(_QWEN3, naming=Naming(nested_prefixes=("model.",))),
    "qwen3_vl_moe_text": replace(_QWEN3, router=routing(renormalize=True), naming=Naming(per_expert=None, turned=True)),
    "qwen2_moe": _QWEN2,
    "qwen3_next": _QWEN2,
    "qwen3_omni_moe_talker_text": replace(_QWEN2, router=routing(renormalize=True)),
    "qwen3_5_moe_text": replace(_QWEN2, router=routing(renormalize=True), layers=every_layer),
    "qwen4_exp_text": replace(_QWEN2, layers=every_layer),
    "mellum": replace(_QWEN3, layers=dense_first(0)),
    "olmoe": _OLMOE,
    "flex_olmo": _OLMOE,
    "flint": replace(
        _QWEN3,
        layers=_flint_layers,
        router=routing("sigmoid", renormalize=_NORM),
        shared=Shared(width=("shared_expert_intermediate_size",)),
        naming=_SHARED_EXPERT,
    ),
    "cohere2_moe": replace(
        _OLMOE,
        router=_cohere2_router,
        layers=dense_first(0),
        shared=Shared(("num_shared_experts",)),
        around=cohere2_around,
    ),
    # The correction bias changes only the choice.
    "ernie4_5_moe": Family(
        router=_ernie_router,
        layers=_ernie_layers,
        experts=("moe_num_experts", "num_experts"),
        shared=Shared(("moe_num_shared_experts",)),
        correction_bias=True,
        naming=Naming(
            correction_bias=("gate.moe_statics.e_score_correction_bias", "moe_statics.e_score_correction_bias"),
            bias_row=True,
        ),
        requires=(("use_bias", False, "a bias of the shared experts"),),
    ),
    "jamba": replace(
        _OLMOE,
        router=routing(renormalize=False),
        layers=_jamba_layers,
        naming=Naming(("feed_forward",), router=("router.weight",)),
    ),
    "hunyuan_v1_moe": replace(
        _OLMOE,
        router=routing(renormalize=True, top_k=("moe_topk", "num_experts_per_tok")),
        shared=Shared(),
        naming=Naming(router=("gate.wg.weight",), shared=(mlp_names("shared_mlp"),)),
    ),
    "lfm2_moe": replace(
        _QWEN3,
        router=_lfm2_router,
        layers=dense_first(2, "num_dense_layers"),
        activation=silu,
        correction_bias="use_expert_bias",
        naming=Naming(("feed_forward",), correction_bias=("expert_bias",), per_expert=("w1", "w3", "w2")),
    ),
}
