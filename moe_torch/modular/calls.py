"""Records of prepare, finalize and apply."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from moe_core.modular.types import ExpertTokensMetadata
from moe_core.specs.matmul import Activation
from moe_torch.modular.quant_config import FUSED_MOE_UNQUANTIZED_CONFIG, FusedMoEQuantConfig
from moe_torch.modular.weight_and_reduce import TopKWeightAndReduce, TopKWeightAndReduceDelegate


@dataclass(frozen=True, eq=False)
class PreparedTokens:
    """The result of `prepare`. Unpacks to `(a1q, a1q_scale, expert_num_tokens)`.

    expert_num_tokens: int32 `[E]`, batched format only. topk_ids and topk_weights: `[M', topk]`, for the tokens in a1q.
    None: the caller's. handle: for `finalize`. batch: slots and experts of all ranks, if sums must have the order of
    one device.
    """

    a1q: torch.Tensor
    a1q_scale: torch.Tensor | None = None
    expert_num_tokens: torch.Tensor | None = None
    topk_ids: torch.Tensor | None = None
    topk_weights: torch.Tensor | None = None
    handle: Any = None
    batch: tuple[int, int] | None = None

    def __iter__(self) -> Iterator[torch.Tensor | None]:
        return iter((self.a1q, self.a1q_scale, self.expert_num_tokens))


class PrepareCall(NamedTuple):
    """Arguments of `prepare` in all published generations, in the newest order.

    a1 `[M, K]`. topk_weights and topk_ids `[M, topk]`. num_experts: of all ranks. num_local_experts: of w1. a1_scale,
    a2_scale: static activation scales of each product.
    """

    a1: torch.Tensor
    topk_weights: torch.Tensor
    topk_ids: torch.Tensor
    num_experts: int
    expert_map: torch.Tensor | None = None
    apply_router_weight_on_input: bool = False
    quant_config: FusedMoEQuantConfig = FUSED_MOE_UNQUANTIZED_CONFIG
    defer_input_quant: bool = True
    num_local_experts: int | None = None
    a1_scale: torch.Tensor | None = None
    a2_scale: torch.Tensor | None = None


class FinalizeCall(NamedTuple):
    output: torch.Tensor
    fused_expert_output: torch.Tensor
    topk_weights: torch.Tensor
    topk_ids: torch.Tensor
    apply_router_weight_on_input: bool
    weight_and_reduce_impl: TopKWeightAndReduce = TopKWeightAndReduceDelegate()
    prepared: PreparedTokens | None = None


class ExpertsCall(NamedTuple):
    output: torch.Tensor
    hidden_states: torch.Tensor
    w1: torch.Tensor
    w2: torch.Tensor
    topk_weights: torch.Tensor
    topk_ids: torch.Tensor
    activation: str | Activation
    global_num_experts: int
    expert_map: torch.Tensor | None
    a1q_scale: torch.Tensor | None
    a2_scale: torch.Tensor | None
    workspace13: torch.Tensor
    workspace2: torch.Tensor
    expert_tokens_meta: ExpertTokensMetadata | None
    apply_router_weight_on_input: bool


def taking(record: Any) -> Callable[[Callable[[Any, Any], Any]], Callable[..., Any]]:
    """The modular kernel reads the record's fields from the signature."""
    parameters = [inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)]
    for name in record._fields:
        default = record._field_defaults.get(name, inspect.Parameter.empty)
        parameters.append(inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=default))

    def decorate(method: Callable[[Any, Any], Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def published(self: Any, *arguments: Any, **named: Any) -> Any:
            return method(self, record(*arguments, **named))

        published.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return published

    return decorate
