"""Reduce the outputs of experts to one row per token."""

from __future__ import annotations

import abc
from dataclasses import dataclass

import torch

from moe_core.base.checks import require_at_least
from moe_core.errors import InvalidInput, Unsupported
from moe_torch import ops
from moe_torch.modular.stages import as_ids, as_weights, batches_of, slots_with_expert, sum_by_token, weighted_rows


class TopKWeightAndReduce(abc.ABC):
    """The result of `FusedMoEPermuteExpertsUnpermute.finalize_weight_and_reduce_impl`, compared by value."""

    @abc.abstractmethod
    def apply(
        self,
        output: torch.Tensor | None,
        fused_expert_output: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        apply_router_weight_on_input: bool,
    ) -> torch.Tensor:
        """Weight, unless the input was weighted, and reduce into output `[M, K]` (None: a new tensor), which is
        returned. topk_weights and topk_ids are `[M, topk]`. The class gives the shape of fused_expert_output."""


def _output_for(output: torch.Tensor | None, fused_expert_output: torch.Tensor, topk_ids: torch.Tensor) -> torch.Tensor:
    shape = (topk_ids.shape[0], fused_expert_output.shape[-1])
    if output is None:
        return fused_expert_output.new_empty(shape)
    if output.shape != shape:
        raise InvalidInput(f"output must be {list(shape)}, a row per token, got {list(output.shape)}; pass such memory")
    return output


@dataclass(frozen=True)
class TopKWeightAndReduceNoOP(TopKWeightAndReduce):
    """The experts have weighted and reduced: fused_expert_output is `[M, K]`, copied unless it is the output."""

    def apply(self, output, fused_expert_output, topk_weights, topk_ids, apply_router_weight_on_input) -> torch.Tensor:
        if output is None or output is fused_expert_output:
            return fused_expert_output
        if output.shape != fused_expert_output.shape:
            raise InvalidInput(
                f"fused_expert_output must be {list(output.shape)}, weighted and reduced, got "
                f"{list(fused_expert_output.shape)}; finalize it with TopKWeightAndReduceContiguous"
            )
        return output.copy_(fused_expert_output)


@dataclass(frozen=True)
class TopKWeightAndReduceDelegate(TopKWeightAndReduce):
    """The experts have done neither, and prepare_finalize chooses by its format."""

    def apply(self, output, fused_expert_output, topk_weights, topk_ids, apply_router_weight_on_input) -> torch.Tensor:
        raise Unsupported(
            "TopKWeightAndReduceDelegate leaves the choice to prepare_finalize, whose finalize must replace it, by "
            "TopKWeightAndReduceContiguous for example"
        )


@dataclass(frozen=True)
class TopKWeightAndReduceContiguous(TopKWeightAndReduce):
    """fused_expert_output is `[M, topk, K]` or `[M * topk, K]`, by slot, not weighted.

    Each row times its weight is rounded to its dtype. The sum is in fp32 in the order k = 0..topk-1, with one cast.
    Rows with a negative id are not read.
    """

    def apply(self, output, fused_expert_output, topk_weights, topk_ids, apply_router_weight_on_input) -> torch.Tensor:
        ids = as_ids(topk_ids)
        rows = fused_expert_output.reshape(-1, fused_expert_output.shape[-1])
        if rows.shape[0] != ids.numel():
            raise InvalidInput(
                f"fused_expert_output must be [M, topk, K] with [M, topk] = {list(ids.shape)}, got "
                f"{list(fused_expert_output.shape)}; pass a row for every slot"
            )
        output = _output_for(output, fused_expert_output, ids)
        if not apply_router_weight_on_input:
            rows = weighted_rows(rows, as_weights(topk_weights, ids).reshape(-1, 1))
        sum_by_token(output, rows, slots_with_expert(ids), ids.shape[1], "slot")
        return output


@dataclass(frozen=True)
class TopKWeightAndReduceNaiveBatched(TopKWeightAndReduce):
    """fused_expert_output is `[E, max_num_tokens, K]`, placed by `BatchedPrepareAndFinalize`, not weighted.

    rank's experts are E ids from rank * E on. Rounding as in TopKWeightAndReduceContiguous.
    """

    rank: int = 0

    def __post_init__(self) -> None:
        require_at_least("rank", self.rank, 0)

    def apply(self, output, fused_expert_output, topk_weights, topk_ids, apply_router_weight_on_input) -> torch.Tensor:
        num_experts, max_rows, _ = fused_expert_output.shape
        ids = as_ids(topk_ids)
        placed = PlacedRows(batches_of(ids_of_rank(ids, self.rank, num_experts), num_experts, max_rows))
        return placed.apply(output, fused_expert_output, topk_weights, ids, apply_router_weight_on_input)


@dataclass(frozen=True, eq=False)
class PlacedRows(TopKWeightAndReduce):
    """`TopKWeightAndReduceNaiveBatched` with a known batched layout."""

    layout: ops.RaggedLayout

    def apply(self, output, fused_expert_output, topk_weights, topk_ids, apply_router_weight_on_input) -> torch.Tensor:
        output = _output_for(output, fused_expert_output, topk_ids)
        if not output.shape[0]:
            return output
        rows, places = fused_expert_output.reshape(-1, fused_expert_output.shape[-1]), self.layout.row_of_slot
        spec = self.layout.spec
        if rows.shape[0] != spec.capacity:
            raise InvalidInput(
                f"fused_expert_output must be [{spec.num_experts}, {spec.max_rows}, K], the blocks that were prepared, "
                f"got {list(fused_expert_output.shape)}; pass the rows of these blocks"
            )
        weights = None if apply_router_weight_on_input else as_weights(topk_weights, topk_ids)
        sum_placed(output, rows, places, self.layout.spec.top_k, weights)
        return output


def sum_placed(
    output: torch.Tensor, rows: torch.Tensor, places: torch.Tensor, top_k: int, weights: torch.Tensor | None
) -> None:
    """Write to output `[M, D]` each token's rows `[R, D]` times fp32 weights `[M, topk]`, as in
    TopKWeightAndReduceContiguous. places: int32 `[M * topk]`, the row of each slot, -1 = none."""
    if weights is None:
        sum_by_token(output, rows, places, top_k, "row")
        return
    by_slot = weighted_rows(rows[places.clamp(min=0).long()], weights.reshape(-1, 1))
    slots = torch.arange(places.shape[0], dtype=torch.int32, device=places.device)
    sum_by_token(output, by_slot, torch.where(places >= 0, slots, -1), top_k, "slot")


def ids_of_rank(topk_ids: torch.Tensor, rank: int, num_experts: int) -> torch.Tensor:
    """Map the rank's num_experts global ids int32 to local ones, others to -1."""
    local_ids = topk_ids - rank * num_experts
    return torch.where((local_ids >= 0) & (local_ids < num_experts), local_ids, -1)
