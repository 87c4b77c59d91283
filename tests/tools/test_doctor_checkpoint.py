"""`moebius-doctor CHECKPOINT`: what it says of healthy and of planted checkpoints."""

# pyright: reportArgumentType=false, reportCallIssue=false
from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from moe_core.errors import Unsupported
from moe_core.tools.doctor.checkpoint import examine
from moe_core.tools.doctor.cli import main
from moe_core.tools.doctor.loaders import SGLANG, TRANSFORMERS, VLLM
from tests.support.checkpoint_files import write, write_family
from tests.support.quantized.files import compressed, fp8_matrix, per_expert_layer, quantized_config, words_matrix

EXPERT, D, F = "model.layers.1.mlp.experts", 128, 64


def int4_files(tmp_path: Path, change: Any = None, zero_points: bool = False, **settings: Any) -> Path:
    generator = np.random.default_rng(3)
    tensors, _ = per_expert_layer(
        "qwen3_moe", D, F, lambda *shape: words_matrix(generator, *shape, 4, 32, zero_points, ml_dtypes.bfloat16)
    )
    if change is not None:
        change(tensors)
    quantization = compressed("pack-quantized", symmetric=not zero_points)
    config = quantized_config("qwen3_moe", quantization, D, F, decoder_sparse_step=2, num_hidden_layers=2, **settings)
    return write(tmp_path / "model", config, {1: tensors})


