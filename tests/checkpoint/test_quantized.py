"""Quantised checkpoints in their published layouts: what is read, bit by bit, and what it stands for."""

# pyright: reportCallIssue=false, reportOptionalMemberAccess=false, reportOptionalCall=false, reportArgumentType=false
from __future__ import annotations

import json
import re
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from moe_core.base.arrays import ALIGNMENT
from moe_core.base.files import open_file
from moe_core.checkpoint import ReadProgress, open_checkpoint, other_tensors
from moe_core.checkpoint.storage import RawTensor
from moe_core.errors import InvalidInput, Unsupported
from moe_core.formats import FP8_BLOCK, FP8_GROUP, MXFP4, QuantizedTensor
from moe_core.layers import LayerWeights
from moe_core.ops.quantize.reference import dequantize
from moe_core.specs.operands import named_arrays
from tests.support.checkpoint_files import write
from tests.support.quantized.files import FP8, E, fp8_matrix, mxfp4_layer, per_expert_layer, quantized_config
from tests.support.quantized.files import MXFP4 as MXFP4_CONFIG

EXPERTS = "model.layers.0.mlp.experts."


@pytest.fixture
def gpt_oss(tmp_path):
    """(directory, tensors) of one published gpt-oss layer, D = 64, F = 96."""
    tensors = mxfp4_layer(64, 96)
    return write(tmp_path, quantized_config("gpt_oss", MXFP4_CONFIG, 64, 96), {0: tensors}), tensors


def assert_owned(tensor: QuantizedTensor) -> None:
    for name, array in named_arrays(tensor):
        assert array.flags.c_contiguous and array.flags.writeable and array.ctypes.data % ALIGNMENT == 0, name


# gpt-oss


def test_gpt_oss_reads_as_published(gpt_oss):
    path, tensors = gpt_oss
    checkpoint = open_checkpoint(path)
    layer = checkpoint.layer(0)
    assert layer.scheme == checkpoint.scheme and str(layer.scheme) == "mxfp4_w4a16" and layer.dtype == "bfloat16"
    assert (layer.spec.weight_layout, layer.spec.activation.gate_layout) == ("out_in", "interleaved")
    for weight, name, shape in (
        (layer.experts.gate_up, "gate_up_proj", (E, 192, 64)),
        (layer.experts.down, "down_proj", (E, 64, 96)),
    ):
        assert (weight.format, weight.layout, weight.shape) == (MXFP4, "out_in", shape)
        assert weight.values.tobytes() == tensors[f"{EXPERTS}{name}_blocks"].tobytes()
        assert weight.scales.tobytes() == tensors[f"{EXPERTS}{name}_scales"].tobytes()
        assert_owned(weight)
    np.testing.assert_array_equal(layer.experts.gate_up_bias, tensors[f"{EXPERTS}gate_up_proj_bias"])
    np.testing.assert_array_equal(layer.experts.down_bias, tensors[f"{EXPERTS}down_proj_bias"])


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_gpt_oss_equals_the_dequantisation_of_transformers(gpt_oss, dtype):
    torch = pytest.importorskip("torch")
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    path, tensors = gpt_oss
    layer = open_checkpoint(path).layer(0).dequantized(dtype)
    assert layer.scheme is None and layer.dtype == dtype
    for weight, name in ((layer.experts.gate_up, "gate_up_proj"), (layer.experts.down, "down_proj")):
        blocks, scales = (torch.from_numpy(tensors[f"{EXPERTS}{name}_{part}"]) for part in ("blocks", "scales"))
        theirs = convert_moe_packed_tensors(blocks, scales, dtype=getattr(torch, dtype))
        assert weight.dtype.name == dtype
        np.testing.assert_array_equal(weight.swapaxes(-1, -2).astype(np.float32), theirs.float().numpy())


