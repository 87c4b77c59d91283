"""A model that transformers built and saved: through `moe-parity --checkpoint`, and its block through `compare`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from moe_core.parity import assert_parity, cli
from moe_core.parity.checkpoint_case import CheckpointInput, checkpoint_case
from moe_core.parity.reference_engine import reference_stages

T, D, F, E, K = 10, 32, 24, 8, 2


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(0)
    settings: dict[str, Any] = {
        "vocab_size": 16, "hidden_size": D, "moe_intermediate_size": F, "num_experts": E, "num_experts_per_tok": K,
        "norm_topk_prob": True, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1,
        "head_dim": 16, "max_position_embeddings": 16, "experts_implementation": "eager",
    }  # fmt: skip
    built: Any = transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**settings)).eval()
    with torch.no_grad():
        for parameter in built.model.layers[0].mlp.parameters():
            parameter.normal_(std=parameter.shape[-1] ** -0.5)
    return built


@pytest.fixture(scope="module")
def checkpoint(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoint")
    transformers.utils.logging.disable_progress_bar()
    model.save_pretrained(path)
    return path


def test_the_tool_agrees_on_the_saved_layer(
    checkpoint: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    report = tmp_path / "report.json"
    arguments = ["--checkpoint", str(checkpoint), "--layer", "0", "--engines", "torch", "--json", str(report)]
    assert cli.main(arguments) == 0, capsys.readouterr().out
    (case,) = json.loads(report.read_text())["cases"]
    assert case["case"] == "qwen3_moe layer 0"
    assert case["sizes"] == {"T": 16, "E": E, "K": K, "D": D, "F": F}


def test_the_models_own_block_agrees_through_compare(model: Any, checkpoint: Path) -> None:
    case = checkpoint_case(CheckpointInput(checkpoint, num_tokens=T))
    ours = reference_stages(case)
    block = model.model.layers[0].mlp
    with torch.no_grad():
        x = torch.tensor(case.x)
        theirs = {"logits": x @ block.gate.weight.T, "output": block(x[None])[0]}
    report = assert_parity({name: ours[name] for name in theirs}, theirs, label="Qwen3-MoE block")
    assert [row.stage for row in report.rows] == ["logits", "output"]
    with torch.no_grad():
        block.experts.down_proj[:] *= 1 + 2**-7
        changed = {"logits": theirs["logits"], "output": block(x[None])[0]}
        block.experts.down_proj[:] /= 1 + 2**-7
    with pytest.raises(AssertionError, match="first divergent stage is output"):
        assert_parity({name: np.array(ours[name]) for name in theirs}, changed)