def test_a_healthy_checkpoint(tmp_path):
    report = examine(str(int4_files(tmp_path)))
    assert report.healthy and not report.unhonoured and not report.notes and not report.loaders
    rows = {row.field: row for row in report.rows}
    gate_up = rows["experts.gate_up"]
    assert (gate_up.count, gate_up.stored, gate_up.scales) == (8, "int4_g32", "BF16 per 1 x 32")
    assert (gate_up.shape, gate_up.wanted) == ((F, D // 8), (F, D))
    assert rows["router.weight"].stored == "plain BF16"


@pytest.mark.parametrize("family", ["gpt_oss", "mixtral", "deepseek_v3"])
def test_plain_families_are_healthy(tmp_path, family):
    path, _ = write_family(tmp_path, family)
    report = examine(str(path))
    assert report.healthy and not report.loaders and {row.stored for row in report.rows} == {"plain BF16"}


def scale_of(number: float) -> Any:
    def change(tensors: dict[str, np.ndarray]) -> None:
        tensors[f"{EXPERT}.2.down_proj.weight_scale"][0, 0] = number

    return change


def dead(tensors: dict[str, np.ndarray]) -> None:
    tensors[f"{EXPERT}.1.up_proj.weight_packed"][:] = 0


def twin(tensors: dict[str, np.ndarray]) -> None:
    tensors[f"{EXPERT}.3.down_proj.weight_packed"] = tensors[f"{EXPERT}.0.down_proj.weight_packed"].copy()


def nearly_twin(tensors: dict[str, np.ndarray]) -> None:
    """The rows that are looked at first are equal, others are not."""
    twin(tensors)
    tensors[f"{EXPERT}.3.down_proj.weight_packed"][0, 0] ^= 1


@pytest.mark.parametrize(
    ("change", "field", "problem"),
    [
        (scale_of(np.nan), "experts.down", f"1 NaN scales, first in {EXPERT}.2.down_proj.weight_scale"),
        (scale_of(0), "experts.down", "1 zero scales"),
        (dead, "experts.gate_up", f"{EXPERT}.1.up_proj.weight_packed is dead: all its values are 0"),
        (twin, "experts.down", f"{EXPERT}.0.down_proj.weight_packed, {EXPERT}.3.down_proj.weight_packed hold equal"),
        (nearly_twin, "experts.down", None),
    ],
)
def test_planted_problems(tmp_path, change, field, problem):
    report = examine(str(int4_files(tmp_path, change)))
    problems = [text for row in report.rows if row.field == field for text in row.problems]
    assert report.healthy == (problem is None)
    assert not problems if problem is None else [text for text in problems if text.startswith(problem)]


def test_missing_tensors_and_names_that_nearly_match(tmp_path):
    def rename(tensors: dict[str, np.ndarray]) -> None:
        tensors[f"{EXPERT}.2.down_proj.weight_scales_"] = tensors.pop(f"{EXPERT}.2.down_proj.weight_scale")

    report = examine(str(int4_files(tmp_path, rename)))
    assert not report.healthy and "weight_scales_" in report.problems[0] and report.problems[0].startswith("layer 1: ")


def test_settings_that_nobody_honours(tmp_path):
    report = examine(str(int4_files(tmp_path, norm_topk_probs=True, moe_novelty=3, rope_theta=1e4, num_experts_x=None)))
    assert report.unhonoured == ("norm_topk_probs = True (like norm_topk_prob)", "moe_novelty = 3")


def one_plain(tensors: dict[str, np.ndarray]) -> None:
    for name in ("gate_proj", "up_proj", "down_proj"):
        shape = tensors.pop(f"{EXPERT}.3.{name}.weight_shape")
        del tensors[f"{EXPERT}.3.{name}.weight_packed"], tensors[f"{EXPERT}.3.{name}.weight_scale"]
        tensors[f"{EXPERT}.3.{name}.weight"] = (
            np.random.default_rng(len(name)).normal(size=shape).astype(ml_dtypes.bfloat16)
        )


@pytest.mark.parametrize(
    ("change", "zero_points", "loader", "effect"),
    [
        (one_plain, False, TRANSFORMERS, "raises: all experts must be stored alike"),
        (one_plain, False, VLLM, "has one format per layer"),
        (one_plain, False, SGLANG, "has one format per layer"),
        (None, True, TRANSFORMERS, "raises: no zero points in experts"),
        (None, True, SGLANG, "raises: it has zero points of experts turned"),
    ],
)
def test_loaders_that_would_misread(tmp_path, change, zero_points, loader, effect):
    path = int4_files(tmp_path, None if change is None else change, zero_points)
    found = [text for name, text, layers in examine(str(path)).loaders if name == loader and layers == (1,)]
    assert any(text.startswith(effect) for text in found), found


def test_blocks_that_vllm_cannot_divide(tmp_path):
    generator = np.random.default_rng(3)
    tensors, _ = per_expert_layer("qwen3_moe", D, 96, lambda *shape: fp8_matrix(generator, *shape))
    for name in [name for name in tensors if name.endswith("weight_scale_inv")]:
        tensors[name.removesuffix("_inv")] = tensors.pop(name)
    tensors = {name: array for name, array in tensors.items() if not name.endswith("proj")}
    settings = compressed("float-quantized", type="float", num_bits=8, strategy="block", block_structure=[128, 128])
    path = write(
        tmp_path / "model", quantized_config("qwen3_moe", settings, D, 96, decoder_sparse_step=2), {1: tensors}
    )
    effects = {(name, effect) for name, effect, _ in examine(str(path)).loaders}
    assert (VLLM, "raises: the experts' width is no multiple of 128") in effects
    assert (TRANSFORMERS, "raises: it cannot decompress these experts") in effects


def test_the_command_prints_json_and_writes_a_page(tmp_path, capsys):
    path, page = int4_files(tmp_path, dead), tmp_path / "report.html"
    assert main([str(path), "--json", "--html", str(page)]) == 1
    content = json.loads(capsys.readouterr().out)
    assert content["family"] == "qwen3_moe" and not content["healthy"] and len(content["matrices"]) == 3
    text = page.read_text()
    assert "is dead" in text and text.count("<tr>") == 4 and "<script" not in text
    assert main([str(path)]) == 1
    printed = capsys.readouterr().out
    assert "int4_g32" in printed and "Other loaders" in printed


def test_directories_that_cannot_be_examined(tmp_path, capsys):
    assert main([str(tmp_path / "nothing")]) == 2
    assert "could not run" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["--html", "page.html"])
    with pytest.raises(Unsupported, match="quant_method"):
        examine(str(write(tmp_path / "model", quantized_config("qwen3_moe", {"quant_method": "x"}, D, F), {})))
