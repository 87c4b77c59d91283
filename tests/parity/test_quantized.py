"""The parity tool on quantised layers: built-in cases, checkpoints as they are on disk, and what it finds."""

from __future__ import annotations

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from moe_core.checkpoint import open_checkpoint
from moe_core.errors import InvalidInput
from moe_core.parity import cli
from moe_core.parity.builtin_cases import Draw, built_in_case
from moe_core.parity.checkpoint_case import CheckpointInput, checkpoint_case
from moe_core.parity.gradients import run_gradients
from moe_core.specs.operands import named_arrays
from tests.support.checkpoint_files import write, write_family
from tests.support.parity import AlteredEngine, run_json
from tests.support.quantized.files import (
    FP8,
    compressed,
    fp8_matrix,
    mxfp4_layer,
    per_expert_layer,
    quantized_config,
    words_matrix,
)
from tests.support.quantized.files import MXFP4 as MXFP4_CONFIG


def test_quantised_products_and_rows_are_compared(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("--case", "deepseek_v3_fp8_block", "--tokens", "5", "--engines", "torch", "--verbose", "--json", "-")
    assert cli.main(arguments) == 0
    printed = capsys.readouterr()
    assert "fp8_block: products of weights fp8_block, activations fp8_group" in printed.err
    (case,) = json.loads(printed.out)["cases"]
    assert case["scheme"] == {"name": "fp8_block", "weights": "fp8_block", "activations": "fp8_group"}
    # The weights of a quantised case have no dtype: it runs once.
    assert case["dtype"] == "bfloat16"
    for engine in case["engines"]:
        rows = {row["stage"]: row for row in engine["stages"]}
        assert list(rows).index("quantized_x") < list(rows).index("matmul1")
        assert list(rows).index("activation") < list(rows).index("quantized_hidden") < list(rows).index("matmul2")
        for stage in ("quantized_x", "quantized_hidden"):
            assert rows[stage]["worst"]["tolerance"] == rows[stage]["relative_tolerance"] == 0
        # Behind the engine's own rows, so that no tolerance covers other codes.
        assert rows["matmul2"]["relative_tolerance"] < 5e-3


def test_gradients_of_frozen_experts_are_compared(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("--case", "gpt_oss_mxfp4", "--tokens", "5", "--backward", "--engines", "torch")
    status, document = run_json(capsys, *arguments)
    assert status == 0, document["conclusion"]
    forward, backward = document["cases"]
    assert forward["scheme"] == backward["scheme"] == {"name": "mxfp4_w4a16", "weights": "mxfp4", "activations": None}
    names = [stage["stage"] for stage in backward["engines"][0]["stages"]]
    biases = ["d_experts.gate_up_bias", "d_experts.down_bias"]
    assert names == ["d_x", *biases, "d_routing.weight", "d_routing.bias"]
    skipped = run_gradients(built_in_case("deepseek_v3_fp8_block", Draw(num_tokens=2)), [AlteredEngine()], print)
    assert "no gradient with activations fp8_group" in skipped.reports[0].skipped


@pytest.mark.parametrize("dtype", [None, "float32"])
def test_a_case_dequantises_on_load_if_asked_to_and_says_so(tmp_path, dtype):
    path = checkpoint_of("mxfp4", tmp_path)
    case = checkpoint_case(CheckpointInput(path, dtype=dtype, dequantize=True))
    wanted = dtype or "bfloat16"
    assert f"; weights stored in mxfp4, dequantised to {wanted} on load; hidden states" in case.description
    assert case.scheme is None
    assert case.dtype == case.experts.down.dtype.name == case.routing.weight.dtype.name == wanted


def test_a_plain_checkpoint_has_nothing_to_dequantise(tmp_path):
    with pytest.raises(InvalidInput, match="dequantize must be False for a plain checkpoint"):
        checkpoint_case(CheckpointInput(write_family(tmp_path, "mixtral")[0], dequantize=True))


def checkpoint_of(kind: str, path: Path) -> Path:
    """A small layer as it is published: gpt-oss in mxfp4, DeepSeek in fp8 blocks, or compressed-tensors."""
    generator = np.random.default_rng(4)
    if kind == "mxfp4":
        return write(path, quantized_config("gpt_oss", MXFP4_CONFIG, 64, 96), {0: mxfp4_layer(64, 96)})
    family, d_model, d_ff, settings = "qwen3_moe", 64, 64, FP8
    if kind == "fp8":
        family, d_model, d_ff = "deepseek_v3", 200, 96
    elif kind == "int4":
        settings = compressed("pack-quantized", group_size=32, symmetric=False)
    elif kind == "int8":
        rows = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}
        settings = compressed("int-quantized", rows, num_bits=8, strategy="channel", group_size=None)

    def matrix(rows: int, columns: int) -> dict[str, np.ndarray]:
        if kind == "fp8":
            return fp8_matrix(generator, rows, columns)
        if kind == "int4":
            return words_matrix(generator, rows, columns, 4, 32, True, ml_dtypes.bfloat16)
        codes = generator.integers(-127, 128, (rows, columns)).astype(np.int8)
        scales = generator.uniform(0.001, 0.01, (rows, 1)).astype(np.float32)
        return {".weight": codes, ".weight_scale": scales, "": codes * scales}

    tensors, _ = per_expert_layer(family, d_model, d_ff, matrix)
    if kind == "fp8":
        wide = 2 * d_ff
        for name, sizes in (("gate", (wide, d_model)), ("up", (wide, d_model)), ("down", (d_model, wide))):
            made = {suffix: array for suffix, array in matrix(*sizes).items() if suffix}
            module = f"model.layers.1.mlp.shared_experts.{name}_proj"
            tensors |= {module + suffix: array for suffix, array in made.items()}
    return write(path, quantized_config(family, settings, d_model, d_ff), {1: tensors})


@pytest.mark.parametrize(
    ("kind", "layer", "weights", "activations"),
    [
        ("mxfp4", 0, "mxfp4", None),
        ("fp8", 1, "fp8_block", "fp8_group"),
        ("int4", 1, "int4_g32_zp", None),
        ("int8", 1, "int8_channel", "int8_token"),
    ],
)
def test_the_tool_runs_the_products_of_a_quantised_checkpoint(tmp_path, capsys, kind, layer, weights, activations):
    pytest.importorskip("torch")
    path = checkpoint_of(kind, tmp_path)
    case = checkpoint_case(CheckpointInput(path, layer))
    assert case.dtype == "bfloat16" and f"; weights stored in {weights}; hidden states" in case.description
    stored = open_checkpoint(path).layer(layer)
    for (name, ours), (_, theirs) in zip(named_arrays(case.experts), named_arrays(stored.experts), strict=True):
        assert ours.tobytes() == theirs.tobytes() or name.endswith("_bias"), name
    assert (case.shared is not None) == (kind == "fp8")
    if case.shared is not None:
        assert case.shared.down.dtype.name == "bfloat16"
    arguments = ("--checkpoint", str(path), "--layer", str(layer), "--tokens", "3", "--engines", "torch")
    status, document = run_json(capsys, *arguments)
    assert status == 0, document["conclusion"]
    (report,) = document["cases"]
    assert (report["scheme"]["weights"], report["scheme"]["activations"]) == (weights, activations)
    stages = [stage["stage"] for stage in report["engines"][0]["stages"]]
    assert ("quantized_x" in stages) == ("quantized_hidden" in stages) == (activations is not None)


def test_upstream_takes_mxfp4_alone() -> None:
    pytest.importorskip("torch")
    from moe_torch.parity.triton_kernels import TritonKernelsEngine

    engine = object.__new__(TritonKernelsEngine)
    cases = {name: built_in_case(name, Draw(num_tokens=2)) for name in ("gpt_oss_mxfp4", "qwen3_moe_int4")}
    assert engine.why_unsupported(cases["gpt_oss_mxfp4"]) is None
    reason = "of quantised weights upstream takes mxfp4 with plain rows, the case is int4_w4a16_zp"
    assert engine.why_unsupported(cases["qwen3_moe_int4"]) == reason
