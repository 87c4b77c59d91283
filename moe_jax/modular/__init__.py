"""Fused MoE in replaceable parts, as pure functions: prepare, experts, finalize (docs/user/modular.md).

Any function with the same arguments can replace one of these, for LoRA or a collective inside `jax.shard_map`. Public
functions keep the published parameters except `inplace`: donate buffers in `jax.jit` instead.
"""

from moe_core.modular.activations import activation_of
from moe_core.modular.deep_gemm import deep_gemm_block_shape
from moe_core.modular.quant_config import FUSED_MOE_UNQUANTIZED_CONFIG, FusedMoEQuantConfig
from moe_core.modular.schemes import QuantKey, ScaleDesc
from moe_core.modular.types import ExpertTokensMetadata, FusedMoEActivationFormat, FusedMoEParallelConfig, SlotContext
from moe_jax.modular.deep_gemm import (
    batched_deep_gemm_experts,
    deep_gemm_experts,
    explain_triton_or_deep_gemm,
    is_blackwell_deep_gemm_e8m0_used,
    m_grouped_fp8_gemm_nt_contiguous,
    m_grouped_fp8_gemm_nt_masked,
    triton_or_deep_gemm_experts,
)
from moe_jax.modular.expert_parallel import SentTokens, finalize_expert_parallel, prepare_expert_parallel
from moe_jax.modular.experts import activate, batched_experts, fused_experts, moe_sum, unfused_experts
from moe_jax.modular.prepare_finalize import PreparedTokens, finalize, finalize_batched, prepare, prepare_batched
from moe_jax.modular.tail import FinalizedNorm, ZeroExperts, finalize_and_norm, zero_experts

__all__ = [
    "FUSED_MOE_UNQUANTIZED_CONFIG", "ExpertTokensMetadata", "FinalizedNorm", "FusedMoEActivationFormat",
    "FusedMoEParallelConfig", "FusedMoEQuantConfig", "PreparedTokens", "QuantKey", "ScaleDesc", "SentTokens",
    "SlotContext", "ZeroExperts", "activate", "activation_of", "batched_deep_gemm_experts", "batched_experts",
    "deep_gemm_block_shape", "deep_gemm_experts", "explain_triton_or_deep_gemm", "finalize", "finalize_and_norm",
    "finalize_batched", "finalize_expert_parallel", "fused_experts", "is_blackwell_deep_gemm_e8m0_used",
    "m_grouped_fp8_gemm_nt_contiguous", "m_grouped_fp8_gemm_nt_masked", "moe_sum", "prepare", "prepare_batched",
    "prepare_expert_parallel", "triton_or_deep_gemm_experts", "unfused_experts", "zero_experts",
]  # fmt: skip
