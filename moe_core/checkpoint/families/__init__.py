"""The model families: one `Family` per model_type."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moe_core.checkpoint.config import ModelConfig
from moe_core.checkpoint.families.deepseek import DEEPSEEK
from moe_core.checkpoint.families.mixtral import GEMMA, MIXTRAL, QWEN
from moe_core.checkpoint.families.record import Architecture as Architecture
from moe_core.checkpoint.families.record import Family as Family
from moe_core.checkpoint.families.record import Naming as Naming
from moe_core.checkpoint.families.record import describe
from moe_core.errors import Unsupported

FAMILIES: Mapping[str, Family] = {**MIXTRAL, **QWEN, **DEEPSEEK, **GEMMA}
#: model_type -> the operation that a layer cannot compute.
REFUSED: Mapping[str, str] = {
    "doge": "experts of one row each, found by a product of keys",
    "ernie4_5_vl_moe_text": "two sets of experts, one for text and one for images",
    "inkling_text": "a softmax over the chosen and the shared experts together",
    "nllb-moe": "a second expert chosen at random, with a capacity that depends on the batch",
    "switch_transformers": "relu experts with dropout, and tokens dropped by a fixed capacity",
    "vitpose_backbone": "an expert per data set, chosen for a whole image",
    "zaya": "a router of several layers that carries a state from layer to layer",
}
_NESTED = ("text_config", "thinker_config")


def text_model(settings: Mapping[str, Any]) -> ModelConfig:
    """The text model of a config.json. Raises Unsupported for unknown families."""
    met, quantization, nested = [], settings.get("quantization_config"), ()
    while True:
        name = settings.get("model_type")
        met.append(repr(name))
        if isinstance(name, str) and name in FAMILIES:
            return ModelConfig(name, settings, quantization, nested)
        if isinstance(name, str) and name in REFUSED:
            raise Unsupported(
                f"model_type {name!r} cannot be described: its block has {REFUSED[name]}, which no layer computes; "
                "keep the model's own block"
            )
        key = next((key for key in _NESTED if isinstance(settings.get(key), Mapping)), None)
        if key is None:
            raise Unsupported(
                f"model_type of config must be one of the {len(FAMILIES)} in moe_core.checkpoint.families.FAMILIES, "
                f"got {' with text_config '.join(met)}; describe the layer with a MoELayerSpec instead"
            )
        settings, nested = settings[key], (*nested, key)
        quantization = quantization or settings.get("quantization_config")


def architecture_of(config: ModelConfig) -> Architecture:
    """The MoE layers of `config` (of one of FAMILIES). Raises InvalidInput if its settings disagree."""
    return describe(FAMILIES[config.model_type], config)
