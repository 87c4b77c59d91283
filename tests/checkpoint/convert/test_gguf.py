"""GGUF files become checkpoints with the published names: weights return bit by bit, and other files are refused."""

# pyright: reportMissingImports=false
from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="transformers lists the published names on torch")
gguf = pytest.importorskip("gguf")
transformers = pytest.importorskip("transformers")

from moe_core.checkpoint import convert_checkpoint, open_checkpoint
from moe_core.checkpoint.convert.gguf import ARCHITECTURES
from moe_core.checkpoint.convert.verify import verify_conversion
from moe_core.errors import InvalidInput, Unsupported
from moe_core.tools.convert_cli import main
from moe_torch.transformers import verify
from moe_torch.transformers.gguf import published_tensors
from tests.support.families import IS_EARLIER
from tests.support.quantized.gguf_files import gguf_tensors, write_gguf
from tools.sweep import models

if IS_EARLIER:
    pytest.skip("the names are of transformers 5.23", allow_module_level=True)

#: Of all ways that llama.cpp changes tensors. The daily run has every family.
FAMILIES = ("gpt_oss", "deepseek_v3", "granitemoeshared")
if os.environ.get("MOEBIUS_FAMILIES") == "all":
    FAMILIES = tuple(ARCHITECTURES)
pytestmark = pytest.mark.filterwarnings("ignore::Warning")


@pytest.fixture(scope="module", autouse=True)
def _quiet() -> None:
    models.quiet()


def source(path: Path, family: str) -> tuple[Any, Path]:
    model = models.build(family).eval()
    path.mkdir()
    model.config.save_pretrained(path)
    tensors = gguf_tensors(model, family)
    if family == "granitemoeshared":
        # As newer converters can write them.
        for name in [name for name in tensors if "gate_exps" in name]:
            both = [tensors.pop(one) for one in (name, name.replace("gate_exps", "up_exps"))]
            tensors[name.replace("gate_exps", "gate_up_exps")] = np.concatenate(both, axis=1)
    return model, write_gguf(path / "model.gguf", ARCHITECTURES[family], tensors)


