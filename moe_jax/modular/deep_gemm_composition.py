"""Experts of DeepGEMM's contract, and the choice between them and the fused ones, as pure functions."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from moe_core.errors import InvalidInput, Unsupported
from moe_core.formats import Format, QuantizedTensor
from moe_core.modular import FusedMoEQuantConfig, activation_of, moe_problem_size
from moe_core.modular.deep_gemm import (
    ALIGNMENT,
    Pair,
    activation_format,
    check_products,
    matmul_side,
    why_not_deep_gemm,
)
from moe_core.modular.deep_gemm_dispatch import (
    DEEP_GEMM,
    DispatchCase,
    choose_experts,
    explain_choice,
    why_not_allowed,
)
from moe_core.operands import ExpertWeights, MatmulOperands
from moe_core.specs import Activation, MatmulSpec, Tuning
from moe_jax import ops
from moe_jax.modular.deep_gemm import blocks_layout, is_blackwell_deep_gemm_e8m0_used, pair_of
from moe_jax.modular.experts import fused_experts, require_experts, weights_of
from moe_jax.modular.prepare import as_routing

_HIDDEN = ("bfloat16", "float16", "float32")


def deep_gemm_experts(
    hidden_states: jax.Array,
    w1: jax.Array,
    w2: jax.Array,
    topk_weights: jax.Array,
    topk_ids: jax.Array,
    activation: str | Activation = "silu",
    global_num_experts: int = -1,
    expert_map: jax.Array | None = None,
    apply_router_weight_on_input: bool = False,
    *,
    quant_config: FusedMoEQuantConfig,
    a1q_scale: jax.Array | None = None,
    e8m0: bool = False,
    tuning: Tuning | None = None,
) -> jax.Array:
    """output `[M, K]`, weighted and reduced, of prepared hidden_states `[M, K]`, products in the contiguous layout.

    quant_config: fp8_w8a8 with block_shape [128, 128] and the scales of w1 `[E, N, K]` and w2 `[E, K, F]`; N, K and F
    are multiples of 128. hidden_states: bf16, fp16 or fp32, or e4m3 with a1q_scale fp32 `[M, K / 128]`, where the
    output is bf16. Rounded as `moe_torch.modular.DeepGemmExperts`: `unfused_experts`, rows padded to 128 by expert.
    e8m0: activations get power-of-two scales. Raises InvalidInput, Unsupported.
    """
    weights, ids = as_routing(topk_weights, topk_ids)
    experts, format = _experts(w1, w2, quant_config), activation_format(e8m0)
    rows, dtype = _rows(hidden_states, a1q_scale, format)
    size = moe_problem_size(hidden_states.shape, w1.shape, w2.shape, ids.shape, "out_in")
    require_experts(size.E, global_num_experts, expert_map)
    if apply_router_weight_on_input:
        weights = jnp.ones_like(weights)
    layout = ops.make_layout(ids, size.E, expert_map=expert_map, alignment=ALIGNMENT)
    first, second = _specs(("token", "row"), ("row", "slot"), dtype, tuning)
    before = ops.matmul_ogs(MatmulOperands(rows, experts.gate_up, bias=experts.gate_up_bias), layout, first)
    hidden = ops.quantize_rows(ops.activation(before, activation_of(activation)), format)
    operands = MatmulOperands(hidden, experts.down, bias=experts.down_bias, row_weight=weights.reshape(-1))
    return ops.reduce(ops.matmul_ogs(operands, layout, second), layout)


def batched_deep_gemm_experts(
    hidden_states: jax.Array,
    w1: jax.Array,
    w2: jax.Array,
    expert_num_tokens: jax.Array,
    activation: str | Activation = "silu",
    *,
    quant_config: FusedMoEQuantConfig,
    a1q_scale: jax.Array | None = None,
    e8m0: bool = False,
    tuning: Tuning | None = None,
) -> jax.Array:
    """Blocks `[E, max_num_tokens, K]` of prepared blocks, neither weighted nor reduced, products in the masked layout.

    Rows past expert_num_tokens int32 `[E]` come out as zeros. Everything else as in `deep_gemm_experts`.
    """
    if hidden_states.ndim != 3:
        raise InvalidInput(
            f"hidden_states must be [E, max_num_tokens, K], got {hidden_states.shape}; call prepare_batched"
        )
    experts, format = _experts(w1, w2, quant_config), activation_format(e8m0)
    size = moe_problem_size(hidden_states.shape, w1.shape, w2.shape, (0, 1), "out_in")
    rows, dtype = _rows(hidden_states, a1q_scale, format)
    layout = blocks_layout(size.E, size.M, jnp.clip(expert_num_tokens, 0, size.M))
    first, second = _specs(("row", "row"), ("row", "row"), dtype, tuning)
    before = ops.matmul_ogs(MatmulOperands(rows, experts.gate_up, bias=experts.gate_up_bias), layout, first)
    hidden = ops.quantize_rows(ops.activation(before, activation_of(activation)), format)
    blocks = ops.matmul_ogs(MatmulOperands(hidden, experts.down, bias=experts.down_bias), layout, second)
    return blocks.reshape(size.E, size.M, size.K)


def triton_or_deep_gemm_experts(
    hidden_states: jax.Array,
    w1: jax.Array,
    w2: jax.Array,
    topk_weights: jax.Array,
    topk_ids: jax.Array,
    activation: str | Activation = "silu",
    global_num_experts: int = -1,
    expert_map: jax.Array | None = None,
    apply_router_weight_on_input: bool = False,
    *,
    quant_config: FusedMoEQuantConfig,
    allow_deep_gemm: bool = False,
    e8m0: bool = False,
    tuning: Tuning | None = None,
) -> jax.Array:
    """`deep_gemm_experts` where it is allowed and the sizes are valid for it, else `fused_experts` with `out_in`.

    The rule is that of `moe_torch.modular.TritonOrDeepGemmExperts`; `explain_triton_or_deep_gemm` says which and why.
    """
    arguments = (
        hidden_states,
        w1,
        w2,
        topk_weights,
        topk_ids,
        activation,
        global_num_experts,
        expert_map,
        apply_router_weight_on_input,
    )
    choice = choose_experts(*_case(hidden_states, w1, w2, quant_config, allow_deep_gemm, e8m0))
    if choice.member == DEEP_GEMM:
        return deep_gemm_experts(*arguments, quant_config=quant_config, e8m0=e8m0, tuning=tuning)
    return fused_experts(*arguments, quant_config=quant_config, tuning=tuning)


def explain_triton_or_deep_gemm(
    hidden_states: Any,
    w1: Any,
    w2: Any,
    *,
    quant_config: FusedMoEQuantConfig,
    allow_deep_gemm: bool = False,
    e8m0: bool = False,
) -> str:
    """Which experts `triton_or_deep_gemm_experts` runs for such arrays or shapes, and why: one line. Runs nothing."""
    return explain_choice(*_case(hidden_states, w1, w2, quant_config, allow_deep_gemm, e8m0))


def _case(
    hidden_states: Any, w1: Any, w2: Any, quant_config: FusedMoEQuantConfig, allow_deep_gemm: bool, e8m0: bool
) -> tuple[str | None, DispatchCase]:
    """What the choice depends on: why DeepGEMM is not allowed at all, and the sizes."""
    not_allowed = why_not_allowed(allow_deep_gemm, quant_config.use_fp8_w8a8, quant_config.block_shape)
    if e8m0 and not_allowed is not None:
        raise InvalidInput(
            f"e8m0 must be False where DeepGEMM is not allowed, got True, and {not_allowed}; leave it out, or allow it"
        )
    used = e8m0 and is_blackwell_deep_gemm_e8m0_used()
    dtypes = (w1.dtype.name, w2.dtype.name)
    return not_allowed, DispatchCase(hidden_states.shape[0], w2.shape, dtypes, e8m0_used=used)


def _experts(w1: jax.Array, w2: jax.Array, quant_config: FusedMoEQuantConfig) -> ExpertWeights:
    """The weights; InvalidInput where a product with them is not the contract's."""
    reason = why_not_deep_gemm(quant_config)
    if reason is not None:
        raise Unsupported(reason)
    experts = weights_of(w1, w2, quant_config, "out_in")
    for weight in (experts.gate_up, experts.down):
        k = weight.values.shape[2]
        rows = Pair((0, k), "float8_e4m3fn", (0, k // ALIGNMENT), "float32")
        check_products(rows, pair_of("b", (weight.values, weight.scales)))
    return experts


def _rows(hidden_states: jax.Array, a1q_scale: jax.Array | None, format: Format) -> tuple[QuantizedTensor, str]:
    """Hidden states `[.., K]` quantised, as rows, those that are already with their scales, and the dtype of the
    stages."""
    *lead, columns = hidden_states.shape
    dtype, rows = hidden_states.dtype.name, hidden_states.reshape(-1, columns)
    if dtype == "float8_e4m3fn" and a1q_scale is not None:
        wanted = (*lead, columns // ALIGNMENT)
        if a1q_scale.dtype.name != "float32" or a1q_scale.shape != wanted:
            raise InvalidInput(
                f"a1q_scale must be float32 {wanted}, a scale for each 1 x {ALIGNMENT} values, got {a1q_scale.dtype} "
                f"{a1q_scale.shape}; pass those of hidden_states"
            )
        return matmul_side(format, rows, a1q_scale.reshape(-1, wanted[-1])), "bfloat16"
    if a1q_scale is not None or dtype not in _HIDDEN:
        raise InvalidInput(
            f"hidden_states must be bf16, fp16 or fp32 without a1q_scale, or e4m3 with it, got {dtype} and "
            f"{'no' if a1q_scale is None else 'an'} a1q_scale; pass one of these pairs"
        )
    return ops.quantize_rows(rows, format), dtype


def _specs(
    first: tuple[str, str], second: tuple[str, str], dtype: str, tuning: Tuning | None
) -> tuple[MatmulSpec, MatmulSpec]:
    """The specs of both products; (gather, scatter) of each."""
    tunings = [None if tuning is None else tuning.of_product(number) for number in (1, 2)]
    return (
        MatmulSpec("out_in", *first, out_dtype=dtype, tuning=tunings[0]),
        MatmulSpec("out_in", *second, out_dtype=dtype, tuning=tunings[1]),
    )
