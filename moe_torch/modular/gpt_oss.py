"""gpt-oss experts in the Standard format, as classes and functions."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Iterator
from typing import Any

import torch

from moe_core.base.checks import require_flag
from moe_core.errors import InvalidInput, Unsupported
from moe_core.modular import quant_config as core
from moe_core.modular.activations import activation_of, width_after
from moe_core.modular.schemes import activation_quantization
from moe_core.modular.types import ProblemSize, SlotContext, moe_problem_size
from moe_core.modular.weights import expert_weights
from moe_core.specs.matmul import Activation
from moe_core.specs.moe import MoESpec
from moe_core.specs.operands import RouterLogits
from moe_core.specs.routing import RouterSpec
from moe_torch import ops
from moe_torch.bridge.options import require_instance
from moe_torch.modular.calls import ExpertsCall, require_written
from moe_torch.modular.experts import WorkspaceShapes
from moe_torch.modular.prepare_finalize import weighted_input
from moe_torch.modular.quant_config import FUSED_MOE_UNQUANTIZED_CONFIG, FusedMoEQuantConfig
from moe_torch.modular.routing_data import GatherIndx, RoutingData, ScatterIndx, layout_and_weights, make_routing_data
from moe_torch.modular.stages import Stages, local_ids, sum_by_token
from moe_torch.modular.stored import Stored, as_stored
from moe_torch.modular.triton_experts import GroupedExperts, view_as, weights_left
from moe_torch.ops import RaggedLayout, make_layout


class BaseOAITritonExperts(GroupedExperts):
    """Experts with w1 `[E, K, N]` and w2 `[E, F, K]` (`in_out`) that weight and reduce inside. The stages run on the
    result of an overridden `_make_routing_data`."""

    default_weight_layout = "in_out"

    def _make_routing_data(
        self, topk_ids: torch.Tensor, topk_weights: torch.Tensor, num_local_experts: int
    ) -> tuple[RoutingData, GatherIndx, ScatterIndx]:
        """Sort rows by expert. topk_ids are local, -1 = not here."""
        return make_routing_data(topk_ids, topk_weights, num_local_experts)

    def _routing_is_ours(self) -> bool:
        # It may also be set on the object.
        overridden = "_make_routing_data" in self.__dict__
        return not overridden and type(self)._make_routing_data is BaseOAITritonExperts._make_routing_data

    def _route(self, call: ExpertsCall, num_local_experts: int) -> tuple[RaggedLayout, torch.Tensor]:
        """The layout, and weights by slot, fp32 `[M * topk]`."""
        weights = weights_left(call)
        if self._routing_is_ours():
            return make_layout(call.topk_ids, num_local_experts, expert_map=call.expert_map), weights.reshape(-1)
        ids = local_ids(call.topk_ids, call.expert_map)
        return layout_and_weights(*self._make_routing_data(ids, weights, num_local_experts))


class OAITritonExperts(BaseOAITritonExperts):
    """Fuse the activation into the first product: one composed plan unless `_make_routing_data` is overridden."""

    def shapes(self, size: ProblemSize, F: int) -> WorkspaceShapes:
        return (0, 0), (size.M * size.topk, F), (size.M, size.K)

    def run(self, call: ExpertsCall) -> None:
        self.require_input(call)
        if self._routing_is_ours():
            self.run_composed(call)
            return
        self.require_experts(call)
        if self._lora_context is not None:
            raise Unsupported(
                f"_make_routing_data of {type(self).__name__} must not be overridden with adapters, which run in one "
                "operator, got both; derive from UnfusedOAITritonExperts"
            )
        E, M, N, _, topk = self.size_of(call)
        hidden = view_as(call.workspace2, M * topk, self.adjust_N_for_activation(N, call.activation))
        layout, row_weight = self._route(call, E)
        stages = self.stages(self.weights(call.w1, call.w2))
        stages.run(call.output, call.hidden_states, layout, row_weight, self.activation_of(call.activation), hidden)


class _Running(threading.local):
    def __init__(self) -> None:
        # Guards of compiled programs record where an attribute is.
        self.context: SlotContext | None = None


_running = _Running()


@contextlib.contextmanager
def _reading(context: SlotContext) -> Iterator[None]:
    outer = _running.context
    try:
        _running.context = context
        yield
    finally:
        _running.context = outer


class UnfusedOAITritonExperts(BaseOAITritonExperts):
    """Run stage by stage, so that `activation` and `moe_sum` may be overridden, for LoRA for example.

    matmul 1 -> `activation` on rows by slot `[M * topk, N]` -> matmul 2 -> `moe_sum`. Stages round to the dtype of the
    hidden states, once more than OAITritonExperts. Rows of slots without an expert are exact zeros after both products.
    """

    calls = ("activation", "moe_sum", "weights")
    places = (("token", "slot"), ("slot", "slot"))

    @property
    def context(self) -> SlotContext:
        """Tokens, layout and weights of the rows. Raises InvalidInput outside of `activation` and `moe_sum`."""
        if _running.context is None:
            raise InvalidInput(
                "context must be read inside of activation or moe_sum, called by apply, got a call from elsewhere; "
                "read it there"
            )
        return _running.context

    def shapes(self, size: ProblemSize, F: int) -> WorkspaceShapes:
        slots = size.M * size.topk
        return (slots, F), (slots, max(size.N, size.K)), (size.M, size.K)

    def moe_sum(self, input: torch.Tensor, output: torch.Tensor) -> None:
        """Write to output `[M, K]` the sum over topk of input `[M, topk, K]`, in fp32 and in order, one cast."""
        M, topk, K = input.shape
        every = torch.arange(M * topk, dtype=torch.int32, device=input.device)
        sum_by_token(output, input.reshape(-1, K), every, topk, "slot")

    def hidden_rows(self, stages, x, layout, activation):
        """In memory of its own."""
        before = stages.product(1, {}, x, layout, self.places[0])
        rows = x.new_empty(before.shape[0], self.adjust_N_for_activation(before.shape[1], activation))
        ones = torch.ones(before.shape[0], dtype=torch.float32, device=x.device)
        with _reading(SlotContext(x, layout, ones)):
            self.activation(activation, rows, before)
        return rows, layout.row_of_slot

    def run(self, call: ExpertsCall) -> None:
        self.require_input(call)
        self.require_experts(call)
        E, M, N, K, topk = self.size_of(call)
        layout, row_weight = self._route(call, E)
        stages = self.stages(self.weights(call.w1, call.w2))
        memory = {"y": view_as(call.workspace2, M * topk, N)}
        before = stages.product(1, memory, call.hidden_states, layout, self.places[0])
        rows = view_as(call.workspace13, M * topk, self.adjust_N_for_activation(N, call.activation))
        adapters = self.context_of(call)
        lora: dict[str, Any] = {"w1": call.w1, "w2": call.w2, "num_tokens": M, "top_k_num": topk}
        if adapters is not None:
            lora |= {"topk_weights": row_weight}
            routing: Any = {"topk_ids": call.topk_ids, "expert_map": call.expert_map}
            routing |= {"gate_layout": self.activation_of(call.activation).gate_layout}
            pairs, *rest = self.apply_w13_lora(adapters, y=before, x=call.hidden_states, **routing, **lora)
            names = ("expert_ids_lora", "num_tokens_post_padded_lora", "token_lora_mapping")
            lora |= {"sorted_token_ids_lora": pairs, **dict(zip(names, rest, strict=True))}
        context = SlotContext(call.hidden_states, layout, row_weight)
        with _reading(context):
            require_written("activation", self.activation(call.activation, rows, before), rows)
        memory = {"y": view_as(call.workspace2, M * topk, K)}
        slots = stages.product(2, memory, rows, layout, self.places[1], row_weight=row_weight)
        if adapters is not None:
            self.apply_w2_lora(adapters, y=slots, x=rows, **lora)
        with _reading(dataclasses.replace(context, activated=rows)):
            require_written("moe_sum", self.moe_sum(slots.view(M, topk, K), call.output), call.output)


def _activation(
    activation: str | Activation, alpha: float, limit: float | None, config: core.FusedMoEQuantConfig
) -> Activation:
    chosen = activation_of(activation, config)
    if (alpha, limit) == (1.702, 7.0):
        return chosen
    if isinstance(activation, Activation) or chosen.name != "swiglu_oai" or config.constants != (None, None, None):
        raise InvalidInput(
            f"swiglu_alpha and swiglu_limit belong to activation='swiglu_oai' without gemm1_alpha and "
            f"gemm1_clamp_limit, got {alpha} and {limit} for {activation!r}; leave them out"
        )
    return dataclasses.replace(chosen, alpha=alpha, limit=limit)


def _stored(w1: Any, w2: Any, quant_config: core.FusedMoEQuantConfig | None) -> Stored:
    """The weights with a configuration. Raises InvalidInput for unexplained bytes."""
    config = FUSED_MOE_UNQUANTIZED_CONFIG if quant_config is None else quant_config
    require_instance("quant_config", config, core.FusedMoEQuantConfig)
    stored = as_stored(w1, w2, FusedMoEQuantConfig.of(config), "in_out")
    if stored.w1.dtype == torch.uint8 and stored.config.scheme is None:
        raise InvalidInput(
            "quant_config must say how w1 is quantised, as w1 is torch.uint8, got none; mxfp4 weights with "
            "their scales are FusedMoEQuantConfig('mxfp4_w4a16', w1_scale=..., w2_scale=...)"
        )
    return stored


def _memory_for(output: torch.Tensor | None, hidden_states: torch.Tensor) -> torch.Tensor:
    """The start of output as memory, as in the original. None: new memory."""
    if output is None:
        return hidden_states.new_empty(hidden_states.shape)
    if output.shape == hidden_states.shape:
        return output
    if not output.is_contiguous() or output.numel() < hidden_states.numel():
        raise InvalidInput(
            f"output_tensor must be contiguous with at least the elements of {list(hidden_states.shape)}, got "
            f"{list(output.shape)} with strides {output.stride()}; pass such memory, or None"
        )
    return output.view(-1)[: hidden_states.numel()].view(hidden_states.shape)


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
    """Return output `[M, K]` of hidden_states `[M, K]` for a routing of `make_routing_data`.

    output_tensor: the result goes to its start. w1: `[E, K, N]`, a K-contiguous view, or a Tensor around mxfp4 codes.
    w2: `[E, F, K]`, likewise. quant_config: with biases in fp32. activation: `activation_of` gives the order of
    columns. swiglu_alpha, swiglu_limit: of swiglu_oai. None: no clamp. apply_router_weight_on_input: weight
    hidden_states once, in fp32 (topk 1). global_num_experts: -1, or at least E. expert_map: None. Apply it to the ids
    before `make_routing_data`. intermediate_cache: memory of M * topk * F elements.
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
    w1, w2, config, weight_layout = _stored(w1, w2, quant_config)
    weights = expert_weights(w1, w2, config, weight_layout)
    layout, row_weight = layout_and_weights(routing_data, gather_indx, scatter_indx)
    tokens = hidden_states.shape[0]
    size = moe_problem_size(hidden_states.shape, w1.shape, w2.shape, (tokens, topk), weight_layout)
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
    chosen = _activation(activation, swiglu_alpha, swiglu_limit, config)
    output = _memory_for(output_tensor, hidden_states)
    hidden = intermediate_cache
    if hidden is not None:
        hidden = view_as(hidden, tokens * topk, width_after(size.N, chosen))
    left = None if apply_router_weight_on_input else row_weight
    stages = Stages(weights, weight_layout, activations=activation_quantization(config))
    stages.run(output, hidden_states, layout, left, chosen, hidden)
    return output


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
    """Return output `[M, K]` of hidden_states `[M, K]` routed by gating_output `[M, E_global]`: one composed plan.

    renormalize: top-k, then softmax over the chosen logits in fp32. False: softmax, then top-k. expert_map: int32
    `[E_global]`, global ids to local ones, or -1. global_num_experts: -1, or E_global. The rest is as in
    `triton_kernel_fused_experts`.
    """
    require_flag("renormalize", renormalize)
    if global_num_experts not in (-1, gating_output.shape[-1]):
        raise InvalidInput(
            f"global_num_experts must be -1 or the {gating_output.shape[-1]} columns of gating_output, got "
            f"{global_num_experts}; leave it out"
        )
    router = RouterSpec(topk, order="topk_then_softmax" if renormalize else "softmax_then_topk")
    w1, w2, config, weight_layout = _stored(w1, w2, quant_config)
    spec = MoESpec(
        activation_of(activation, config),
        router,
        weight_layout,
        apply_router_weight_on_input=apply_router_weight_on_input,
        activations=activation_quantization(config),
    )
    routing = RouterLogits(gating_output.to(torch.float32).contiguous())
    weights = expert_weights(w1, w2, config, weight_layout)
    return ops.moe(hidden_states, weights, routing, spec, expert_map=expert_map).output
