"""GGUF files of transformers' models, in the order that llama.cpp's converter writes."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from transformers.core_model_loading import revert_weight_conversion

from moe_core.checkpoint.convert.gguf import ARCHITECTURES

_EXPERT = re.compile(r".*layers\.(\d+)\.\w+\.experts\.(\d+)\.(\w+)\.weight")
_HALVES = {"gate_proj": "gate", "up_proj": "up", "down_proj": "down", "w1": "gate", "w3": "up", "w2": "down"}


def gguf_tensors(model: Any, family: str) -> dict[str, np.ndarray]:
    """GGUF's names and arrays of a model."""
    config, architecture = model.config, ARCHITECTURES[family]
    number = next(number for number, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    table, made, experts = gguf.get_tensor_name_map(number, config.num_hidden_layers), {}, defaultdict(list)
    for name, tensor in sorted(revert_weight_conversion(model, model.state_dict()).items(), key=_natural):
        array, layer = tensor.detach().float().numpy(), (re.findall(r"layers\.(\d+)\.", name) or [""])[0]
        block, mapped = f"blk.{layer}.", table.get_name(name, try_suffixes=(".weight", ".bias"))
        if match := _EXPERT.fullmatch(name):
            experts[f"{block}ffn_{_HALVES[match[3]]}_exps.weight"].append(array)
        elif "correction_bias" in name or "expert_bias" in name:
            made[f"{block}exp_probs_b.bias"] = array
        elif ".experts.gate_up_proj" in name or "input_linear" in name:
            is_bias, end = name.endswith("_bias"), "shexp" if "shared" in name else "exps"
            halves = (array[..., ::2], array[..., 1::2]) if family == "gpt_oss" else np.split(array, 2, axis=-2)
            for half, one in zip(("gate", "up"), halves, strict=True):
                turned = one.swapaxes(-1, -2) if family == "gpt_oss" and not is_bias else one
                made[f"{block}ffn_{half}_{end}.{'bias' if is_bias else 'weight'}"] = turned
        elif ".experts.down_proj" in name:
            is_bias = name.endswith("_bias")
            made[f"{block}ffn_down_exps.{'bias' if is_bias else 'weight'}"] = array if is_bias else array.swapaxes(1, 2)
        elif "kv_b_proj" in name:
            heads = array.reshape(config.num_attention_heads, -1, array.shape[-1])
            made[f"{block}attn_k_b.weight"] = heads[:, : config.qk_nope_head_dim].swapaxes(1, 2)
            made[f"{block}attn_v_b.weight"] = heads[:, config.qk_nope_head_dim :]
        elif mapped is not None and not (name == "lm_head.weight" and config.tie_word_embeddings):
            heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
            one = heads.get(name.split(".")[-2]) if architecture in ("llama", "granitemoe") else None
            if one is not None:
                array = array.reshape(one, 2, -1, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)
            array = array.squeeze(1) if "conv.conv" in name else array
            made[mapped if mapped.endswith((".weight", ".bias")) else f"{mapped}.weight"] = array
    return made | {name: np.stack(arrays) for name, arrays in experts.items()}


def _natural(item: tuple[str, Any]) -> list[int | str]:
    return [int(one) if one.isdigit() else one for one in re.split(r"(\d+)", item[0])]


def write_gguf(
    path: Path,
    architecture: str,
    tensors: dict[str, np.ndarray],
    metadata: dict[str, Any] | None = None,
    stored: Callable[[str, np.ndarray], tuple[np.ndarray, Any]] = lambda name, array: (array, None),
) -> Path:
    """stored: the (bytes, type) of a tensor. Matrices only: others are fp32."""
    path.parent.mkdir(exist_ok=True)
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in (metadata or {}).items():
        add = {str: writer.add_string, float: writer.add_float32, list: writer.add_array}
        add.get(type(value), writer.add_uint32)(key, value)
    for name, array in tensors.items():
        data, kind = stored(name, array) if array.ndim > 1 else (array, None)
        writer.add_tensor(name, np.ascontiguousarray(data), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
