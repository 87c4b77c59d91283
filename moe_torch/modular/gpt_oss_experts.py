"""Experts in gpt-oss's layout, tokens in the Standard format: fused, and open between the stages."""

from __future__ import annotations

import dataclasses
import threading

import torch

from moe_core.errors import InvalidInput
from moe_core.modular import ExpertTokensMetadata, FusedMoEActivationFormat, SlotContext, activation_of
from moe_core.specs import Activation, MatmulSpec
from moe_torch.modular.experts import WorkspaceShapes
from moe_torch.modular.grouped_experts import GroupedExperts, view_as, weights_left
from moe_torch.modular.routing_data import (
    GatherIndx,
    RoutingData,
    ScatterIndx,
    layout_and_weights,
    make_routing_data,
)
from moe_torch.modular.rows import local_ids, sum_by_token
from moe_torch.modular.weight_and_reduce import TopKWeightAndReduce, TopKWeightAndReduceNoOP
from moe_torch.ops import RaggedLayout, make_layout


class BaseOAITritonExperts(GroupedExperts):
    """w1 `[E, K, N]`, w2 `[E, F, K]` (weight_layout `in_out`); weights and reduction inside.

    `_make_routing_data` may be overridden: the stages then run on what it returns.
    """

    default_weight_layout = "in_out"

    @property
    def activation_formats(self) -> tuple[FusedMoEActivationFormat, FusedMoEActivationFormat]:
        return FusedMoEActivationFormat.Standard, FusedMoEActivationFormat.Standard

    def supports_expert_map(self) -> bool:
        return True

    def finalize_weight_and_reduce_impl(self) -> TopKWeightAndReduce:
        return TopKWeightAndReduceNoOP()

    def _make_routing_data(
        self, topk_ids: torch.Tensor, topk_weights: torch.Tensor, num_local_experts: int
    ) -> tuple[RoutingData, GatherIndx, ScatterIndx]:
        """Rows sorted by expert; topk_ids are local, -1 = not here."""
        return make_routing_data(topk_ids, topk_weights, num_local_experts)

    def _routing_is_ours(self) -> bool:
        # One may be put on the object too.
        overridden = "_make_routing_data" in self.__dict__
        return not overridden and type(self)._make_routing_data is BaseOAITritonExperts._make_routing_data

    def _route(
        self,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        num_local_experts: int,
        expert_map: torch.Tensor | None,
    ) -> tuple[RaggedLayout, torch.Tensor]:
        """The layout of `_make_routing_data`, and its weights by slot, fp32 `[M * topk]`."""
        if self._routing_is_ours():
            # Its layout and weights, without the arrays that only others read.
            return make_layout(topk_ids, num_local_experts, expert_map=expert_map), topk_weights.reshape(-1)
        ids = local_ids(topk_ids, expert_map)
        return layout_and_weights(*self._make_routing_data(ids, topk_weights, num_local_experts))


class OAITritonExperts(BaseOAITritonExperts):
    """The activation fused into the first product; one composed plan unless `_make_routing_data` is overridden."""

    fuses_activation = True

    def workspace_shapes(
        self,
        M: int,
        N: int,
        K: int,
        topk: int,
        global_num_experts: int,
        local_num_experts: int,
        expert_tokens_meta: ExpertTokensMetadata | None,
        activation: str | Activation,
    ) -> WorkspaceShapes:
        return (0, 0), (M * topk, self.adjust_N_for_activation(N, activation)), (M, K)

    def apply(
        self,
        output: torch.Tensor,
        hidden_states: torch.Tensor,
        w1: torch.Tensor,
        w2: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        activation: str | Activation,
        global_num_experts: int,
        expert_map: torch.Tensor | None,
        a1q_scale: torch.Tensor | None,
        a2_scale: torch.Tensor | None,
        workspace13: torch.Tensor,
        workspace2: torch.Tensor,
        expert_tokens_meta: ExpertTokensMetadata | None,
        apply_router_weight_on_input: bool,
    ) -> None:
        """workspace13 is empty; expert_tokens_meta is not needed: rows are counted from the ids."""
        self.require_input(hidden_states, w1, a1q_scale, a2_scale)
        if self._routing_is_ours():
            self.run_composed(
                output,
                hidden_states,
                w1,
                w2,
                topk_weights,
                topk_ids,
                activation,
                global_num_experts,
                expert_map,
                apply_router_weight_on_input,
                hidden=workspace2,
            )
            return
        self.require_experts(w1, global_num_experts, expert_map)
        E, M, N, _, topk = self.moe_problem_size(hidden_states, w1, w2, topk_ids)
        hidden = view_as(workspace2, M * topk, self.adjust_N_for_activation(N, activation))
        left = weights_left(topk_weights, apply_router_weight_on_input)
        layout, row_weight = self._route(topk_ids, left, E, expert_map)
        stages = self.stages(self.weights(w1, w2))
        stages.run(output, hidden_states, layout, row_weight, activation_of(activation), hidden)


