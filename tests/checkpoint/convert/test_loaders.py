"""The table family x format of converted checkpoints, for transformers with compressed-tensors and for our reader.

`MOEBIUS_FAMILIES=all` judges every family in every format, as the daily run does.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the judge needs torch")
transformers = pytest.importorskip("transformers", reason="the judge needs transformers")
pytest.importorskip("compressed_tensors", reason="needs compressed-tensors (pip install 'moebius[recipes]')")

from moe_core.checkpoint import convert_checkpoint, open_checkpoint
from moe_core.checkpoint.convert.target import Target
from moe_core.errors import InvalidInput
from moe_core.formats import format_named
from moe_core.tools.convert_cli import main
from moe_torch.transformers import verify
from tests.support.families import IS_EARLIER, ROWS
from tests.support.families.loaders import verdict, wide
from tests.support.paths import ROOT

if IS_EARLIER:
    pytest.skip("the table is of transformers 5.23", allow_module_level=True)

FORMATS = ("int4_g32", "fp8_block", "mxfp4", "fp8_channel", "mxfp8", "int8_row", "fp8_tensor")
#: Refused for transformers in every family.
REFUSED = ("int4_g32_zp", "int8_channel")
USED = (
    *("qwen3_moe", "qwen2_moe", "qwen3_next", "mixtral", "deepseek_v2", "deepseek_v3", "deepseek_v4", "gpt_oss"),
    *("llama4", "glm4_moe", "kimi_linear", "minimax_m2", "granitemoe", "gemma4", "olmoe", "phimoe", "ernie4_5_moe"),
    *("nemotron_h", "cohere2_moe", "jamba"),
)
ALL = os.environ.get("MOEBIUS_FAMILIES") == "all"
FAMILIES = [row for row in ROWS if ALL or row in USED]
pytestmark = pytest.mark.filterwarnings("ignore::Warning")


@pytest.fixture(scope="module", autouse=True)
def _quiet() -> Iterator[None]:
    log = transformers.utils.logging
    verbosity = log.get_verbosity()
    log.set_verbosity_error()
    log.disable_progress_bar()
    yield
    log.set_verbosity(verbosity)
    log.enable_progress_bar()


def formats_of(row: str) -> tuple[str, ...]:
    """All, or int4 and two others by turns."""
    turn = 2 * FAMILIES.index(row)
    return (*FORMATS, *REFUSED) if ALL else (FORMATS[0], *(FORMATS[1 + (turn + step) % 6] for step in (0, 1)))


@pytest.mark.parametrize("row", FAMILIES)
def test_loaders(tmp_path: Path, row: str) -> None:
    family, model = wide(row)
    source = tmp_path / "source"
    model.save_pretrained(source, save_original_format=True)
    verdicts = {name: verdict(row, model, source, tmp_path / name, name) for name in formats_of(row)}
    print(f"{row:24}" + "".join(f" {name}: {one};" for name, one in verdicts.items()))
    listed = not_loaded()
    for name, found in verdicts.items():
        wanted = family in listed and not (family == "gpt_oss" and name == "mxfp4")
        wanted = wanted or name in REFUSED or (family == "llama4" and name in ("fp8_block", "mxfp8"))
        wanted = wanted or (
            family in ("bailing_hybrid", "glm5_next", "kimi_linear") and name.startswith(("int", "mxfp4"))
        )
        assert (found != "equal") == wanted, (row, name, found)


def not_loaded() -> list[str]:
    """The families that the user's page lists."""
    page = (ROOT / "docs" / "user" / "quantization.md").read_text()
    listed = re.search(r"does not load quantised experts one by one in ([^.]+)\.", page)
    assert listed is not None
    return re.findall(r"\w+", listed[1])


def classes(self: Target, *arguments: Any, right: Any = Target.settings) -> Any:
    """Target every Linear, as the fault did that was mended."""
    found = right(self, *arguments)
    for group in (found or {}).get("config_groups", {}).values():
        group["targets"] = ["Linear"]
    return found


@pytest.mark.parametrize(
    ("row", "method", "fault", "message"),
    [
        ("granitemoe", "why_not_transformers", lambda self: None, "transformers leaves keys"),
        ("qwen3_moe", "_scale_dtype", lambda self: None, "experts.* (differs|is float32)"),
        ("cohere2_moe", "settings", classes, "Linear has no attribute"),
    ],
)
def test_faults_are_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, row: str, method: str, fault: Any, message: str
):
    monkeypatch.setattr(Target, method, fault)
    _, model = wide(row)
    model.save_pretrained(tmp_path / "source", save_original_format=True)
    with pytest.raises((AssertionError, AttributeError), match=message):
        verdict(row, model, tmp_path / "source", tmp_path / "int4", "int4_g32")


# Layers that predict further tokens


