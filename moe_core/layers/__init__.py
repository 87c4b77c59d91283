"""What layers of every framework share: their specs, presets, canonical weights and exact conversions."""

from moe_core.layers.auxiliary import MoEAux
from moe_core.layers.convert import convert_weights, placements
from moe_core.layers.prepared import tiled_specs
from moe_core.layers.presets import PRESETS, layer_spec_from_config
from moe_core.layers.spec import (
    FREE_FIELDS,
    HUGGING_FACE,
    MAXTEXT,
    ExpertsSpec,
    MoELayerSpec,
    Parameter,
    SharedExpertsSpec,
    Storage,
)
from moe_core.layers.weights import LayerWeights

__all__ = [
    "FREE_FIELDS",
    "HUGGING_FACE",
    "MAXTEXT",
    "PRESETS",
    "ExpertsSpec",
    "LayerWeights",
    "MoEAux",
    "MoELayerSpec",
    "Parameter",
    "SharedExpertsSpec",
    "Storage",
    "convert_weights",
    "layer_spec_from_config",
    "placements",
    "tiled_specs",
]
