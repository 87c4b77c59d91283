"""GGUF files beside a config.json: bits that are kept, numbers of other types, and malformed headers."""

# pyright: reportArgumentType=false, reportCallIssue=false, reportMissingImports=false, reportOptionalMemberAccess=false
from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

gguf = pytest.importorskip("gguf")

from moe_core.checkpoint import open_checkpoint
from moe_core.errors import InvalidInput
from moe_core.formats import MXFP4, int4_grouped, int8_grouped
from moe_core.tools.doctor.checkpoint import examine

E, D, F = 3, 256, 512
NAMES = {"gate": "ffn_gate_exps", "up": "ffn_up_exps", "down": "ffn_down_exps"}
QWEN = {"model_type": "qwen2_moe", "hidden_size": D, "moe_intermediate_size": F, "num_experts": E,
    "num_hidden_layers": 1, "num_experts_per_tok": 2, "norm_topk_prob": True, "hidden_act": "silu",
    "shared_expert_intermediate_size": F, "dtype": "float32"}  # fmt: skip
GPT_OSS = {"model_type": "gpt_oss", "hidden_size": D, "intermediate_size": F, "num_local_experts": E,
    "num_hidden_layers": 1, "num_experts_per_tok": 2, "dtype": "float32"}  # fmt: skip


