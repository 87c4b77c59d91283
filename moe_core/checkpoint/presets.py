"""Layer specs from Hugging Face configs."""

from __future__ import annotations

from typing import Any

from moe_core.checkpoint.config import settings_of
from moe_core.checkpoint.families import architecture_of, text_model
from moe_core.errors import Unsupported
from moe_core.layers.spec import MoELayerSpec


def layer_spec_from_config(config: Any, layer: int | None = None) -> MoELayerSpec:
    """The MoE layers of a Hugging Face model, in the framework's default storage.

    config: a dict, a transformers config (anything with `to_dict`), or a path to config.json or its directory;
    multimodal models use their text model. layer: needed only if layers differ (the limits of Step-3.7). A
    quantization_config is ignored. Raises InvalidInput for missing or malformed settings, Unsupported for other
    families than `moe_core.checkpoint.families.FAMILIES` and for variants that the layer cannot compute.
    """
    architecture = architecture_of(text_model(settings_of(config)))
    if layer is not None:
        architecture.require_layer(layer)
    if architecture.input_noise:
        raise Unsupported(
            f"{architecture.family.input_noise} in config.json must be 0 or null for a preset, got "
            f"{architecture.input_noise}: a spec has no noise in training; set it to 0 to describe the layer without "
            "noise, or use moe_torch.MoE.from_block(block), which adds it"
        )
    return architecture.layer_spec(layer)
