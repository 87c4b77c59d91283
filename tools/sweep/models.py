"""A tiny random model of every family of transformers that has experts, found in the installed package."""

from __future__ import annotations

import functools
import importlib
import inspect
import pathlib
import re
from typing import Any

import torch
import transformers

#: Sizes of the models: width, width of an expert, experts, experts per token, vocabulary, tokens.
D, F, E, K, VOCABULARY, T = 32, 24, 8, 3, 64, 12
#: What makes a modelling file one of experts.
_EXPERTS = re.compile(r"^@use_experts_implementation|^class \w*(Experts|MoE|Moe|MoeMLP|NaiveMoe)\(", re.MULTILINE)
#: Settings that a config has -> their small values. Those a config lacks are left out.
_SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": D,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "use_cache": False,
    # experts
    "num_experts": E,
    "num_local_experts": E,
    "n_routed_experts": E,
    "moe_num_experts": E,
    "num_experts_per_tok": K,
    "num_experts_per_token": K,
    "moe_topk": K,
    "moe_k": K,
    "top_k_experts": K,
    "intermediate_size": F,
    "moe_intermediate_size": F,
    "expert_ffn_hidden_size": F,
    "shared_expert_intermediate_size": 16,
    "shared_intermediate_size": 16,
    "moe_shared_expert_intermediate_size": 16,
    "share_expert_dim": 16,
    "shared_experts_intermediate_size": 16,
    "dense_intermediate_size": 40,
    "ffn_hidden_size": 40,
    "intermediate_size_mlp": 40,
    "first_k_dense_replace": 1,
    "num_dense_layers": 1,
    "n_group": 4,
    "topk_group": 2,
    "n_groups": 1,
    "num_expert_group": 4,
    "decoder_sparse_step": 1,
    "num_nextn_predict_layers": 0,
    "router_jitter_noise": 0.0,
    "input_jitter_noise": 0.0,
    # attention
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "qk_head_dim": 16,
    "v_head_dim": 8,
    "index_head_dim": 16,
    "index_n_heads": 2,
    "index_topk": 8,
    "index_block_size": 8,
    "rotary_dim": 8,
    "sliding_window": 8,
    "o_lora_rank": 8,
    "o_groups": 2,
    "linear_head_dim": 16,
    "linear_num_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "mamba_d_state": 8,
    "mamba_d_head": 16,
    "mamba_n_heads": 4,
    "mamba_dt_rank": 4,
    "mamba_num_heads": 4,
    "mamba_head_dim": 16,
    "ssm_state_size": 8,
    "mamba_chunk_size": 8,
    "chunk_size": 8,
    "block_size": 8,
}
#: Family -> its class, where the name does not tell.
_CLASSES = {
    "nllb_moe": "NllbMoeEncoder",
    "switch_transformers": "SwitchTransformersEncoderModel",
    "vitpose_backbone": "VitPoseBackbone",
}
#: Family -> settings that the table does not fit.
_ROPE = {"rope_type": "default", "rope_theta": 1e4}
_OWN: dict[str, dict[str, Any]] = {
    "axk1": {"head_dim": 8},
    "axk2": {"n_group": None, "topk_group": None},
    "beam": {"mlp_layer_types": ["dense", "sparse"]},
    "cohere2_moe": {"num_shared_experts": 1},
    "dbrx": {
        "d_model": D,
        "n_heads": 2,
        "n_layers": 2,
        "max_seq_len": 64,
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8},
        "ffn_config": {"hidden_size": D, "ffn_hidden_size": F, "moe_num_experts": E, "moe_top_k": K},
    },
    "deepseek_ocr2": {"mlp_layer_types": ["dense", "sparse"], "n_shared_experts": 2},
    "deepseek_v3": {"head_dim": 8},
    "deepseek_v4": {"mlp_layer_types": ["hash_moe", "moe"]},
    "doge": {"is_moe": True, "num_experts": 16, "num_experts_per_tok": 4},
    "dots1": {"n_shared_experts": 2},
    "ernie4_5_vl_moe": {"moe_intermediate_size": [F, F], "rope_parameters": {**_ROPE, "mrope_section": [3, 3, 2]}},
    "flint": {"mlp_only_layers": [0]},
    "gemma4": {"enable_moe_block": True, "vocab_size_per_layer_input": VOCABULARY, "hidden_size_per_layer_input": 8},
    "glm4v_moe": {"rope_parameters": {**_ROPE, "mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5}},
    "glm5_next": {"index_kpool": 4, "mlp_layer_types": ["dense", "sparse"], "qk_rope_head_dim": 0},
    "inkling": {"rel_extent": 16, "swa_num_attention_heads": 2, "swa_num_key_value_heads": 2, "swa_head_dim": 16},
    "inkling2": {"rel_extent": 16, "swa_num_attention_heads": 2, "swa_num_key_value_heads": 2, "swa_head_dim": 16},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "llama4": {"num_experts_per_tok": 1},
    "longcat_flash": {"head_dim": 8, "num_layers": 2, "zero_expert_num": 4, "moe_topk": K},
    "mimo_v2_flash": {
        "num_attention_heads": 4,
        "rope_parameters": {"full_attention": _ROPE, "sliding_attention": _ROPE},
    },
    "muse_spark": {"moe_hidden_size": 16},
    "nllb_moe": {
        "d_model": D,
        "encoder_layers": 2,
        "decoder_layers": 2,
        "encoder_ffn_dim": F,
        "decoder_ffn_dim": F,
        "encoder_attention_heads": 2,
        "decoder_attention_heads": 2,
        "encoder_sparse_step": 2,
        "decoder_sparse_step": 2,
        "dropout": 0.0,
    },
    "openai_privacy_filter": {"id2label": {0: "O", 1: "B"}},
    "phimoe": {"num_experts_per_tok": 2, "router_jitter_noise": 0.3},
    "qwen4_exp": {"hc_lowrank": 8},
    "step3p7": {"mlp_layer_types": ["dense", "sparse"]},
    "switch_transformers": {
        "d_model": D,
        "d_ff": F,
        "d_kv": 16,
        "num_layers": 2,
        "num_heads": 2,
        "num_sparse_encoder_layers": 1,
        "dropout_rate": 0.0,
    },
    "vitpose_backbone": {"num_experts": E, "part_features": 8, "image_size": [32, 32], "patch_size": [8, 8]},
    "zaya": {"num_experts_per_tok": 1, "router_hidden_size": 16},
}


@functools.cache
def families() -> tuple[str, ...]:
    """The model packages whose code has experts, in alphabetical order."""
    root = pathlib.Path(inspect.getfile(transformers)).parent / "models"
    files = sorted(root.glob("*/modeling_*.py"))
    return tuple(dict.fromkeys(file.parent.name for file in files if _EXPERTS.search(file.read_text("utf-8"))))


def quiet() -> None:
    """No advice about settings and no progress bars from transformers in this process."""
    log = transformers.utils.logging
    log.set_verbosity_error()
    log.disable_progress_bar()


def model_class(family: str) -> type:
    """The smallest class of a family that runs its experts on token ids and gives logits, or else hidden states."""
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    classes = [
        value
        for name, value in vars(module).items()
        if inspect.isclass(value)
        and issubclass(value, transformers.PreTrainedModel)
        and value.__module__ == module.__name__
        and name == value.__name__
        and "PreTrained" not in name
    ]
    if family in _CLASSES:
        return getattr(module, _CLASSES[family])
    for ending in ("ForCausalLM", "TextModel", "Model", ""):
        for found in classes:
            if found.__name__.endswith(ending):
                return found
    raise LookupError(f"{family} has no model")


def settings(family: str) -> dict[str, Any]:
    """What the config of a family is made with."""
    names = set(vars(model_class(family).config_class()))  # pyright: ignore[reportAttributeAccessIssue]
    return {name: value for name, value in _SMALL.items() if name in names} | _OWN.get(family, {})


def build(family: str, **changes: Any) -> Any:
    """A float32 model whose MoE blocks have random weights, biases and correction biases, of sizes that make every part
    count; changes: further settings."""
    made = model_class(family)
    torch.manual_seed(0)
    config = made.config_class(**settings(family) | changes)  # pyright: ignore[reportAttributeAccessIssue]
    config._experts_implementation = "eager"
    model = made(config).float().eval()
    with torch.no_grad():
        for block in moe_blocks(model).values():
            for name, parameter in block.named_parameters():
                if is_decoder(block) and not name.startswith(("router.", "experts.")):
                    continue
                std = 0.5 if name.endswith("bias") else 1.5 * parameter.shape[-1] ** -0.5
                parameter.normal_(float(name.endswith("scale")), std)
            for name, buffer in block.named_buffers():
                if buffer.is_floating_point():
                    buffer.normal_(std=0.2)
                elif name.endswith("tid2eid"):
                    rows = [torch.randperm(E) for _ in buffer]
                    buffer.copy_(torch.stack(rows)[:, : buffer.shape[1]] % config.num_local_experts)
    return model


def moe_blocks(model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """The modules that route tokens to a child `experts`, by their paths; decoder layers that do so too.

    JetMoE's have the experts' matrices as children; its attention has experts as well, which are none.
    """
    found = {}
    for path, module in model.named_modules():
        children = {name for name, _ in module.named_children()}
        if ("experts" in children or {"input_linear", "router"} <= children) and "self_attention" not in path:
            found[path] = module
    return found


def is_decoder(block: torch.nn.Module) -> bool:
    """Whether a block is a decoder layer, whose router and experts lie beside its attention."""
    return any("attn" in name for name, _ in block.named_children())


def inputs(family: str) -> dict[str, torch.Tensor]:
    """Arguments for the model of a family: token ids `[1, T]`, or for a vision model pixels."""
    generator = torch.Generator().manual_seed(1)
    if family == "vitpose_backbone":
        return {"pixel_values": torch.randn(1, 3, 32, 32, generator=generator), "dataset_index": torch.zeros(1).long()}
    return {"input_ids": torch.randint(3, VOCABULARY, (1, T), generator=generator)}


def ids_of(x: torch.Tensor) -> torch.Tensor:
    """Token ids for rows x `[B, T, D]` of a block."""
    return (torch.arange(x[..., 0].numel(), device=x.device) * 7 % VOCABULARY).view(x.shape[:-1])


def outputs(result: Any) -> torch.Tensor:
    """The logits of a model's result, or else its hidden states."""
    if "logits" in result:
        return result["logits"]
    return result["feature_maps"][0] if "feature_maps" in result else result["last_hidden_state"]
