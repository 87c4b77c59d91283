"""Tiny causal models of transformers with experts, whose every part counts."""

from __future__ import annotations

from typing import Any

import torch
import transformers

T, D, F, E, K = 8, 32, 24, 8, 3
_COMMON = {
    "vocab_size": 16,
    "hidden_size": D,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 16,
    "num_experts_per_tok": K,
    "experts_implementation": "eager",
    "dtype": "float32",
}
#: Family -> start of its classes' names, settings beside the common ones.
_FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("Mixtral", {"intermediate_size": F, "num_local_experts": E}),
    "qwen3_moe": ("Qwen3Moe", {"moe_intermediate_size": F, "num_experts": E, "norm_topk_prob": True, "head_dim": 16}),
    "gpt_oss": ("GptOss", {"intermediate_size": F, "num_local_experts": E, "head_dim": 16}),
    "deepseek_v3": (
        "DeepseekV3",
        {
            "intermediate_size": 40,
            "moe_intermediate_size": F,
            "n_routed_experts": E,
            "n_shared_experts": 2,
            "first_k_dense_replace": 1,
            "n_group": 4,
            "topk_group": 2,
            "q_lora_rank": 8,
            "kv_lora_rank": 8,
            "qk_rope_head_dim": 8,
            "v_head_dim": 8,
            "qk_nope_head_dim": 8,
        },
    ),
}


def build(family: str) -> Any:
    """A float32 model with random weights, biases and correction biases in its MoE blocks."""
    classes, settings = _FAMILIES[family]
    log = transformers.utils.logging
    log.set_verbosity_error()
    log.disable_progress_bar()
    torch.manual_seed(0)
    config = getattr(transformers, f"{classes}Config")(**_COMMON | settings)
    model = getattr(transformers, f"{classes}ForCausalLM")(config).eval()
    with torch.no_grad():
        for layer in model.model.layers:
            if not hasattr(layer.mlp, "experts"):
                continue
            for name, parameter in layer.mlp.named_parameters():
                parameter.normal_(std=0.5 if name.endswith("bias") else 1.5 * parameter.shape[-1] ** -0.5)
            for buffer in layer.mlp.buffers():
                buffer.normal_(std=0.2)
    return model


def tokens() -> torch.Tensor:
    """Token ids `[2, T]`."""
    return torch.randint(0, 16, (2, T), generator=torch.Generator().manual_seed(1))
