"""Fused MoE in replaceable parts, under the names and with the parameters of serving systems (docs/user/modular.md)."""

from moe_core.modular.activations import activation_of
from moe_core.modular.deep_gemm import deep_gemm_block_shape
from moe_core.modular.schemes import QuantKey, ScaleDesc
from moe_core.modular.types import FusedMoEActivationFormat, FusedMoEParallelConfig, ProblemSize, SlotContext
from moe_torch.modular.calls import PreparedTokens
from moe_torch.modular.deep_gemm import (
    is_blackwell_deep_gemm_e8m0_used,
    m_grouped_fp8_gemm_nt_contiguous,
    m_grouped_fp8_gemm_nt_masked,
)
from moe_torch.modular.deep_gemm_dispatch import TritonOrDeepGemmExperts
from moe_torch.modular.deep_gemm_experts import BatchedDeepGemmExperts, DeepGemmExperts
from moe_torch.modular.experts import FusedMoEPermuteExpertsUnpermute
from moe_torch.modular.experts import FusedMoEPermuteExpertsUnpermute as FusedMoEExpertsModular
from moe_torch.modular.generations.tokens import ExpertTokensMetadata, _moe_problem_size  # pyright: ignore[reportPrivateUsage]
from moe_torch.modular.generations.unfinalized import UnfinalizedMoEOutput
from moe_torch.modular.gpt_oss import (
    BaseOAITritonExperts,
    OAITritonExperts,
    UnfusedOAITritonExperts,
    triton_kernel_fused_experts,
    triton_kernel_moe_forward,
)
from moe_torch.modular.kernel import FusedMoEModularKernel
from moe_torch.modular.newest.activation import (
    ApplyMoEActivationConfig,
    MoEActivation,
    activation_without_mul,
    apply_moe_activation,
    apply_moe_activation_masked_supported,
    apply_moe_activation_supported,
)
from moe_torch.modular.newest.experts import FusedMoEExperts
from moe_torch.modular.newest.lora import LoRAExpertsMixin, MoELoRAContext
from moe_torch.modular.newest.moe_config import FusedMoEConfig, RoutingMethodType, get_routing_method_type
from moe_torch.modular.newest.monolithic import (
    FusedMoEExpertsMonolithic,
    FusedMoEKernel,
    FusedMoEKernelModularImpl,
    FusedMoEKernelMonolithicImpl,
    FusedMoEPrepareAndFinalizeMonolithic,
    PrepareMonolithicResultType,
    PrepareResultType,
    ReceiverType,
)
from moe_torch.modular.newest.quant_configs import (
    biased_moe_quant_config,
    fp8_w8a8_moe_quant_config,
    fp8_w8a16_moe_quant_config,
    int4_w4a16_moe_quant_config,
    int4_w4afp8_moe_quant_config,
    int8_w8a8_moe_quant_config,
    int8_w8a16_moe_quant_config,
    mxfp4_moe_quant_config,
    mxfp4_mxfp8_moe_quant_config,
    mxfp4_w4a8_moe_quant_config,
    mxfp4_w4a16_moe_quant_config,
    nvfp4_moe_quant_config,
    nvfp4_w4a16_moe_quant_config,
    ocp_mx_moe_quant_config,
)
from moe_torch.modular.newest.tail import FinalizedNorm, ZeroExperts, finalize_and_norm, zero_experts
from moe_torch.modular.parallel.deep_ep import DeepEPHTPrepareAndFinalize, DeepEPLLPrepareAndFinalize
from moe_torch.modular.parallel.exchange import MoEPrepareAndFinalizeAllToAll, MoEPrepareAndFinalizeNaiveEP
from moe_torch.modular.parallel.peer import PeerBatchedPrepareAndFinalize, PeerPrepareAndFinalize
from moe_torch.modular.prepare_finalize import (
    BatchedPrepareAndFinalize,
    FusedMoEPrepareAndFinalize,
    MoEPrepareAndFinalizeNoEP,
)
from moe_torch.modular.prepare_finalize import FusedMoEPrepareAndFinalize as FusedMoEPrepareAndFinalizeModular
from moe_torch.modular.quant_config import FUSED_MOE_UNQUANTIZED_CONFIG, FusedMoEQuantConfig
from moe_torch.modular.routing_data import GatherIndx, RoutingData, ScatterIndx, make_routing_data, pack_bitmatrix
from moe_torch.modular.triton_experts import BatchedTritonExperts, TritonExperts
from moe_torch.modular.weight_and_reduce import (
    TopKWeightAndReduce,
    TopKWeightAndReduceContiguous,
    TopKWeightAndReduceDelegate,
    TopKWeightAndReduceNaiveBatched,
    TopKWeightAndReduceNoOP,
)
from moe_torch.modular.workspaces import Workspaces

