"""GGUF files by transformers: a model's config.json, and the tensors that its family publishes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from moe_core.checkpoint.storage import TensorIndex
from moe_core.errors import InvalidInput, Unsupported

#: Architectures with a config that transformers makes whole, and the experts' widths that it leaves out.
_WHOLE = {
    "qwen2moe": {
        "expert_feed_forward_length": "moe_intermediate_size",
        "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
    },
    "qwen3moe": {"expert_feed_forward_length": "moe_intermediate_size"},
    "minimax-m2": {},
}
_CONFIG = "put the config.json of the original model beside it"


def config_of(index: TensorIndex, name: str) -> dict[str, Any]:
    """A config.json from the metadata in `name`, a model's first GGUF file. Raises Unsupported if incomplete."""
    import gguf
    import transformers

    path = index.directory / name
    fields = gguf.GGUFReader(path).fields
    architecture = fields["general.architecture"].contents() if "general.architecture" in fields else None
    scaling = [key for key in fields if ".rope.scaling." in key or ".expert_weights_scale" in key]
    if architecture not in _WHOLE or scaling:
        raise Unsupported(
            f"{path} must be of an architecture with a config.json in its metadata ({', '.join(_WHOLE)}), got "
            f"{architecture!r}{f' with {scaling[0]}' if scaling else ''}; {_CONFIG}"
        )
    try:
        config = transformers.AutoConfig.from_pretrained(index.directory, gguf_file=name)
    except Exception as error:  # whatever a loader raises
        raise InvalidInput(f"{path} must have a config in its metadata, got: {error!s:.400}; {_CONFIG}") from error
    settings = {key: value for key, value in config.to_dict().items() if not key.startswith("_")}
    for key, setting in _WHOLE[architecture].items():
        field = fields.get(f"{architecture}.{key}")
        if field is None:
            raise InvalidInput(f"{path} must have {architecture}.{key} in its metadata, got none; {_CONFIG}")
        settings[setting] = field.contents()
    model: Any = transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    settings |= {"architectures": [model.__name__], "tie_word_embeddings": "output.weight" not in index.files}
    return settings


def published_tensors(settings: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Name -> shape of the tensors in files of the model with this config.json, plain. Tied ones are left out."""
    import transformers
    from transformers.core_model_loading import revert_weight_conversion

    settings = {key: value for key, value in settings.items() if key != "quantization_config"}
    with torch.device("meta"):
        try:
            config: Any = transformers.AutoConfig.for_model(**settings)
            model = transformers.AutoModelForCausalLM.from_config(config)
        except Exception as error:  # whatever a model raises
            raise Unsupported(
                f"model_type must be of a causal language model of transformers for GGUF files, got "
                f"{settings.get('model_type')!r}, where it raises {type(error).__name__}: {error!s:.300}; update "
                "transformers"
            ) from error
        state = revert_weight_conversion(model, model.state_dict())
    tied = set(model._tied_weights_keys or ()) if getattr(config, "tie_word_embeddings", False) else set()
    return {name: tuple(tensor.shape) for name, tensor in state.items() if name not in tied}
