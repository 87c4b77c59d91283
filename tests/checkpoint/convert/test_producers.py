"""Files made by quantisers' own code are read as the quantiser reads them, and converted without a loss.

`.ci/run` installs the packages, and `MOEBIUS_PRODUCERS=1` turns an absent one into an error.
"""

# pyright: reportCallIssue=false
from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="quantisers compute in torch")
pytest.importorskip("transformers", reason="llm-compressor quantises models of transformers")

from moe_core.checkpoint import convert_checkpoint, open_checkpoint
from moe_core.checkpoint.convert.verify import verify_conversion
from moe_core.formats import format_named
from tests.support.families.loaders import wide
from tests.support.quantized import producers, published

pytestmark = pytest.mark.filterwarnings("ignore")
BNB = {"quant_method": "bitsandbytes", "load_in_4bit": True}
GPTQ = published.GPTQ | {"checkpoint_format": "gptq"}
#: Package, settings, maker of matrices, and torchao's type.
CASES: dict[str, tuple[str, dict[str, Any], Any, str]] = {
    "autoawq": ("awq", published.AWQ, producers.autoawq, ""),
    "gptqmodel": ("gptqmodel", GPTQ, producers.gptqmodel, ""),
    "gptqmodel v2": ("gptqmodel", GPTQ | {"checkpoint_format": "gptq_v2"},
        lambda *sizes: producers.gptqmodel(*sizes, version=2), ""),
    "gptqmodel act-order": ("gptqmodel", GPTQ, lambda *sizes: producers.gptqmodel(*sizes, act_order=True), ""),
    "hqq": ("hqq", {"quant_method": "hqq", "quant_config": {}}, producers.hqq, ""),
    "bitsandbytes nf4": ("bitsandbytes", BNB, producers.bitsandbytes, ""),
    "bitsandbytes fp4": ("bitsandbytes", BNB, lambda *sizes: producers.bitsandbytes(*sizes, "fp4", True), ""),
    "bitsandbytes int8": ("bitsandbytes", {"quant_method": "bitsandbytes", "load_in_8bit": True},
        producers.bitsandbytes_int8, ""),
    "torchao Int8": ("torchao", {"quant_method": "torchao"}, producers.torchao, "Int8Tensor"),
    "torchao Float8": (
        "torchao",
        {"quant_method": "torchao"},
        lambda *sizes: producers.torchao(*sizes, "Float8"),
        "Float8Tensor",
    ),
    "modelopt": ("modelopt", {"quant_method": "modelopt", "quant_algo": "NVFP4"}, producers.modelopt, ""),
}  # fmt: skip


def require(package: str) -> None:
    if importlib.util.find_spec(package) is None:
        assert os.environ.get("MOEBIUS_PRODUCERS") != "1", f"{package} must be installed"
        pytest.skip(f"needs {package}, which a step of .ci/run installs")


@pytest.mark.parametrize("name", CASES)
def test_files_of_a_producer(tmp_path: Path, name: str) -> None:
    package, settings, make, tag = CASES[name]
    require(package)

    def matrix(*sizes: Any) -> dict[str, np.ndarray]:
        return {end: producers.to_numpy(tensor) for end, tensor in make(*sizes).items()}

    layer, numbers = published.layer_of(tmp_path / "source", settings, matrix, tag)
    experts = layer.dequantized("float32").experts
    gate_up = experts.gate_up if experts.up is None else np.concatenate([experts.gate_up, experts.up], 1)
    theirs = (np.concatenate([numbers["gate"], numbers["up"]], 1), numbers["down"])
    for ours, wanted in zip((gate_up, experts.down), theirs, strict=True):
        if package == "hqq":
            # It rounds the difference to float16, too.
            np.testing.assert_allclose(ours, wanted.astype(np.float32), rtol=0, atol=1e-3 * np.abs(wanted).max())
        else:
            np.testing.assert_array_equal(ours.astype(wanted.dtype), wanted)
    report = convert_checkpoint(tmp_path / "source", tmp_path / "plain", "float32")
    assert report.layers[0][1:] == (0, 0)
    report = convert_checkpoint(tmp_path / "source", tmp_path / "int8", format_named("int8_g32"))
    assert max(report.layers[0][1:]) < 0.02
    verify_conversion(tmp_path / "source", tmp_path / "int8", max(report.layers[0][1:]), transformers=False)


INT4 = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
GROUPS: dict[str, dict[str, Any]] = {
    "int4": {"weights": INT4},
    "int4 with zero points": {"weights": INT4 | {"symmetric": False}},
    "int8": {"weights": INT4 | {"num_bits": 8}},
}
#: Schemes that compressed-tensors names, and what our reader makes of them.
PRESETS = ("W8A8", "FP8_DYNAMIC", "NVFP4A16", "MXFP4A16", "MXFP8A16")


@pytest.mark.parametrize(
    ("row", "scheme"),
    [
        *(("qwen3_moe", scheme) for scheme in (*GROUPS, *PRESETS)),
        *((row, "int4") for row in ("granitemoe", "gpt_oss", "mixtral", "deepseek_v3")),
    ],
)
def test_files_of_llm_compressor(tmp_path: Path, row: str, scheme: str) -> None:
    require("llmcompressor")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig
    from safetensors.torch import load_file

    source, path = tmp_path / "source", tmp_path / "made"
    made = wide(row)[1]
    made.save_pretrained(source)
    experts = [r"re:.*[.]experts[.]\d+[.].*"]
    groups = {"group_0": GROUPS[scheme] | {"targets": experts}} if scheme in GROUPS else {scheme: experts}
    with producers.llmcompressor() as package:
        from llmcompressor.modeling.moe.linearize import load_quantizable_moe  # type: ignore[import-not-found]
        from llmcompressor.modifiers.quantization import QuantizationModifier  # type: ignore[import-not-found]

        with load_quantizable_moe(type(made)):
            model = type(made).from_pretrained(source, dtype=torch.bfloat16)
        recipe = QuantizationModifier(**({"config_groups": groups} if scheme in GROUPS else {"scheme": groups}))
        package.oneshot(model=model, recipe=recipe, pipeline="datafree", processor=object())
        model.save_pretrained(path, save_compressed=True)
    checkpoint = open_checkpoint(path)
    number = checkpoint.moe_layers[-1]
    layer = checkpoint.layer(number).dequantized("float32").experts
    settings = json.loads((path / "config.json").read_text())["quantization_config"]
    (group,) = QuantizationConfig.model_validate(settings).config_groups.values()
    compressor: Any = BaseCompressor.get_value_from_registry(settings["format"])
    tensors = load_file(path / "model.safetensors")
    block = checkpoint.block(number)
    for expert in range(len(layer.down)):
        numbers = []
        for module in ("gate_proj", "up_proj", "down_proj"):
            prefix = f"{block}experts.{expert}.{module}."
            state = {name.removeprefix(prefix): one for name, one in tensors.items() if name.startswith(prefix)}
            numbers.append(compressor.decompress(state, group)["weight"].detach().bfloat16())
        wanted = torch.cat(numbers[:2]), numbers[2]
        ours = [layer.gate_up[expert], layer.down[expert]]
        ours = ours if layer.up is None else [np.concatenate([layer.gate_up[expert], layer.up[expert]]), ours[1]]
        for one, theirs in zip(ours, wanted, strict=True):
            one = one.T if one.shape != tuple(theirs.shape) else one
            assert torch.equal(torch.from_numpy(np.ascontiguousarray(one)).bfloat16(), theirs)
    assert convert_checkpoint(path, tmp_path / "plain", "float32").layers[0][1:] == (0, 0)
