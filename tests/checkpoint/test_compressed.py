"""Checkpoints of compressed-tensors: what is read, bit by bit, and which quantization_config cannot be."""

# pyright: reportCallIssue=false, reportOptionalMemberAccess=false, reportOptionalCall=false, reportArgumentType=false
from __future__ import annotations

import re

import ml_dtypes
import numpy as np
import pytest

from moe_core.checkpoint import open_checkpoint
from moe_core.checkpoint.packing import words_packing
from moe_core.checkpoint.quantization import read_quantization
from moe_core.errors import InvalidInput, Unsupported
from moe_core.formats import (
    FP8_BLOCK,
    INT8_CHANNEL,
    INT8_TOKEN,
    MXFP4,
    MXFP8,
    Scheme,
    int4_grouped,
    int8_grouped,
)
from moe_core.ops.quantize.reference import dequantize
from tests.support.checkpoint_files import write
from tests.support.quantized.files import FP8, compressed, per_expert_layer, quantized_config, words_matrix
from tests.support.quantized.files import MXFP4 as MXFP4_CONFIG


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("zero_points", [False, True], ids=["symmetric", "zero_points"])
@pytest.mark.parametrize("group", [32, None])
@pytest.mark.parametrize("bits", [4, 8])
def test_pack_quantized(tmp_path, bits, group, zero_points, dtype):
    """D = 96, F = 32: whole words everywhere but in the zero points of one row's gate or up."""
    generator = np.random.default_rng(8)
    tensors, numbers = per_expert_layer(
        "qwen3_moe", 96, 32, lambda *s: words_matrix(generator, *s, bits, group or s[1], zero_points, dtype)
    )
    arguments = {"strategy": "channel", "group_size": None} if group is None else {"group_size": group}
    settings = compressed("pack-quantized", num_bits=bits, symmetric=not zero_points, **arguments)
    layer = open_checkpoint(write(tmp_path, quantized_config("qwen3_moe", settings, 96, 32), {1: tensors})).layer(1)
    format = (int4_grouped if bits == 4 else int8_grouped)(group, zero_points)
    assert layer.experts.gate_up.format == layer.scheme.weights == format and layer.scheme.activations is None
    assert layer.experts.down.scales.dtype == dtype
    both = np.concatenate([numbers["gate"], numbers["up"]], axis=1)
    np.testing.assert_array_equal(dequantize(layer.experts.gate_up), both)
    np.testing.assert_array_equal(dequantize(layer.experts.down), numbers["down"])


@pytest.mark.parametrize(("symmetric", "zero_points"), [({}, False), (True, False), (False, True)])
def test_weights_are_symmetric_unless_they_say_no(symmetric, zero_points):
    """As in compressed-tensors; {} = absent."""
    settings = compressed("pack-quantized", symmetric=symmetric)
    if symmetric == {}:
        del settings["config_groups"]["group_0"]["weights"]["symmetric"]
    quantization = read_quantization(settings, "qwen3_moe")
    assert quantization is not None
    (packing,) = quantization.packings(["model.layers.0.mlp.experts.0.up_proj"])
    assert packing.format == int4_grouped(32, zero_points)


@pytest.mark.parametrize("d_ff", [36, 33])
def test_words_that_are_not_full(tmp_path, d_ff):
    """36 output channels of zero points fill four and a half words; 33 inputs of down do not fill their bytes."""
    generator = np.random.default_rng(9)
    tensors, numbers = per_expert_layer(
        "qwen3_moe", 64, d_ff, lambda *s: words_matrix(generator, *s, 4, s[1], True, np.float32)
    )
    settings = compressed("pack-quantized", symmetric=False, strategy="channel", group_size=None)
    checkpoint = open_checkpoint(write(tmp_path, quantized_config("qwen3_moe", settings, 64, d_ff), {1: tensors}))
    if d_ff % 2:
        with pytest.raises(InvalidInput, match=r"must be a multiple of 2 for int4_row_zp .*, got 33 in"):
            checkpoint.layer(1)
        return
    experts = checkpoint.layer(1).experts
    np.testing.assert_array_equal(dequantize(experts.gate_up), np.concatenate([numbers["gate"], numbers["up"]], axis=1))
    np.testing.assert_array_equal(dequantize(experts.down), numbers["down"])


def test_bytes_of_a_row_are_filled_up_to_words_whatever_the_number_of_rows():
    values = words_packing(Scheme("words", int4_grouped(None, True)), {}).components[0]
    packed = np.arange(15, dtype=np.uint8).reshape(3, 5)
    words = values.encode(packed)
    assert words.shape == (3, 2) and words.dtype == np.dtype("<i4")
    np.testing.assert_array_equal(values.decode(words), np.pad(packed, ((0, 0), (0, 3))))


