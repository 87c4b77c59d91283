"""Reading checkpoints written by hand: what a layer holds, what is read, and in which arrays."""

from __future__ import annotations

import json

import numpy as np
import pytest

from moe_core.base.arrays import ALIGNMENT
from moe_core.checkpoint import MoELayer, ReadProgress, convert_checkpoint, open_checkpoint
from moe_core.checkpoint import storage as storage_module
from moe_core.checkpoint.families import FAMILIES as FAMILIES_READ
from moe_core.checkpoint.layer import NO_SHARED_EXPERT
from moe_core.errors import InvalidInput, Unsupported
from moe_core.formats import MXFP8
from moe_core.specs import Activation, MoESpec, RouterSpec
from moe_core.specs.operands import named_arrays
from moe_core.tools.doctor.checkpoint import examine
from moe_core.tools.doctor.loaders import TRANSFORMERS
from tests.support.checkpoint_files import (
    FAMILIES,
    LAYERS,
    MOE_LAYERS,
    D,
    E,
    F,
    K,
    config_of,
    layer_tensors,
    write,
    write_family,
)

STORAGES = [(family, "per_expert") for family in FAMILIES if family != "gpt_oss"]
STORAGES += [(family, "fused") for family in FAMILIES]
HALVES = Activation("silu", gate_layout="halves")
SPECS = {
    "mixtral": MoESpec(HALVES, RouterSpec(K, order="softmax_then_topk", renormalize=True), "out_in",
        router_weight_layout="out_in"),
    "qwen3_moe": MoESpec(HALVES, RouterSpec(K, order="softmax_then_topk", renormalize=True), "out_in",
        router_weight_layout="out_in"),
    "gpt_oss": MoESpec(Activation("swiglu_oai", gate_layout="interleaved", alpha=1.702, limit=7.0),
        RouterSpec(K, order="topk_then_softmax"), "in_out", router_weight_layout="out_in"),
    "deepseek_v3": MoESpec(HALVES,
        RouterSpec(K, scoring="sigmoid", renormalize=True, scale=2.5, num_groups=4, topk_group=2), "out_in",
        router_weight_layout="out_in"),
}  # fmt: skip


def arrays_of(layer: MoELayer) -> dict[str, np.ndarray]:
    """Every array of a layer by field name."""
    found = dict(named_arrays(layer.experts, "experts.")) | dict(named_arrays(layer.router, "router."))
    return found | (dict(named_arrays(layer.shared, "shared.")) if layer.shared is not None else {})


def assert_arrays(layer: MoELayer, expected: dict[str, np.ndarray]) -> None:
    """Equal names, dtypes and bits; memory that every engine can take."""
    found = arrays_of(layer)
    assert set(found) == set(expected)
    for name, array in found.items():
        assert array.dtype == expected[name].dtype, name
        assert array.shape == expected[name].shape, name
        assert array.tobytes() == expected[name].tobytes(), name
        assert array.flags.c_contiguous and array.flags.writeable, name
        assert array.ctypes.data % ALIGNMENT == 0, name


