"""What layers of every framework share: their specs, presets, canonical weights and exact conversions."""

from moe_core.layers.convert import convert_weights, placements
from moe_core.layers.spec import (
    FREE_FIELDS,
    HUGGING_FACE,
    MAXTEXT,
    ExpertsSpec,
    MoEAux,
    MoELayerSpec,
    Parameter,
    SharedExpertsSpec,
    Storage,
    tiled_specs,
)
from moe_core.layers.weights import LayerWeights

__all__ = [
    "FREE_FIELDS",
    "HUGGING_FACE",
    "MAXTEXT",
    "ExpertsSpec",
    "LayerWeights",
    "MoEAux",
    "MoELayerSpec",
    "Parameter",
    "SharedExpertsSpec",
    "Storage",
    "convert_weights",
    "placements",
    "tiled_specs",
]
