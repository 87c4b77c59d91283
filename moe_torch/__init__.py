"""Moebius on torch tensors: Mixture-of-Experts ops on the kernels of `moe_core`."""

from moe_core import __version__
from moe_core.errors import InvalidInput, Unsupported
from moe_core.target import cpu_engine
from moe_torch.compile_ahead import warmup
from moe_torch.exchange import from_dlpack
from moe_torch.gradients import define_gradients
from moe_torch.launcher import MoELauncher, prepare_moe
from moe_torch.layers import (
    HUGGING_FACE,
    MAXTEXT,
    ExpertsSpec,
    LayerWeights,
    MoE,
    MoEAux,
    MoELayerSpec,
    SharedExpertsSpec,
    Storage,
    layer_spec_from_config,
)
from moe_torch.ops import (
    Activation,
    ExpertWeights,
    LayoutSpec,
    LogitsSpec,
    MatmulOperands,
    MatmulSpec,
    MatmulTuning,
    MoEOutput,
    MoESpec,
    RaggedLayout,
    RouterLogits,
    RouterSpec,
    RouterWeights,
    Routing,
    SharedExpert,
    TileConfig,
    TileTable,
    TopK,
    Tuning,
    activation,
    explain_moe,
    make_layout,
    matmul_ogs,
    moe,
    pack_bitmatrix,
    reduce,
    route,
    router,
    scale_rows,
    unpack_bitmatrix,
)
from moe_torch.options import register_pytrees
from moe_torch.router_gradients import define_router_gradients
from moe_torch.stage_gradients import define_stage_gradients

define_gradients()
define_router_gradients()
define_stage_gradients()
register_pytrees()

__all__ = [
    "HUGGING_FACE",
    "MAXTEXT",
    "Activation",
    "ExpertWeights",
    "ExpertsSpec",
    "InvalidInput",
    "LayerWeights",
    "LayoutSpec",
    "LogitsSpec",
    "MatmulOperands",
    "MatmulSpec",
    "MatmulTuning",
    "MoE",
    "MoEAux",
    "MoELauncher",
    "MoELayerSpec",
    "MoEOutput",
    "MoESpec",
    "RaggedLayout",
    "RouterLogits",
    "RouterSpec",
    "RouterWeights",
    "Routing",
    "SharedExpert",
    "SharedExpertsSpec",
    "Storage",
    "TileConfig",
    "TileTable",
    "TopK",
    "Tuning",
    "Unsupported",
    "__version__",
    "activation",
    "cpu_engine",
    "explain_moe",
    "from_dlpack",
    "layer_spec_from_config",
    "make_layout",
    "matmul_ogs",
    "moe",
    "pack_bitmatrix",
    "prepare_moe",
    "reduce",
    "route",
    "router",
    "scale_rows",
    "unpack_bitmatrix",
    "warmup",
]
