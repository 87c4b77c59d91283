"""Files of PEFT's adapters of experts: read, written with PEFT's bytes, converted and merged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from moe_core.checkpoint import merge_adapter, open_checkpoint, read_adapter, write_adapter
from moe_core.layers import LayerWeights
from tests.support.families import tiny

peft = pytest.importorskip("peft", reason="needs peft (pip install 'moebius[recipes]')")

#: PEFT reads a name of transformers that will go, and overlooks parameters when it checks patterns.
pytestmark = pytest.mark.filterwarnings(
    "ignore:.is_gradient_checkpointing.:FutureWarning", "ignore:The following rank_pattern keys:RuntimeWarning"
)
FAMILIES = ("gpt_oss", "qwen3_moe", "mixtral")


def adapted(model: Any, **options: Any) -> Any:
    """Factors that change results, of the experts and of attention."""
    options = {"r": 3, "lora_alpha": 8, "target_modules": ["q_proj"], "init_lora_weights": False, **options}
    router = "mlp.router.weight" if model.config.model_type == "gpt_oss" else "mlp.gate.weight"
    names = ["mlp.experts.down_proj", "mlp.experts.gate_up_proj", router]
    return peft.get_peft_model(model, peft.LoraConfig(target_parameters=names, **options)).eval()


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.arange(8)[None]).logits


@pytest.mark.parametrize("family", FAMILIES)
def test_files_are_pefts(family: str, tmp_path: Path) -> None:
    """Equal bytes after reading and writing, and PEFT loads what comes by way of another packing."""
    torch.manual_seed(0)
    model = adapted(tiny(family), use_rslora=True, rank_pattern={"experts.down_proj": 5})
    wanted = logits(model)
    model.save_pretrained(tmp_path / "peft")
    adapter = read_adapter(tmp_path / "peft", model.config, others=True)
    write_adapter(tmp_path / "again", adapter)
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        assert (tmp_path / "peft" / name).read_bytes() == (tmp_path / "again" / name).read_bytes(), name

    model = adapted(tiny(family), target_modules=[])
    base = model.unload()
    base.save_pretrained(tmp_path / "base")
    model = adapted(base, target_modules=[])
    wanted = logits(model)
    model.save_pretrained(tmp_path / "experts")
    adapter = read_adapter(tmp_path / "experts", model.config)
    for packing in ("unsloth-old", "vllm-2d", "megatron-bridge"):
        write_adapter(tmp_path / packing, adapter, packing=packing)
        write_adapter(tmp_path / f"from-{packing}", read_adapter(tmp_path / packing, model.config))
        base = type(model.base_model.model).from_pretrained(tmp_path / "base")
        loaded = peft.PeftModel.from_pretrained(base, tmp_path / f"from-{packing}")
        torch.testing.assert_close(logits(loaded), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_merged_as_peft_merges(family: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    base = tiny(family)
    base.save_pretrained(tmp_path / "base")
    model = adapted(base, target_modules=[])
    model.save_pretrained(tmp_path / "adapter")
    model.merge_and_unload().save_pretrained(tmp_path / "merged")
    before, after = open_checkpoint(tmp_path / "base"), open_checkpoint(tmp_path / "merged")
    read = LayerWeights.from_checkpoint
    pairs: dict[int | str, tuple[LayerWeights, LayerWeights]] = {
        layer: (read(before.layer(layer)), read(after.layer(layer))) for layer in before.moe_layers
    }
    adapter = read_adapter(tmp_path / "adapter", model.config, verify=pairs)
    for layer, (plain, theirs) in pairs.items():
        merged = merge_adapter(plain, adapter.layer(layer).with_gate_layout(plain.storage.gate_layout)).weights
        for name, array in merged.named().items():
            torch.testing.assert_close(torch.from_numpy(array), torch.from_numpy(theirs.named()[name]), msg=name)
