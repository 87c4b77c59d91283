"""Makers of published layouts, one number at a time, and layers of them."""

# pyright: reportCallIssue=false
from __future__ import annotations

import json
import warnings
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from moe_core.checkpoint import open_checkpoint
from tests.support.checkpoint_files import write
from tests.support.quantized.files import per_expert_layer, quantized_config, to_words, words_matrix

D, F, BF16 = 128, 64, ml_dtypes.bfloat16
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": False}
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def integers(rng: Any, rows: int, columns: int, group: np.ndarray, bits: int = 4) -> tuple[np.ndarray, ...]:
    """(codes, zero points [N, G], scales [N, G], numbers)."""
    groups = int(group.max()) + 1
    codes = rng.integers(0, 2**bits, (rows, columns))
    points = rng.integers(1, 2**bits, (rows, groups))
    scales = rng.uniform(0.01, 0.1, (rows, groups)).astype(np.float16)
    return codes, points, scales, ((codes - points[:, group]) * scales.astype(np.float32)[:, group]).astype(np.float32)


def awq(rng: Any, rows: int, columns: int) -> dict[str, np.ndarray]:
    codes, points, scales, numbers = integers(rng, rows, columns, np.arange(columns) // 32)

    def packed(array: np.ndarray) -> np.ndarray:
        words = np.zeros((array.shape[0], array.shape[1] // 8), np.int64)
        for column in range(array.shape[1]):
            words[:, column // 8] |= array[:, column].astype(np.int64) << 4 * _AWQ_ORDER.index(column % 8)
        return words.astype(np.uint32).view(np.int32)

    tensors = {".qweight": packed(codes.T), ".qzeros": packed(points.T), ".scales": np.ascontiguousarray(scales.T)}
    return tensors | {"": numbers}


def gptq(rng: Any, rows: int, columns: int, bits: int = 4, version: int = 1, act_order: bool = False) -> dict:
    group = np.arange(columns) // 32
    group = rng.permutation(group) if act_order else group
    codes, points, scales, numbers = integers(rng, rows, columns, group, bits)
    return {
        ".qweight": np.ascontiguousarray(to_words(codes, bits).T),
        ".qzeros": to_words(points.T - (version == 1), bits),
        ".scales": np.ascontiguousarray(scales.T),
        ".g_idx": group.astype(np.int32),
        "": numbers,
    }


def e2m1(rng: Any, rows: int, columns: int) -> tuple[np.ndarray, np.ndarray]:
    codes = rng.integers(0, 16, (rows, columns))
    return (codes[:, ::2] | codes[:, 1::2] << 4).astype(np.uint8), E2M1[codes]


def fp4(rng: Any, rows: int, columns: int) -> dict[str, np.ndarray]:
    packed, numbers = e2m1(rng, rows, columns)
    scales = 2.0 ** rng.integers(-9, 0, (rows, columns // 32))
    numbers = numbers * np.repeat(scales, 32, 1).astype(np.float32)
    return {".weight": packed.view(np.int8), ".scale": scales.astype(ml_dtypes.float8_e8m0fnu), "": numbers}


def nvfp4(rng: Any, rows: int, columns: int, modelopt: bool = False) -> dict[str, np.ndarray]:
    packed, numbers = e2m1(rng, rows, columns)
    scales = rng.uniform(1, 400, (rows, columns // 16)).astype(ml_dtypes.float8_e4m3fn)
    whole = np.float32(0.0007) if modelopt else np.float32(1500)
    exact = scales.astype(np.float32) * whole if modelopt else scales.astype(np.float32) / whole
    names = (".weight", ".weight_scale_2") if modelopt else (".weight_packed", ".weight_global_scale")
    whole_array = np.array(whole) if modelopt else np.array([whole])
    tensors = {names[0]: packed, ".weight_scale": scales, names[1]: whole_array}
    tensors |= {".input_scale" if modelopt else ".input_global_scale": whole_array}
    return tensors | {"": numbers * np.repeat(exact, 16, 1)}


def mxfp8(rng: Any, rows: int, columns: int) -> dict[str, np.ndarray]:
    weight = rng.normal(size=(rows, columns)).astype(ml_dtypes.float8_e4m3fn)
    scales = rng.integers(110, 130, (rows, columns // 32)).astype(np.uint8)
    numbers = weight.astype(np.float32) * np.repeat(2.0 ** (scales.astype(np.float32) - 127), 32, 1)
    return {".weight": weight, ".weight_scale_inv": scales, "": numbers}


def static_fp8(rng: Any, rows: int, columns: int, shape: tuple[int, ...] = (1,)) -> dict[str, np.ndarray]:
    weight = rng.normal(size=(rows, columns)).astype(ml_dtypes.float8_e4m3fn)
    scale = rng.uniform(0.01, 0.1, shape).astype(np.float32)
    tensors = {".weight": weight, ".weight_scale": scale, ".input_scale": rng.uniform(0.1, 1, shape).astype(np.float32)}
    return tensors | {"": weight.astype(np.float32) * scale.reshape(1, 1)}


def int4(rng: Any, rows: int, columns: int) -> dict[str, np.ndarray]:
    return words_matrix(rng, rows, columns, 4, 32, False, BF16)


def permuted(rng: Any, rows: int, columns: int) -> dict[str, np.ndarray]:
    group = rng.permutation(np.arange(columns) // 32)
    codes = rng.integers(0, 16, (rows, columns))
    scales = rng.uniform(0.01, 0.1, (rows, columns // 32)).astype(BF16)
    tensors = {".weight_packed": to_words(codes, 4), ".weight_scale": scales, ".weight_g_idx": group.astype(np.int32)}
    return tensors | {"": (codes - 8).astype(np.float32) * scales.astype(np.float32)[:, group]}


def hqq(rng: Any, rows: int, columns: int) -> dict[str, np.ndarray]:
    """Groups of 32 inputs are rows; the first half of them is in the high nibbles."""
    codes = rng.integers(0, 16, (rows * columns // 32, 32)).astype(np.uint8)
    scale, zero = (rng.uniform(0.5, 8, (len(codes), 1)).astype(np.float16) for _ in range(2))
    numbers = (codes.astype(np.float32) - zero.astype(np.float32)) * scale.astype(np.float32)
    half = len(codes) // 2
    facts = {".nbits": 4, ".axis": 1, ".group_size": 32}
    tensors = {".W_q": codes[:half] << 4 | codes[half:], ".scale": scale, ".zero": zero, "": numbers.reshape(rows, -1)}
    return (
        tensors
        | {name: np.array(fact, np.int32) for name, fact in facts.items()}
        | {".shape": np.array([rows, columns])}
    )


def bitsandbytes(rng: Any, rows: int, columns: int, kind: str = "nf4", nested: bool = False) -> dict[str, np.ndarray]:
    """Blocks of 64 numbers, the first of each pair in the high nibble."""
    codes, table = rng.integers(0, 16, rows * columns), rng.normal(size=16).astype(np.float32)
    absmax = rng.uniform(0.5, 2, rows * columns // 64).astype(np.float32)
    state: dict[str, Any] = {"quant_type": kind, "blocksize": 64, "dtype": "bfloat16", "shape": [rows, columns]}
    tensors: dict[str, np.ndarray] = {".weight.absmax": absmax}
    if nested:
        packed, second = rng.integers(0, 256, absmax.size).astype(np.uint8), rng.normal(size=256).astype(np.float32)
        largest = rng.uniform(0.5, 2, -(-absmax.size // 100)).astype(np.float32)
        absmax = second[packed] * np.repeat(largest, 100)[: absmax.size] + np.float32(0.25)
        state |= {"nested_blocksize": 100, "nested_offset": 0.25, "nested_dtype": "float32"}
        tensors = {".weight.absmax": packed, ".weight.nested_absmax": largest, ".weight.nested_quant_map": second}
    tensors |= {".weight": (codes[::2] << 4 | codes[1::2]).astype(np.uint8)[:, None], ".weight.quant_map": table}
    tensors[f".weight.quant_state.bitsandbytes__{kind}"] = np.frombuffer(json.dumps(state).encode(), np.uint8)
    return tensors | {"": (table[codes] * np.repeat(absmax, 64)).reshape(rows, columns)}


def bitsandbytes_int8(rng: Any, rows: int, columns: int) -> dict[str, np.ndarray]:
    codes, scales = rng.integers(-127, 128, (rows, columns)), rng.uniform(0.5, 2, rows).astype(np.float32)
    numbers = codes.astype(np.float32) * scales[:, None] * np.float32(1 / 127)
    return {".weight": codes.astype(np.int8), ".SCB": scales, ".weight_format": np.array(0, np.uint8), "": numbers}


def torchao(rng: Any, rows: int, columns: int, kind: str) -> dict[str, np.ndarray]:
    """Signed nibbles with scales `[K/g, N]` and zero points that are added, fp8, or int8 with one scale per row."""
    if kind == "Int4Tensor":
        codes = rng.integers(-8, 8, (rows, columns))
        scales, zero = (rng.uniform(0.1, 1, (columns // 32, rows)).astype(BF16) for _ in range(2))
        spread = [np.repeat(array.T.astype(np.float32), 32, 1) for array in (scales, zero)]
        tensors = {"qdata": (codes[:, ::2] & 15 | (codes[:, 1::2] & 15) << 4).astype(np.uint8), "zero_point": zero}
        numbers = codes.astype(np.float32) * spread[0] + spread[1]
    else:
        dtype = ml_dtypes.float8_e4m3fn if kind == "Float8Tensor" else np.int8
        codes, scales = rng.integers(-9, 9, (rows, columns)).astype(dtype), rng.uniform(0.1, 1, (rows, 1)).astype(BF16)
        tensors, numbers = {"qdata": codes}, codes.astype(np.float32) * scales.astype(np.float32)
    return {f"._weight_{name}": array for name, array in (tensors | {"scale": scales}).items()} | {"": numbers}


def layer_of(
    tmp_path: Any, settings: dict[str, Any], matrix: Any, tag: str = "", **options: Any
) -> tuple[Any, dict[str, np.ndarray]]:
    """(layer 1, the numbers that its matrices stand for). tag: the type in torchao's metadata."""
    generator = np.random.default_rng(5)
    tensors, numbers = per_expert_layer("qwen3_moe", D, F, lambda *shape: matrix(generator, *shape))
    layers = {"num_hidden_layers": 2, "mlp_only_layers": [0]}
    config = quantized_config("qwen3_moe", settings, D, F, dtype="float32", **layers)
    path = write(tmp_path, config, {1: {name: np.ascontiguousarray(array) for name, array in tensors.items()}})
    if tag:
        tensors = {name: np.ascontiguousarray(array) for name, array in tensors.items()}
        modules = {name.rpartition(".")[0] for name in tensors if "._weight" in name}
        save_file(
            tensors, path / "model.safetensors", {f"{name}.weight": json.dumps({"_type": tag}) for name in modules}
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return open_checkpoint(path).layer(1, **options), numbers


def assert_stands_for(layer: Any, numbers: dict[str, np.ndarray]) -> None:
    experts = layer.dequantized("float32").experts
    gate_up = experts.gate_up if experts.up is None else np.concatenate([experts.gate_up, experts.up], 1)
    np.testing.assert_array_equal(gate_up, np.concatenate([numbers["gate"], numbers["up"]], 1))
    np.testing.assert_array_equal(experts.down, numbers["down"])
