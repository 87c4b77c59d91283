"""Converted checkpoints: read back they are the quantised weights, the rest is untouched, the report is true."""

from __future__ import annotations

import dataclasses
import json
import re
import warnings
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from moe_core.checkpoint import (
    ConversionReport,
    MoELayer,
    convert_checkpoint,
    open_checkpoint,
    other_tensors,
)
from moe_core.errors import InvalidInput, Unsupported
from moe_core.formats import (
    FP8_BLOCK,
    FP8_GROUP,
    MXFP4,
    MXFP4_CEIL,
    MXFP8,
    Format,
    QuantizedTensor,
    format_named,
    format_names,
)
from moe_core.formats import int4_grouped as int4
from moe_core.ops.quantize.reference import dequantize, quantize
from moe_core.specs.operands import named_arrays
from moe_core.tools.convert_cli import main
from tests.support.checkpoint_files import E, config_of, write
from tests.support.quantized.codes import quantization_error
from tests.support.quantized.plain import D, F, source

WEIGHT_FORMATS = [
    name
    for name in format_names()
    if not name.startswith(("fp8_token", "fp8_group", "int8_token")) and "_g128" not in name
]
#: (family, storage): gpt_oss has only fused storage.
SOURCES = [("qwen3_moe", "per_expert"), ("qwen3_moe", "fused"), ("deepseek_v3", "per_expert"), ("gpt_oss", "fused")]


def joined_shared(layer: MoELayer) -> dict[str, np.ndarray]:
    """The shared experts' arrays, gate and up as one."""
    if layer.shared is None:
        return {}
    arrays = dict(named_arrays(layer.shared))
    up = arrays.pop("up", None)
    return arrays | ({} if up is None else {"gate_up": np.concatenate([arrays["gate_up"], up])})


def convert(source: Path, destination: Path, format: Format) -> ConversionReport:
    """For this library alone, so that every format is written."""
    return convert_checkpoint(source, destination, format, loader="moebius")


def rounded(matrix: np.ndarray, format: Format) -> QuantizedTensor:
    """As compressed-tensors: scales have the dtype of the checkpoint, and codes follow from them."""
    found = quantize(matrix, format)
    if format.has_e8m0_scales or format.group_rows == 128:
        return found
    scales = found.scales.astype(matrix.dtype).astype(np.float32)
    return dataclasses.replace(found, scales=scales) if format.zero_points else quantize(matrix, format, scales=scales)


#: Every format from gpt_oss, whose experts are transposed and interleaved, and from one of the other sources by turns.
PAIRS = [
    (*kind, name) for number, name in enumerate(WEIGHT_FORMATS) for kind in (SOURCES[number % 3], SOURCES[3])
]  # fmt: skip


@pytest.mark.parametrize(("family", "storage", "name"), PAIRS)
def test_what_is_written_reads_back(tmp_path, family, storage, name):
    format = format_named(name)
    plain = open_checkpoint(source(tmp_path / "plain", family, storage))
    report = convert(plain.path, tmp_path / "small", format)
    converted = open_checkpoint(tmp_path / "small")
    assert (report.format, [error.layer for error in report.layers]) == (format, list(plain.moe_layers))
    before = 0
    for number, error in zip(plain.moe_layers, report.layers, strict=True):
        old, new = plain.layer(number), converted.layer(number)
        # How scales were chosen cannot be told from a file.
        assert new.scheme is not None and new.scheme.weights.element == format.element
        swap = family == "gpt_oss"
        kept_in_turn = swap and format.element == "e2m1"
        for field, found in (("gate_up", error.gate_up), ("down", error.down)):
            weight = getattr(old.experts, field)
            weight = weight.swapaxes(-1, -2) if swap else weight
            parts = [weight]
            if field == "gate_up" and not kept_in_turn:
                # The files hold gate and up by themselves: a scale per tensor, or a block cut short, is of one of them.
                parts = [weight[:, ::2], weight[:, 1::2]] if swap else np.split(weight, 2, axis=1)
                weight = np.concatenate(parts, axis=1)
            wanted = [rounded(part, format) for part in parts]
            own = getattr(new.experts, field)
            stored = [own] if field == "down" or new.experts.up is None else [own, new.experts.up]
            np.testing.assert_array_equal(
                np.concatenate([dequantize(part) for part in stored], axis=1),
                np.concatenate([dequantize(part) for part in wanted], axis=1),
            )
            joined = np.concatenate([dequantize(part) for part in wanted], axis=1).astype(float)
            exact = np.linalg.norm(joined - weight.astype(float)) / np.linalg.norm(weight.astype(float))
            assert found == pytest.approx(exact, rel=1e-9) and 0 < found < 0.2
            before += weight.nbytes
        kept = [(dict(named_arrays(layer.router)), joined_shared(layer)) for layer in (old, new)]
        for wanted_arrays, found_arrays in zip(*kept, strict=True):
            assert {key: array.tobytes() for key, array in wanted_arrays.items()} == {
                key: array.tobytes() for key, array in found_arrays.items()
            }
        if swap:
            bias = new.experts.gate_up_bias if new.experts.up is None else None
            bias = np.concatenate([new.experts.gate_up_bias, new.experts.up_bias], 1) if bias is None else bias
            stored = old.experts.gate_up_bias
            stored = stored if kept_in_turn else np.concatenate([stored[:, ::2], stored[:, 1::2]], 1)
            assert new.experts.down_bias.tobytes() == old.experts.down_bias.tobytes()
            assert bias.tobytes() == stored.tobytes()
    sizes = {name: end - start for name, (start, end) in headers(tmp_path / "small", "data_offsets").items()}
    after = sum(size for name, size in sizes.items() if ".experts." in name and not name.endswith("bias"))
    assert (report.bytes_before, report.bytes_after) == (before, after)
    others = {name: array.tobytes() for name, array in other_tensors(plain)}
    assert {name: array.tobytes() for name, array in other_tensors(converted)} == others


