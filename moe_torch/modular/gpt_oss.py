"""gpt-oss experts as functions."""

from __future__ import annotations

import torch

from moe_core.checks import require_flag
from moe_core.errors import InvalidInput
from moe_core.modular import (
    FUSED_MOE_UNQUANTIZED_CONFIG,
    FusedMoEQuantConfig,
    activation_of,
    activation_quantization,
    expert_weights,
    moe_problem_size,
    width_after,
)
from moe_core.operands import RouterLogits
from moe_core.specs import Activation, MoESpec, RouterSpec
from moe_torch import ops
from moe_torch.modular.grouped_experts import view_as
from moe_torch.modular.prepare_finalize import weighted_input
from moe_torch.modular.routing_data import GatherIndx, RoutingData, ScatterIndx, layout_and_weights
from moe_torch.modular.stages import Stages
from moe_torch.options import require_instance

_LAYOUT = "in_out"


def _activation(activation: str | Activation, alpha: float, limit: float | None) -> Activation:
    """The named activation; InvalidInput for an alpha or a limit of another one than swiglu_oai."""
    chosen = activation_of(activation)
    if isinstance(activation, Activation) or chosen.name != "swiglu_oai":
        if (alpha, limit) != (1.702, 7.0):
            raise InvalidInput(
                f"swiglu_alpha and swiglu_limit belong to activation='swiglu_oai', got {alpha} and {limit} for "
                f"{activation!r}; leave them out"
            )
        return chosen
    return Activation("swiglu_oai", gate_layout="interleaved", alpha=alpha, limit=limit)


def _configuration(w1: torch.Tensor, quant_config: FusedMoEQuantConfig | None) -> FusedMoEQuantConfig:
    """The caller's, or that of no quantisation; InvalidInput for weights in bytes that no scheme explains."""
    config = FUSED_MOE_UNQUANTIZED_CONFIG if quant_config is None else quant_config
    require_instance("quant_config", config, FusedMoEQuantConfig)
    if w1.dtype == torch.uint8 and config.scheme is None:
        raise InvalidInput(
            "quant_config must say how w1 is quantised, as w1 is torch.uint8, got none; mxfp4 weights with "
            "their scales are FusedMoEQuantConfig('mxfp4_w4a16', w1_scale=..., w2_scale=...)"
        )
    return config


def triton_kernel_fused_experts(
    output_tensor: torch.Tensor | None,
    hidden_states: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    routing_data: RoutingData,
    gather_indx: GatherIndx,
    scatter_indx: ScatterIndx,
    topk: int,
    activation: str | Activation = "swiglu_oai",
    quant_config: FusedMoEQuantConfig | None = None,
    swiglu_alpha: float = 1.702,
    swiglu_limit: float | None = 7.0,
    apply_router_weight_on_input: bool = False,
    global_num_experts: int = -1,
    expert_map: torch.Tensor | None = None,
    intermediate_cache: torch.Tensor | None = None,
    a1q_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """output `[M, K]` of hidden_states `[M, K]` for a routing of `make_routing_data`.

    output_tensor: memory for the result, None = new. w1 `[E, K, N]`, w2 `[E, F, K]`; biases (fp32) in quant_config.
    activation: swiglu_oai unless another is asked for by name; columns as in `activation_of`. swiglu_alpha,
    swiglu_limit: of swiglu_oai (None = no clamp). apply_router_weight_on_input: on hidden_states, in fp32, once (topk
    1). global_num_experts: -1, or at least E. intermediate_cache: memory of M * topk * F elements, None = new.
    Raises InvalidInput, among others for an expert_map: it belongs on the ids before `make_routing_data`; and
    Unsupported where no kernel exists.
    """
    require_instance("routing_data", routing_data, RoutingData)
    require_instance("gather_indx", gather_indx, GatherIndx)
    require_instance("scatter_indx", scatter_indx, ScatterIndx)
    require_flag("apply_router_weight_on_input", apply_router_weight_on_input)
    if expert_map is not None:
        raise InvalidInput(
            "expert_map must be None, as routing_data holds local experts, got a tensor; map the ids before "
            "make_routing_data"
        )
    if a1q_scale is not None:
        raise InvalidInput("a1q_scale must be None where activations are not quantised, got a tensor; leave it out")
    config = _configuration(w1, quant_config)
    weights = expert_weights(w1, w2, config, _LAYOUT)
    layout, row_weight = layout_and_weights(routing_data, gather_indx, scatter_indx)
    tokens = hidden_states.shape[0]
    size = moe_problem_size(hidden_states.shape, w1.shape, w2.shape, (tokens, topk), _LAYOUT)
    if (layout.spec.num_tokens, layout.spec.top_k, layout.spec.num_experts) != (tokens, topk, size.E):
        raise InvalidInput(
            f"routing_data must be of {tokens} tokens, topk {topk} and {size.E} experts, got "
            f"{layout.spec.num_tokens}, {layout.spec.top_k} and {layout.spec.num_experts}; route the same tokens"
        )
    if global_num_experts != -1 and global_num_experts < size.E:
        raise InvalidInput(
            f"global_num_experts must be -1 or at least the {size.E} experts of w1, got {global_num_experts}; leave it "
            "out"
        )
    if apply_router_weight_on_input:
        hidden_states = weighted_input(hidden_states, row_weight.view(tokens, topk), True)
    chosen = _activation(activation, swiglu_alpha, swiglu_limit)
    if output_tensor is None:
        output_tensor = hidden_states.new_empty(hidden_states.shape)
    hidden = intermediate_cache
    if hidden is not None:
        hidden = view_as(hidden, tokens * topk, width_after(size.N, chosen))
    left = None if apply_router_weight_on_input else row_weight
    stages = Stages(weights, _LAYOUT, activations=activation_quantization(config))
    stages.run(output_tensor, hidden_states, layout, left, chosen, hidden)
    return output_tensor


def triton_kernel_moe_forward(
    hidden_states: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    gating_output: torch.Tensor,
    topk: int,
    renormalize: bool,
    activation: str | Activation = "swiglu_oai",
    quant_config: FusedMoEQuantConfig | None = None,
    apply_router_weight_on_input: bool = False,
    global_num_experts: int = -1,
    expert_map: torch.Tensor | None = None,
) -> torch.Tensor:
    """output `[M, K]` of hidden_states `[M, K]` routed by gating_output `[M, E_global]`: one composed plan.

    renormalize: top-k, then softmax over the chosen logits; else softmax, then top-k. Logits are taken as fp32. w1, w2,
    activation, quant_config: as in `triton_kernel_fused_experts`. expert_map int32 `[E_global]`: global ids to local
    ones, or -1; global_num_experts: -1, or E_global. Raises InvalidInput, Unsupported.
    """
    require_flag("renormalize", renormalize)
    if global_num_experts not in (-1, gating_output.shape[-1]):
        raise InvalidInput(
            f"global_num_experts must be -1 or the {gating_output.shape[-1]} columns of gating_output, got "
            f"{global_num_experts}; leave it out"
        )
    router = RouterSpec(topk, order="topk_then_softmax" if renormalize else "softmax_then_topk")
    config = _configuration(w1, quant_config)
    spec = MoESpec(
        activation_of(activation),
        router,
        _LAYOUT,
        apply_router_weight_on_input=apply_router_weight_on_input,
        activations=activation_quantization(config),
    )
    routing = RouterLogits(gating_output.to(torch.float32).contiguous())
    weights = expert_weights(w1, w2, config, _LAYOUT)
    return ops.moe(hidden_states, weights, routing, spec, expert_map=expert_map).output