__all__ = [
    "FUSED_MOE_UNQUANTIZED_CONFIG", "ApplyMoEActivationConfig", "BaseOAITritonExperts", "BatchedDeepGemmExperts",
    "BatchedPrepareAndFinalize", "BatchedTritonExperts", "DeepEPHTPrepareAndFinalize", "DeepEPLLPrepareAndFinalize",
    "DeepGemmExperts", "ExpertTokensMetadata", "FinalizedNorm", "FusedMoEActivationFormat", "FusedMoEConfig",
    "FusedMoEExperts", "FusedMoEExpertsModular", "FusedMoEExpertsMonolithic", "FusedMoEKernel",
    "FusedMoEKernelModularImpl", "FusedMoEKernelMonolithicImpl", "FusedMoEModularKernel", "FusedMoEParallelConfig",
    "FusedMoEPermuteExpertsUnpermute", "FusedMoEPrepareAndFinalize", "FusedMoEPrepareAndFinalizeModular",
    "FusedMoEPrepareAndFinalizeMonolithic", "FusedMoEQuantConfig", "GatherIndx", "LoRAExpertsMixin", "MoEActivation",
    "MoELoRAContext", "MoEPrepareAndFinalizeAllToAll", "MoEPrepareAndFinalizeNaiveEP", "MoEPrepareAndFinalizeNoEP",
    "OAITritonExperts", "PeerBatchedPrepareAndFinalize", "PeerPrepareAndFinalize", "PrepareMonolithicResultType",
    "PrepareResultType", "PreparedTokens", "ProblemSize", "QuantKey", "ReceiverType", "RoutingData",
    "RoutingMethodType", "ScaleDesc", "ScatterIndx", "SlotContext", "TopKWeightAndReduce",
    "TopKWeightAndReduceContiguous", "TopKWeightAndReduceDelegate", "TopKWeightAndReduceNaiveBatched",
    "TopKWeightAndReduceNoOP", "TritonExperts", "TritonOrDeepGemmExperts", "UnfinalizedMoEOutput",
    "UnfusedOAITritonExperts", "Workspaces", "ZeroExperts", "_moe_problem_size", "activation_of",
    "activation_without_mul", "apply_moe_activation", "apply_moe_activation_masked_supported",
    "apply_moe_activation_supported", "biased_moe_quant_config", "deep_gemm_block_shape", "finalize_and_norm",
    "fp8_w8a8_moe_quant_config", "fp8_w8a16_moe_quant_config", "get_routing_method_type", "int4_w4a16_moe_quant_config",
    "int4_w4afp8_moe_quant_config", "int8_w8a8_moe_quant_config", "int8_w8a16_moe_quant_config",
    "is_blackwell_deep_gemm_e8m0_used", "m_grouped_fp8_gemm_nt_contiguous", "m_grouped_fp8_gemm_nt_masked",
    "make_routing_data", "mxfp4_moe_quant_config", "mxfp4_mxfp8_moe_quant_config", "mxfp4_w4a8_moe_quant_config",
    "mxfp4_w4a16_moe_quant_config", "nvfp4_moe_quant_config", "nvfp4_w4a16_moe_quant_config", "ocp_mx_moe_quant_config",
    "pack_bitmatrix", "triton_kernel_fused_experts", "triton_kernel_moe_forward", "zero_experts",
]  # fmt: skip
