"""Experts in the family's layout, tokens in the batched format."""

from __future__ import annotations

import torch

from moe_core.checks import require_at_least
from moe_core.errors import InvalidInput
from moe_core.modular import (
    FUSED_MOE_UNQUANTIZED_CONFIG,
    ExpertTokensMetadata,
    FusedMoEActivationFormat,
    FusedMoEQuantConfig,
    activation_of,
)
from moe_core.specs import Activation, Tuning
from moe_torch.modular.experts import WorkspaceShapes
from moe_torch.modular.grouped_experts import GroupedExperts, view_as
from moe_torch.modular.rows import batched_layout
from moe_torch.modular.weight_and_reduce import TopKWeightAndReduce, TopKWeightAndReduceDelegate


class BatchedTritonExperts(GroupedExperts):
    """hidden_states and output `[E, max_num_tokens * num_dispatchers, K]`; w1 `[E, N, K]`, w2 `[E, K, F]`.

    Counts are `expert_tokens_meta.expert_num_tokens`, and stay on the device; rows past them are never read, and come
    out as zeros. Outputs are neither weighted nor reduced: `finalize` does both.
    """

    default_weight_layout = "out_in"
    fuses_activation = True

    def __init__(
        self,
        max_num_tokens: int,
        num_dispatchers: int = 1,
        quant_config: FusedMoEQuantConfig = FUSED_MOE_UNQUANTIZED_CONFIG,
        *,
        weight_layout: str | None = None,
        tuning: Tuning | None = None,
    ) -> None:
        super().__init__(quant_config, weight_layout=weight_layout, tuning=tuning)
        require_at_least("max_num_tokens", max_num_tokens, 1)
        require_at_least("num_dispatchers", num_dispatchers, 1)
        self.max_num_tokens, self.num_dispatchers = max_num_tokens, num_dispatchers

    @property
    def activation_formats(self) -> tuple[FusedMoEActivationFormat, FusedMoEActivationFormat]:
        return FusedMoEActivationFormat.BatchedExperts, FusedMoEActivationFormat.BatchedExperts

    def supports_chunking(self) -> bool:
        return False

    def supports_expert_map(self) -> bool:
        return False

    def finalize_weight_and_reduce_impl(self) -> TopKWeightAndReduce:
        return TopKWeightAndReduceDelegate()

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
        rows = self.max_num_tokens * self.num_dispatchers
        hidden = (local_num_experts, rows, self.adjust_N_for_activation(N, activation))
        return (0, 0), hidden, (local_num_experts, rows, K)

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
        """topk_weights and topk_ids are those of the tokens, and `finalize` reads them: rows have been placed."""
        self.require_input(hidden_states, w1, a1q_scale, a2_scale)
        E, rows, N, K, _ = self.moe_problem_size(hidden_states, w1, w2, topk_ids)
        if hidden_states.dim() != 3 or rows != self.max_num_tokens * self.num_dispatchers:
            raise InvalidInput(
                f"hidden_states must be [{E}, {self.max_num_tokens * self.num_dispatchers}, {K}], got "
                f"{list(hidden_states.shape)}; prepare them with the same max_num_tokens"
            )
        if expert_map is not None:
            raise InvalidInput("expert_map must be None in the batched format, got a tensor; prepare applies it")
        if expert_tokens_meta is None:
            raise InvalidInput("expert_tokens_meta must say how many rows of each expert are used, got None; pass it")
        weights, layout = self.weights(w1, w2), batched_layout(E, rows, expert_tokens_meta.expert_num_tokens)
        stages, x = self.stages(weights), hidden_states.reshape(E * rows, K)
        memory = {"y": view_as(workspace2, E * rows, self.adjust_N_for_activation(N, activation))}
        hidden = stages.first(memory, x, layout, activation_of(activation), "row", "row")
        places = {"y": output.view(E * rows, K)}
        found = stages.second(places, hidden, layout, None, "row", "row")
        if found is not places["y"]:
            output.copy_(found.view_as(output))