#: What reads back under another name: how scales were chosen, and what they are for, is not in the files.
STORED = {"fp8_token": "fp8_channel", "fp8_token_pow2": "fp8_channel", "int8_token": "int8_channel"}
#: Formats the list above leaves out, and fp8 blocks whose gate and up are one array.
WIDE_FORMATS = ["fp8_block", *(name for name in format_names() if "_g128" in name), *STORED]
REFUSED_FORMATS = ["fp8_group", "fp8_group_pow2"]


def test_every_format_is_written_or_refused(tmp_path):
    assert {*WEIGHT_FORMATS, *WIDE_FORMATS, *REFUSED_FORMATS} == set(format_names())
    path = source(tmp_path / "plain", "qwen3_moe", "per_expert")
    for name in REFUSED_FORMATS:
        with pytest.raises(Unsupported, match=f"format must be one that checkpoints store weights in, got {name}"):
            convert(path, tmp_path / name, format_named(name))


def test_whole_groups_of_128_and_formats_of_tokens(tmp_path):
    config = config_of("qwen3_moe", hidden_size=256, moe_intermediate_size=128)
    generator = np.random.default_rng(2)
    tensors = {"model.layers.0.mlp.gate.weight": np.ones((E, 256), np.float32)}
    for field, shape in (("gate_up_proj", (E, 256, 256)), ("down_proj", (E, 256, 128))):
        tensors[f"model.layers.0.mlp.experts.{field}"] = generator.standard_normal(shape).astype(np.float32)
    path = write(tmp_path / "plain", config | {"num_hidden_layers": 1}, {0: tensors})
    for format in map(format_named, WIDE_FORMATS):
        report = convert(path, tmp_path / format.name, format)
        experts = open_checkpoint(tmp_path / format.name).layer(0).experts
        assert experts.up is None and experts.gate_up.format.name == STORED.get(format.name, format.name)
        for field, error in (("gate_up", report.layers[0].gate_up), ("down", report.layers[0].down)):
            original, stored = tensors[f"model.layers.0.mlp.experts.{field}_proj"], getattr(experts, field)
            wanted = quantize(original, format)
            for array in ("values", "scales"):
                assert getattr(stored, array).tobytes() == getattr(wanted, array).tobytes()
            assert wanted.zero_points is None or (stored.zero_points == wanted.zero_points).all()
            assert error == pytest.approx(quantization_error(original, wanted), rel=1e-9)


