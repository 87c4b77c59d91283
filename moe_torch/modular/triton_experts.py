"""Experts in the family's layout, on Triton kernels: tokens in the Standard and in the batched format."""

from __future__ import annotations

from typing import Any

from moe_core.base.checks import require_at_least
from moe_core.errors import InvalidInput
from moe_core.modular.types import ExpertTokensMetadata, FusedMoEActivationFormat, ProblemSize
from moe_core.modular.weights import activation_of
from moe_torch.modular.experts import ExpertsCall, WorkspaceShapes
from moe_torch.modular.grouped_experts import GroupedExperts, view_as
from moe_torch.modular.stages import batched_layout
from moe_torch.modular.weight_and_reduce import TopKWeightAndReduce, TopKWeightAndReduceDelegate


class TritonExperts(GroupedExperts):
    """w1 `[E, N, K]`, w2 `[E, K, F]` (weight_layout `out_in`): one composed plan from ids to weighted, reduced tokens.

    The activation is fused into the first product, so that what it reads is never rounded or stored.
    """

    default_weight_layout = "out_in"
    fuses_activation = True

    def shapes(self, size: ProblemSize, F: int) -> WorkspaceShapes:
        slots = size.M * size.topk
        return (slots, size.K), (slots, F), (size.M, size.K)

    def run(self, call: ExpertsCall) -> None:
        self.require_input(call)
        self.run_composed(call, slots=call.workspace13)


class BatchedExperts(GroupedExperts):
    """hidden_states and output `[E, max_num_tokens * num_dispatchers, K]`; w1 `[E, N, K]`, w2 `[E, K, F]`.

    Counts are `expert_tokens_meta.expert_num_tokens`, and stay on the device; rows past them are never read, and come
    out as zeros. Outputs are neither weighted nor reduced: `finalize` does both, with the topk_weights and topk_ids of
    the tokens. Further arguments are those of experts in the Standard format.
    """

    activation_formats = property(lambda self: (FusedMoEActivationFormat.BatchedExperts,) * 2)

    def __init__(self, max_num_tokens: int, num_dispatchers: int = 1, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        require_at_least("max_num_tokens", max_num_tokens, 1)
        require_at_least("num_dispatchers", num_dispatchers, 1)
        self.max_num_tokens, self.num_dispatchers = max_num_tokens, num_dispatchers

    def supports_chunking(self) -> bool:
        return False

    def supports_expert_map(self) -> bool:
        return False

    def finalize_weight_and_reduce_impl(self) -> TopKWeightAndReduce:
        return TopKWeightAndReduceDelegate()

    def shapes(self, size: ProblemSize, F: int) -> WorkspaceShapes:
        rows = self.max_num_tokens * self.num_dispatchers
        return (0, 0), (size.E, rows, F), (size.E, rows, size.K)

    def require_blocks(self, call: ExpertsCall) -> tuple[ProblemSize, ExpertTokensMetadata]:
        """The sizes and counts of a call; InvalidInput where it is not in the batched format."""
        size, rows = self.size_of(call), self.max_num_tokens * self.num_dispatchers
        if call.hidden_states.dim() != 3 or rows != size.M:
            raise InvalidInput(
                f"hidden_states must be [{size.E}, {rows}, {size.K}], got {list(call.hidden_states.shape)}; prepare "
                "them with the same max_num_tokens"
            )
        if call.expert_map is not None:
            raise InvalidInput("expert_map must be None in the batched format, got a tensor; prepare applies it")
        if call.expert_tokens_meta is None:
            raise InvalidInput("expert_tokens_meta must say how many rows of each expert are used, got None; pass it")
        return size, call.expert_tokens_meta


class BatchedTritonExperts(BatchedExperts):
    """`BatchedExperts` on the kernels of this library, the activation fused into the first product."""

    default_weight_layout = "out_in"
    fuses_activation = True

    def run(self, call: ExpertsCall) -> None:
        self.require_input(call)
        (E, rows, N, K, _), meta = self.require_blocks(call)
        weights, layout = self.weights(call.w1, call.w2), batched_layout(E, rows, meta.expert_num_tokens)
        stages, x = self.stages(weights), call.hidden_states.reshape(E * rows, K)
        memory = {"y": view_as(call.workspace2, E * rows, self.adjust_N_for_activation(N, call.activation))}
        hidden = stages.product(1, memory, x, layout, ("row", "row"), activation_of(call.activation))
        places = {"y": call.output.view(E * rows, K)}
        found = stages.product(2, places, hidden, layout, ("row", "row"))
        if found is not places["y"]:
            call.output.copy_(found.view_as(call.output))
