"""Families like Mixtral, and gpt-oss's."""

from __future__ import annotations

from dataclasses import replace

from moe_core.checkpoint.config import ModelConfig
from moe_core.checkpoint.families.around import phi_mixer, phi_router
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
    swiglu_oai,
)
from moe_core.errors import InvalidInput
from moe_core.layers.around import OutputSpec
from moe_core.specs import Activation, RouterSpec

_EXPERTS, _FUSED = ("num_local_experts", "num_experts"), ("experts.gate_up_proj", "experts.down_proj")
_GATE_UP = ("shared_experts.gate_up_proj.weight", "shared_experts.down_proj.weight")
_TOPK_FIRST = routing(
    order="topk_then_softmax", renormalize=False, top_k=("num_experts_per_tok", "experts_per_token", "moe_topk")
)
_NAMES = Naming(("mlp", "block_sparse_moe"), per_expert=("w1", "w3", "w2"))

_MIXTRAL = Family(
    router=routing(renormalize=True),
    layers=every_layer,
    width=("intermediate_size",),
    experts=_EXPERTS,
    naming=_NAMES,
)
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


def _dbrx_layers(config: ModelConfig) -> Layers:
    count = config.num_layers("n_layers", "num_hidden_layers")
    return Layers(count, tuple(range(count)), "every layer")


def _llama4_layers(config: ModelConfig) -> Layers:
    """moe_layers, or one layer in interleave_moe_layer_step."""
    count, chosen = config.num_layers(), set(config.integers("moe_layers"))
    if config.settings.get("moe_layers") is not None:
        return Layers(count, tuple(n for n in range(count) if n in chosen), f"moe_layers = {sorted(chosen)}")
    step = config.integer("interleave_moe_layer_step", default=1)
    return Layers(count, tuple(range(step - 1, count, step)), f"interleave_moe_layer_step = {step}")


def _aria_shared_activation(config: ModelConfig) -> Activation:
    """hidden_act or silu. The experts always have silu."""
    return hidden_activation()(config) if "hidden_act" in config.settings else silu(config)


MIXTRAL = {
    "mixtral": _MIXTRAL,
    "minimax": _MIXTRAL,
    "phimoe": replace(
        _MIXTRAL,
        router=phi_router,
        around=phi_mixer,
        naming=replace(_NAMES, router=("router.weight", "gate.weight")),
    ),
    "minimax_m2": replace(
        _MIXTRAL,
        router=routing("sigmoid"),
        correction_bias=True,
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
            shared=(
                _GATE_UP,
                mlp_names("shared_experts"),
            ),
            nested_prefixes=("model.language_model.", "language_model.model."),
        ),
        alone=Naming(per_expert=None, shared=(_GATE_UP,)),
    ),
    "granitemoe": replace(_GRANITE, shared=None),
    "granitemoeshared": _GRANITE,
    "granitemoehybrid": _GRANITE,
    "granitemoe_swa": replace(
        _GRANITE,
        naming=replace(_GRANITE_NAMES, router=("router.weight",), fused=(_FUSED,)),
    ),
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
        layers=_dbrx_layers,
        hidden=("d_model",),
        width=("ffn_hidden_size",),
        experts=("moe_num_experts",),
        activation=_dbrx_activation,
        part="ffn_config",
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
        shared_activation=_aria_shared_activation,
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
