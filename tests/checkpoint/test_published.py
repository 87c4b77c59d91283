"""Layouts of published quantisers, written one number at a time, and the numbers that each stands for."""

# pyright: reportCallIssue=false, reportOptionalMemberAccess=false, reportOptionalCall=false, reportArgumentType=false
from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from moe_core.checkpoint import open_checkpoint
from moe_core.errors import InvalidInput, Unsupported
from moe_core.formats import FP8_BLOCK_POW2, FP8_GROUP_POW2, FP8_TENSOR, MXFP4, MXFP8, int4_grouped, int8_grouped
from moe_core.tools.doctor.checkpoint import examine
from tests.support.checkpoint_files import write
from tests.support.quantized.files import (
    FP8,
    E,
    compressed,
    fp8_matrix,
    per_expert_layer,
    quantized_config,
)
from tests.support.quantized.published import (
    AWQ,
    BF16,
    GPTQ,
    D,
    F,
    assert_stands_for,
    awq,
    bitsandbytes,
    bitsandbytes_int8,
    fp4,
    gptq,
    hqq,
    int4,
    layer_of,
    mxfp8,
    nvfp4,
    permuted,
    static_fp8,
    torchao,
)


def gptq_of(**options: Any) -> Any:
    return lambda rng, rows, columns: gptq(rng, rows, columns, **options)


ACTIVATIONS = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True}
STATIC = compressed("float-quantized", ACTIVATIONS, num_bits=8, type="float", strategy="tensor", group_size=None)
NVFP4 = compressed("nvfp4-pack-quantized", type="float", strategy="tensor_group", group_size=16)
BITSANDBYTES = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_use_double_quant": True}
TORCHAO = {"quant_method": "torchao", "quant_type": {"default": {}}}
MODELOPT = {"quant_method": "modelopt", "producer": {"name": "modelopt"}}


@pytest.mark.parametrize(
    ("settings", "matrix", "format"),
    [
        (AWQ, awq, int4_grouped(32, True)),
        (GPTQ | {"checkpoint_format": None, "novelty": None}, gptq, int4_grouped(32, True)),
        (GPTQ | {"checkpoint_format": "gptq_v2"}, gptq_of(version=2), int4_grouped(32, True)),
        (GPTQ | {"bits": 8}, gptq_of(bits=8), int8_grouped(32, True)),
        (FP8 | {"scale_fmt": "ue8m0"}, fp8_matrix, FP8_BLOCK_POW2),
        (FP8 | {"expert_dtype": "fp4"}, fp4, MXFP4),
        (FP8 | {"weight_block_size": [1, 32], "scale_fmt": "ue8m0"}, mxfp8, MXFP8),
        (STATIC, static_fp8, FP8_TENSOR),
        (MODELOPT | {"quant_algo": "FP8"}, lambda *sizes: static_fp8(*sizes, ()), FP8_TENSOR),
        (MODELOPT | {"quantization": {"quant_algo": "FP8"}}, static_fp8, FP8_TENSOR),
    ],
)
def test_formats_that_kernels_take(tmp_path, settings, matrix, format):
    layer, numbers = layer_of(tmp_path, settings, matrix)
    assert layer.experts.down.format == layer.scheme.weights == format
    assert_stands_for(layer, numbers)
    rows = examine(str(tmp_path)).rows
    assert rows and not any(row.problems for row in rows)
    if format is FP8_BLOCK_POW2:
        assert layer.scheme.activations is FP8_GROUP_POW2


@pytest.mark.parametrize(
    ("settings", "matrix", "label"),
    [
        (GPTQ | {"desc_act": True}, gptq_of(act_order=True), "gptq int4 with permuted columns"),
        (compressed("pack-quantized", actorder="group"), permuted, "int4_g32 with permuted columns"),
        (NVFP4, nvfp4, "nvfp4"),
        (MODELOPT | {"quant_algo": "NVFP4", "group_size": 16}, lambda *sizes: nvfp4(*sizes, True), "nvfp4"),
        ({"quant_method": "hqq", "quant_config": {}}, hqq, "hqq"),
        (BITSANDBYTES, bitsandbytes, "bitsandbytes nf4"),
        (BITSANDBYTES, lambda *sizes: bitsandbytes(*sizes, "fp4", True), "bitsandbytes fp4"),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, bitsandbytes_int8, "bitsandbytes int8"),
        (TORCHAO, lambda *sizes: torchao(*sizes, "Int4Tensor"), "torchao Int4Tensor"),
        (TORCHAO, lambda *sizes: torchao(*sizes, "Float8Tensor"), "torchao Float8Tensor"),
        (TORCHAO, lambda *sizes: torchao(*sizes, "Int8Tensor"), "torchao Int8Tensor"),
    ],
)
def test_formats_without_a_kernel_are_dequantised_and_named(tmp_path, settings, matrix, label):
    tag = label.removeprefix("torchao ") if settings is TORCHAO else ""
    layer, numbers = layer_of(tmp_path, settings, matrix, tag)
    assert layer.scheme is None and any(f"no kernel takes {label}, as " in note for note in layer.notes)
    assert_stands_for(layer, numbers)
    assert {row.stored for row in examine(str(tmp_path)).rows} == {label, "plain BF16"}


