"""Names of specs that `moe_jax.layers` and both Flax layers export."""

from moe_core.checkpoint.presets import layer_spec_from_config
from moe_core.layers import (
    ExpertsSpec,
    LatentSpec,
    LayerWeights,
    LoRA,
    MoEAux,
    MoELayerSpec,
    OutputSpec,
    SharedExpertsSpec,
)
from moe_core.specs import Activation, NormSpec, RouterSpec, TokenRounding, Tuning
from moe_jax.layers.axes import LogicalAxes
from moe_jax.layers.functional import update_correction_bias
from moe_jax.layers.losses import load_balance_loss
from moe_jax.parallel.axis import ExpertAxis

__all__ = [
    "Activation", "ExpertAxis", "ExpertsSpec", "LatentSpec", "LayerWeights", "LoRA", "LogicalAxes", "MoEAux",
    "MoELayerSpec", "NormSpec", "OutputSpec", "RouterSpec", "SharedExpertsSpec", "TokenRounding", "Tuning",
    "layer_spec_from_config", "load_balance_loss", "update_correction_bias",
]  # fmt: skip
