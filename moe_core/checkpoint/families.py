"""What each model family's config.json says about its MoE layers, and how its files name their tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from moe_core.checkpoint.config import ModelConfig
from moe_core.errors import Unsupported
from moe_core.specs import Activation, MoESpec, RouterSpec

#: hidden_act of a config.json -> name of the activation.
_HIDDEN_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu2": "relu2",
}


@dataclass(frozen=True)
class Naming:
    """Tensor names below `layers.<n>.`.

    blocks: names of the MoE block, newest first. router: the router's module. per_expert: (gate, up, down) module
    names below `experts.<e>.`; None = the family has only fused storage (`experts.gate_up_proj`,
    `experts.down_proj`).
    """

    blocks: tuple[str, ...] = ("mlp",)
    router: str = "gate"
    per_expert: tuple[str, str, str] | None = ("gate_proj", "up_proj", "down_proj")
    router_bias: bool = False
    expert_bias: bool = False
    correction_bias: bool = False


@dataclass(frozen=True)
class Architecture:
    """The MoE layers of one model.

    moe_layers: the layers that have one, ascending; moe_layers_rule: the settings that decided it. d_ff: width of one
    expert after gating; shared_d_ff: of the shared experts together, 0 = none. spec: weights as the family's fused
    storage lays them out, which per-expert storage is stacked into.
    """

    num_layers: int
    moe_layers: tuple[int, ...]
    moe_layers_rule: str
    d_model: int
    d_ff: int
    num_experts: int
    shared_d_ff: int
    spec: MoESpec
    naming: Naming


def _gated(config: ModelConfig) -> Activation:
    name = config.find("hidden_act")
    if name not in _HIDDEN_ACTIVATIONS:
        raise Unsupported(
            f"hidden_act in config.json must be one of {', '.join(_HIDDEN_ACTIVATIONS)}, got {name!r}; "
            "this activation cannot be computed"
        )
    return Activation(_HIDDEN_ACTIVATIONS[name], gate_layout="halves")


def _out_in(activation: Activation, router: RouterSpec) -> MoESpec:
    return MoESpec(activation, router, weight_layout="out_in", router_weight_layout="out_in")


def _mixtral(config: ModelConfig) -> Architecture:
    """Softmax over all experts, then top-k, renormalised."""
    num_layers = config.integer("num_hidden_layers")
    router = RouterSpec(config.integer("num_experts_per_tok"), renormalize=True)
    return Architecture(
        num_layers=num_layers,
        moe_layers=tuple(range(num_layers)),
        moe_layers_rule="every layer",
        d_model=config.integer("hidden_size"),
        d_ff=config.integer("intermediate_size"),
        num_experts=config.integer("num_local_experts", "num_experts"),
        shared_d_ff=0,
        spec=_out_in(_gated(config), router),
        naming=Naming(blocks=("mlp", "block_sparse_moe"), per_expert=("w1", "w3", "w2")),
    )


def _qwen3_moe(config: ModelConfig) -> Architecture:
    """Softmax over all experts, then top-k, renormalised if norm_topk_prob.

    Layer n has experts if (n + 1) is a multiple of decoder_sparse_step and n is not in mlp_only_layers.
    """
    num_layers = config.integer("num_hidden_layers")
    step = config.integer("decoder_sparse_step") if "decoder_sparse_step" in config.settings else 1
    dense = config.integers("mlp_only_layers")
    router = RouterSpec(config.integer("num_experts_per_tok"), renormalize=config.boolean("norm_topk_prob"))
    return Architecture(
        num_layers=num_layers,
        moe_layers=tuple(layer for layer in range(num_layers) if (layer + 1) % step == 0 and layer not in dense),
        moe_layers_rule=f"decoder_sparse_step = {step}, mlp_only_layers = {list(dense)}",
        d_model=config.integer("hidden_size"),
        d_ff=config.integer("moe_intermediate_size"),
        num_experts=config.integer("num_experts", "num_local_experts"),
        shared_d_ff=0,
        spec=_out_in(_gated(config), router),
        naming=Naming(),
    )


def _gpt_oss(config: ModelConfig) -> Architecture:
    """Top-k of the logits, then softmax over the chosen; clamped SwiGLU whatever hidden_act says; biases everywhere.

    Files hold `[E, D, 2F]` and `[E, F, D]` with gate and up columns interleaved.
    """
    num_layers = config.integer("num_hidden_layers")
    limit = config.settings.get("swiglu_limit", 7.0)
    activation = Activation(
        "swiglu_oai",
        gate_layout="interleaved",
        alpha=config.number("swiglu_alpha", default=1.702),
        limit=None if limit is None else config.number("swiglu_limit", default=7.0),
    )
    router = RouterSpec(config.integer("num_experts_per_tok", "experts_per_token"), order="topk_then_softmax")
    return Architecture(
        num_layers=num_layers,
        moe_layers=tuple(range(num_layers)),
        moe_layers_rule="every layer",
        d_model=config.integer("hidden_size"),
        d_ff=config.integer("intermediate_size"),
        num_experts=config.integer("num_local_experts", "num_experts"),
        shared_d_ff=0,
        spec=MoESpec(activation, router, weight_layout="in_out", router_weight_layout="out_in"),
        naming=Naming(router="router", per_expert=None, router_bias=True, expert_bias=True),
    )


def _deepseek_v3(config: ModelConfig) -> Architecture:
    """Sigmoid scores, selection with a correction bias within the best groups, scaled weights, shared experts.

    Layers from first_k_dense_replace on, at multiples of moe_layer_freq, have experts.
    """
    config.require("scoring_func", "sigmoid")
    config.require("topk_method", "noaux_tc")
    num_layers = config.integer("num_hidden_layers")
    first = config.integer("first_k_dense_replace", least=0, null=0)
    frequency = config.integer("moe_layer_freq") if "moe_layer_freq" in config.settings else 1
    d_ff = config.integer("moe_intermediate_size")
    router = RouterSpec(
        config.integer("num_experts_per_tok"),
        scoring="sigmoid",
        renormalize=config.boolean("norm_topk_prob"),
        scale=config.number("routed_scaling_factor"),
        num_groups=config.integer("n_group", null=1),
        topk_group=config.integer("topk_group", null=1),
    )
    return Architecture(
        num_layers=num_layers,
        moe_layers=tuple(layer for layer in range(first, num_layers) if layer % frequency == 0),
        moe_layers_rule=f"first_k_dense_replace = {first}, moe_layer_freq = {frequency}",
        d_model=config.integer("hidden_size"),
        d_ff=d_ff,
        num_experts=config.integer("n_routed_experts", "num_local_experts", "num_experts"),
        shared_d_ff=d_ff * config.integer("n_shared_experts", least=0, null=0),
        spec=_out_in(_gated(config), router),
        naming=Naming(correction_bias=True),
    )


_FAMILIES: Mapping[str, Callable[[ModelConfig], Architecture]] = {
    "mixtral": _mixtral,
    "qwen3_moe": _qwen3_moe,
    "gpt_oss": _gpt_oss,
    "deepseek_v3": _deepseek_v3,
}
#: The model types that can be read.
FAMILY_NAMES = tuple(_FAMILIES)


def architecture_of(config: ModelConfig) -> Architecture:
    """The MoE layers that `config` (of one of FAMILY_NAMES) describes; InvalidInput where its settings disagree."""
    architecture = _FAMILIES[config.model_type](config)
    router = architecture.spec.router
    assert router is not None
    router.validate_experts(architecture.num_experts, has_bias=architecture.naming.correction_bias)
    return architecture
