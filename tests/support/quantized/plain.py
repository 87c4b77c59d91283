"""A plain checkpoint for conversions."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np

from tests.support.checkpoint_files import MOE_LAYERS, E, config_of, write

D, F = 128, 64


def source(directory: Path, family: str, storage: str, layers: int | None = None) -> Path:
    """A bf16 checkpoint with attention, embeddings and a tokenizer beside its MoE layers, in one file per layer."""
    widths = {"qwen3_moe": "moe_intermediate_size", "deepseek_v3": "moe_intermediate_size"}
    config = config_of(family, hidden_size=D, **{widths.get(family, "intermediate_size"): F})
    generator = np.random.default_rng(1)

    def draw(*shape: int) -> np.ndarray:
        return generator.standard_normal(shape).astype(ml_dtypes.bfloat16)

    tensors = {}
    for layer in MOE_LAYERS[family]:
        block, own = f"model.layers.{layer}.mlp.", {}
        router = block + ("router" if family == "gpt_oss" else "gate")
        own |= {f"model.layers.{layer}.self_attn.q_proj.weight": draw(8, D), f"{router}.weight": draw(E, D)}
        if family == "gpt_oss":
            own |= {f"{router}.bias": draw(E), f"{block}experts.gate_up_proj": draw(E, D, 2 * F)}
            own |= {f"{block}experts.down_proj": draw(E, F, D), f"{block}experts.down_proj_bias": draw(E, D)}
            own |= {f"{block}experts.gate_up_proj_bias": draw(E, 2 * F)}
        elif storage == "fused":
            own |= {f"{block}experts.gate_up_proj": draw(E, 2 * F, D), f"{block}experts.down_proj": draw(E, D, F)}
        else:
            for expert in range(E):
                for name, shape in (("gate_proj", (F, D)), ("up_proj", (F, D)), ("down_proj", (D, F))):
                    own[f"{block}experts.{expert}.{name}.weight"] = draw(*shape)
        if family == "deepseek_v3":
            own[f"{router}.e_score_correction_bias"] = draw(E).astype(np.float32)
            for name, shape in (("gate_proj", (2 * F, D)), ("up_proj", (2 * F, D)), ("down_proj", (D, 2 * F))):
                own[f"{block}shared_experts.{name}.weight"] = draw(*shape)
        tensors[layer] = own
    tensors[MOE_LAYERS[family][0]]["model.norm.weight"] = draw(D)
    path = write(directory, config, tensors, shards=True)
    (path / "tokenizer.json").write_text("{}")
    (path / "README.md").write_text("not of the model")
    return path