def test_static_scales_are_the_largest_of_all_experts(tmp_path):
    generator = np.random.default_rng(5)
    made: list[float] = []

    def matrix(_: Any, rows: int, columns: int) -> dict[str, np.ndarray]:
        tensors = static_fp8(generator, rows, columns)
        made.append(tensors[".input_scale"][0] if rows == F else -tensors[".input_scale"][0])
        return tensors

    layer, _ = layer_of(tmp_path, STATIC, matrix)
    assert layer.experts.gate_up_input_scale == max(made) and layer.experts.down_input_scale == -min(made)
    assert layer.dequantized("float32").experts.gate_up_input_scale is None


@pytest.mark.parametrize("odd", ["model.layers.1.mlp.experts.2.up_proj", "model.layers.1.mlp.experts.0.down_proj"])
def test_one_matrix_left_plain(tmp_path, odd):
    generator = np.random.default_rng(5)
    tensors, numbers = per_expert_layer("qwen3_moe", D, F, lambda *shape: int4(generator, *shape))
    for suffix in (".weight_packed", ".weight_scale", ".weight_shape"):
        del tensors[odd + suffix]
    *_, expert, name = odd.split(".")
    plain = generator.normal(size=numbers[name.removesuffix("_proj")][0].shape).astype(BF16)
    tensors[f"{odd}.weight"] = numbers[name.removesuffix("_proj")][int(expert)] = plain
    path = write(tmp_path, quantized_config("qwen3_moe", compressed("pack-quantized"), D, F), {1: tensors})
    with pytest.warns(UserWarning, match="kernels take all matrices in one format: .* as int4_g32, .* as plain numb"):
        layer = open_checkpoint(path).layer(1)
    assert layer.dtype == "bfloat16" and layer.experts.down.dtype == BF16
    assert_stands_for(layer, {name: array.astype(BF16).astype(np.float32) for name, array in numbers.items()})


def test_groups_targets_and_ignore_decide_per_matrix(tmp_path):
    """Kimi: fp8 attention beside int4 experts. Exact names win over patterns, and these over classes."""
    weights = compressed("")["config_groups"]["group_0"]["weights"]
    fp8 = {"format": "float-quantized", "weights": {"num_bits": 3, "type": "float"}}
    groups = {
        "g0": fp8 | {"targets": ["re:.*self_attn.*"]},
        "g1": {"targets": ["re:.*[.]experts[.][0-9]+[.].*"], "weights": weights, "format": "pack-quantized"},
        "g2": fp8 | {"targets": ["Linear"]},
    }
    settings = compressed("mixed-precision") | {"config_groups": groups, "ignore": ["lm_head", "re:.*self_attn.*"]}
    layer, numbers = layer_of(tmp_path, settings, int4)
    assert layer.scheme.weights == int4_grouped(32)
    assert_stands_for(layer, numbers)
    settings["ignore"] = ["re:.*experts.*"]
    with pytest.raises(
        Unsupported, match=r"it declares nothing \(targets, ignore\) for .*experts.0.*weight_packed I32"
    ):
        layer_of(tmp_path / "ignored", settings, int4)