def test_int8_channels_with_activations_per_token(tmp_path):
    generator = np.random.default_rng(10)

    def matrix(rows: int, columns: int) -> dict[str, np.ndarray]:
        weight = generator.integers(-127, 128, (rows, columns), np.int8)
        scales = generator.uniform(0.1, 1, (rows, 1)).astype(ml_dtypes.bfloat16)
        return {".weight": weight, ".weight_scale": scales, "": weight.astype(np.float32) * scales.astype(np.float32)}

    tensors, numbers = per_expert_layer("qwen3_moe", 40, 24, matrix)
    token = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
    settings = compressed("int-quantized", token, num_bits=8, strategy="channel", group_size=None)
    layer = open_checkpoint(write(tmp_path, quantized_config("qwen3_moe", settings, 40, 24), {1: tensors})).layer(1)
    assert (layer.scheme.weights, layer.scheme.activations) == (INT8_CHANNEL, INT8_TOKEN)
    np.testing.assert_array_equal(dequantize(layer.experts.down), numbers["down"])


@pytest.mark.parametrize(
    ("settings", "weights", "activations"),
    [
        (compressed("pack-quantized", strategy=None), int4_grouped(32), None),
        (compressed("pack-quantized", group_size=-1, strategy=None), int4_grouped(None), None),
        (compressed("pack-quantized", {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}),
            int4_grouped(32), None),
        (compressed("float-quantized", num_bits=8, type="float", strategy="block", block_structure=[128, 128]),
            FP8_BLOCK, None),
        (compressed("mxfp4-pack-quantized", type="float"), MXFP4, None),
        (compressed("mxfp8-quantized",
            {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 32, "dynamic": True}, type="float",
            num_bits=8), MXFP8, MXFP8),
    ],
)  # fmt: skip
def test_schemes_of_compressed_tensors(tmp_path, settings, weights, activations):
    scheme = open_checkpoint(write(tmp_path, quantized_config("qwen3_moe", settings, 64, 32), {})).scheme
    assert (scheme.weights, scheme.activations) == (weights, activations)


# What is refused


@pytest.mark.parametrize(
    ("family", "settings", "error", "message"),
    [
        ("qwen3_moe", MXFP4_CONFIG, Unsupported,
            "has quant_method mxfp4 for qwen3_moe; only gpt_oss is published in it"),
        ("qwen3_moe", {"quant_method": "quark"}, Unsupported,
            "quant_method 'quark'; the methods that can be read are mxfp4"),
        ("qwen3_moe", "fp8", InvalidInput, "quantization_config in config.json must be an object, got 'fp8'"),
        ("qwen3_moe", FP8 | {"weight_block_size": [64, 64]}, Unsupported, "weight_block_size [64, 64]; it must be"),
        ("qwen3_moe", FP8 | {"fmt": "e5m2"}, Unsupported, "fmt 'e5m2'; it must be 'e4m3'"),
        ("qwen3_moe", FP8 | {"activation_scheme": "static"}, Unsupported, "activation_scheme 'static' with blocks"),
        ("qwen3_moe", compressed("marlin-24"), Unsupported, "format 'marlin-24'; the formats that can be read"),
        ("qwen3_moe", compressed("pack-quantized", num_bits=3), Unsupported, "weights of 3 bits int, strategy 'group'"),
        ("qwen3_moe", compressed("pack-quantized", symmetric=None), InvalidInput, "symmetric in config.json must be"),
        ("qwen3_moe", compressed("int-quantized", type="float", num_bits=8), Unsupported,
            "format 'int-quantized' with weights of mxfp8; it stores int8, and float-quantized, naive-quantized,"),
        ("qwen3_moe", compressed("mxfp8-quantized", num_bits=8, type="float", strategy="channel"), Unsupported, "e8m0"),
        ("qwen3_moe", compressed("int-quantized", num_bits=8), Unsupported, "int8 values must have one scale per ch"),
        ("qwen3_moe",
            compressed("pack-quantized", {"num_bits": 8, "type": "int", "strategy": "tensor", "dynamic": False}),
            Unsupported, "input_activations with static scales of 8 bits int, strategy 'tensor'; static scales must"),
        ("qwen3_moe", compressed("pack-quantized", {"num_bits": 8, "type": "int", "strategy": "token"}),
            Unsupported, "input_activations with static scales of 8 bits int, strategy 'token'; static scales must"),
        ("qwen3_moe",
            compressed("pack-quantized", {"num_bits": 3, "type": "int", "strategy": "token", "dynamic": True}),
            Unsupported, "input_activations of 3 bits int, strategy 'token', beside weights of int4_g32"),
        ("qwen3_moe", compressed("pack-quantized", activations=7), InvalidInput,
            "input_activations in config.json must"),
        ("qwen3_moe", {"quant_method": "compressed-tensors"}, InvalidInput, "config_groups in config.json must map"),
        ("qwen3_moe", {"quant_method": "compressed-tensors", "config_groups": {}}, Unsupported,
            "no config_groups"),
        ("qwen3_moe", {"quant_method": "compressed-tensors", "config_groups": {"a": {"weights": None}}}, Unsupported,
            "a group without weights"),
    ],
)  # fmt: skip
def test_settings_that_cannot_be_read(tmp_path, family, settings, error, message):
    with pytest.raises(error, match=re.escape(message)):
        open_checkpoint(write(tmp_path, quantized_config(family, settings, 64, 32), {}))