def blocks(kind: Any, shape: tuple[int, ...], rng: Any) -> np.ndarray:
    """Random codes with finite scales: gguf does not quantise to every type."""
    if kind.name in ("F32", "BF16"):
        return gguf.quants.quantize(rng.normal(size=shape).astype(np.float32), kind)
    elements, size = gguf.GGML_QUANT_SIZES[kind]
    made = rng.integers(0, 256, (*shape[:-1], shape[-1] // elements, size)).astype(np.uint8)
    half = np.array([0.01, 0.02], np.float16).view(np.uint8)
    if kind.name == "MXFP4":
        made[..., 0] = rng.integers(110, 130, made.shape[:-1])
    elif kind.name == "Q6_K":
        made[..., -2:] = half[:2]
    else:
        made[..., : 4 if kind.name in ("Q4_K", "Q5_K") else 2] = half[: 4 if kind.name in ("Q4_K", "Q5_K") else 2]
    return made.reshape(*shape[:-1], -1)


def written(path: Path, config: dict[str, Any], name: str, bias: bool = False) -> tuple[Path, dict[str, np.ndarray]]:
    """(directory, numbers by gguf's own decoder)."""
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    writer, rng = gguf.GGUFWriter(path / "model.gguf", "moe"), np.random.default_rng(4)
    writer.add_array("tokenizer.ggml.tokens", ["a", "bc", "é"])
    kind, numbers = gguf.GGMLQuantizationType[name], {}
    writer.add_tensor("blk.0.ffn_gate_inp.weight", rng.normal(size=(E, D)).astype(np.float32))
    shapes = {"gate": (E, F, D), "up": (E, F, D), "down": (E, D, F)}
    shapes = {NAMES[half]: shape for half, shape in shapes.items()}
    if "shared_expert_intermediate_size" in config:
        shapes |= {key.replace("exps", "shexp"): shape[1:] for key, shape in shapes.items()}
        writer.add_tensor("blk.0.ffn_gate_inp_shexp.weight", rng.normal(size=D).astype(np.float32))
    for key, shape in shapes.items():
        raw = blocks(kind, shape, rng)
        numbers[key] = gguf.quants.dequantize(raw, kind)
        writer.add_tensor(f"blk.0.{key}.weight", raw, raw_dtype=kind)
        if bias:
            numbers[f"{key}.bias"] = rng.normal(size=shape[:2]).astype(np.float32)
            writer.add_tensor(f"blk.0.{key}.bias", numbers[f"{key}.bias"])
    if bias:
        writer.add_tensor("blk.0.ffn_gate_inp.bias", np.zeros(E, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path, numbers


@pytest.mark.filterwarnings("ignore:.*no kernel takes:UserWarning")
@pytest.mark.parametrize(
    ("name", "format"),
    [
        ("Q4_0", int4_grouped(32)), ("Q8_0", int8_grouped(32)), ("MXFP4", MXFP4), ("Q4_K", None), ("Q5_K", None),
        ("Q6_K", None), ("F32", None),
    ],
)  # fmt: skip
@pytest.mark.parametrize("config", [QWEN, GPT_OSS], ids=["qwen2_moe", "gpt_oss"])
def test_types(tmp_path, config, name, format):
    is_oss = config is GPT_OSS
    path, numbers = written(tmp_path / "model", config, name, bias=is_oss)
    layer = open_checkpoint(path).layer(0)
    assert (layer.scheme and layer.scheme.weights) == format
    plain = layer.dequantized("float32")
    bundles = [(plain.experts, "exps")] + ([] if plain.shared is None else [(plain.shared, "shexp")])
    assert len(bundles) == 1 + (not is_oss)
    for bundle, end in bundles:
        gate_up, down = bundle.gate_up, bundle.down
        if layer.spec.weight_layout == "in_out":
            gate_up, down = gate_up.swapaxes(-1, -2), down.swapaxes(-1, -2)
        np.testing.assert_array_equal(
            gate_up, np.concatenate([numbers[f"ffn_{half}_{end}"] for half in ("gate", "up")], -2)
        )
        np.testing.assert_array_equal(down, numbers[f"ffn_down_{end}"])
    assert examine(str(path)).healthy
    if is_oss:
        assert layer.spec.activation.gate_layout == "halves"
        biases = [numbers[f"ffn_{half}_exps.bias"] for half in ("gate", "up")]
        np.testing.assert_array_equal(layer.experts.gate_up_bias, np.concatenate(biases, 1))


def test_other_names_and_two_models_are_refused(tmp_path):
    path, _ = written(tmp_path / "model", QWEN, "Q8_0")
    (path / "config.json").write_text(json.dumps(QWEN | {"num_hidden_layers": 2}))
    with pytest.raises(InvalidInput, match=r"must hold the tensor blk\.1\.ffn_gate_exps\.weight"):
        open_checkpoint(path).layer(1)
    (path / "second.gguf").write_bytes((path / "model.gguf").read_bytes())
    with pytest.raises(InvalidInput, match=r"must hold the GGUF files of one model, got blk\.0\."):
        open_checkpoint(path)


def header(*parts: bytes, tensors: int = 1, pairs: int = 0, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, pairs) + b"".join(parts)


def info(name: bytes = b"t", shape: tuple[int, ...] = (32,), kind: int = 0, offset: int = 0) -> bytes:
    axes = struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
    return struct.pack("<Q", len(name)) + name + axes + struct.pack("<IQ", kind, offset)


def setting(kind: int, *parts: bytes) -> bytes:
    return struct.pack("<Q", 1) + b"a" + struct.pack("<I", kind) + b"".join(parts)


@pytest.mark.parametrize(("kind", "code"), list(zip((*range(8), 10, 11, 12), "BbHhIif?Qqd", strict=True)))
def test_metadata_of_every_type_is_passed_over(tmp_path, kind, code):
    one, three = setting(kind, struct.pack(f"<{code}", 1)), struct.pack(f"<IQ3{code}", kind, 3, 1, 1, 1)
    (tmp_path / "config.json").write_text(json.dumps(QWEN))
    (tmp_path / "model.gguf").write_bytes(header(one, setting(9, three), info(kind=999), pairs=2))
    with pytest.raises(InvalidInput, match=r"model.gguf must be a readable GGUF file, got: .*999"):
        open_checkpoint(tmp_path)


def alignment(size: int) -> bytes:
    return struct.pack("<Q", 17) + b"general.alignment" + struct.pack("<II", 4, size)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"GGUF", "a header that ends"),
        (header(alignment(0), info(), pairs=1), "an alignment of 0"),
        (header(alignment(24), info(), pairs=1), "an alignment of 24"),
        (header(alignment(1), info(kind=999), pairs=1), "999"),
        (header(version=1), "no GGUF of version 2 or 3"),
        (header(tensors=2**60), "tensors or settings"),
        (header(struct.pack("<Q", 2**62)), "a header that ends"),
        (header(info(shape=(1,) * 9)), "9 axes"),
        (header(info(shape=(2**40, 2**40))), "beyond the end"),
        (header(info(kind=2, shape=(33,)), bytes(64)), "rows of 33 elements in Q4_0"),
        (header(info(kind=999)), "999"),
        (header(info(), info(), bytes(400), tensors=2), "twice"),
        (header(info(offset=2**63)), "beyond the end"),
        (header(struct.pack("<Q", 1) + b"a" + struct.pack("<I", 77), pairs=1), "metadata of type 77"),
        (
            header(struct.pack("<Q", 1) + b"a" + struct.pack("<IIQ", 9, 9, 2**50) * 3, pairs=1),
            "metadata of type|header",
        ),
    ],
)
def test_malformed_headers(tmp_path, data, message):
    (tmp_path / "config.json").write_text(json.dumps(QWEN))
    (tmp_path / "model.gguf").write_bytes(data)
    with pytest.raises(InvalidInput, match=f"model.gguf must be a readable GGUF file, got: .*{message}"):
        open_checkpoint(tmp_path)