@pytest.mark.parametrize(
    ("family", "block", "names", "settings"),
    [
        ("granitemoe", "model.layers.0.block_sparse_moe", {"router.layer.weight": (E, D)}, {}),
        ("llama4_text", "model.layers.0.feed_forward",
            {"router.weight": (E, D), "shared_expert.gate_proj.weight": (F, D), "shared_expert.up_proj.weight": (F, D),
             "shared_expert.down_proj.weight": (D, F)}, {"num_experts_per_tok": 1, "interleave_moe_layer_step": 1}),
        ("gemma4_text", "model.layers.0",
            {"router.proj.weight": (E, D), "router.scale": (D,), "router.per_expert_scale": (E,)},
            {"top_k_experts": 2, "enable_moe_block": True, "hidden_activation": "gelu_pytorch_tanh",
             "rms_norm_eps": 1e-6}),
        ("qwen3_moe", "model.language_model.language_model.layers.0.mlp", {"gate.weight": (E, D)}, {}),
        ("gpt_oss", "model.layers.0.mlp", {"router.weight": (E, D), "router.bias": (E,)}, {}),
    ],
)  # fmt: skip
@pytest.mark.parametrize("quantized", [True, False])
def test_experts_one_by_one_in_families_of_fused_experts(tmp_path, family, block, names, settings, quantized):
    generator = np.random.default_rng(6)
    tensors = {f"{block}.{name}": generator.normal(size=shape).astype(BF16) for name, shape in names.items()}
    numbers: dict[str, list[np.ndarray]] = {"gate": [], "up": [], "down": []}
    biases: dict[str, list[np.ndarray]] = {"gate": [], "up": [], "down": []}
    for expert in range(E):
        for name, shape in (("gate", (F, D)), ("up", (F, D)), ("down", (D, F))):
            weight = generator.normal(size=shape).astype(BF16)
            made = int4(generator, *shape) if quantized else {".weight": weight, "": weight.astype(np.float32)}
            numbers[name].append(made.pop(""))
            if family == "gpt_oss":
                made[".bias"] = generator.normal(size=shape[:1]).astype(BF16)
                biases[name].append(made[".bias"])
            tensors |= {f"{block}.experts.{expert}.{name}_proj{suffix}": array for suffix, array in made.items()}
    config = {"model_type": family, "hidden_size": D, "intermediate_size": F, "moe_intermediate_size": F,
        "num_hidden_layers": 1, "hidden_act": "silu", "num_local_experts": E, "num_experts": E,
        "num_experts_per_tok": 2, "norm_topk_prob": True, **settings}  # fmt: skip
    if quantized:
        config["quantization_config"] = compressed("pack-quantized")
    layer = open_checkpoint(write(tmp_path, config, {0: tensors})).layer(0)
    experts = layer.dequantized("float32").experts
    turned = layer.spec.weight_layout == "in_out"
    gate_up, down = (array.swapaxes(1, 2) if turned else array for array in (experts.gate_up, experts.down))
    assert turned == (family in ("llama4_text", "gpt_oss") and not quantized)
    np.testing.assert_array_equal(gate_up, np.concatenate([np.stack(numbers["gate"]), np.stack(numbers["up"])], 1))
    np.testing.assert_array_equal(down, np.stack(numbers["down"]))
    if family == "gpt_oss":
        assert layer.spec.activation.gate_layout == "halves"
        both = np.concatenate([np.stack(biases["gate"]), np.stack(biases["up"])], 1).astype(np.float32)
        np.testing.assert_array_equal(experts.gate_up_bias.astype(np.float32), both)


@pytest.mark.parametrize(("kind", "number"), [("NaN", np.nan), ("infinite", np.inf), ("zero", 0.0)])
def test_bad_scales_are_named_and_refused_unless_allowed(tmp_path, kind, number):
    def matrix(rng: Any, rows: int, columns: int) -> dict[str, np.ndarray]:
        made = int4(rng, rows, columns)
        made[".weight_scale"][3, 1] = number
        return made

    settings = compressed("pack-quantized")
    with pytest.raises(InvalidInput, match=f"experts.0.gate_proj.weight_scale in model.safetensors .* got 1 {kind} am"):
        layer_of(tmp_path / "refused", settings, matrix)
    layer, _ = layer_of(tmp_path / "allowed", settings, matrix, allow_bad_scales=True)
    assert layer.experts.down.scales.shape == (E, D, 2)


def test_bytes_of_255_are_bad_exponents(tmp_path):
    def matrix(*sizes: Any) -> dict[str, np.ndarray]:
        made = mxfp8(*sizes)
        return made | {".weight_scale_inv": np.full_like(made[".weight_scale_inv"], 255)}

    with pytest.raises(InvalidInput, match=r"weight_scale_inv .* got 256 NaN among"):
        layer_of(tmp_path, FP8 | {"weight_block_size": [1, 32], "scale_fmt": "ue8m0"}, matrix)


