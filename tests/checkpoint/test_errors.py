"""Every error of the checkpoint readers: its type, and a message with name, expectation, value and fix."""

from __future__ import annotations

import json
import re
import sys

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from moe_core.checkpoint import open_checkpoint
from moe_core.checkpoint.families import FAMILIES
from moe_core.errors import InvalidInput, Unsupported
from tests.support.checkpoint_files import D, E, F, config_of, layer_tensors, write, write_family


def test_missing_directory(tmp_path):
    with pytest.raises(
        InvalidInput, match=r"path must be a checkpoint directory, got .*gone, which does not exist; down"
    ):
        open_checkpoint(tmp_path / "gone")


def test_a_file_instead_of_a_directory(tmp_path):
    path, _ = write_family(tmp_path, "mixtral")
    with pytest.raises(InvalidInput, match=r"path must be a checkpoint directory, got .*config.json, which is a file"):
        open_checkpoint(path / "config.json")


def test_no_config(tmp_path):
    with pytest.raises(InvalidInput, match=r"with a config.json, got .*, which has none; pass the directory"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"), [("{", "readable JSON file, got: "), ("[]", "object, got a list; down")]
)
def test_malformed_config(tmp_path, content, message):
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(InvalidInput, match=message):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("config", "got"),
    [
        ({"model_type": "llama"}, "'llama';"),
        ({}, "None;"),
        ({"model_type": ["mixtral"]}, "['mixtral'];"),
        ({"model_type": "picture", "text_config": {"model_type": "llama"}}, "'picture' with text_config 'llama';"),
    ],
)
def test_unknown_family_says_where_the_known_are(tmp_path, config, got):
    known = f"must be one of the {len(FAMILIES)} in moe_core.checkpoint.families.FAMILIES, got "
    with pytest.raises(Unsupported, match=re.escape(known + got)):
        open_checkpoint(write(tmp_path, config, {}))


@pytest.mark.parametrize(
    ("family", "changes", "error", "message"),
    [
        ("mixtral", {"hidden_size": ...}, InvalidInput, "config.json must give hidden_size, got 6 settings without it"),
        ("mixtral", {"num_local_experts": ...}, InvalidInput, "must give num_local_experts or num_experts, got"),
        ("mixtral", {"hidden_size": "24"}, InvalidInput, "hidden_size in config.json must be an integer of at least 1"),
        ("mixtral", {"num_hidden_layers": 10**9}, InvalidInput,
            "num_hidden_layers in config.json must be an integer of"),
        ("mixtral", {"num_experts_per_tok": [2, 3]}, Unsupported, "the same number for every layer, got [2, 3]"),
        ("mixtral", {"num_hidden_layers": 0}, InvalidInput, "num_hidden_layers in config.json must be an integer of"),
        ("mixtral", {"num_local_experts": True}, InvalidInput, "num_local_experts in config.json must be an integer"),
        ("mixtral", {"num_experts_per_tok": E + 1}, InvalidInput,
            f"config.json with num_experts_per_tok = {E + 1}, num_local_experts = {E}: top_k must be at most"),
        ("mixtral", {"hidden_act": "mish"}, Unsupported, "hidden_act in config.json must be one of silu, "),
        ("qwen3_moe", {"norm_topk_prob": ...}, InvalidInput, "config.json must give norm_topk_prob, got"),
        ("qwen3_moe", {"norm_topk_prob": 1}, InvalidInput,
            "norm_topk_prob in config.json must be true or false, got 1"),
        ("qwen3_moe", {"mlp_only_layers": 3}, InvalidInput,
            "mlp_only_layers in config.json must be a list of integers"),
        ("qwen3_moe", {"decoder_sparse_step": 0}, InvalidInput,
            "decoder_sparse_step in config.json must be an integer"),
        ("gpt_oss", {"swiglu_alpha": "1.7"}, InvalidInput, "swiglu_alpha in config.json must be a finite number, got"),
        ("gpt_oss", {"swiglu_limit": -1}, InvalidInput, "limit must be positive, got -1"),
        ("deepseek_v3", {"n_group": 3}, InvalidInput, f"num_groups must divide num_experts = {E}, got 3"),
        ("deepseek_v3", {"n_group": E, "topk_group": E}, InvalidInput, "at least two experts per group"),
        ("deepseek_v3", {"scoring_func": "softmax"}, Unsupported,
            "scoring_func in config.json must be 'sigmoid' for d"),
        ("deepseek_v3", {"topk_method": "greedy"}, Unsupported,
            "topk_method in config.json must be 'noaux_tc' for deep"),
        ("deepseek_v3", {"routed_scaling_factor": float("inf")}, InvalidInput, "routed_scaling_factor in config.json"),
        ("deepseek_v3", {"n_shared_experts": -1}, InvalidInput,
            "n_shared_experts in config.json must be an integer of"),
    ],
)  # fmt: skip
def test_wrong_settings(tmp_path, family, changes, error, message):
    with pytest.raises(error, match=re.escape(message)):
        open_checkpoint(write(tmp_path, config_of(family, **changes), {}))


