"""Fused MoE in replaceable parts, as pure functions: prepare, experts, finalize (docs/modular.md).

    prepared = prepare(hidden_states, topk_weights, topk_ids)
    output = fused_experts(prepared.a1q, w1, w2, topk_weights, topk_ids)

Any function with the arguments of one of these can take its place, LoRA or a collective inside `jax.shard_map` for
example. Gradients, jit, scan, vmap and shard_map work as they do for the ops. Public functions keep the published
parameters, however many; `inplace` has no meaning here, donate in the `jax.jit` around.
"""

from moe_core.modular import (
    FUSED_MOE_UNQUANTIZED_CONFIG,
    ExpertTokensMetadata,
    FusedMoEActivationFormat,
    FusedMoEParallelConfig,
    FusedMoEQuantConfig,
    QuantKey,
    ScaleDesc,
    activation_of,
)
from moe_jax.modular.experts import activate, batched_experts, fused_experts, moe_sum, unfused_experts
from moe_jax.modular.finalize import finalize, finalize_batched
from moe_jax.modular.prepare import PreparedTokens, prepare, prepare_batched

__all__ = [
    "FUSED_MOE_UNQUANTIZED_CONFIG",
    "ExpertTokensMetadata",
    "FusedMoEActivationFormat",
    "FusedMoEParallelConfig",
    "FusedMoEQuantConfig",
    "PreparedTokens",
    "QuantKey",
    "ScaleDesc",
    "activate",
    "activation_of",
    "batched_experts",
    "finalize",
    "finalize_batched",
    "fused_experts",
    "moe_sum",
    "prepare",
    "prepare_batched",
    "unfused_experts",
]