def test_progress_counts_packed_bytes(gpt_oss):
    path, _ = gpt_oss
    calls: list[ReadProgress] = []
    layer = open_checkpoint(path).layer(0, calls.append)
    arrays = [*dict(named_arrays(layer.router)).values(), layer.experts.gate_up_bias, layer.experts.down_bias]
    packed = layer.experts.gate_up.nbytes + layer.experts.down.nbytes
    assert calls[-1].bytes_read == calls[-1].bytes_total == packed + sum(array.nbytes for array in arrays)


# DeepSeek


@pytest.mark.parametrize(("d_ff", "layout"), [(128, "halves"), (96, "separate")])
@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_fp8_blocks(tmp_path, family, d_ff, layout):
    """F a multiple of 128: one array for gate and up. Else a block would hold rows of both: two arrays."""
    generator = np.random.default_rng(3)
    tensors, numbers = per_expert_layer(family, 200, d_ff, lambda *shape: fp8_matrix(generator, *shape))
    shared = {}
    if family == "deepseek_v3":
        for name, shape in (("gate", (2 * d_ff, 200)), ("up", (2 * d_ff, 200)), ("down", (200, 2 * d_ff))):
            made = fp8_matrix(generator, *shape)
            shared[name] = made.pop("")
            prefix = f"model.layers.1.mlp.shared_experts.{name}_proj"
            tensors |= {prefix + suffix: array for suffix, array in made.items()}
    # In one file the scales of up would lie behind those of gate, and too long a read would find them.
    ups = {name: tensors.pop(name) for name in list(tensors) if ".up_proj." in name}
    path = write(tmp_path, quantized_config(family, FP8, 200, d_ff), {1: tensors, 2: ups}, shards=True)
    layer = open_checkpoint(path).layer(1)
    assert layer.scheme.weights is FP8_BLOCK and layer.scheme.activations is FP8_GROUP
    assert layer.spec.activation.gate_layout == layout
    for bundle, wanted in ((layer.experts, numbers), (layer.shared, shared)):
        if bundle is None:
            continue
        gate_up, axis = dequantize(bundle.gate_up), -2
        if layout == "separate":
            gate_up = np.concatenate([gate_up, dequantize(bundle.up)], axis)
        np.testing.assert_array_equal(gate_up, np.concatenate([wanted["gate"], wanted["up"]], axis))
        np.testing.assert_array_equal(dequantize(bundle.down), wanted["down"])
    assert_owned(layer.experts.gate_up)
    plain = LayerWeights.from_checkpoint(layer.dequantized("float32"))
    assert plain.dtype == "float32" and plain.storage.gate_layout == layout


def test_fp8_equals_the_dequantisation_of_transformers():
    """Their operation takes whole blocks: the last ones are filled up for it, and what fills them is cut off again."""
    torch = pytest.importorskip("torch")
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    made = fp8_matrix(np.random.default_rng(4), 200, 300)
    codes = np.zeros((256, 384), np.uint8)
    codes[:200, :300] = made[".weight"].view(np.uint8)
    weight = torch.from_numpy(codes).view(torch.float8_e4m3fn)
    pair: dict[str, Any] = {
        "proj.weight": [weight],
        "proj.weight_scale_inv": [torch.from_numpy(made[".weight_scale_inv"])],
    }
    (theirs,) = Fp8Dequantize(hf_quantizer=None).convert(pair)["proj.weight"]
    assert theirs.dtype == torch.float32
    np.testing.assert_array_equal(theirs[:200, :300].numpy(), made[""])


def test_fused_fp8_as_transformers_saves_it(tmp_path):
    generator = np.random.default_rng(5)
    tensors, numbers = per_expert_layer("qwen3_moe", 128, 128, lambda *shape: fp8_matrix(generator, *shape))
    fused = {name: array for name, array in tensors.items() if ".experts." not in name}
    for field, names in (("gate_up_proj", ("gate_proj", "up_proj")), ("down_proj", ("down_proj",))):
        for suffix, ending in ((".weight", ""), (".weight_scale_inv", "_scale_inv")):
            arrays = [
                np.concatenate([tensors[f"model.layers.1.mlp.experts.{expert}.{name}{suffix}"] for name in names])
                for expert in range(E)
            ]
            fused[f"model.layers.1.mlp.experts.{field}{ending}"] = np.stack(arrays)
    layer = open_checkpoint(write(tmp_path, quantized_config("qwen3_moe", FP8, 128, 128), {1: fused})).layer(1)
    np.testing.assert_array_equal(
        dequantize(layer.experts.gate_up), np.concatenate([numbers["gate"], numbers["up"]], axis=1)
    )