class _Running(threading.local):
    """What the injection points of the `apply` that runs on this thread are told."""

    def __init__(self) -> None:
        # Not an attribute of the class: compiled programs are guarded by where they find it.
        self.context: SlotContext | None = None


_running = _Running()


class UnfusedOAITritonExperts(BaseOAITritonExperts):
    """Stage by stage, with two places to inject something, LoRA for example: override `activation` and `moe_sum`.

    matmul 1 without activation -> `activation` on rows by slot `[M * topk, N]` -> matmul 2 -> `moe_sum`. What lies
    between the stages is rounded to the dtype of the hidden states: once more than in OAITritonExperts. Rows of slots
    without an expert are exact zeros after either product. While they run, `context` says what the rows belong to.
    """

    @property
    def context(self) -> SlotContext:
        """The tokens, layout and weights of the rows that `activation` or `moe_sum` was called with.

        Raises InvalidInput where neither is called by `apply` on this thread.
        """
        if _running.context is None:
            raise InvalidInput(
                "context must be read inside of activation or moe_sum, called by apply, got a call from elsewhere; "
                "read it there"
            )
        return _running.context

    def workspace_shapes(
        self,
        M: int,
        N: int,
        K: int,
        topk: int,
        global_num_experts: int,
        local_num_experts: int,
        expert_tokens_meta: ExpertTokensMetadata | None,
        activation: str | Activation,
    ) -> WorkspaceShapes:
        return (M * topk, self.adjust_N_for_activation(N, activation)), (M * topk, max(N, K)), (M, K)

    def products(self, activation: str | Activation) -> tuple[MatmulSpec, MatmulSpec]:
        first = MatmulSpec(self.weight_layout, "token", "slot", tuning=self.matmul_tuning(1))
        return first, MatmulSpec(self.weight_layout, "slot", "slot", tuning=self.matmul_tuning(2))

    def moe_sum(self, input: torch.Tensor, output: torch.Tensor) -> None:
        """Write to output `[M, K]` the sum over topk of input `[M, topk, K]`, in fp32 and in order, one cast.

        Every row of input is read: those of slots without an expert are zeros.
        """
        M, topk, K = input.shape
        every = torch.arange(M * topk, dtype=torch.int32, device=input.device)
        sum_by_token(output, input.reshape(-1, K), every, topk, "slot")

    def apply(
        self,
        output: torch.Tensor,
        hidden_states: torch.Tensor,
        w1: torch.Tensor,
        w2: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        activation: str | Activation,
        global_num_experts: int,
        expert_map: torch.Tensor | None,
        a1q_scale: torch.Tensor | None,
        a2_scale: torch.Tensor | None,
        workspace13: torch.Tensor,
        workspace2: torch.Tensor,
        expert_tokens_meta: ExpertTokensMetadata | None,
        apply_router_weight_on_input: bool,
    ) -> None:
        """expert_tokens_meta is not needed: rows are counted from the ids."""
        self.require_input(hidden_states, w1, a1q_scale, a2_scale)
        self.require_experts(w1, global_num_experts, expert_map)
        E, M, N, K, topk = self.moe_problem_size(hidden_states, w1, w2, topk_ids)
        left = weights_left(topk_weights, apply_router_weight_on_input)
        layout, row_weight = self._route(topk_ids, left, E, expert_map)
        stages = self.stages(self.weights(w1, w2))
        memory = {"y": view_as(workspace2, M * topk, N)}
        before = stages.first(memory, hidden_states, layout, None, "token", "slot")
        rows = view_as(workspace13, M * topk, self.adjust_N_for_activation(N, activation))
        outer, context = _running.context, SlotContext(hidden_states, layout, row_weight)
        try:
            _running.context = context
            self.activation(activation, rows, before)
            # The memory of what the activation has read.
            memory = {"y": view_as(workspace2, M * topk, K)}
            slots = stages.second(memory, rows, layout, row_weight, "slot", "slot")
            _running.context = dataclasses.replace(context, activated=rows)
            self.moe_sum(slots.view(M, topk, K), output)
        finally:
            _running.context = outer