def test_layers_of_multi_token_prediction_stay_plain(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """transformers leaves them out, and compressed-tensors' own matching, with which vLLM loads them, ignores them."""
    from compressed_tensors.quantization import QuantizationConfig
    from compressed_tensors.utils import is_match
    from safetensors.torch import load_file, save_file

    _, model = wide("deepseek_v3")
    source = tmp_path / "source"
    model.save_pretrained(source, save_original_format=True)
    config, tensors = json.loads((source / "config.json").read_text()), load_file(source / "model.safetensors")
    last, further = config["num_hidden_layers"] - 1, config["num_hidden_layers"]
    added = {
        name.replace(f".layers.{last}.", f".layers.{further}."): tensor.clone() + 1
        for name, tensor in tensors.items()
        if f".layers.{last}." in name
    }
    added |= {f"model.layers.{further}.{name}.weight": torch.ones(4) for name in ("enorm", "hnorm", "shared_head.norm")}
    added[f"model.layers.{further}.eh_proj.weight"] = torch.ones(4, 8)
    save_file(tensors | added, source / "model.safetensors", {"format": "pt"})
    (source / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))
    for format in ("int4_g32", "fp8_block"):
        made = tmp_path / format
        assert main([str(source), str(made), "--format", format]) == 0
        assert "  equal" in capsys.readouterr().out
        stored = load_file(made / "model.safetensors")
        assert all(torch.equal(stored[name], tensor) for name, tensor in added.items())
        settings = json.loads((made / "config.json").read_text())["quantization_config"]
        kept, quantised = (f"model.layers.{layer}.mlp.experts.0.gate_proj" for layer in (further, last))
        if format == "fp8_block":
            assert kept in settings["modules_to_not_convert"] and quantised not in settings["modules_to_not_convert"]
            continue
        groups: Any = QuantizationConfig.model_validate(settings).config_groups
        module = torch.nn.Linear(4, 4)
        assert all(is_match(name, module, groups["group_0"].targets) for name in (kept, quantised))
        assert is_match(kept, module, settings["ignore"]) and not is_match(quantised, module, settings["ignore"])


# The command proves its output.


@pytest.mark.parametrize(
    ("row", "format"), [("qwen3_moe", "int4_g32"), ("llama4", "int4_g32"), ("gpt_oss", "mxfp4"), ("gpt_oss", "bf16")]
)
def test_the_command_verifies(tmp_path: Path, capsys: pytest.CaptureFixture[str], row: str, format: str) -> None:
    wide(row)[1].save_pretrained(tmp_path / "source", save_original_format=True)
    assert main([str(tmp_path / "source"), str(tmp_path / "made"), "--format", format]) == 0
    printed = capsys.readouterr().out
    rows = re.findall(r"^ +\d+ +(\S+e[+-]\d+) +(\S+e[+-]\d+)  equal$", printed, re.MULTILINE)
    assert len(rows) == 2 and all((float(one) > 0) == (format != "bf16") for row in rows for one in row)
    (logits,) = re.findall(r"logits of transformers differ from the source's by (\S+)", printed)
    assert 0 < float(logits) < 0.5 if format != "bf16" else float(logits) < 1e-2


@pytest.mark.parametrize(
    ("row", "method", "message"),
    [
        ("granitemoe", "why_not_transformers", "got missing keys such as"),
        ("qwen3_moe", "quantized", "got layer 1, whose weights differ from the source's by"),
        ("cohere2_moe", "settings", "got AttributeError: Linear has no attribute"),
    ],
)
def test_the_command_finds_faults(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    row: str,
    method: str,
    message: str,
) -> None:
    wide(row)[1].save_pretrained(tmp_path / "source", save_original_format=True)
    if method == "quantized":
        monkeypatch.setattr("moe_core.tools.convert_cli.convert_checkpoint", damaged)
    else:
        monkeypatch.setattr(Target, method, classes if method == "settings" else lambda self: None)
    assert main([str(tmp_path / "source"), str(tmp_path / "made"), "--format", "int4_g32"]) == 1
    assert message in capsys.readouterr().err


def test_the_judge_loads_the_named_class_and_misses_experts(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    wide("qwen3_moe")[1].save_pretrained(tmp_path / "source", save_original_format=True)
    convert_checkpoint(tmp_path / "source", tmp_path / "made", format_named("fp8_block"))
    file, config = tmp_path / "made" / "model.safetensors", tmp_path / "source" / "config.json"
    tensors = load_file(file)
    next(one for name, one in tensors.items() if ".experts." in name and "scale" in name).fill_(float("nan"))
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(InvalidInput, match="got no experts in layer 0"):
        list(verify._experts(open_checkpoint(tmp_path / "source"), 0, {}))
    fused = "model.layers.0.mlp.experts.gate_up_proj"
    ((_, ours),) = verify._experts(open_checkpoint(tmp_path / "made"), 0, {fused: None})
    assert torch.from_numpy(ours.astype("float32")).isnan().any(), "scales are compared, not judged"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"architectures": ["Qwen3MoeModel"]}))
    assert isinstance(verify._loaded(open_checkpoint(tmp_path / "source"))[0], transformers.Qwen3MoeModel)


def damaged(source: str, destination: str, *arguments: Any, **options: Any) -> Any:
    """A conversion with one byte of layer 1 turned round on the disk."""
    report = convert_checkpoint(source, destination, *arguments, **options)
    file = Path(destination, "model.safetensors")
    data = bytearray(file.read_bytes())
    size = 8 + int.from_bytes(data[:8], "little")
    entry = json.loads(data[8:size])["model.layers.1.mlp.experts.3.up_proj.weight_scale"]
    data[size + entry["data_offsets"][0] + 1] ^= 0x03
    file.write_bytes(data)
    return report
