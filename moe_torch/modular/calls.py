"""Records of the arguments of a modular kernel's parts, and the parameters that each generation published."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch

from moe_core.errors import InvalidInput
from moe_core.specs.matmul import Activation
from moe_torch.modular.generations.tokens import ExpertTokensMetadata
from moe_torch.modular.quant_config import FUSED_MOE_UNQUANTIZED_CONFIG, FusedMoEQuantConfig
from moe_torch.modular.weight_and_reduce import TopKWeightAndReduce, TopKWeightAndReduceDelegate

Handle = TypeVar("Handle")


@dataclass(frozen=True, eq=False)
class PreparedTokens:
    """The result of `prepare`. Unpacks to `(a1q, a1q_scale, expert_num_tokens)`.

    expert_num_tokens: int32 `[E]` or ExpertTokensMetadata. topk_ids and topk_weights: `[M', topk]`, for the tokens in
    a1q. None: the caller's. handle: for `finalize`. batch: slots and experts of all ranks, if sums must have the order
    of one device. adapter_ids: int32, of the rows of a1q, where `set_lora_context` gave adapters.
    """

    a1q: torch.Tensor
    a1q_scale: torch.Tensor | None = None
    expert_num_tokens: torch.Tensor | ExpertTokensMetadata | None = None
    topk_ids: torch.Tensor | None = None
    topk_weights: torch.Tensor | None = None
    handle: Any = None
    batch: tuple[int, int] | None = None
    adapter_ids: torch.Tensor | None = None

    def __iter__(self) -> Iterator[Any]:
        return iter((self.a1q, self.a1q_scale, self.expert_num_tokens))


def handle_of(part: Any, prepared: PreparedTokens | None, kind: type[Handle]) -> Handle:
    handle = None if prepared is None else prepared.handle
    if not isinstance(handle, kind):
        raise InvalidInput(
            f"prepared must be what prepare of {type(part).__name__} gave for the same tokens, got "
            f"{type(prepared).__name__}; pass it on, as FusedMoEModularKernel does"
        )
    return handle


class PrepareCall(NamedTuple):
    """Arguments of `prepare` in all published generations, in the newest order."""

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
    extra_prepare_args: None = None


class FinalizeCall(NamedTuple):
    output: torch.Tensor
    fused_expert_output: torch.Tensor
    topk_weights: torch.Tensor
    topk_ids: torch.Tensor
    apply_router_weight_on_input: bool
    weight_and_reduce_impl: TopKWeightAndReduce = TopKWeightAndReduceDelegate()
    prepared: PreparedTokens | None = None
    extra_finalize_args: None = None


class ShapesCall(NamedTuple):
    """Arguments of `workspace_shapes`. a: the tokens of the call, aq: as prepared."""

    M: int
    N: int
    K: int
    topk: int
    global_num_experts: int
    local_num_experts: int
    expert_tokens_meta: ExpertTokensMetadata | None
    activation: str | Activation
    a: torch.Tensor
    aq: torch.Tensor
    num_experts: int


class ExpertsCall(NamedTuple):
    """Arguments of `apply`, in the newest order. Weight scales, zero points and expert_num_tokens: older ones."""

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
    w1_scale: torch.Tensor | None = None
    w2_scale: torch.Tensor | None = None
    w1_zp: torch.Tensor | None = None
    w2_zp: torch.Tensor | None = None
    expert_num_tokens: torch.Tensor | None = None
    extra_expert_args: None = None


def _orders(text: str, *counts: int) -> tuple[tuple[str, ...], ...]:
    names = tuple(text.split())
    return tuple(names[:count] for count in (len(names), *counts))


_SCALES = "w1_scale w2_scale w1_zp w2_zp a1q_scale a2_scale workspace13 workspace2"
_ROUTED = "activation global_num_experts expert_map"
_FIRST_PREPARE = "a1 a1_scale a2_scale topk_weights topk_ids num_experts expert_map apply_router_weight_on_input"
#: Published parameters of each method, newest first. Releases in between left out the last ones.
PUBLISHED: dict[type[NamedTuple], tuple[tuple[str, ...], ...]] = {
    PrepareCall: (
        *_orders(" ".join(PrepareCall._fields[:8]), 7),
        *_orders(f"{_FIRST_PREPARE} quant_config extra_prepare_args", 9, 8),
    ),
    FinalizeCall: (
        FinalizeCall._fields[:6],
        *_orders(" ".join((*FinalizeCall._fields[:6], "extra_finalize_args"))),
        *_orders(" ".join(FinalizeCall._fields[:7]), 5),
    ),
    ShapesCall: (
        *_orders(" ".join(ShapesCall._fields[:8]), 7),
        *_orders("a aq M N K topk global_num_experts local_num_experts expert_tokens_meta", 8),
        *_orders("a M N K topk num_experts"),
    ),
    ExpertsCall: (
        ExpertsCall._fields[:15],
        *_orders(
            f"output hidden_states w1 w2 topk_weights topk_ids {_ROUTED} {_SCALES} expert_tokens_meta "
            "apply_router_weight_on_input extra_expert_args",
            19,
        ),
        *_orders(f"output hidden_states w1 w2 topk_ids {_ROUTED} {_SCALES} expert_num_tokens"),
        *_orders(f"hidden_states w1 w2 topk_ids {_ROUTED} {_SCALES} expert_num_tokens"),
    ),
}
#: Parameters of the newest `apply`.
NEWEST = len(PUBLISHED[ExpertsCall][0])
#: Those of older generations.
OLDER = ExpertsCall._fields[NEWEST:]


def taking(record: Any) -> Callable[[Callable[[Any, Any], Any]], Callable[..., Any]]:
    """The modular kernel reads the record's fields from the signature."""
    parameters = [inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)]
    for name in record._fields:
        if name.startswith("extra_"):  # another kernel's, None in ours
            continue
        default = record._field_defaults.get(name, inspect.Parameter.empty)
        parameters.append(inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=default))

    def decorate(method: Callable[[Any, Any], Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def published(self: Any, *arguments: Any, **named: Any) -> Any:
            return method(self, record(*arguments, **named))

        published.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return published

    return decorate


def require_written(name: str, result: Any, output: Any) -> None:
    """Raise InvalidInput for a returned value that nobody would read. `output` itself may be returned."""
    if result is not None and result is not output:
        raise InvalidInput(f"{name} must write its result and return None, got {type(result).__name__}; write it there")


def finished(halves: Any, name: str = "an asynchronous method") -> Any:
    """Call the hook of an asynchronous method, if any, then its receiver."""
    hook, receiver = halves if isinstance(halves, tuple) and len(halves) == 2 else (None, halves)
    if not callable(receiver) or not (hook is None or callable(hook)):
        got = type(halves).__name__
        raise InvalidInput(f"{name} must return a receiver, or a hook and a receiver, got {got}; return functions")
    if hook is not None:
        require_written(f"the hook of {name}", hook(), None)
    return receiver()
