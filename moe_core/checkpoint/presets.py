"""Layer specs from the configs of Hugging Face models."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from moe_core.checkpoint.config import ModelConfig, settings_of
from moe_core.checkpoint.families import FAMILY_NAMES, architecture_of
from moe_core.errors import Unsupported
from moe_core.layers.spec import ExpertsSpec, MoELayerSpec, SharedExpertsSpec
from moe_core.specs.routing import RouterSpec


def layer_spec_from_config(config: Any) -> MoELayerSpec:
    """The MoE layers of a Hugging Face model, stored as the framework stores them by default.

    config: a dict, a transformers config object (anything with `to_dict`), or a path to config.json or its directory;
    of multimodal models the text model's settings are taken. Families: see `PRESETS`. A quantization_config is ignored:
    the layer computes with dequantised weights. Raises InvalidInput for missing or malformed settings, Unsupported
    for other families and for variants the layer cannot compute.
    """
    settings = settings_of(config)
    nested = settings.get("text_config")
    if settings.get("model_type") not in PRESETS and isinstance(nested, Mapping):
        settings = nested
    model_type = str(settings.get("model_type"))
    if model_type not in PRESETS:
        raise Unsupported(
            f"model_type of config must be one of {', '.join(PRESETS)}, got {model_type!r}; describe the layer with a "
            "MoELayerSpec instead"
        )
    return PRESETS[model_type](ModelConfig(model_type, settings))


def _checkpoint_family(config: ModelConfig, family: str | None = None, **changes: Any) -> MoELayerSpec:
    """The layer of a family whose checkpoints can be read; changes replace settings, None removes one."""
    given = {**config.settings, **changes}.items()
    settings = {key: value for key, value in given if value is not None or key not in changes}
    found = architecture_of(ModelConfig(family or config.model_type, settings))
    activation, router = found.spec.activation, found.spec.router
    assert router is not None
    sizes, naming = (found.d_model, found.d_ff, found.num_experts, router.require_top_k()), found.naming
    # The family's own gate layout is that of its files, not of the layer.
    experts = ExpertsSpec(dataclasses.replace(activation, gate_layout="halves"), bias=naming.expert_bias)
    shared = SharedExpertsSpec(found.shared_d_ff) if found.shared_d_ff else None
    return MoELayerSpec(*sizes, router, experts, shared, naming.router_bias, naming.correction_bias)


def _qwen2_moe(config: ModelConfig) -> MoELayerSpec:
    """Qwen3-MoE with a shared expert behind a sigmoid gate."""
    shared = SharedExpertsSpec(config.integer("shared_expert_intermediate_size"), gate=True)
    return dataclasses.replace(_checkpoint_family(config, "qwen3_moe"), shared_experts=shared)


def _olmoe(config: ModelConfig) -> MoELayerSpec:
    """Qwen3-MoE whose every layer has experts, with another name for their width."""
    return _checkpoint_family(config, "qwen3_moe", moe_intermediate_size=config.integer("intermediate_size"))


def _granitemoe(config: ModelConfig) -> MoELayerSpec:
    """Mixtral with the softmax over the chosen logits."""
    return dataclasses.replace(_checkpoint_family(config, "mixtral"), router=RouterSpec(order="topk_then_softmax"))


def _llama4_text(config: ModelConfig) -> MoELayerSpec:
    """Sigmoid weights on the input of the one chosen expert, and a shared expert of the same width."""
    return dataclasses.replace(
        _checkpoint_family(config, "mixtral"),
        router=RouterSpec(scoring="sigmoid"),
        shared_experts=SharedExpertsSpec(config.integer("intermediate_size")),
        apply_router_weight_on_input=True,
    )


def _deepseek_v2(config: ModelConfig) -> MoELayerSpec:
    """Softmax scores, chosen within the best groups where topk_method says so, scaled; shared experts."""
    config.require("scoring_func", "softmax")
    config.require("norm_topk_prob", False)
    method = config.find("topk_method")
    if method not in ("greedy", "group_limited_greedy"):
        raise Unsupported(
            f"topk_method must be 'greedy' or 'group_limited_greedy' for deepseek_v2, got {method!r}; this variant "
            "cannot be computed"
        )
    groups = {"n_group": 1, "topk_group": 1} if method == "greedy" else {}
    base = _deepseek_v3_like(config, norm_topk_prob=False, **groups)
    router = dataclasses.replace(base.router, scoring="softmax")
    return dataclasses.replace(base, router=router, correction_bias=False)


def _deepseek_v3_like(config: ModelConfig, **changes: Any) -> MoELayerSpec:
    """Routed as DeepSeek-V3 whatever scoring_func and topk_method say: the models do not read them."""
    return _checkpoint_family(config, "deepseek_v3", scoring_func=None, topk_method=None, **changes)


#: model_type -> what makes the spec from the settings.
PRESETS: Mapping[str, Callable[[ModelConfig], MoELayerSpec]] = {
    "mixtral": _checkpoint_family,
    "minimax": lambda config: _checkpoint_family(config, "mixtral"),
    "granitemoe": _granitemoe,
    "qwen3_moe": _checkpoint_family,
    "qwen2_moe": _qwen2_moe,
    "qwen3_next": _qwen2_moe,
    "olmoe": _olmoe,
    "gpt_oss": _checkpoint_family,
    "deepseek_v3": _checkpoint_family,
    "deepseek_v2": _deepseek_v2,
    "glm4_moe": _deepseek_v3_like,
    "dots1": _deepseek_v3_like,
    "llama4_text": _llama4_text,
}
assert set(FAMILY_NAMES) <= set(PRESETS), "every family whose checkpoints can be read has a preset"
