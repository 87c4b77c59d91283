"""What each model family's config.json says about its MoE layers, and how its files name their tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from moe_core.checkpoint.config import ModelConfig
from moe_core.errors import Unsupported
from moe_core.specs import Activation, MoESpec, RouterSpec

#: hidden_act of a config.json -> name of the activation.
_HIDDEN_ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu": "gelu"}
_HIDDEN_ACTIVATIONS |= {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "relu2": "relu2"}


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


def _gated(config: ModelConfig, router: RouterSpec) -> MoESpec:
    """The spec of gated experts, all weights `out_in`."""
    name = config.find("hidden_act")
    if name not in _HIDDEN_ACTIVATIONS:
        raise Unsupported(
            f"hidden_act in config.json must be one of {', '.join(_HIDDEN_ACTIVATIONS)}, got {name!r}; "
            "this activation cannot be computed"
        )
    return MoESpec(Activation(_HIDDEN_ACTIVATIONS[name]), router, "out_in", router_weight_layout="out_in")


def _architecture(
    config: ModelConfig,
    spec: MoESpec,
    naming: Naming,
    moe_layers: Callable[[int], bool] = lambda layer: True,
    rule: str = "every layer",
    *,
    width: str = "intermediate_size",
    experts: tuple[str, ...] = ("num_local_experts", "num_experts"),
    num_shared: int = 0,
) -> Architecture:
    """moe_layers: whether a layer has experts, as `rule` says; width, experts: the settings that give d_ff and E."""
    num_layers, d_ff = config.integer("num_hidden_layers"), config.integer(width)
    layers = tuple(filter(moe_layers, range(num_layers)))
    d_model, num_experts = config.integer("hidden_size"), config.integer(*experts)
    return Architecture(num_layers, layers, rule, d_model, d_ff, num_experts, d_ff * num_shared, spec, naming)


def _mixtral(config: ModelConfig) -> Architecture:
    """Softmax over all experts, then top-k, renormalised."""
    router = RouterSpec(config.integer("num_experts_per_tok"), renormalize=True)
    naming = Naming(blocks=("mlp", "block_sparse_moe"), per_expert=("w1", "w3", "w2"))
    return _architecture(config, _gated(config, router), naming)


def _qwen3_moe(config: ModelConfig) -> Architecture:
    """Softmax over all experts, then top-k, renormalised if norm_topk_prob.

    Layer n has experts if (n + 1) is a multiple of decoder_sparse_step and n is not in mlp_only_layers.
    """
    step = config.integer("decoder_sparse_step") if "decoder_sparse_step" in config.settings else 1
    dense = config.integers("mlp_only_layers")
    router = RouterSpec(config.integer("num_experts_per_tok"), renormalize=config.boolean("norm_topk_prob"))
    return _architecture(
        config,
        _gated(config, router),
        Naming(),
        lambda layer: (layer + 1) % step == 0 and layer not in dense,
        f"decoder_sparse_step = {step}, mlp_only_layers = {list(dense)}",
        width="moe_intermediate_size",
        experts=("num_experts", "num_local_experts"),
    )


def _gpt_oss(config: ModelConfig) -> Architecture:
    """Top-k of the logits, then softmax over the chosen; clamped SwiGLU whatever hidden_act says; biases everywhere.

    Files hold `[E, D, 2F]` and `[E, F, D]` with gate and up columns interleaved.
    """
    limit = config.settings.get("swiglu_limit", 7.0)
    alpha = config.number("swiglu_alpha", default=1.702)
    limit = None if limit is None else config.number("swiglu_limit", default=7.0)
    activation = Activation("swiglu_oai", gate_layout="interleaved", alpha=alpha, limit=limit)
    router = RouterSpec(config.integer("num_experts_per_tok", "experts_per_token"), order="topk_then_softmax")
    spec = MoESpec(activation, router, weight_layout="in_out", router_weight_layout="out_in")
    return _architecture(config, spec, Naming(router="router", per_expert=None, router_bias=True, expert_bias=True))


def _deepseek_v3(config: ModelConfig) -> Architecture:
    """Sigmoid scores, selection with a correction bias within the best groups, scaled weights, shared experts.

    Layers from first_k_dense_replace on, at multiples of moe_layer_freq, have experts.
    """
    config.require("scoring_func", "sigmoid")
    config.require("topk_method", "noaux_tc")
    first = config.integer("first_k_dense_replace", least=0, null=0)
    frequency = config.integer("moe_layer_freq") if "moe_layer_freq" in config.settings else 1
    top_k, renormalize = config.integer("num_experts_per_tok"), config.boolean("norm_topk_prob")
    scale, num_groups = config.number("routed_scaling_factor"), config.integer("n_group", null=1)
    topk_group = config.integer("topk_group", null=1)
    router = RouterSpec(top_k, "sigmoid", None, renormalize, scale, num_groups, topk_group)
    return _architecture(
        config,
        _gated(config, router),
        Naming(correction_bias=True),
        lambda layer: layer >= first and layer % frequency == 0,
        f"first_k_dense_replace = {first}, moe_layer_freq = {frequency}",
        width="moe_intermediate_size",
        experts=("n_routed_experts", "num_local_experts", "num_experts"),
        num_shared=config.integer("n_shared_experts", least=0, null=0),
    )


_FAMILIES = {"mixtral": _mixtral, "qwen3_moe": _qwen3_moe, "gpt_oss": _gpt_oss, "deepseek_v3": _deepseek_v3}
#: The model types that can be read.
FAMILY_NAMES = tuple(_FAMILIES)


def architecture_of(config: ModelConfig) -> Architecture:
    """The MoE layers that `config` (of one of FAMILY_NAMES) describes; InvalidInput where its settings disagree."""
    # Every family has it: where a config is no model's, this is what it lacks first.
    config.integer("num_hidden_layers")
    architecture = _FAMILIES[config.model_type](config)
    router = architecture.spec.router
    assert router is not None
    router.validate_experts(architecture.num_experts, has_bias=architecture.naming.correction_bias)
    return architecture
