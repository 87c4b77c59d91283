"""Experts as pure functions: fused, open between the stages, and batched."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from moe_core.errors import InvalidInput
from moe_core.modular.activations import activation_of
from moe_core.modular.quant_config import FUSED_MOE_UNQUANTIZED_CONFIG, FusedMoEQuantConfig
from moe_core.modular.schemes import activation_quantization
from moe_core.modular.types import ProblemSize, SlotContext, moe_problem_size, number_of_ids
from moe_core.modular.weights import expert_weights
from moe_core.ops.quantize.rows import chooses_one_scale
from moe_core.specs.matmul import Activation, MatmulSpec
from moe_core.specs.moe import MoESpec
from moe_core.specs.operands import ExpertWeights, MatmulOperands, RaggedLayout, TopK
from moe_core.specs.tuning import Tuning, tunings_of
from moe_jax import ops
from moe_jax.bridge.calls import require_array, require_type
from moe_jax.modular.prepare_finalize import blocks_layout, left_routing, rows_by_slot

jax.tree_util.register_dataclass(
    SlotContext, data_fields=["hidden_states", "layout", "row_weight", "activated"], meta_fields=[]
)
#: `activation_function(activation, input, context) -> output`: rows by slot `[M * topk, N]` to `[M * topk, F]`.
ActivationFunction = Callable[[Any, jax.Array, SlotContext], jax.Array]
#: `moe_sum(input, context) -> output`: weighted slots `[M, topk, K]` to `[M, K]`.
SumFunction = Callable[[jax.Array, SlotContext], jax.Array]


def weights_of(w1: jax.Array, w2: jax.Array, quant_config: FusedMoEQuantConfig, weight_layout: str) -> ExpertWeights:
    require_array("w1", w1)
    require_array("w2", w2)
    require_type("quant_config", quant_config, FusedMoEQuantConfig)
    return expert_weights(w1, w2, quant_config, weight_layout)


def require_experts(num_local: int, global_num_experts: int, expert_map: jax.Array | None) -> None:
    if expert_map is not None:
        require_array("expert_map", expert_map)
    if number_of_ids(global_num_experts, num_local, expert_map) != num_local and expert_map is None:
        raise InvalidInput(
            f"global_num_experts must be {num_local} or -1, got {global_num_experts}; pass an expert_map of all"
        )


def blocks_size(hidden_states: jax.Array, w1: jax.Array, w2: jax.Array, weight_layout: str) -> ProblemSize:
    require_array("hidden_states", hidden_states)
    if hidden_states.ndim != 3:
        raise InvalidInput(
            f"hidden_states must be [E, max_num_tokens, K], got {hidden_states.shape}; call prepare_batched"
        )
    return moe_problem_size(hidden_states.shape, w1.shape, w2.shape, (0, 1), weight_layout)


def blocks_dtype(hidden_states: Any) -> str:
    """Of batched experts' results: bf16 of quantised hidden states, fp32 of fp16 ones, which may pass 65,504."""
    dtype: str = hidden_states.dtype.name
    return {"float16": "float32", "float8_e4m3fn": "bfloat16"}.get(dtype, dtype)


def fused_experts(
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
    quant_config: FusedMoEQuantConfig = FUSED_MOE_UNQUANTIZED_CONFIG,
    weight_layout: str = "out_in",
    tuning: Tuning | None = None,
) -> jax.Array:
    """Return output `[M, K]`, weighted and reduced, of prepared hidden_states `[M, K]`: one composed plan.

    w1: `[E, N, K]`, or `[E, K, N]` with weight_layout `in_out`. w2: `[E, K, F]`, or `[E, F, K]`.
    apply_router_weight_on_input: `prepare` has applied the weight.
    """
    weights, ids = left_routing(topk_weights, topk_ids, apply_router_weight_on_input)
    experts = weights_of(w1, w2, quant_config, weight_layout)
    require_experts(w1.shape[0], global_num_experts, expert_map)
    spec = MoESpec(
        activation_of(activation, quant_config),
        weight_layout=weight_layout,
        tuning=tuning,
        activations=activation_quantization(quant_config),
    )
    return ops.moe(hidden_states, experts, TopK(ids, weights), spec, expert_map=expert_map).output


def _product(
    operands: MatmulOperands, layout: RaggedLayout, spec: MatmulSpec, quant_config: FusedMoEQuantConfig, scale: Any
) -> jax.Array:
    format = activation_quantization(quant_config)
    if format is not None:
        spec = dataclasses.replace(spec, out_dtype=spec.out_dtype or operands.x.dtype.name)
        # Rows without a slot are unwritten and must not enter one common scale.
        used_by = layout.slot_of_row if spec.gather == "row" else None
        if used_by is None and chooses_one_scale(format, scale is not None):
            used_by = layout.row_of_slot
        operands = dataclasses.replace(operands, x=ops.quantize_rows(operands.x, format, scales=scale, used_by=used_by))
    return ops.matmul_ogs(operands, layout, spec)


