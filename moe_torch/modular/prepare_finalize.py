"""What comes before the experts and after them: the interface, and the class for one device."""

from __future__ import annotations

import abc
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from moe_core.errors import InvalidInput
from moe_core.modular import FusedMoEActivationFormat
from moe_torch.modular.rows import as_weights, weighted_rows
from moe_torch.modular.weight_and_reduce import (
    TopKWeightAndReduce,
    TopKWeightAndReduceContiguous,
    TopKWeightAndReduceDelegate,
    TopKWeightAndReduceNoOP,
)

_DELEGATE = TopKWeightAndReduceDelegate()


@dataclass(frozen=True, eq=False)
class PreparedTokens:
    """What `prepare` gives; unpacks to `(a1q, a1q_scale, expert_num_tokens)`.

    a1q: the activations in the class's format. expert_num_tokens: int32 `[E]`, of the batched format. topk_ids,
    topk_weights `[M', topk]`: of the tokens in a1q where these are others than the caller's, as after a dispatch to
    other ranks; None = the caller's. handle: whatever `finalize` of the same class wants to know.
    """

    a1q: torch.Tensor
    a1q_scale: torch.Tensor | None = None
    expert_num_tokens: torch.Tensor | None = None
    topk_ids: torch.Tensor | None = None
    topk_weights: torch.Tensor | None = None
    handle: Any = None

    def __iter__(self) -> Iterator[torch.Tensor | None]:
        return iter((self.a1q, self.a1q_scale, self.expert_num_tokens))


class FusedMoEPrepareAndFinalize(abc.ABC):
    """Brings tokens to the experts and their outputs back. Objects keep nothing between calls.

    Expert parallelism is one subclass: `prepare` sends tokens to the ranks of their experts (all-gather or all-to-all)
    and returns what arrived, with its ids and weights and a handle; `finalize` reduces and sends back (reduce-scatter
    or all-to-all). The modular kernel passes the one's result to the other.
    """

    @property
    @abc.abstractmethod
    def activation_format(self) -> FusedMoEActivationFormat:
        """The format of a1q."""

    @abc.abstractmethod
    def prepare(
        self,
        a1: torch.Tensor,
        a1_scale: torch.Tensor | None,
        a2_scale: torch.Tensor | None,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        num_experts: int,
        expert_map: torch.Tensor | None,
        apply_router_weight_on_input: bool,
    ) -> PreparedTokens:
        """Weight a1 `[M, K]` if asked to (topk 1), and dispatch. Never writes to a1. num_experts: all ranks'.

        a1_scale, a2_scale: static scales of the activations before each product. A class that quantises while it
        dispatches needs them; those here leave quantising to the experts, which have them in their configuration.
        """

    @abc.abstractmethod
    def finalize(
        self,
        output: torch.Tensor,
        fused_expert_output: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        apply_router_weight_on_input: bool,
        weight_and_reduce_impl: TopKWeightAndReduce = _DELEGATE,
        prepared: PreparedTokens | None = None,
    ) -> None:
        """Combine into output `[M, K]`, weighted unless the weight was on the input.

        weight_and_reduce_impl: what is left to do, as the experts say; by default this class chooses.
        prepared: what `prepare` gave for the same tokens.
        """

    def writes_output(self, weight_and_reduce_impl: TopKWeightAndReduce) -> bool:
        """Whether experts of that kind may write the caller's output themselves, so that nothing is left to combine."""
        return False

    @property
    def maps_experts(self) -> bool:
        """Whether `prepare` applies expert_map, so that the experts must not."""
        return False


def weighted_input(a1: torch.Tensor, topk_weights: torch.Tensor, apply_router_weight_on_input: bool) -> torch.Tensor:
    """a1, or with the flag a new tensor: a1 times the weight of its token in fp32, rounded once (topk 1 only)."""
    if not apply_router_weight_on_input:
        return a1
    if topk_weights.shape[1] != 1:
        raise InvalidInput(
            f"topk must be 1 with apply_router_weight_on_input, got {topk_weights.shape[1]}; weight the output instead"
        )
    return weighted_rows(a1, as_weights(topk_weights, topk_weights))


class MoEPrepareAndFinalizeNoEP(FusedMoEPrepareAndFinalize):
    """One device, format Standard: tokens stay where they are."""

    @property
    def activation_format(self) -> FusedMoEActivationFormat:
        return FusedMoEActivationFormat.Standard

    def prepare(
        self,
        a1: torch.Tensor,
        a1_scale: torch.Tensor | None,
        a2_scale: torch.Tensor | None,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        num_experts: int,
        expert_map: torch.Tensor | None,
        apply_router_weight_on_input: bool,
    ) -> PreparedTokens:
        return PreparedTokens(weighted_input(a1, topk_weights, apply_router_weight_on_input))

    def finalize(
        self,
        output: torch.Tensor,
        fused_expert_output: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        apply_router_weight_on_input: bool,
        weight_and_reduce_impl: TopKWeightAndReduce = _DELEGATE,
        prepared: PreparedTokens | None = None,
    ) -> None:
        chosen = weight_and_reduce_impl
        if isinstance(chosen, TopKWeightAndReduceDelegate):
            chosen = TopKWeightAndReduceContiguous()
        chosen.apply(output, fused_expert_output, topk_weights, topk_ids, apply_router_weight_on_input)

    def writes_output(self, weight_and_reduce_impl: TopKWeightAndReduce) -> bool:
        return isinstance(weight_and_reduce_impl, TopKWeightAndReduceNoOP)