@pytest.mark.parametrize(("d_ff", "layout"), [(128, "halves"), (96, "separate")])
def test_fp8_blocks_of_all_experts_in_one_tensor(tmp_path, d_ff, layout):
    """step3p5: gate and up of all experts in a tensor each."""
    generator = np.random.default_rng(8)
    block, numbers = "model.layers.1.moe.", {}
    tensors = {f"{block}gate.weight": np.ones((E, 200), np.float32), f"{block}router_bias": np.ones(E, np.float32)}
    for name, shape in (("gate", (d_ff, 200)), ("up", (d_ff, 200)), ("down", (200, d_ff))):
        made = [fp8_matrix(generator, *shape) for _ in range(E)]
        numbers[name] = np.stack([one.pop("") for one in made])
        tensors |= {f"{block}{name}_proj{suffix}": np.stack([one[suffix] for one in made]) for suffix in made[0]}
    settings = {
        **{"model_type": "step3p5", "hidden_size": 200, "moe_intermediate_size": d_ff, "moe_num_experts": E},
        **{"num_hidden_layers": 2, "moe_layers_enum": "1", "moe_top_k": 2, "moe_router_scaling_factor": 3.0},
        **{"share_expert_dim": 0, "quantization_config": FP8},
    }
    config = {"model_type": "step3p7", "text_config": settings}
    experts = open_checkpoint(write(tmp_path, config, {1: tensors})).layer(1).experts
    found = [dequantize(weight) for weight in (experts.gate_up, experts.up) if weight is not None]
    assert len(found) == (1 if layout == "halves" else 2)
    np.testing.assert_array_equal(np.concatenate(found, 1), np.concatenate([numbers["gate"], numbers["up"]], 1))
    np.testing.assert_array_equal(dequantize(experts.down), numbers["down"])


def test_scales_stored_as_exponents_are_read_as_numbers(tmp_path):
    generator = np.random.default_rng(6)

    def matrix(rows: int, columns: int) -> dict[str, np.ndarray]:
        made = fp8_matrix(generator, rows, columns)
        exponents = np.full(made[".weight_scale_inv"].shape, 2.0**-9).astype(ml_dtypes.float8_e8m0fnu)
        return made | {".weight_scale_inv": exponents, "": made[".weight"].astype(np.float32) * np.float32(2**-9)}

    tensors, numbers = per_expert_layer("qwen3_moe", 128, 128, matrix)
    config = quantized_config("qwen3_moe", FP8 | {"scale_fmt": "ue8m0"}, 128, 128)
    layer = open_checkpoint(write(tmp_path, config, {1: tensors})).layer(1)
    assert layer.experts.down.scales.dtype == np.float32
    np.testing.assert_array_equal(dequantize(layer.experts.down), numbers["down"])


def test_layers_left_out_of_quantisation_are_plain(tmp_path):
    generator = np.random.default_rng(7)

    def matrix(rows: int, columns: int) -> dict[str, np.ndarray]:
        weight = generator.standard_normal((rows, columns)).astype(ml_dtypes.bfloat16)
        return {".weight": weight, "": weight}

    tensors, numbers = per_expert_layer("qwen3_moe", 64, 32, matrix)
    layer = open_checkpoint(write(tmp_path, quantized_config("qwen3_moe", FP8, 64, 32), {1: tensors})).layer(1)
    assert layer.scheme is None and layer.dtype == "bfloat16"
    np.testing.assert_array_equal(layer.experts.down, numbers["down"])
    np.testing.assert_array_equal(layer.dequantized("float32").experts.down, numbers["down"].astype(np.float32))


# What is refused