@pytest.mark.parametrize(
    ("family", "storage", "format", "names"),
    [
        ("gpt_oss", "fused", MXFP4, {"experts.gate_up_proj_blocks": (E, 2 * F, D // 32, 16)}),
        ("gpt_oss", "fused", MXFP4_CEIL, {"experts.down_proj_scales": (E, D, F // 32)}),
        ("qwen3_moe", "per_expert", FP8_BLOCK, {"experts.0.gate_proj.weight_scale_inv": (1, 1)}),
        ("qwen3_moe", "fused", FP8_BLOCK, {"experts.7.down_proj.weight": (D, F)}),
        (
            "qwen3_moe",
            "fused",
            int4(32, zero_points=True),
            {
                "experts.0.up_proj.weight_packed": (F, D // 8),
                "experts.0.up_proj.weight_zero_point": (F // 8, D // 32),
                "experts.0.up_proj.weight_shape": (2,),
            },
        ),
        ("qwen3_moe", "fused", MXFP4, {"experts.0.up_proj.weight_packed": (F, D // 2)}),
        ("qwen3_moe", "fused", MXFP8, {"experts.0.up_proj.weight_scale": (F, D // 32)}),
        ("qwen3_moe", "fused", format_named("fp8_tensor"), {"experts.0.up_proj.weight_scale": (1,)}),
    ],
)
def test_published_names_and_shapes(tmp_path, family, storage, format, names):
    convert(source(tmp_path / "plain", family, storage), tmp_path / "small", format)
    tensors = headers(tmp_path / "small")
    for name, shape in names.items():
        assert tensors[f"model.layers.1.mlp.{name}"] == shape
    config = json.loads((tmp_path / "small" / "config.json").read_text())["quantization_config"]
    if config["quant_method"] == "compressed-tensors":
        pattern = config["config_groups"]["group_0"]["targets"][0].removeprefix("re:")
        assert re.match(pattern, "model.layers.1.mlp.experts.7.down_proj") and config["ignore"] == []
        assert not any(re.match(pattern, f"model.layers.1.{name}") for name in ("self_attn.q_proj", "mlp.gate"))
    else:
        kept = config["modules_to_not_convert"]
        assert "model.layers.1.self_attn.q_proj" in kept and not any(".experts." in module for module in kept)


def headers(directory: Path, fact: str = "shape") -> dict[str, tuple[int, ...]]:
    """Shapes or offsets of all tensors, from the files' headers."""
    shapes = {}
    for file in directory.glob("*.safetensors"):
        data = file.read_bytes()
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        shapes |= {name: tuple(entry[fact]) for name, entry in header.items() if name != "__metadata__"}
    return shapes


@pytest.mark.parametrize(
    ("format", "error", "message"),
    [
        (FP8_GROUP, Unsupported, "format must be one that checkpoints store weights in, got fp8_group"),
        (7, InvalidInput, "format must be a Format, got int"),
        ("mxfp5", InvalidInput, "format must be one of bfloat16, float16, float32, nvfp4, .*mxfp4.*, got 'mxfp5'"),
        (int4(96), InvalidInput, r"the experts' gate_proj cannot be quantised: the input axis must be a multiple of "
            r"96 for int4_g96 \(groups of 96\), got 128 in \(64, 128\)"),
        (int4(128), InvalidInput, r"experts' down_proj cannot be quantised: .* got 64 in \(128, 64\)"),
    ],
)  # fmt: skip
def test_formats_that_cannot_be_written(tmp_path, format, error, message):
    path = source(tmp_path / "plain", "qwen3_moe", "per_expert")
    with pytest.raises(error, match=message):
        convert_checkpoint(path, tmp_path / "small", format)
    assert not (tmp_path / "small").exists()


@pytest.mark.parametrize(
    ("name", "bad"), [("mlp.experts.3.up_proj.weight", np.nan), ("self_attn.q_proj.weight", -np.inf)]
)
def test_weights_that_are_not_finite_are_named(tmp_path, capsys, name, bad):
    path, name = source(tmp_path / "plain", "qwen3_moe", "per_expert"), f"model.layers.1.{name}"
    file = path / "model-00002-of-00003.safetensors"
    tensors = load_file(file)
    tensors[name][1, 2] = bad
    save_file(tensors, file)
    with pytest.raises(InvalidInput, match=rf"{name} must hold finite numbers, got 1 that are NaN or infinite in \["):
        convert_checkpoint(path, tmp_path / "small", MXFP8)
    assert not list((tmp_path / "small").iterdir())
    arguments = [str(path), str(tmp_path / "small"), "--format", "int8_row", "--json", "-"]
    assert main(arguments) == 2
    printed = capsys.readouterr()
    assert not printed.out and f"could not convert: {name} must hold finite numbers" in printed.err
    with np.errstate(invalid="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        assert main([*arguments, "--allow-not-finite"]) == 0
    document = json.loads(capsys.readouterr().out, parse_constant=lambda text: pytest.fail(f"{text} is not JSON"))
    assert document["not_finite"] == [name]
    assert (document["layers"][1]["gate_up"] is None) == ("experts" in name)
    assert document["layers"][0]["gate_up"] > 0
