"""Conversions to nvfp4: compressed-tensors' numbers and layout, one divisor of gate and up, and kept bits."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from moe_core.checkpoint import convert_checkpoint, open_checkpoint
from moe_core.checkpoint.convert.verify import verify_conversion
from moe_core.checkpoint.storage import find_tensors, read_tensor
from moe_core.errors import InvalidInput
from moe_core.tools.convert_cli import main
from tests.support.quantized import published
from tests.support.quantized.files import FP8, compressed, fp8_matrix
from tests.support.quantized.plain import source

GROUP, LEAST = 16, np.float32(2**-9)
ENDS = ("packed", "scale", "global_scale")
MODELOPT = {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": GROUP}
COMPRESSED = compressed("nvfp4-pack-quantized", type="float", strategy="tensor_group", group_size=GROUP)
EXPERTS = "model.layers.1.mlp.experts."
SOURCES: dict[str, tuple[dict[str, Any], Any]] = {
    "awq": (published.AWQ, published.awq),
    "gptq": (published.GPTQ, published.gptq),
    "fp8": (FP8, fp8_matrix),
    "mxfp8": (FP8 | {"weight_block_size": [1, 32], "scale_fmt": "ue8m0"}, published.mxfp8),
    "fp4": (FP8 | {"expert_dtype": "fp4"}, published.fp4),
    "int4": (compressed("pack-quantized"), published.int4),
    "hqq": ({"quant_method": "hqq", "quant_config": {}}, published.hqq),
    "bitsandbytes": ({"quant_method": "bitsandbytes", "load_in_4bit": True}, published.bitsandbytes),
    "modelopt": (MODELOPT, lambda *sizes: published.nvfp4(*sizes, modelopt=True)),
    "compressed": (COMPRESSED, published.nvfp4),
}


def quantised(*matrices: np.ndarray) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """(numbers, scales, divisor) of matrices that share the divisor, one group at a time."""
    divisor = np.float32(448 * 6) * (1 / np.float32(max(np.abs(one).max() for one in matrices)))
    made = []
    for matrix in matrices:
        numbers = np.empty(matrix.shape, np.float32)
        scales = np.empty((len(matrix), matrix.shape[1] // GROUP), ml_dtypes.float8_e4m3fn)
        for row, group in np.ndindex(scales.shape):
            columns = slice(group * GROUP, (group + 1) * GROUP)
            wanted = np.abs(matrix[row, columns]).max() / np.float32(6) * divisor
            scales[row, group] = max(min(wanted, np.float32(448)), LEAST)
            scale = np.float32(scales[row, group]) / divisor
            codes = np.clip(matrix[row, columns] / scale, -6, 6).astype(ml_dtypes.float4_e2m1fn)
            numbers[row, columns] = codes.astype(np.float32) * scale
        made.append((numbers, scales, divisor))
    return made


def load(directory: Path) -> dict[str, np.ndarray]:
    index = find_tensors(directory)
    return {name: read_tensor(file, name) for name, file in index.opened(index.files)}


def convert(path: Path, made: Path) -> Any:
    return convert_checkpoint(path, made, "nvfp4", loader="moebius")


@pytest.mark.filterwarnings("ignore:.*no kernel takes nvfp4")
def test_numbers_and_layout(tmp_path: Path) -> None:
    path = source(tmp_path / "plain", "qwen3_moe", "fused")
    report = convert(path, tmp_path / "small")
    tensors = load(tmp_path / "small")
    plain = open_checkpoint(path).layer(1).dequantized("float32").experts
    layer = open_checkpoint(tmp_path / "small").layer(1).dequantized("float32").experts
    for expert in (0, 5):
        halves = quantised(*np.split(plain.gate_up[expert], 2))
        made = (*halves, *quantised(plain.down[expert]))
        for module, (numbers, scales, divisor) in zip(("gate", "up", "down"), made, strict=True):
            stored = {end: tensors[f"{EXPERTS}{expert}.{module}_proj.weight_{end}"] for end in ENDS}
            assert stored["packed"].dtype == np.uint8 and stored["packed"].shape[1] == numbers.shape[1] // 2
            assert stored["scale"].tobytes() == scales.tobytes()
            np.testing.assert_array_equal(stored["global_scale"], [divisor])
        wanted = (np.concatenate([one[0] for one in halves]), made[2][0])
        for found, numbers in zip((layer.gate_up[expert], layer.down[expert]), wanted, strict=True):
            np.testing.assert_array_equal(found, numbers.astype(ml_dtypes.bfloat16).astype(np.float32))
    assert all(0.05 < error < 0.15 for one in report.layers for error in one[1:])
    assert report.bytes_after == sum(array.nbytes for name, array in tensors.items() if ".experts." in name)
    settings = json.loads((tmp_path / "small" / "config.json").read_text())["quantization_config"]
    group = settings["config_groups"]["group_0"]
    assert settings["format"] == group["format"] == "nvfp4-pack-quantized" and group["input_activations"] is None
    assert group["weights"]["strategy"] == "tensor_group" and group["weights"]["group_size"] == GROUP


def test_compressed_tensors_makes_and_reads_the_same_bits(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    safetensors_torch = pytest.importorskip("safetensors.torch")
    pytest.importorskip("compressed_tensors", reason="needs compressed-tensors (pip install 'moebius[recipes]')")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    path = source(tmp_path / "plain", "qwen3_moe", "per_expert")
    convert(path, tmp_path / "small")
    settings = json.loads((tmp_path / "small" / "config.json").read_text())["quantization_config"]
    scheme: Any = QuantizationConfig.model_validate(settings).config_groups["group_0"]
    compressor: Any = BaseCompressor.get_value_from_registry("nvfp4-pack-quantized")
    made = safetensors_torch.load_file(tmp_path / "small" / "model.safetensors")
    plain = safetensors_torch.load_file(path / "model-00002-of-00003.safetensors")
    weight = plain[f"{EXPERTS}3.down_proj.weight"].float()
    low, high = torch.aminmax(weight.unflatten(-1, (-1, GROUP)), dim=-1)
    divisor = generate_gparam(weight.min(), weight.max())
    scales, _ = calculate_qparams(low, high, scheme.weights, divisor)
    state = {"weight": weight, "weight_scale": scales, "weight_global_scale": divisor}
    theirs = compressor.compress(state, scheme)
    ours = {end: made[f"{EXPERTS}3.down_proj.weight_{end}"] for end in ENDS}
    for end, array in ours.items():
        assert torch.equal(array.view(torch.uint8), theirs[f"weight_{end}"].view(torch.uint8)), end
    read = compressor.decompress({f"weight_{end}": array for end, array in ours.items()}, scheme)["weight"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        own = open_checkpoint(tmp_path / "small").layer(1).dequantized("float32").experts.down[3]
    np.testing.assert_array_equal(read.bfloat16().float().numpy(), own)


@pytest.mark.parametrize("name", SOURCES)
@pytest.mark.filterwarnings("ignore:.*no kernel takes")
def test_every_source(tmp_path: Path, name: str) -> None:
    settings, matrix = SOURCES[name]
    _, numbers = published.layer_of(tmp_path / "source", settings, matrix)
    report = convert(tmp_path / "source", tmp_path / "small")
    verified = verify_conversion(tmp_path / "source", tmp_path / "small", max(report.layers[0][1:]), transformers=False)
    assert verified.layers[0].weights <= max(report.layers[0][1:]) + 1e-6
    tensors, kept = load(tmp_path / "small"), name in ("modelopt", "compressed")
    assert not any("input" in tensor for tensor in tensors)
    before = load(tmp_path / "source")
    for expert, module in np.ndindex(4, 3):
        field = ("gate", "up", "down")[module]
        prefix = f"{EXPERTS}{expert}.{field}_proj.weight"
        if kept:
            stored = before.get(f"{prefix}_packed", before.get(prefix))
            assert stored is not None and tensors[f"{prefix}_packed"].tobytes() == stored.tobytes()
            assert tensors[f"{prefix}_scale"].tobytes() == before[f"{prefix}_scale"].tobytes()
            divisor = before.get(f"{prefix}_global_scale")
            divisor = 1 / before[f"{prefix}_scale_2"] if divisor is None else divisor
            np.testing.assert_array_equal(tensors[f"{prefix}_global_scale"], divisor.reshape(1))
        elif field == "down":
            wanted = quantised(numbers["down"][expert])[0]
            assert tensors[f"{prefix}_scale"].tobytes() == wanted[1].tobytes()
    error = report.layers[0].gate_up
    assert error == 0 if name == "compressed" else error < (1e-6 if kept else 0.15)


@pytest.mark.filterwarnings("ignore:.*no kernel takes")
def test_gate_and_up_with_other_divisors_share_one(tmp_path: Path) -> None:
    _, numbers = published.layer_of(tmp_path / "source", COMPRESSED, published.nvfp4)
    file, tensors = tmp_path / "source" / "model.safetensors", load(tmp_path / "source")
    tensors[f"{EXPERTS}2.up_proj.weight_global_scale"] *= np.float32(0.7)
    save_file(tensors, file)
    report = convert(tmp_path / "source", tmp_path / "small")
    made = load(tmp_path / "small")
    up = numbers["up"][2] / np.float32(0.7)
    for name, (_, scales, divisor) in zip(("gate", "up"), quantised(numbers["gate"][2], up), strict=True):
        np.testing.assert_allclose(made[f"{EXPERTS}2.{name}_proj.weight_global_scale"], [divisor], rtol=1e-6)
        assert (made[f"{EXPERTS}2.{name}_proj.weight_scale"] == scales).mean() > 0.99
    assert 0 < report.layers[0].gate_up < 0.1 and report.layers[0].down == 0


@pytest.mark.filterwarnings("ignore")
def test_groups_of_zeros_tiny_numbers_and_nan(tmp_path: Path) -> None:
    path = source(tmp_path / "plain", "qwen3_moe", "per_expert")
    file = path / "model-00002-of-00003.safetensors"
    tensors = {name: array for name, array in load(path).items() if ".layers.1." in name}
    down = tensors[f"{EXPERTS}0.down_proj.weight"]
    down[0, :16], down[1, :16], down[2, 3], down[3, 5] = 0, 1e-9, np.nan, np.inf
    tensors[f"{EXPERTS}1.down_proj.weight"][:] = 0
    save_file(tensors, file)
    with pytest.raises(InvalidInput, match=r"0.down_proj.weight must hold finite numbers, got 2 that are NaN or inf"):
        convert(path, tmp_path / "refused")
    report = convert_checkpoint(path, tmp_path / "small", "nvfp4", loader="moebius", allow_not_finite=True)
    made = load(tmp_path / "small")
    scales = made[f"{EXPERTS}0.down_proj.weight_scale"].astype(np.float32)
    assert scales[0, 0] == scales[1, 0] == LEAST and np.argwhere(np.isnan(scales)).tolist() == [[2, 0], [3, 0]]
    assert made[f"{EXPERTS}1.down_proj.weight_global_scale"] == 1 and len(report.not_finite) == 1
    back = open_checkpoint(tmp_path / "small").layer(1, allow_bad_scales=True).dequantized("float32").experts.down
    assert not back[0, 0, :16].any() and not back[0, 1, :16].any() and not back[1].any()
    assert np.isnan(back[0, 2, :16]).all() and np.isfinite(back[0, 2:4, 16:]).all()


def test_the_command_refuses_for_transformers_and_verifies(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = source(tmp_path / "plain", "qwen3_moe", "per_expert")
    arguments = [str(path), str(tmp_path / "small"), "--format", "nvfp4"]
    assert main(arguments) == 2
    printed = capsys.readouterr().err
    assert "drops weight_global_scale" in printed and "vLLM 0.33 loads it" in printed and "--loader moebius" in printed
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert main([*arguments, "--loader", "moebius", "--verify"]) == 0
    assert "verified, relative errors" in capsys.readouterr().out