@pytest.mark.parametrize("nested", [False, True])
def test_quantised_config(tmp_path, nested):
    config = config_of("gpt_oss", quantization_config={"quant_method": "quark"})
    if nested:
        config = {"model_type": "picture", "text_config": config}
    with pytest.raises(Unsupported, match=r"quant_method 'quark'.*dequantise to bfloat16 first"):
        open_checkpoint(write(tmp_path, config, {}))


@pytest.mark.parametrize("layer", [-1, 3, True, "1", 1.0])
def test_layer_out_of_range(tmp_path, layer):
    path, _ = write_family(tmp_path, "mixtral")
    with pytest.raises(InvalidInput, match=rf"layer must be an integer from 0 to 2, got {layer!r}; .* has 3 layers"):
        open_checkpoint(path).layer(layer)


def test_dense_layer_names_the_first_moe_layer(tmp_path):
    path, _ = write_family(tmp_path, "deepseek_v3")
    message = r"\(first_k_dense_replace = 1, moe_layer_freq = 1\), got 0, which is dense; the first MoE layer is 1"
    with pytest.raises(InvalidInput, match=message):
        open_checkpoint(path).layer(0)


def test_model_without_moe_layers(tmp_path):
    config = config_of("qwen3_moe", mlp_only_layers=[0, 1, 2])
    with pytest.raises(InvalidInput, match=r"mlp_only_layers = \[0, 1, 2\]\), got 1, which is dense; no layer has exp"):
        open_checkpoint(write(tmp_path, config, {})).layer(1)


def test_no_safetensors_in_the_directory(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(config_of("mixtral")))
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    message = r"model.safetensors.index.json, got config.json, pytorch_model.bin; save the model as safetensors first"
    with pytest.raises(InvalidInput, match=message):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    "index", [{}, {"weight_map": []}, {"weight_map": {"a": 1}}, {"weight_map": {"a": "b", "c": 1}}]
)
def test_malformed_index(tmp_path, index):
    (tmp_path / "config.json").write_text(json.dumps(config_of("mixtral")))
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(InvalidInput, match=r"weight_map in .*index.json must map tensor names to file names, got"):
        open_checkpoint(tmp_path)


