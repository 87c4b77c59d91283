"""DeepGEMM's grouped products, and experts on them."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from moe_core.base import dtypes
from moe_core.base.checks import require_at_least, require_choice
from moe_core.errors import InvalidInput, Unsupported
from moe_core.formats import FP8_BLOCK, FP8_GROUP
from moe_core.modular import deep_gemm as contract
from moe_core.modular.activations import activation_of
from moe_core.modular.quant_config import FusedMoEQuantConfig
from moe_core.modular.types import moe_problem_size
from moe_core.specs.matmul import Activation, MatmulSpec
from moe_core.specs.operands import MatmulOperands, RaggedLayout
from moe_core.specs.tuning import Tuning, tunings_of
from moe_jax import ops
from moe_jax.bridge import platforms
from moe_jax.bridge.calls import OpCall, require_array
from moe_jax.modular.experts import blocks_dtype, blocks_size, fused_experts, require_experts, weights_of
from moe_jax.modular.prepare_finalize import blocks_layout, left_routing

Quantized = tuple[Any, Any]


def m_grouped_fp8_gemm_nt_contiguous(
    a: Quantized, b: Quantized, m_indices: jax.Array, *, out_dtype: Any = jnp.bfloat16
) -> jax.Array:
    """Return d `[M, N]` with `d[row] = a[row] @ b[m_indices[row]].T` for every row: the contiguous layout.

    See the function in `moe_torch.modular` for the arrays. No gradients. out_dtype: bf16, fp16 or fp32.
    """
    name = _out_dtype(out_dtype)
    rows, _ = contract.check_products(contract.pair_of("a", a), contract.pair_of("b", b))
    _require_indices("m_indices", m_indices, rows)
    layout = ops.make_layout(m_indices.reshape(-1, 1), b[0].shape[0])
    operands = MatmulOperands(contract.matmul_side(FP8_GROUP, *a), contract.matmul_side(FP8_BLOCK, *b))
    return ops.matmul_ogs(operands, layout, MatmulSpec("out_in", "token", "slot", out_dtype=name))


def m_grouped_fp8_gemm_nt_masked(
    a: Quantized, b: Quantized, masked_m: jax.Array, expected_m: int, *, out_dtype: Any = jnp.bfloat16
) -> jax.Array:
    """Return d `[G, M, N]` with `d[g, :masked_m[g]] = a[g, :masked_m[g]] @ b[g].T` for every group: the masked layout.

    See the function in `moe_torch.modular` for the arrays. No gradients. expected_m: static. out_dtype: bf16, fp16 or
    fp32.
    """
    name = _out_dtype(out_dtype)
    require_at_least("expected_m", expected_m, 1)
    groups, rows, n = contract.check_products(contract.pair_of("a", a), contract.pair_of("b", b), masked=True)
    _require_indices("masked_m", masked_m, groups)
    layout = blocks_layout(groups, rows, jnp.clip(masked_m, 0, rows))
    flat = (a[0].reshape(groups * rows, -1), a[1].reshape(groups * rows, -1))
    operands = MatmulOperands(contract.matmul_side(FP8_GROUP, *flat), contract.matmul_side(FP8_BLOCK, *b))
    call = OpCall("m_grouped_fp8_gemm_nt_masked")
    shapes = call.bundle("operands", operands)
    for field in ("group_sizes", "group_start", "slot_of_row"):
        call.array(field, getattr(layout, field))
    spec = MatmulSpec("out_in", out_dtype=name)
    (d,) = call.run(contract.plan_masked, shapes, layout.spec, spec, min(expected_m, max(rows, 1)))
    return d.reshape(groups, rows, n)


def is_blackwell_deep_gemm_e8m0_used() -> bool:
    """True if programs are traced for Blackwell (sm_100 to sm_109), where DeepGEMM takes power-of-two scales only."""
    target = platforms.cuda_target()
    return target is not None and contract.has_e8m0_mode(target)


def _out_dtype(out_dtype: Any) -> str:
    name = dtypes.canonical(out_dtype)
    require_choice("out_dtype", name, dtypes.MATMUL_DTYPES)
    return name


def _require_indices(name: str, indices: Any, count: int) -> None:
    require_array(name, indices)
    if indices.dtype.name != "int32" or indices.shape != (count,):
        raise InvalidInput(f"{name} must be int32 [{count}], got {indices.dtype} {indices.shape}; cast or cut it")


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
    """Return output `[M, K]`, weighted and reduced, of prepared hidden_states `[M, K]` by contiguous products.

    See `moe_torch.modular.DeepGemmExperts` for arrays, options and roundings. The output of e4m3 hidden states is
    bf16.
    """
    weights, ids = left_routing(topk_weights, topk_ids, apply_router_weight_on_input)
    size = moe_problem_size(hidden_states.shape, w1.shape, w2.shape, ids.shape, "out_in")
    require_experts(size.E, global_num_experts, expert_map)
    layout = ops.make_layout(ids, size.E, expert_map=expert_map, alignment=contract.ALIGNMENT)
    rows = _Rows(layout, ("token", "row"), ("row", "slot"), weights.reshape(-1))
    experts = (w1, w2, quant_config)
    return ops.reduce(_slots(hidden_states, experts, rows, activation, a1q_scale, e8m0, tuning), layout)


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
    """Return blocks `[E, max_num_tokens, K]` of prepared blocks, neither weighted nor reduced, by masked products.

    Rows past expert_num_tokens int32 `[E]` come out as zeros. Blocks of fp16 hidden states are fp32, see
    `batched_experts`. The rest is as in `deep_gemm_experts`.
    """
    size = blocks_size(hidden_states, w1, w2, "out_in")
    layout = blocks_layout(size.E, size.M, jnp.clip(expert_num_tokens, 0, size.M))
    rows = _Rows(layout, ("row", "row"), ("row", "row"))
    blocks = _slots(hidden_states, (w1, w2, quant_config), rows, activation, a1q_scale, e8m0, tuning)
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
    a1q_scale: jax.Array | None = None,
    e8m0: bool = False,
    tuning: Tuning | None = None,
) -> jax.Array:
    """Run `deep_gemm_experts` if it is allowed and the sizes are valid, else `fused_experts`."""
    tokens = (hidden_states, w1, w2, topk_weights, topk_ids)
    arguments = (*tokens, activation, global_num_experts, expert_map, apply_router_weight_on_input)
    choice = contract.choose_experts(*_case(hidden_states, w1, w2, quant_config, allow_deep_gemm, e8m0))
    if choice.member == contract.DEEP_GEMM:
        return deep_gemm_experts(*arguments, quant_config=quant_config, a1q_scale=a1q_scale, e8m0=e8m0, tuning=tuning)
    if a1q_scale is not None:
        raise InvalidInput(
            f"a1q_scale must be None where {contract.TRITON} runs ({choice.reason}), got an array; pass hidden states "
            "in bf16, fp16 or fp32"
        )
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
    """Name the experts that `triton_or_deep_gemm_experts` runs for these arrays or shapes, and the reason."""
    return contract.explain_choice(*_case(hidden_states, w1, w2, quant_config, allow_deep_gemm, e8m0))


def _case(
    hidden_states: Any, w1: Any, w2: Any, quant_config: FusedMoEQuantConfig, allow_deep_gemm: bool, e8m0: bool
) -> tuple[str | None, contract.DispatchCase]:
    not_allowed = contract.why_not_allowed(allow_deep_gemm, quant_config.use_fp8_w8a8, quant_config.block_shape)
    if e8m0 and not_allowed is not None:
        raise InvalidInput(
            f"e8m0 must be False where DeepGEMM is not allowed, got True, and {not_allowed}; leave it out, or allow it"
        )
    used = e8m0 and is_blackwell_deep_gemm_e8m0_used()
    dtypes = (w1.dtype.name, w2.dtype.name)
    sizes = (hidden_states.shape[0], w2.shape, dtypes)
    quantized = hidden_states.dtype.name == "float8_e4m3fn"
    return not_allowed, contract.DispatchCase(*sizes, e8m0_used=used, quantized=quantized)


class _Rows(NamedTuple):
    """(gather, scatter) of both products, and weights by slot."""

    layout: RaggedLayout
    first: tuple[str, str]
    second: tuple[str, str]
    weights: jax.Array | None = None


def _slots(
    hidden_states: jax.Array,
    experts: tuple[jax.Array, jax.Array, FusedMoEQuantConfig],
    rows_of: _Rows,
    activation: str | Activation,
    a1q_scale: jax.Array | None,
    e8m0: bool,
    tuning: Tuning | None,
) -> jax.Array:
    """Both products of hidden states `[.., K]`, quantised here if they are not yet."""
    reason = contract.why_not_deep_gemm(experts[2])
    if reason is not None:
        raise Unsupported(reason)
    weights = contract.check_experts(weights_of(*experts, "out_in"))
    format, rows = contract.activation_format(e8m0), hidden_states.reshape(-1, hidden_states.shape[-1])
    if contract.has_scales(hidden_states, a1q_scale):
        assert a1q_scale is not None
        x, dtype = contract.matmul_side(format, rows, a1q_scale.reshape(-1, a1q_scale.shape[-1])), "bfloat16"
    else:
        x, dtype = ops.quantize_rows(rows, format), rows.dtype.name
    tunings = tunings_of(tuning)
    first = MatmulSpec("out_in", *rows_of.first, out_dtype=dtype, tuning=tunings[0])
    dtype = blocks_dtype(hidden_states) if rows_of.weights is None else dtype
    second = MatmulSpec("out_in", *rows_of.second, out_dtype=dtype, tuning=tunings[1])
    before = ops.matmul_ogs(MatmulOperands(x, weights.gate_up, bias=weights.gate_up_bias), rows_of.layout, first)
    hidden = ops.quantize_rows(ops.activation(before, activation_of(activation, experts[2])), format)
    operands = MatmulOperands(hidden, weights.down, bias=weights.down_bias, row_weight=rows_of.weights)
    return ops.matmul_ogs(operands, rows_of.layout, second)