def activate(activation: str | Activation, input: jax.Array, context: SlotContext) -> jax.Array:
    """Apply the activation to rows `[M * topk, N]`: the default of `unfused_experts`."""
    return ops.activation(input, activation_of(activation))


def moe_sum(input: jax.Array, context: SlotContext) -> jax.Array:
    """Return output `[M, K]`: the sum over topk of `[M, topk, K]` in fp32 and in order, one cast."""
    tokens, top_k, columns = input.shape
    every = jnp.arange(tokens * top_k, dtype=jnp.int32)
    return ops.reduce(input.reshape(-1, columns), rows_by_slot(every, top_k))


def unfused_experts(
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
    activation_function: ActivationFunction = activate,
    moe_sum: SumFunction = moe_sum,
    quant_config: FusedMoEQuantConfig = FUSED_MOE_UNQUANTIZED_CONFIG,
    weight_layout: str = "in_out",
    tuning: Tuning | None = None,
) -> jax.Array:
    """Run `fused_experts` stage by stage, with w1 `[E, K, N]` and w2 `[E, F, K]`. LoRA goes into the two functions.

    Both get a `SlotContext`. Stages round to the dtype of the hidden states. Slots without an expert are zeros after
    both products.
    """
    weights, ids = left_routing(topk_weights, topk_ids, apply_router_weight_on_input)
    experts = weights_of(w1, w2, quant_config, weight_layout)
    require_array("hidden_states", hidden_states)
    size = moe_problem_size(hidden_states.shape, w1.shape, w2.shape, ids.shape, weight_layout)
    require_experts(size.E, global_num_experts, expert_map)
    layout = ops.make_layout(ids, size.E, expert_map=expert_map)
    tunings = tunings_of(tuning)
    first = MatmulSpec(weight_layout, "token", "slot", tuning=tunings[0])
    operands = MatmulOperands(hidden_states, experts.gate_up, bias=experts.gate_up_bias)
    before = _product(operands, layout, first, quant_config, experts.gate_up_input_scale)
    context = SlotContext(hidden_states, layout, weights.reshape(-1))
    if activation_function is activate:
        activation = activation_of(activation, quant_config)
    rows = activation_function(activation, before, context)
    second = MatmulSpec(weight_layout, "slot", "slot", tuning=tunings[1])
    operands = MatmulOperands(rows, experts.down, bias=experts.down_bias, row_weight=context.row_weight)
    slots = _product(operands, layout, second, quant_config, experts.down_input_scale)
    context = dataclasses.replace(context, activated=rows)
    return moe_sum(slots.reshape(size.M, size.topk, size.K), context)


def batched_experts(
    hidden_states: jax.Array,
    w1: jax.Array,
    w2: jax.Array,
    expert_num_tokens: jax.Array,
    activation: str | Activation = "silu",
    *,
    quant_config: FusedMoEQuantConfig = FUSED_MOE_UNQUANTIZED_CONFIG,
    weight_layout: str = "out_in",
    tuning: Tuning | None = None,
) -> jax.Array:
    """Return blocks `[E, max_num_tokens, K]` of prepared blocks, neither weighted nor reduced.

    w1: `[E, N, K]`. w2: `[E, K, F]`. expert_num_tokens: int32 `[E]`. Rows past it are not read, and come out as zeros.
    Blocks of fp16 hidden states are fp32: rows beyond 65,504 come back into range with their router weights.
    """
    experts = weights_of(w1, w2, quant_config, weight_layout)
    size = blocks_size(hidden_states, w1, w2, weight_layout)
    require_array("expert_num_tokens", expert_num_tokens)
    layout, tunings = blocks_layout(size.E, size.M, expert_num_tokens), tunings_of(tuning)
    first = MatmulSpec(weight_layout, activation=activation_of(activation, quant_config), tuning=tunings[0])
    x = hidden_states.reshape(size.E * size.M, hidden_states.shape[2])
    operands = MatmulOperands(x, experts.gate_up, bias=experts.gate_up_bias)
    hidden = _product(operands, layout, first, quant_config, experts.gate_up_input_scale)
    second = MatmulSpec(weight_layout, out_dtype=blocks_dtype(hidden_states), tuning=tunings[1])
    operands = MatmulOperands(hidden, experts.down, bias=experts.down_bias)
    blocks = _product(operands, layout, second, quant_config, experts.down_input_scale)
    return blocks.reshape(size.E, size.M, size.K)
