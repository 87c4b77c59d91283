"""Layers of torch: `moe_torch.MoE` and what it is described with."""

from moe_core.checkpoint.presets import layer_spec_from_config
from moe_core.layers import LatentSpec, LayerWeights, LoRA, MoEAux, OutputSpec
from moe_core.layers.spec import HUGGING_FACE, MAXTEXT, ExpertsSpec, MoELayerSpec, SharedExpertsSpec, Storage
from moe_torch.layers.losses import load_balance_loss
from moe_torch.layers.moe import MoE

__all__ = [
    "HUGGING_FACE", "MAXTEXT", "ExpertsSpec", "LatentSpec", "LayerWeights", "LoRA", "MoE", "MoEAux", "MoELayerSpec",
    "OutputSpec", "SharedExpertsSpec", "Storage", "layer_spec_from_config", "load_balance_loss",
]  # fmt: skip