def test_nested_settings_are_found(tmp_path):
    config = {"model_type": "picture", "text_config": quantized_config("gpt_oss", MXFP4_CONFIG, 64, 96)}
    assert open_checkpoint(write(tmp_path, config, {})).scheme.weights is MXFP4


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"down_proj_scales": None}, InvalidInput, "must hold the tensor model.layers.0.mlp.experts.down_proj_scales"),
        ({"down_proj_scales": np.zeros((E, 64, 2), np.uint8)}, InvalidInput,
            "down_proj_scales in model.safetensors must be [4, 64, 3] by config.json, got [4, 64, 2]"),
        ({"down_proj_scales": np.zeros((E, 64, 3), np.float32)}, Unsupported,
            "down_proj_scales in model.safetensors must be U8 or F8_E8M0 by config.json, got F32"),
        ({"down_proj_g_idx": np.zeros(4, np.int32)}, Unsupported,
            "down_proj_g_idx in model.safetensors belongs to a quantised tensor in a way that the quantization_config"),
    ],
)  # fmt: skip
def test_tensors_that_disagree(tmp_path, change, error, message):
    tensors = mxfp4_layer(64, 96)
    for name, array in change.items():
        tensors[EXPERTS + name] = array
    tensors = {name: array for name, array in tensors.items() if array is not None}
    checkpoint = open_checkpoint(write(tmp_path, quantized_config("gpt_oss", MXFP4_CONFIG, 64, 96), {0: tensors}))
    with pytest.raises(error, match=re.escape(message)):
        checkpoint.layer(0)


def test_sizes_the_format_cannot_have(tmp_path):
    path = write(tmp_path, quantized_config("gpt_oss", MXFP4_CONFIG, 64, 40), {0: mxfp4_layer(64, 64)})
    with pytest.raises(
        InvalidInput, match=r"the input axis must be a multiple of 32 for mxfp4 .*, got 40 in \(64, 40\)"
    ):
        open_checkpoint(path).layer(0)


def test_layers_take_the_arrays_as_they_are(gpt_oss):
    path, _ = gpt_oss
    layer = open_checkpoint(path).layer(0)
    weights = LayerWeights.from_checkpoint(layer)
    assert weights.experts.gate_up is layer.experts.gate_up
    assert weights.layer_spec().experts.scheme == layer.scheme and weights.dtype == "bfloat16"


# 8-bit floats of files


def test_raw_tensors(tmp_path):
    arrays: dict[str, Any] = {
        "matrix": np.arange(24, dtype=np.uint8).reshape(4, 6).view(ml_dtypes.float8_e4m3fn),
        "scalar": np.array(2.0, ml_dtypes.float8_e4m3fn),
        "empty": np.zeros((0, 3), ml_dtypes.float8_e4m3fn),
        "exponents": np.arange(5, dtype=np.uint8).view(ml_dtypes.float8_e8m0fnu),
    }
    save_file(arrays, tmp_path / "model.safetensors")
    with open_file(tmp_path / "model.safetensors") as file:
        for name, array in arrays.items():
            tensor = RawTensor(file, name)
            assert (tensor.get_shape(), tensor[:].dtype) == (list(array.shape), array.dtype)
            assert tensor[:].tobytes() == array.tobytes() and tensor[:].flags.writeable
        middle = RawTensor(file, "matrix")[1:3]
    assert middle.shape == (2, 6) and middle.tobytes() == arrays["matrix"][1:3].tobytes()


def test_other_tensors_of_a_quantised_checkpoint(gpt_oss):
    path, tensors = gpt_oss
    attention = np.ones((8, 8), ml_dtypes.float8_e4m3fn)
    save_file(tensors | {"model.layers.0.self_attn.q_proj.weight": attention}, path / "model.safetensors")
    config = json.loads((path / "config.json").read_text()) | {"num_hidden_layers": 1}
    (path / "config.json").write_text(json.dumps(config))
    ((name, array),) = other_tensors(open_checkpoint(path))
    assert name.endswith("q_proj.weight") and array.dtype == attention.dtype and (array == attention).all()
