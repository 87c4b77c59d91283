"""Fused MoE in replaceable parts, under the names that serving systems use for them (docs/modular.md).

    kernel = FusedMoEModularKernel(MoEPrepareAndFinalizeNoEP(), TritonExperts())
    output = kernel(hidden_states, w1, w2, topk_weights, topk_ids)

Public functions here keep the published parameters, however many.
"""

from moe_core.modular import (
    FUSED_MOE_UNQUANTIZED_CONFIG,
    ExpertTokensMetadata,
    FusedMoEActivationFormat,
    FusedMoEParallelConfig,
    FusedMoEQuantConfig,
    ProblemSize,
    QuantKey,
    ScaleDesc,
    activation_of,
)
from moe_torch.modular.batched_experts import BatchedTritonExperts
from moe_torch.modular.batched_prepare_finalize import BatchedPrepareAndFinalize
from moe_torch.modular.experts import FusedMoEPermuteExpertsUnpermute
from moe_torch.modular.gpt_oss import triton_kernel_fused_experts, triton_kernel_moe_forward
from moe_torch.modular.gpt_oss_experts import BaseOAITritonExperts, OAITritonExperts, UnfusedOAITritonExperts
from moe_torch.modular.kernel import FusedMoEModularKernel
from moe_torch.modular.prepare_finalize import (
    FusedMoEPrepareAndFinalize,
    MoEPrepareAndFinalizeNoEP,
    PreparedTokens,
)
from moe_torch.modular.routing_data import (
    GatherIndx,
    RoutingData,
    ScatterIndx,
    make_routing_data,
    pack_bitmatrix,
)
from moe_torch.modular.triton_experts import TritonExperts
from moe_torch.modular.weight_and_reduce import (
    TopKWeightAndReduce,
    TopKWeightAndReduceContiguous,
    TopKWeightAndReduceDelegate,
    TopKWeightAndReduceNaiveBatched,
    TopKWeightAndReduceNoOP,
)
from moe_torch.modular.workspaces import Workspaces

__all__ = [
    "FUSED_MOE_UNQUANTIZED_CONFIG",
    "BaseOAITritonExperts",
    "BatchedPrepareAndFinalize",
    "BatchedTritonExperts",
    "ExpertTokensMetadata",
    "FusedMoEActivationFormat",
    "FusedMoEModularKernel",
    "FusedMoEParallelConfig",
    "FusedMoEPermuteExpertsUnpermute",
    "FusedMoEPrepareAndFinalize",
    "FusedMoEQuantConfig",
    "GatherIndx",
    "MoEPrepareAndFinalizeNoEP",
    "OAITritonExperts",
    "PreparedTokens",
    "ProblemSize",
    "QuantKey",
    "RoutingData",
    "ScaleDesc",
    "ScatterIndx",
    "TopKWeightAndReduce",
    "TopKWeightAndReduceContiguous",
    "TopKWeightAndReduceDelegate",
    "TopKWeightAndReduceNaiveBatched",
    "TopKWeightAndReduceNoOP",
    "TritonExperts",
    "UnfusedOAITritonExperts",
    "Workspaces",
    "activation_of",
    "make_routing_data",
    "pack_bitmatrix",
    "triton_kernel_fused_experts",
    "triton_kernel_moe_forward",
]