def test_missing_shard(tmp_path):
    path, _ = write_family(tmp_path, "mixtral", shards=True)
    (path / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(
        InvalidInput, match=r"model-00002-of-00003.safetensors must be a readable safetensors file, got"
    ):
        open_checkpoint(path).layer(1)


def test_truncated_file(tmp_path):
    path, _ = write_family(tmp_path, "mixtral")
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(InvalidInput, match=r"model.safetensors must be a readable safetensors file, got: .*; download"):
        open_checkpoint(path)


def test_shard_without_the_tensor_the_index_names(tmp_path):
    path, layers = write_family(tmp_path, "mixtral", shards=True)
    missing = "model.layers.1.block_sparse_moe.experts.3.w2.weight"
    rest = {name: value for name, value in layers[1].stored.items() if name != missing}
    save_file(rest, path / "model-00002-of-00003.safetensors")
    with pytest.raises(
        InvalidInput, match=rf"00002-of-00003.safetensors must hold the tensor {missing}, got a file with"
    ):
        open_checkpoint(path).layer(1)


@pytest.mark.parametrize(
    ("family", "storage", "missing"),
    [
        ("mixtral", "per_expert", "model.layers.1.block_sparse_moe.experts.7.w3.weight"),
        ("qwen3_moe", "fused", "model.layers.1.mlp.experts.down_proj"),
        ("gpt_oss", "fused", "model.layers.1.mlp.experts.gate_up_proj"),
        ("gpt_oss", "fused", "model.layers.1.mlp.experts.down_proj_bias"),
        ("gpt_oss", "fused", "model.layers.1.mlp.router.bias"),
        ("deepseek_v3", "per_expert", "model.layers.1.mlp.gate.e_score_correction_bias"),
        ("deepseek_v3", "per_expert", "model.layers.1.mlp.shared_experts.up_proj.weight"),
    ],
)
def test_missing_tensor_is_named(tmp_path, family, storage, missing):
    tensors = layer_tensors(family, 1, storage).stored
    del tensors[missing]
    path = write(tmp_path, config_of(family), {1: tensors})
    with pytest.raises(
        InvalidInput, match=rf"must hold (the tensor )?{missing}(,| or .*,) got 1 file\(s\) with .* without (it|either)"
    ):
        open_checkpoint(path).layer(1)


def test_missing_router_names_what_was_looked_for(tmp_path):
    tensors = layer_tensors("qwen3_moe", 1).stored
    del tensors["model.layers.1.mlp.gate.weight"]
    with pytest.raises(
        InvalidInput, match=r"router of layer 1 under a name such as model.layers.1.mlp.gate.weight, got"
    ):
        open_checkpoint(write(tmp_path, config_of("qwen3_moe"), {1: tensors})).layer(1)


def test_missing_experts_names_both_storages(tmp_path):
    router = {"model.layers.1.mlp.gate.weight": np.zeros((E, D), np.float32)}
    message = r"experts.gate_up_proj or model.layers.1.mlp.experts.0.gate_proj.weight, got 1 file\(s\) with 1 tensors"
    with pytest.raises(InvalidInput, match=message):
        open_checkpoint(write(tmp_path, config_of("qwen3_moe"), {1: router})).layer(1)


@pytest.mark.parametrize(
    ("family", "storage", "changes", "message"),
    [
        ("mixtral", "per_expert", {"num_local_experts": 9},
            rf"gate.weight in model.safetensors must be \[9, {D}\] by c"),
        ("qwen3_moe", "per_expert", {"moe_intermediate_size": 9},
            rf"gate_proj.weight in .* must be \[9, {D}\] by conf"),
        ("qwen3_moe", "fused", {"moe_intermediate_size": 9},
            rf"gate_up_proj in .*, 18, {D}\] by .*, got .*; use the co"),
        ("gpt_oss", "fused", {"intermediate_size": 30},
            rf"gate_up_proj in .* must be \[{E}, {D}, 60\] by config.json, got"),
        ("deepseek_v3", "fused", {"n_shared_experts": 1},
            rf"shared_experts.gate_proj.weight in .* must be \[{F}, {D}\]"),
    ],
)  # fmt: skip
def test_shapes_that_disagree_with_config(tmp_path, family, storage, changes, message):
    path = write(tmp_path, config_of(family, **changes), {1: layer_tensors(family, 1, storage).stored})
    with pytest.raises(InvalidInput, match=message):
        open_checkpoint(path).layer(1)


@pytest.mark.parametrize(
    ("family", "storage", "name", "value", "dtype"),
    [
        ("gpt_oss", "fused", "experts.gate_up_proj_blocks", np.zeros((E, 2 * F, 1, 16), np.uint8), "U8"),
        ("deepseek_v3", "per_expert", "experts.0.gate_proj.weight_scale_inv", np.ones((1, 1), np.float32), "F32"),
        ("qwen3_moe", "per_expert", "experts.0.gate_proj.weight_scale", np.ones((1,), np.float32), "F32"),
        ("qwen3_moe", "per_expert", "experts.0.gate_proj.qweight", np.zeros((1,), np.int32), "I32"),
    ],
)
def test_quantised_companions_are_refused(tmp_path, family, storage, name, value, dtype):
    tensors = layer_tensors(family, 1, storage).stored | {f"model.layers.1.mlp.{name}": value}
    message = rf"{name} in model.safetensors \({dtype}\) belongs to a quantised layer, .*; dequantise the ch"
    with pytest.raises(Unsupported, match=message):
        open_checkpoint(write(tmp_path, config_of(family), {1: tensors})).layer(1)


@pytest.mark.parametrize(
    ("value", "dtype"),
    [(np.zeros((F, D), ml_dtypes.float8_e4m3fn), "F8_E4M3"), (np.zeros((F, D), np.int8), "I8"), (np.zeros(1), "F64")],
)
def test_dtypes_that_cannot_be_multiplied_are_refused(tmp_path, value, dtype):
    tensors = layer_tensors("qwen3_moe", 1).stored
    tensors["model.layers.1.mlp.experts.2.up_proj.weight"] = value
    message = rf"experts.2.up_proj.weight in .* must be bfloat16, float16 or float32, got {dtype}; .*dequantise or cast"
    with pytest.raises(Unsupported, match=message):
        open_checkpoint(write(tmp_path, config_of("qwen3_moe"), {1: tensors})).layer(1)


def test_mixed_dtypes_within_a_stack(tmp_path):
    tensors = layer_tensors("qwen3_moe", 1).stored
    name = "model.layers.1.mlp.experts.2.up_proj.weight"
    tensors[name] = tensors[name].astype(np.float32)
    with pytest.raises(
        InvalidInput, match=rf"must have one dtype, got bfloat16 \(.*\) and float32 \({name}\); cast them"
    ):
        open_checkpoint(write(tmp_path, config_of("qwen3_moe"), {1: tensors})).layer(1)


def test_mixed_dtypes_between_experts_and_shared_expert(tmp_path):
    tensors = layer_tensors("deepseek_v3", 1).stored
    name = "model.layers.1.mlp.shared_experts.down_proj.weight"
    tensors[name] = tensors[name].astype(np.float32)
    with pytest.raises(
        InvalidInput, match=r"shared.down must be bfloat16 like experts.gate_up, got float32; cast the ch"
    ):
        open_checkpoint(write(tmp_path, config_of("deepseek_v3"), {1: tensors})).layer(1)


def test_missing_package_names_the_extra(tmp_path, monkeypatch):
    path, _ = write_family(tmp_path, "mixtral")
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(Unsupported, match=r"needs the package safetensors, .*; pip install 'moebius\[checkpoint\]'"):
        open_checkpoint(path)
