"""Options, operand bundles and tile configurations: frozen, hashable, checked when made, of no framework.

Letters: T tokens, K top-k, E experts, D d_model, F d_ff per expert (after gating). Slot `s = t * K + k`.
"""

from moe_core.specs.matmul import Activation, MatmulSpec, WeightGradientSpec
from moe_core.specs.moe import MoESpec
from moe_core.specs.routing import LayoutSpec, LogitsSpec, RouterSpec
from moe_core.specs.tile import TileConfig
from moe_core.specs.tile_table import TileTable
from moe_core.specs.tuning import MatmulTuning, Tuning

__all__ = [
    "Activation",
    "LayoutSpec",
    "LogitsSpec",
    "MatmulSpec",
    "MatmulTuning",
    "MoESpec",
    "RouterSpec",
    "TileConfig",
    "TileTable",
    "Tuning",
    "WeightGradientSpec",
]
