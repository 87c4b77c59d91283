"""Small checkpoints written by hand: every family, storage, dtype and sharding, with the arrays they must read as."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from moe_core.base import dtypes

D, F, E, K, LAYERS = 24, 16, 8, 2, 3
FAMILIES = ("mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3")
#: Layers with experts, by family, for the configs below.
MOE_LAYERS = {"mixtral": (0, 1, 2), "qwen3_moe": (0, 1, 2), "gpt_oss": (0, 1, 2), "deepseek_v3": (1, 2)}

_COMMON = {"hidden_size": D, "num_hidden_layers": LAYERS, "num_experts_per_tok": K, "hidden_act": "silu"}
_CONFIGS: dict[str, dict[str, Any]] = {
    "mixtral": {"intermediate_size": F, "num_local_experts": E},
    "qwen3_moe": {"intermediate_size": 40, "moe_intermediate_size": F, "num_experts": E, "norm_topk_prob": True},
    "gpt_oss": {"intermediate_size": F, "num_local_experts": E, "swiglu_limit": 7.0},
    "deepseek_v3": {"intermediate_size": 40, "moe_intermediate_size": F, "n_routed_experts": E, "n_shared_experts": 2,
        "n_group": 4, "topk_group": 2, "norm_topk_prob": True, "routed_scaling_factor": 2.5, "first_k_dense_replace": 1,
        "scoring_func": "sigmoid", "topk_method": "noaux_tc"},
}  # fmt: skip


def config_of(family: str, **changes: Any) -> dict[str, Any]:
    """A config.json of `family`, with settings changed, or removed where the change is `...`."""
    settings = {"model_type": family} | _COMMON | _CONFIGS[family] | changes
    return {key: value for key, value in settings.items() if value is not ...}


@dataclass(frozen=True)
class Tensors:
    """The tensors of one layer's file and the arrays that reading the layer must give, by field name."""

    stored: dict[str, np.ndarray]
    expected: dict[str, np.ndarray]


def layer_tensors(
    family: str, layer: int, storage: str = "per_expert", dtype: str = "bfloat16", prefix: str = "model."
) -> Tensors:
    """Random tensors of one MoE layer. storage: `per_expert` or `fused` (gpt_oss has only `fused`)."""
    generator = np.random.default_rng(layer)

    def draw(*shape: int) -> np.ndarray:
        return generator.standard_normal(shape).astype(dtypes.numpy_dtype(dtype))

    old_mixtral = family == "mixtral" and storage == "per_expert"
    block = f"{prefix}layers.{layer}.{'block_sparse_moe' if old_mixtral else 'mlp'}."
    router = block + ("router" if family == "gpt_oss" else "gate")
    weight = draw(E, D)
    stored, expected = {f"{router}.weight": weight}, {"router.weight": weight}
    if family == "gpt_oss":
        shapes = {"gate_up": (E, D, 2 * F), "down": (E, F, D), "gate_up_bias": (E, 2 * F), "down_bias": (E, D)}
        for field, shape in shapes.items():
            name = field.replace("gate_up", "gate_up_proj").replace("down", "down_proj")
            stored[f"{block}experts.{name}"] = expected[f"experts.{field}"] = draw(*shape)
        stored[f"{router}.bias"] = expected["router.bias"] = draw(E)
        return Tensors(stored, expected)
    gate, up, down = draw(E, F, D), draw(E, F, D), draw(E, D, F)
    expected |= {"experts.gate_up": np.concatenate([gate, up], axis=1), "experts.down": down}
    if storage == "fused":
        stored[f"{block}experts.gate_up_proj"] = expected["experts.gate_up"]
        stored[f"{block}experts.down_proj"] = down
    else:
        names = ("w1", "w3", "w2") if family == "mixtral" else ("gate_proj", "up_proj", "down_proj")
        for name, stack in zip(names, (gate, up, down), strict=True):
            stored |= {f"{block}experts.{expert}.{name}.weight": stack[expert] for expert in range(E)}
    if family == "deepseek_v3":
        bias = draw(E)
        stored[f"{router}.e_score_correction_bias"] = bias
        expected["router.correction_bias"] = bias.astype(np.float32)
        shared = {"gate_proj": draw(2 * F, D), "up_proj": draw(2 * F, D), "down_proj": draw(D, 2 * F)}
        stored |= {f"{block}shared_experts.{name}.weight": value for name, value in shared.items()}
        expected["shared.gate_up"] = np.concatenate([shared["gate_proj"], shared["up_proj"]])
        expected["shared.down"] = shared["down_proj"]
    return Tensors(stored, expected)


def write(
    directory: Path, config: Mapping[str, Any], layers: Mapping[int, Mapping[str, np.ndarray]], shards: bool = False
) -> Path:
    """Write config.json and the tensors of some layers: one file, or with `shards` one file per layer and an index."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    if not shards:
        save_file(
            {name: value for tensors in layers.values() for name, value in tensors.items()},
            directory / "model.safetensors",
        )
        return directory
    weight_map: dict[str, str] = {}
    for layer, tensors in layers.items():
        file = f"model-{layer + 1:05}-of-{LAYERS:05}.safetensors"
        save_file(dict(tensors), directory / file)
        weight_map |= dict.fromkeys(tensors, file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return directory


def write_family(
    directory: Path, family: str, storage: str = "per_expert", dtype: str = "bfloat16", shards: bool = False
) -> tuple[Path, dict[int, Tensors]]:
    """A whole checkpoint of `family`, and the tensors of each MoE layer."""
    layers = {layer: layer_tensors(family, layer, storage, dtype) for layer in MOE_LAYERS[family]}
    path = write(directory, config_of(family), {layer: one.stored for layer, one in layers.items()}, shards)
    return path, layers