@pytest.mark.parametrize(
    ("settings", "matrix", "change", "message"),
    [
        (AWQ, awq, {".qzeros": None}, "must hold the tensor .*gate_proj.qzeros"),
        (AWQ, awq, {".scales": np.ones((2, F), np.float16)}, r"gate_proj.scales .* must be \[4, 64\] by config.json"),
        (AWQ, awq, {".pre_quant_scale": np.ones(D, np.float16)}, "pre_quant_scale .* awq int4 has .qweight, .qzeros"),
        (GPTQ, gptq, {".g_idx": np.full(D, 4, np.int32)}, "g_idx .* must hold groups from 0 to 3, got 4 to 4"),
        (GPTQ, gptq, {".g_idx": np.zeros(3, np.int32)}, r"g_idx .* must be I32 \[128\], got I32 \[3\]"),
        (NVFP4, nvfp4, {".weight_scale": np.ones((F, 8), np.float32)}, "weight_scale .* must be F8_E4M3 by config"),
        ({"quant_method": "hqq"}, hqq, {".nbits": np.array(3, np.int32)}, "stored as hqq, got .*: 3 bits along axis 1"),
        ({"quant_method": "hqq"}, hqq, {".scale": np.ones((7, 1), np.float16)},
            "stored as hqq, got tensors that disag"),
        ({"quant_method": "hqq"}, hqq, {".zero": np.array(1, np.float16)}, r"hqq, got .*: zero \(1,\) and scale"),
        (BITSANDBYTES, bitsandbytes, {".weight.absmax": np.ones(3, np.float32)}, "3 scales of blocks of 64 for"),
        (compressed("pack-quantized"), int4, {".weight_shape": np.array([D, F])}, r"weight_shape .* be \[64, 128\]"),
        (TORCHAO, lambda *sizes: torchao(*sizes, "Int8Tensor"), {}, "must belong to an Int4Tensor, .* got None"),
        (STATIC, static_fp8, {".input_scale": None}, "must hold the tensor .*gate_proj.input_scale"),
        (STATIC, static_fp8, {".input_scale": np.zeros(1, np.float32)},
            "input_scale .* must be a finite scale above 0"),
        (STATIC, static_fp8, {".input_scale": np.ones(2, np.float32)},
            r"input_scale .* must be one number, got F32 \[2\]"),
    ],
)  # fmt: skip
def test_tensors_that_disagree(tmp_path, settings, matrix, change, message):
    def broken(rng: Any, rows: int, columns: int) -> dict[str, np.ndarray]:
        made = matrix(rng, rows, columns) | (change if rows == F else {})
        return {name: array for name, array in made.items() if array is not None}

    with pytest.raises((InvalidInput, Unsupported), match=message):
        layer_of(tmp_path, settings, broken)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (AWQ | {"version": "gemv"}, "version 'gemv'; it must be 'gemm'"),
        (AWQ | {"bits": 3}, "bits 3; it must be 4 or 8"),
        (
            AWQ | {"zero_pont": True},
            "unknown key 'zero_pont' in quantization_config of awq; .* keys like it are zero_po",
        ),
        (GPTQ | {"dynamic": {"-:.*": {}}}, "dynamic"),
        (GPTQ | {"checkpoint_format": "marlin"}, "checkpoint_format 'marlin'"),
        (FP8 | {"scale_fmt": "ue4m3"}, "scale_fmt 'ue4m3'; it must be 'float' or 'ue8m0'"),
        (FP8 | {"scale_format": "ue8m0"}, "unknown key 'scale_format' .* keys like it are scale_fmt"),
        (compressed("pack-quantized", bits=4), "unknown key 'bits' in weights"),
        (compressed("pack-quantized") | {"transform_config": {"a": 1}}, "transform_config"),
        (MODELOPT | {"quant_algo": "NVFP4_AWQ"}, "quant_algo 'NVFP4_AWQ'; the ones that can be read are FP8"),
        (compressed("pack-quantized") | {"ignore": ["re:(a+)+b"]}, "at most 8 repetitions"),
        (compressed("pack-quantized") | {"ignore": ["re:(a"]}, "patterns that compile"),
    ],
)
def test_keys_are_honoured_or_refused(tmp_path, settings, message):
    with pytest.raises((InvalidInput, Unsupported), match=message):
        open_checkpoint(write(tmp_path, quantized_config("qwen3_moe", settings, D, F), {}))


def test_the_expert_dtype_of_the_model_counts(tmp_path):
    generator = np.random.default_rng(5)
    tensors, _ = per_expert_layer("qwen3_moe", D, F, lambda *shape: fp4(generator, *shape))
    config = quantized_config("qwen3_moe", FP8, D, F, expert_dtype="fp4")
    with pytest.warns(UserWarning, match="no kernel takes activations in groups of 128"):
        assert open_checkpoint(write(tmp_path, config, {1: tensors})).layer(1).scheme.weights is MXFP4


def test_empty_moe_layers_of_llama4_are_dense(tmp_path):
    config = {"model_type": "llama4_text", "hidden_size": D, "intermediate_size": F, "num_hidden_layers": 2,
        "hidden_act": "silu", "num_local_experts": E, "num_experts_per_tok": 1, "moe_layers": [],
        "interleave_moe_layer_step": 1}  # fmt: skip
    assert open_checkpoint(write(tmp_path, config, {})).moe_layers == ()
