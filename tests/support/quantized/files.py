"""Quantised tensors as published files store them, made one number at a time, independently of the readers."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from tests.support.checkpoint_files import config_of

E = 4
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.mlp.router"]}
FP8 = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]}


def compressed(kind: str, activations: dict[str, Any] | None = None, **weights: Any) -> dict[str, Any]:
    """A quantization_config of compressed-tensors with one group."""
    arguments = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32} | weights
    group = {"targets": ["Linear"], "weights": arguments, "input_activations": activations, "output_activations": None}
    return {"quant_method": "compressed-tensors", "format": kind, "config_groups": {"group_0": group}, "ignore": []}


def quantized_config(
    family: str, quantization: dict[str, Any], d_model: int, d_ff: int, **changes: Any
) -> dict[str, Any]:
    """A config.json of `family` with these sizes."""
    width = "moe_intermediate_size" if family in ("qwen3_moe", "deepseek_v3") else "intermediate_size"
    experts = "n_routed_experts" if family == "deepseek_v3" else "num_experts"
    experts = "num_local_experts" if family in ("gpt_oss", "mixtral") else experts
    sizes = {"hidden_size": d_model, width: d_ff, experts: E}
    if family == "deepseek_v3":
        sizes |= {"n_group": 2, "topk_group": 2}
    return config_of(family, quantization_config=quantization, **sizes, **changes)


def router(family: str, d_model: int) -> dict[str, np.ndarray]:
    """The router's tensors, by name behind the block's."""
    generator = np.random.default_rng(99)
    name = "router" if family == "gpt_oss" else "gate"
    tensors = {f"{name}.weight": generator.standard_normal((E, d_model)).astype(ml_dtypes.bfloat16)}
    if family == "gpt_oss":
        tensors["router.bias"] = generator.standard_normal(E).astype(ml_dtypes.bfloat16)
    if family == "deepseek_v3":
        tensors["gate.e_score_correction_bias"] = generator.standard_normal(E).astype(np.float32)
    return tensors


def mxfp4_layer(d_model: int, d_ff: int) -> dict[str, np.ndarray]:
    """gpt-oss as published: blocks, scales and biases of interleaved gate and up; every byte of values occurs."""
    generator = np.random.default_rng(1)
    tensors = {f"model.layers.0.mlp.{name}": array for name, array in router("gpt_oss", d_model).items()}
    for name, rows, columns in (("gate_up_proj", 2 * d_ff, d_model), ("down_proj", d_model, d_ff)):
        prefix = f"model.layers.0.mlp.experts.{name}"
        tensors[f"{prefix}_blocks"] = generator.integers(0, 256, (E, rows, columns // 32, 16), np.uint8)
        tensors[f"{prefix}_scales"] = generator.integers(110, 126, (E, rows, columns // 32), np.uint8)
        tensors[f"{prefix}_bias"] = generator.standard_normal((E, rows)).astype(ml_dtypes.bfloat16)
    return tensors


def fp8_matrix(generator: np.random.Generator, rows: int, columns: int) -> dict[str, np.ndarray]:
    """`.weight` and `.weight_scale_inv` of one matrix, and what it stands for under ``."""
    weight = generator.standard_normal((rows, columns)).astype(ml_dtypes.float8_e4m3fn)
    scales = generator.uniform(0.5, 2, (-(-rows // 128), -(-columns // 128))).astype(np.float32)
    spread = np.repeat(np.repeat(scales, 128, 0), 128, 1)[:rows, :columns]
    return {".weight": weight, ".weight_scale_inv": scales, "": weight.astype(np.float32) * spread}


def to_words(codes: np.ndarray, bits: int) -> np.ndarray:
    """int32 words along the last axis: element i from bit bits * i of the row, the end filled with zeros."""
    per_word = 32 // bits
    words = np.zeros((*codes.shape[:-1], -(-codes.shape[-1] // per_word)), np.int64)
    for column in range(codes.shape[-1]):
        words[..., column // per_word] |= codes[..., column].astype(np.int64) << (bits * (column % per_word))
    return words.astype(np.uint32).view(np.int32)


def words_matrix(
    generator: np.random.Generator, rows: int, columns: int, bits: int, group: int, zero_points: bool, dtype: Any
) -> dict[str, np.ndarray]:
    """A module of pack-quantized, and what it stands for under ``. Numbers are stored shifted by half their range."""
    half = 2 ** (bits - 1)
    numbers = generator.integers(-half, half, (rows, columns))
    scales = generator.uniform(0.01, 0.1, (rows, columns // group)).astype(dtype)
    points = generator.integers(-half, half, scales.shape) if zero_points else np.zeros(scales.shape, int)
    tensors = {
        ".weight_packed": to_words(numbers + half, bits),
        ".weight_scale": scales,
        ".weight_shape": np.array([rows, columns], np.int64),
    }
    if zero_points:
        tensors[".weight_zero_point"] = np.ascontiguousarray(to_words((points + half).T, bits).T)
    difference = (numbers - np.repeat(points, group, 1)).astype(np.float32)
    return tensors | {"": difference * np.repeat(scales.astype(np.float32), group, 1)}


def per_expert_layer(family: str, d_model: int, d_ff: int, matrix: Any) -> tuple[dict, dict[str, np.ndarray]]:
    """(tensors, gate, up and down `[E, N, D]` as numbers) of layer 1; matrix(rows, columns) makes one module's."""
    block = "model.layers.1.mlp."
    tensors = {block + name: array for name, array in router(family, d_model).items()}
    sizes = {"gate": (d_ff, d_model), "up": (d_ff, d_model), "down": (d_model, d_ff)}
    numbers: dict[str, list[np.ndarray]] = {name: [] for name in sizes}
    for expert in range(E):
        for name, (rows, columns) in sizes.items():
            made = matrix(rows, columns)
            numbers[name].append(made.pop(""))
            tensors |= {f"{block}experts.{expert}.{name}_proj{suffix}": array for suffix, array in made.items()}
    return tensors, {name: np.stack(arrays) for name, arrays in numbers.items()}