def assert_same(model: Any, path: Path) -> None:
    other, report = type(model).from_pretrained(path, dtype=torch.float32, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    wanted, found = model.state_dict(), other.state_dict()
    assert wanted.keys() == found.keys()
    for name, tensor in wanted.items():
        assert torch.equal(tensor, found[name]), name


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_return(tmp_path: Path, family: str) -> None:
    model, file = source(tmp_path / "source", family)
    report = convert_checkpoint(file.parent, tmp_path / "plain", "float32")
    assert all(error[1:] == (0, 0) for error in report.layers)
    assert_same(model, tmp_path / "plain")
    assert verify_conversion(file.parent, tmp_path / "plain", 0).layers[0].theirs == "equal"


D, F, E = 256, 256, 4
SETTINGS = {
    "hidden_size": D, "moe_intermediate_size": F, "num_experts": E, "num_hidden_layers": 2, "num_experts_per_tok": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 96, "norm_topk_prob": True,
    "dtype": "bfloat16", "rope_theta": 1e6,
}  # fmt: skip
METADATA = {
    "qwen3moe.block_count": 2, "qwen3moe.context_length": 64, "qwen3moe.embedding_length": D,
    "qwen3moe.feed_forward_length": 32, "qwen3moe.attention.head_count": 4, "qwen3moe.attention.head_count_kv": 2,
    "qwen3moe.attention.key_length": 64, "qwen3moe.attention.layer_norm_rms_epsilon": 1e-6, "qwen3moe.expert_count": E,
    "qwen3moe.expert_used_count": 2, "qwen3moe.expert_feed_forward_length": F, "qwen3moe.rope.freq_base": 1e6,
    "tokenizer.ggml.tokens": [f"t{n}" for n in range(96)],
}  # fmt: skip


@pytest.fixture(scope="module")
def quantised(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file alone, as people download it: experts and embeddings in types that keep their bits, and that do not."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model("qwen3_moe", **SETTINGS))
    kinds = {"exps": "Q4_0", "attn_k": "Q8_0", "output": "Q6_K", "attn_q": "BF16", "embd": "Q4_K"}

    def stored(name: str, array: np.ndarray) -> tuple[np.ndarray, Any]:
        # Other weights than those of a bf16 model have scales with more bits.
        array = array * np.float32(1.001) if "down" in name else array
        kind = gguf.GGMLQuantizationType[next((kind for key, kind in kinds.items() if key in name), "F32")]
        if kind.name not in ("Q4_K", "Q6_K"):
            return gguf.quants.quantize(array, kind), kind
        # The package writes no blocks of these types, so they are random, with finite scales.
        elements, size = gguf.GGML_QUANT_SIZES[kind]
        blocks = np.random.default_rng(0).integers(0, 256, (len(array), array.shape[1] // elements, size), np.uint8)
        scales = np.full(2, 1e-3, np.float16).view(np.uint8)
        blocks[..., -2:] = scales[:2]
        blocks[..., : 4 if kind.name == "Q4_K" else 0] = scales[: 4 if kind.name == "Q4_K" else 0]
        return blocks.reshape(len(array), -1), kind

    tensors = gguf_tensors(model, "qwen3_moe")
    return write_gguf(tmp_path_factory.mktemp("gguf") / "m.gguf", "qwen3moe", tensors, METADATA, stored)


FORMATS = ("bf16", "int4_g32", "int8_row", "fp8_tensor", "fp8_channel", "fp8_block", "mxfp4", "mxfp8", "nvfp4")


@pytest.mark.parametrize("format", FORMATS)
def test_a_file_alone_has_the_logits_of_transformers(
    quantised: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    format: str,
) -> None:
    """Q4_0 and int4_g32 are one storage; the config comes from the metadata, which transformers reads in part.

    Scales of other 16 bits than the checkpoint's are rounded, because transformers computes experts in their dtype.
    """
    (quantised.parent / "notes.txt").write_text("not of the model")
    loader = ["--loader", "moebius"] if format == "nvfp4" else []  # transformers does not read it
    assert main([str(quantised), str(tmp_path / "made"), "--format", format, *loader, "--verify"]) == 0
    shown = capsys.readouterr().out
    assert ("need not load" if loader else "logits of transformers differ") in shown and (loader or "equal" in shown)
    assert not (tmp_path / "made" / "notes.txt").exists()
    if format == "bf16":
        assert "differ from the source's by 0.000e+00" in shown, shown
        config = json.loads((tmp_path / "made" / "config.json").read_text())
        assert config["moe_intermediate_size"] == F and config["architectures"] == ["Qwen3MoeForCausalLM"]
        assert not any(key.startswith("_") for key in config)
        assert type(verify_conversion(quantised, tmp_path / "made").logits) is float
        # A source that transformers leaves random in part is nothing to compare with.
        loaded = verify._loaded

        def lacking(checkpoint: Any) -> Any:
            model, report = loaded(checkpoint)
            return model, report | ({"missing_keys": {"lm_head.weight"}} if checkpoint.index.is_gguf else {})

        monkeypatch.setattr(verify, "_loaded", lacking)
        compared = verify_conversion(quantised, tmp_path / "made")
        assert compared.logits is None and "it leaves lm_head.weight and others random" in str(compared)
    elif format == "int4_g32":
        one, other = (open_checkpoint(path).layer(0).experts for path in (quantised, tmp_path / "made"))
        np.testing.assert_array_equal(one.gate_up.values, other.gate_up.values)
        np.testing.assert_array_equal(one.gate_up.scales, other.gate_up.scales)
        np.testing.assert_array_equal(one.down.scales.astype(other.down.scales.dtype), other.down.scales)


def test_what_cannot_become_a_checkpoint_is_refused_before_writing(tmp_path: Path, quantised: Path) -> None:
    made = tmp_path / "made"
    model, file = source(tmp_path / "mixtral", "mixtral")
    tensors = gguf_tensors(model, "mixtral")

    def refused(error: type[Exception], match: str, architecture: str = "llama", **changes: Any) -> None:
        new = {name: array for name, array in (tensors | changes).items() if array is not None}
        write_gguf(file, architecture, new)
        with pytest.raises(error, match=match):
            convert_checkpoint(file, made, "float32")
        assert not made.exists()

    refused(InvalidInput, "general.architecture in model.gguf must be 'llama' for mixtral, got 'qwen3moe'", "qwen3moe")
    refused(InvalidInput, "must hold the tensor blk.0.attn_q.weight", **{"blk.0.attn_q.weight": None})
    refused(
        Unsupported, "blk.0.ssm_a in model.gguf must be a tensor of mixtral", **{"blk.0.ssm_a": np.ones((2, 2), "f")}
    )
    wide = np.ones((3, 2), np.float32)
    refused(InvalidInput, r"token_embd.weight must be .* by config.json, got \[3, 2\]", **{"token_embd.weight": wide})
    (file.parent / "config.json").unlink()
    refused(Unsupported, "must be of an architecture with a config.json in its metadata .*, got 'llama'")
    models.build("jamba").config.save_pretrained(file.parent)
    refused(Unsupported, "model_type must be one of mixtral, .* to convert GGUF, got 'jamba', where llama.cpp changes")
    scaled = write_gguf(tmp_path / "m.gguf", "qwen3moe", tensors, METADATA | {"qwen3moe.rope.scaling.factor": 4.0})
    with pytest.raises(Unsupported, match=r"with qwen3moe.rope.scaling.factor; put the config.json"):
        open_checkpoint(scaled)


def test_tied_embeddings_are_published_once() -> None:
    settings = models.build("mixtral").config.to_dict()
    loose, tied = (set(published_tensors(settings | {"tie_word_embeddings": one})) for one in (False, True))
    assert loose - tied == {"lm_head.weight"} and tied < loose


def test_multi_token_prediction_is_left_out_with_a_warning(tmp_path: Path) -> None:
    model, file = source(tmp_path / "glm", "glm4_moe")
    later = {f"blk.{model.config.num_hidden_layers}.nextn.eh_proj.weight": np.ones((2, 2), np.float32)}
    write_gguf(file, "glm4moe", gguf_tensors(model, "glm4_moe") | later)
    with pytest.warns(UserWarning, match="1 tensors of multi-token prediction"):
        convert_checkpoint(file, tmp_path / "made", "float32")
    assert_same(model, tmp_path / "made")
