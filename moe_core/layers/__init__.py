"""Shared by layers of every framework: specs, presets, canonical weights and exact conversions."""

from moe_core.layers.around import LatentSpec as LatentSpec
from moe_core.layers.around import LayerPart as LayerPart
from moe_core.layers.around import OutputSpec as OutputSpec
from moe_core.layers.convert import convert_weights as convert_weights
from moe_core.layers.convert import placements as placements
from moe_core.layers.costs import LayerCost as LayerCost
from moe_core.layers.costs import layer_cost as layer_cost
from moe_core.layers.parameter import Parameter as Parameter
from moe_core.layers.parameter import first_table as first_table
from moe_core.layers.result import MoEAux as MoEAux
from moe_core.layers.spec import FREE_FIELDS as FREE_FIELDS
from moe_core.layers.spec import HUGGING_FACE as HUGGING_FACE
from moe_core.layers.spec import MAXTEXT as MAXTEXT
from moe_core.layers.spec import ExpertsSpec as ExpertsSpec
from moe_core.layers.spec import MoELayerSpec as MoELayerSpec
from moe_core.layers.spec import SharedExpertsSpec as SharedExpertsSpec
from moe_core.layers.spec import Storage as Storage
from moe_core.layers.tiling import tiled_specs as tiled_specs
from moe_core.layers.weights import LayerWeights as LayerWeights
