"""Experts in the family's layout, tokens in the Standard format."""

from __future__ import annotations

import torch

from moe_core.modular import ExpertTokensMetadata, FusedMoEActivationFormat
from moe_core.specs import Activation
from moe_torch.modular.experts import WorkspaceShapes
from moe_torch.modular.grouped_experts import GroupedExperts
from moe_torch.modular.weight_and_reduce import TopKWeightAndReduce, TopKWeightAndReduceNoOP


class TritonExperts(GroupedExperts):
    """w1 `[E, N, K]`, w2 `[E, K, F]` (weight_layout `out_in`): one composed plan from ids to weighted, reduced tokens.

    The activation is fused into the first product, so that what it reads is never rounded or stored.
    """

    default_weight_layout = "out_in"
    fuses_activation = True

    @property
    def activation_formats(self) -> tuple[FusedMoEActivationFormat, FusedMoEActivationFormat]:
        return FusedMoEActivationFormat.Standard, FusedMoEActivationFormat.Standard

    def supports_expert_map(self) -> bool:
        return True

    def finalize_weight_and_reduce_impl(self) -> TopKWeightAndReduce:
        return TopKWeightAndReduceNoOP()

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
        return (M * topk, K), (M * topk, self.adjust_N_for_activation(N, activation)), (M, K)

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
            slots=workspace13,
        )
