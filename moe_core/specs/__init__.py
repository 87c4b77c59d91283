"""Options, operand bundles and tile configurations: frozen, hashable, checked when made, of no framework.

Letters: T tokens, K top-k, E experts, D d_model, F d_ff per expert (after gating). Slot `s = t * K + k`.
"""

from moe_core.specs.matmul import Activation as Activation
from moe_core.specs.matmul import MatmulSpec as MatmulSpec
from moe_core.specs.matmul import WeightGradientSpec as WeightGradientSpec
from moe_core.specs.moe import MoESpec as MoESpec
from moe_core.specs.norm import NormSpec as NormSpec
from moe_core.specs.operands import LAYOUT_INPUTS as LAYOUT_INPUTS
from moe_core.specs.operands import ExpertWeights as ExpertWeights
from moe_core.specs.operands import LayoutArrays as LayoutArrays
from moe_core.specs.operands import LoRAFactors as LoRAFactors
from moe_core.specs.operands import MatmulOperands as MatmulOperands
from moe_core.specs.operands import MoEOperands as MoEOperands
from moe_core.specs.operands import OutputGradients as OutputGradients
from moe_core.specs.operands import RouterLogits as RouterLogits
from moe_core.specs.operands import RouterWeights as RouterWeights
from moe_core.specs.operands import SharedExpert as SharedExpert
from moe_core.specs.operands import TopK as TopK
from moe_core.specs.operands import map_arrays as map_arrays
from moe_core.specs.operands import named_arrays as named_arrays
from moe_core.specs.operands import named_fields as named_fields
from moe_core.specs.routing import LayoutSpec as LayoutSpec
from moe_core.specs.routing import LogitsSpec as LogitsSpec
from moe_core.specs.routing import RouterSpec as RouterSpec
from moe_core.specs.routing import RowLimit as RowLimit
from moe_core.specs.routing import TokenRounding as TokenRounding
from moe_core.specs.tile import TileConfig as TileConfig
from moe_core.specs.tile_table import TileTable as TileTable
from moe_core.specs.tuning import MatmulTuning as MatmulTuning
from moe_core.specs.tuning import Tuning as Tuning