@pytest.mark.parametrize("shards", [False, True], ids=["one_file", "shards"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize(("family", "storage"), STORAGES)
def test_a_layer_reads_as_stored(tmp_path, family, storage, dtype, shards):
    path, layers = write_family(tmp_path, family, storage, dtype, shards)
    checkpoint = open_checkpoint(path)
    assert (checkpoint.family, checkpoint.num_layers, checkpoint.moe_layers) == (family, LAYERS, MOE_LAYERS[family])
    assert checkpoint.config["hidden_size"] == D
    for number in checkpoint.moe_layers:
        layer = checkpoint.layer(number)
        assert (layer.layer, layer.family, layer.dtype) == (number, family, dtype)
        assert (layer.d_model, layer.d_ff, layer.num_experts) == (D, F, E)
        assert layer.spec == SPECS[family]
        assert_arrays(layer, layers[number].expected)


@pytest.mark.parametrize("prefix", ["", "model.language_model.", "language_model.model.", "language_model."])
def test_prefixes(tmp_path, prefix):
    tensors = layer_tensors("qwen3_moe", 1, prefix=prefix)
    layer = open_checkpoint(write(tmp_path, config_of("qwen3_moe"), {1: tensors.stored})).layer(1)
    assert_arrays(layer, tensors.expected)


def test_text_config_is_found_under_a_multimodal_config(tmp_path):
    tensors = layer_tensors("deepseek_v3", 1, prefix="language_model.model.")
    config = {"model_type": "picture_model", "hidden_size": 7, "text_config": config_of("deepseek_v3")}
    checkpoint = open_checkpoint(str(write(tmp_path, config, {1: tensors.stored})))
    assert checkpoint.family == "deepseek_v3"
    assert_arrays(checkpoint.layer(1), tensors.expected)


def test_only_the_shards_of_the_layer_are_opened(tmp_path):
    path, layers = write_family(tmp_path, "qwen3_moe", shards=True)
    for layer in (0, 2):
        (path / f"model-{layer + 1:05}-of-{LAYERS:05}.safetensors").write_bytes(b"not a checkpoint")
    assert_arrays(open_checkpoint(path).layer(1), layers[1].expected)


def test_one_file_wins_over_a_stale_index(tmp_path):
    path, layers = write_family(tmp_path, "mixtral")
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": "gone.safetensors"}}))
    assert_arrays(open_checkpoint(path).layer(0), layers[0].expected)


@pytest.mark.parametrize(("family", "storage"), STORAGES)
def test_progress_counts_every_byte_once(tmp_path, family, storage, monkeypatch):
    monkeypatch.setattr(storage_module, "_PIECE_BYTES", 3 * D * F * 2)
    path, layers = write_family(tmp_path, family, storage)
    calls: list[ReadProgress] = []
    layer = open_checkpoint(path).layer(1, calls.append)
    assert_arrays(layer, layers[1].expected)
    total = sum(array.nbytes for array in arrays_of(layer).values())
    done = [call.bytes_read for call in calls]
    assert done == sorted(set(done)) and done[-1] == total
    assert {call.bytes_total for call in calls} == {total}
    assert {call.tensor for call in calls} == set(layers[1].stored)
    pieces = [call for call in calls if call.tensor.endswith("experts.gate_up_proj")]
    assert storage == "per_expert" or len(pieces) == E


def test_qwen3_layers_without_experts(tmp_path):
    config = config_of("qwen3_moe", num_hidden_layers=8, decoder_sparse_step=2, mlp_only_layers=[3])
    assert open_checkpoint(write(tmp_path, config, {})).moe_layers == (1, 5, 7)


def test_deepseek_layers_without_experts(tmp_path):
    config = config_of("deepseek_v3", num_hidden_layers=8, first_k_dense_replace=3, moe_layer_freq=2)
    assert open_checkpoint(write(tmp_path, config, {})).moe_layers == (4, 6)


def test_null_settings_mean_no_groups_and_no_shared_experts(tmp_path):
    tensors = layer_tensors("deepseek_v3", 0)
    stored = {name: value for name, value in tensors.stored.items() if "shared_experts" not in name}
    nulls = {"n_group": None, "topk_group": None, "n_shared_experts": None, "first_k_dense_replace": None}
    layer = open_checkpoint(write(tmp_path, config_of("deepseek_v3", **nulls), {0: stored})).layer(0)
    assert layer.shared is None
    assert layer.spec.router == RouterSpec(K, scoring="sigmoid", renormalize=True, scale=2.5)


@pytest.mark.parametrize(
    ("family", "changes", "router"),
    [
        ("qwen3_moe", {"norm_topk_prob": False}, RouterSpec(K)),
        ("qwen3_moe", {"num_experts": ..., "num_local_experts": E}, RouterSpec(K, renormalize=True)),
        ("mixtral", {"num_local_experts": ..., "num_experts": E}, RouterSpec(K, renormalize=True)),
        ("mixtral", {"num_experts_per_tok": [3, 3]}, RouterSpec(3, renormalize=True)),
        ("gpt_oss", {"num_experts_per_tok": ..., "experts_per_token": 3}, RouterSpec(3, order="topk_then_softmax")),
        (
            "deepseek_v3",
            {"norm_topk_prob": False, "routed_scaling_factor": 1, "scoring_func": ..., "topk_method": ...},
            RouterSpec(K, scoring="sigmoid", num_groups=4, topk_group=2),
        ),
    ],
)
def test_router_settings(tmp_path, family, changes, router):
    checkpoint = open_checkpoint(write(tmp_path, config_of(family, **changes), {}))
    assert checkpoint.architecture.spec.router == router
    assert checkpoint.architecture.num_experts == E


@pytest.mark.parametrize(
    ("family", "changes", "activation"),
    [
        ("mixtral", {"hidden_act": "gelu"}, Activation("gelu")),
        ("mixtral", {"hidden_act": "gelu_pytorch_tanh"}, Activation("gelu_tanh")),
        ("qwen3_moe", {"hidden_act": "swish"}, Activation("silu")),
        (
            "gpt_oss",
            {"swiglu_limit": None, "swiglu_alpha": 2, "hidden_act": "gelu"},
            Activation("swiglu_oai", gate_layout="interleaved", alpha=2.0, limit=None),
        ),
        ("gpt_oss", {"swiglu_limit": ...}, Activation("swiglu_oai", gate_layout="interleaved")),
    ],
)
def test_activation_settings(tmp_path, family, changes, activation):
    checkpoint = open_checkpoint(write(tmp_path, config_of(family, **changes), {}))
    assert checkpoint.architecture.spec.activation == activation


def test_biases_may_be_fp32_beside_bfloat16_weights(tmp_path):
    tensors = layer_tensors("gpt_oss", 0)
    for name, value in tensors.stored.items():
        if name.endswith("_bias"):
            tensors.stored[name] = value.astype(np.float32)
    layer = open_checkpoint(write(tmp_path, config_of("gpt_oss"), {0: tensors.stored})).layer(0)
    assert layer.dtype == "bfloat16"
    assert layer.experts.down_bias.dtype == layer.experts.gate_up_bias.dtype == np.float32


# Shared experts


def test_files_without_any_shared_expert(tmp_path):
    """They are read without, named by a warning and by the doctor, and refused for transformers. One layer's absence is
    an error."""
    layers = {layer: layer_tensors("deepseek_v3", layer) for layer in (1, 2)}
    bare = {n: {name: a for name, a in one.stored.items() if "shared" not in name} for n, one in layers.items()}
    path = write(tmp_path / "bare", config_of("deepseek_v3"), bare)
    checkpoint = open_checkpoint(path)
    with pytest.warns(UserWarning, match="without the shared experts of config.json: no file holds a tensor of one"):
        layer = checkpoint.layer(2)
    expected = {name: array for name, array in layers[2].expected.items() if not name.startswith("shared.")}
    assert_arrays(layer, expected)
    assert layer.shared is None and layer.spec.shared_activation is None and checkpoint.architecture.shared_d_ff == 0
    assert layer.notes == (NO_SHARED_EXPERT,) == examine(str(path)).notes
    says = "fills the shared experts with random numbers and reports missing keys: no file holds one"
    assert (TRANSFORMERS, says, (1, 2)) in examine(str(path)).loaders
    for format in ("float32", MXFP8):
        with (
            pytest.warns(UserWarning, match="read without the shared experts"),
            pytest.raises(Unsupported, match=r"transformers loads for deepseek_v3.*none of the shared experts"),
        ):
            convert_checkpoint(path, tmp_path / "refused", format)
    with pytest.warns(UserWarning, match="read without the shared experts"):
        convert_checkpoint(path, tmp_path / "made", "float32", loader="moebius")
    with pytest.warns(UserWarning, match="read without the shared experts"):
        assert open_checkpoint(tmp_path / "made").layer(2).shared is None
    path = write(tmp_path / "one", config_of("deepseek_v3"), bare | {1: layers[1].stored})
    open_checkpoint(path).layer(1)
    with pytest.raises(InvalidInput, match=r"must hold the tensor .*layers.2.mlp.shared_experts.gate_proj.weight"):
        open_checkpoint(path).layer(2)


def test_shared_experts_are_known_by_their_names():
    """`open_checkpoint` looks for `share` in any tensor's name."""
    namings = [one for family in FAMILIES_READ.values() for one in (family.naming, family.alone) if one is not None]
    assert all("share" in name for naming in namings for names in naming.shared for name in names)
