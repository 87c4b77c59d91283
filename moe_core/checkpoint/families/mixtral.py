"""Families like Mixtral, Qwen-MoE, gpt-oss and Gemma: most score all experts by a softmax."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from moe_core.checkpoint.config import ModelConfig
from moe_core.checkpoint.families.record import (
    NO_BIAS,
    Family,
    Layers,
    Naming,
    Shared,
    dense_first,
    every_layer,
    hidden_activation,
    mlp_names,
    routing,
    silu,
    sparse_step,
    swiglu_oai,
)
from moe_core.errors import InvalidInput, Unsupported
from moe_core.layers.around import OutputSpec
from moe_core.specs import Activation, NormSpec, RouterSpec

_EXPERTS, _FUSED = ("num_local_experts", "num_experts"), ("experts.gate_up_proj", "experts.down_proj")
_GATE_UP = ("shared_experts.gate_up_proj.weight", "shared_experts.down_proj.weight")
_TOPK_FIRST = routing(
    order="topk_then_softmax", renormalize=False, top_k=("num_experts_per_tok", "experts_per_token", "moe_topk")
)
_NAMES = Naming(("mlp", "block_sparse_moe"), per_expert=("w1", "w3", "w2"))

_MIXTRAL = Family(router=routing(), layers=every_layer, width=("intermediate_size",), experts=_EXPERTS, naming=_NAMES)
_NOISE = "router_jitter_noise"
_GRANITE_NAMES = Naming(
    ("block_sparse_moe",),
    router=("router.weight", "router.layer.weight"),
    fused=(_FUSED, ("input_linear.weight", "output_linear.weight")),
    per_expert=None,
    shared=(("/shared_mlp.input_linear.weight", "/shared_mlp.output_linear.weight"),),
)
#: Softmax over the chosen logits. The shared experts are an MLP outside the block.
_GRANITE = replace(
    _MIXTRAL, router=_TOPK_FIRST, shared=Shared(width=("shared_intermediate_size",)), naming=_GRANITE_NAMES
)
#: Files hold `[E, D, 2F]` and `[E, F, D]`.
_GPT_OSS = replace(
    _MIXTRAL,
    router=_TOPK_FIRST,
    activation=swiglu_oai("interleaved"),
    router_bias=True,
    expert_bias=True,
    weight_layout="in_out",
    naming=Naming(router=("router.weight",), per_expert=None),
)


def _dbrx_router(config: ModelConfig) -> RouterSpec:
    """Softmax over all experts, then top-k, divided by their p-norm with p = moe_normalize_expert_weights."""
    norm = config.settings.get("moe_normalize_expert_weights", 1.0)
    config.require("moe_normalize_expert_weights", 1.0, "a norm of weights other than their sum")
    return routing(renormalize=norm is not None, top_k=("moe_top_k",))(config)


def _dbrx_activation(config: ModelConfig) -> Activation:
    function = config.settings.get("ffn_act_fn")
    if function is not None and not isinstance(function, dict):
        raise InvalidInput(
            f"ffn_act_fn in config.json must be an object or null, got {function!r}; restore the original config.json"
        )
    return hidden_activation()(replace(config, settings={"hidden_act": (function or {}).get("name", "silu")}))


def _llama4_layers(config: ModelConfig) -> Layers:
    count, chosen = config.num_layers(), set(config.integers("moe_layers"))
    if config.settings.get("moe_layers") is not None:
        return Layers(count, tuple(n for n in range(count) if n in chosen), f"moe_layers = {sorted(chosen)}")
    step = config.integer("interleave_moe_layer_step", default=1)
    return Layers(count, tuple(range(step - 1, count, step)), f"interleave_moe_layer_step = {step}")


MIXTRAL = {
    "mixtral": replace(_MIXTRAL, input_noise=_NOISE),
    "minimax": replace(_MIXTRAL, input_noise=_NOISE),
    "phimoe": replace(
        _MIXTRAL,
        router=lambda config: RouterSpec(2),
        around=lambda config: {"sparse_mixer": config.number("router_jitter_noise", default=0.01)},
        requires=(("num_experts_per_tok", 2, "sparsemixer routing to another number of experts"),),
        naming=replace(_NAMES, router=("router.weight", "gate.weight")),
    ),
    "minimax_m2": replace(
        _MIXTRAL,
        router=routing("sigmoid"),
        correction_bias=True,
        input_noise=_NOISE,
        naming=replace(_NAMES, correction_bias=("e_score_correction_bias",)),
    ),
    "minimax_m3_vl_text": replace(
        _MIXTRAL,
        router=routing("sigmoid", scale=("routed_scaling_factor",)),
        layers=dense_first(0),
        activation=swiglu_oai("halves"),
        shared=Shared(width=("shared_intermediate_size",)),
        correction_bias=True,
        naming=replace(
            _NAMES,
            correction_bias=("gate.e_score_correction_bias", "e_score_correction_bias"),
            shared=(_GATE_UP, mlp_names("shared_experts")),
            nested_prefixes=("model.language_model.", "language_model.model."),
        ),
        alone=Naming(per_expert=None, shared=(_GATE_UP,)),
    ),
    "granitemoe": replace(_GRANITE, shared=None),
    "granitemoeshared": _GRANITE,
    "granitemoehybrid": _GRANITE,
    "granitemoe_swa": replace(_GRANITE, naming=replace(_GRANITE_NAMES, router=("router.weight",), fused=(_FUSED,))),
    # Each expert's module holds one tensor, and a bias is added to their sum.
    "jetmoe": replace(
        _MIXTRAL,
        router=_TOPK_FIRST,
        activation=hidden_activation("activation_function"),
        around=lambda config: {"output": OutputSpec(bias=True)},
        naming=Naming(
            router=("router.layer.weight",),
            fused=(("input_linear.weight", "output_linear.weight"),),
            per_expert=None,
            around={"output.bias": ("bias",)},
        ),
    ),
    "gpt_oss": _GPT_OSS,
    "dbrx": Family(
        router=_dbrx_router,
        layers=lambda config: every_layer(config, "n_layers", "num_hidden_layers"),
        hidden=("d_model",),
        width=("ffn_hidden_size",),
        experts=("moe_num_experts",),
        activation=_dbrx_activation,
        part="ffn_config",
        input_noise="moe_jitter_eps",
        naming=Naming(
            ("ffn",),
            router=("router.layer.weight",),
            fused=(("experts.mlp.w1", "experts.mlp.v1", "experts.mlp.w2"),),
            per_expert=None,
            prefixes=("transformer.",),
            flat=True,
            layers="blocks",
        ),
    ),
    # Its block divides the weights by K and multiplies the output by K.
    "openai_privacy_filter": replace(_GPT_OSS, activation=swiglu_oai("halves")),
    # Sigmoid weights on the input of the one chosen expert.
    "llama4_text": replace(
        _MIXTRAL,
        router=routing("sigmoid", renormalize=False),
        layers=_llama4_layers,
        shared=Shared(),
        weight_layout="in_out",
        router_weight_on_input=True,
        naming=Naming(
            ("feed_forward",),
            router=("router.weight",),
            per_expert=None,
            shared=(mlp_names("shared_expert"),),
            nested_prefixes=("language_model.model.",),
        ),
    ),
    "aria_text": replace(
        _MIXTRAL,
        router=_TOPK_FIRST,
        experts=("moe_num_experts",),
        activation=silu,
        shared=Shared(("moe_num_shared_experts",)),
        shared_activation=lambda config: (hidden_activation() if "hidden_act" in config.settings else silu)(config),
        requires=(NO_BIAS,),
        weight_layout="in_out",
        naming=Naming(
            router=("router.weight",),
            fused=(_FUSED, ("experts.fc1.weight", "experts.fc2.weight")),
            per_expert=None,
            nested_prefixes=("model.language_model.", "language_model.model."),
        ),
    ),
}

#: The largest moe_norm_min of ernie4_5_moe that counts as none.
_MOST_NORM_MIN = 1e-6
_QWEN_EXPERTS, _NORM = ("num_experts", "num_local_experts"), ("norm_topk_prob",)
_SCALE = ("routed_scaling_factor",)
_GATED = Shared(width=("shared_expert_intermediate_size",), gate=True)
_SHARED_EXPERT = Naming(shared=(mlp_names("shared_expert"),))

_QWEN3 = Family(router=routing(renormalize=_NORM), layers=sparse_step, experts=_QWEN_EXPERTS)
_QWEN2 = replace(_QWEN3, shared=_GATED, naming=_SHARED_EXPERT)
_OLMOE = replace(_QWEN3, layers=every_layer, width=("intermediate_size",))


def _ernie_layers(config: ModelConfig) -> Layers:
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
    return routing(top_k=("moe_k", "num_experts_per_tok"))(config)


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


def _cohere2_around(config: ModelConfig) -> Mapping[str, Any]:
    if config.integer("num_shared_experts", least=0, null=0, default=0) == 0:
        return {}
    if config.settings.get("shared_expert_combination_strategy") in (None, "average"):
        return {"output": OutputSpec(scale=0.5)}
    config.require("shared_expert_combination_strategy", "sum", "another combination of routed and shared experts")
    return {}


QWEN = {
    "qwen3_moe": _QWEN3,
    "qwen3_omni_moe_text": replace(_QWEN3, naming=Naming(nested_prefixes=("model.",))),
    "qwen3_vl_moe_text": replace(_QWEN3, router=routing(), naming=Naming(per_expert=None, turned=True)),
    "qwen2_moe": _QWEN2,
    "qwen3_next": _QWEN2,
    "qwen3_omni_moe_talker_text": replace(_QWEN2, router=routing()),
    "qwen3_5_moe_text": replace(_QWEN2, router=routing(), layers=every_layer),
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
        around=_cohere2_around,
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
        router=routing(top_k=("moe_topk", "num_experts_per_tok")),
        shared=Shared(),
        naming=Naming(router=("gate.wg.weight",), shared=(mlp_names("shared_mlp"),)),
    ),
    "lfm2_moe": replace(
        _QWEN3,
        router=lambda config: routing(
            "sigmoid", renormalize=_NORM, scale=_SCALE, epsilon=1e-6 if config.boolean(*_NORM) else 0.0
        )(config),
        layers=dense_first(2, "num_dense_layers"),
        activation=silu,
        correction_bias="use_expert_bias",
        naming=Naming(("feed_forward",), correction_bias=("expert_bias",), per_expert=("w1", "w3", "w2")),
    ),
}

#: The router scores the residual stream, the experts take normalised rows: pass the former as `gate_inputs`.
_GEMMA4 = Family(
    router=routing(top_k=("top_k_experts",)),
    layers=every_layer,
    activation=hidden_activation("hidden_activation"),
    # Normalised rows are divided by the root of their number of columns.
    router_norm=lambda config: NormSpec(config.number("rms_norm_eps"), config.integer("hidden_size") ** -0.5),
    expert_scale=True,
    naming=Naming(("",), router=("router.proj.weight",), per_expert=None),
    requires=(("enable_moe_block", True, "a model without experts"),),
)
GEMMA = {"gemma4_text": replace(_GEMMA4, given=("enable_moe_block",)), "diffusion_gemma_text": _GEMMA4}
