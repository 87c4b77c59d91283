"""The stages of a layer one by one."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from moe_core.errors import InvalidInput, Unsupported
from moe_core.layers.rounding import refuse_expert_parallel, refuse_given_ids, require_ids
from moe_core.ops.lora.beyond import adapted_tokens
from moe_core.parallel import ParallelOutput
from moe_core.specs import RouterSpec
from moe_core.specs.operands import LoRAFactors, MoEOutput, RaggedLayout, RouterWeights, TopK
from moe_torch import ops
from moe_torch.bridge.arrays import require_dense
from moe_torch.layers.casts import at_least_float32, autocast
from moe_torch.layers.parameters import Uncast, has_own_call, is_gathered, own_part, require_here
from moe_torch.layers.weights import unmerged
from moe_torch.operators.beyond import ARRAYS
from moe_torch.operators.kinds import as_int32


def run_stages(
    layer: Any,
    x: torch.Tensor,
    token_mask: torch.Tensor | None,
    scored: torch.Tensor,
    given: torch.Tensor | None,
    lora: tuple[LoRAFactors, torch.Tensor] | None = None,
) -> MoEOutput | ParallelOutput:
    """Run router, route and experts of a layer one by one.

    scored: rows of the router, `[T, D]`. given int32 `[T, K]`: ids. None: the router chooses. lora: factors, and each
    token's adapter. ids are -1 for dropped slots, and tokens_per_expert counts slots before. With token rounding in
    training, ids are `[T, W]` of `TokenRounding.width`, and counts are those before rounding.
    """
    spec = layer.spec
    rounding = spec.token_rounding if layer.training else None
    if rounding is not None:
        refuse_expert_parallel(own_part(layer.experts, "experts").exchange is not None)
        refuse_given_ids(given is not None)
    if scored is x and given is None and lora is None and not layer._runs_stages():
        # Only experts on several ranks are between the stages.
        dense = None if layer.shared_experts is None else layer.shared_experts.operands()
        whole = {"token_mask": token_mask, "shared": dense}
        router = layer.router
        routing = RouterWeights(router.weight, router.bias, router.correction_bias)
        return layer.experts.moe(autocast(x), layer.experts.operands(), routing, layer.moe_spec, **whole)
    rows = scored
    if token_mask is not None and torch.is_grad_enabled():
        # The router's backward multiplies rows by 0 for masked tokens: rows may hold NaN.
        rows = scored.masked_fill(~token_mask[:, None], 0)
    adapters = _Adapters.of(layer, lora, token_mask)
    logits = at_least_float32(layer.router(rows, *adapters.router))
    router = own_part(layer.router, "router")
    bias = router.correction_bias if spec.correction_bias and given is None else None
    options = {"correction_bias": bias, "token_mask": token_mask}
    if rounding is not None:
        ids, weights, counts = ops.route_rounded(logits, layer.moe_spec.router, rounding, **options)
        invalid_ids = counts.new_zeros(1)
    elif spec.sparse_mixer is None:
        ids, weights = ops.route(logits, layer.moe_spec.router, ids=given, **options)
    else:
        ids, weights = _sparse_mixed(logits, spec.sparse_mixer, token_mask)
    weights = router.scaled(weights, ids)
    kept = ids
    if rounding is None:
        layout = ops.make_layout(ids, spec.num_experts)
        kept = ids if spec.capacity_factor is None else _within_capacity(ids, layout, layer)
        counts, invalid_ids = layout.group_sizes, layout.invalid_ids
    experts, shared, normed = layer.experts, layer.shared_experts, spec.norm_of_experts is not None
    computed: Any = None
    own_spec = dataclasses.replace(layer.moe_spec, router=None, lora_dropout=adapters.dropout)
    shared_alone = shared is not None and (has_own_call(shared) or len(adapters.shared) > 0)
    if spec.latent is not None or normed or has_own_call(experts) or shared_alone:
        norm = (require_here("output.norm", own_part(layer.output, "output").norm, x),) if normed else ()
        entering = x
        if spec.latent is not None:
            if torch.is_grad_enabled():
                # The projection's backward multiplies rows without an expert by 0.
                entering = x.masked_fill((kept < 0).all(1, keepdim=True), 0)
            entering = layer.before(entering)
        # Units of `fully_shard` cast tensors that they are called with.
        uncast = Uncast(weights) if is_gathered(experts) else weights
        if has_own_call(experts) and own_part(experts, "experts").exchange is not None and unmerged(experts):
            raise Unsupported(
                "experts on several ranks take no adapters of PEFT, got some; train them on one device, or merge them"
            )
        if not adapters.experts:
            output = experts(entering, kept, uncast, *norm)
        else:
            plain = dataclasses.replace(own_spec, shared_activation=None)
            computed = experts.moe(entering, experts.operands(), TopK(kept, weights), plain, **adapters.experts)
            output = computed.output
        output = output if spec.latent is None else layer.after(output)
        if shared is not None:
            output = (at_least_float32(output) + at_least_float32(shared(x, *adapters.shared))).to(output.dtype)
    else:
        limit = None if rounding is None or adapters.experts else rounding.row_limit(spec.top_k)
        moe_spec = dataclasses.replace(own_spec, row_limit=limit)
        dense = None if shared is None else shared.operands()
        computed = experts.moe(x, experts.operands(), TopK(kept, weights), moe_spec, shared=dense, **adapters.experts)
        output = computed.output
    if given is not None:
        outside = (given < -1) | (given >= spec.num_experts)
        counted = outside if token_mask is None else outside & token_mask[:, None]
        invalid_ids = counted.sum().to(torch.int32).view(1)
    invalid_ids = invalid_ids + (computed.invalid_ids if adapters.experts else adapters.invalid)
    results = output, kept, weights, logits, counts, invalid_ids
    return computed._replace(**dict(zip(MoEOutput._fields, results, strict=True))) if computed else MoEOutput(*results)


class _Adapters(NamedTuple):
    """Return the arguments of each part of a layer, and the number of tokens that name no adapter."""

    router: tuple[Any, ...] = ()
    shared: tuple[Any, ...] = ()
    experts: Mapping[str, Any] = {}
    dropout: float = 0.0
    invalid: Any = 0

    @classmethod
    def of(
        cls, layer: Any, lora: tuple[LoRAFactors, torch.Tensor] | None, token_mask: torch.Tensor | None
    ) -> _Adapters:
        if lora is None:
            return cls()
        factors, ids = lora
        options, own, parts = layer.lora.options, factors.of_experts(), {"experts": layer.experts}
        dropout, router, shared = 0.0 if factors.seed is None else options.dropout, (), ()
        tokens, invalid = None, 0
        if options.beyond_experts:
            tokens, invalid = adapted_tokens(ARRAYS, factors, ids, dropout, token_mask)
        if factors.a_router is not None:
            parts["router"], router = layer.router, (tokens,)
        if factors.a1_shared is not None or factors.a2_shared is not None:
            parts["shared_experts"], shared = layer.shared_experts, (tokens,)
        for name in [name for name, part in parts.items() if has_own_call(part) and (own or name != "experts")]:
            raise Unsupported(
                f"layer.{name} of a layer with adapters must have no hooks and wrappers, which would see none of them, "
                "got some; put them on the layer"
            )
        masked = ids if token_mask is None else ids.masked_fill(~token_mask, -1)
        experts = {} if own is None else {"lora": own, "adapter_ids": masked}
        return cls(router, shared, experts, dropout if own else 0.0, invalid)


def _sparse_mixed(
    logits: torch.Tensor, epsilon: float, token_mask: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """ids and weights `[T, 2]`, see `MoELayerSpec.sparse_mixer`."""
    left, choices, every = logits, [], torch.arange(logits.shape[1], device=logits.device)
    for _ in range(2):
        largest = left.detach().amax(-1, keepdim=True)
        far = (largest - logits.detach()) / torch.maximum(logits.detach().abs(), largest) > 2 * epsilon
        choices.append(ops.route(left.masked_fill(far, -math.inf), RouterSpec(1), token_mask=token_mask))
        left = left.masked_fill(every == choices[-1].ids, -math.inf)
    return torch.cat([one.ids for one in choices], 1), torch.cat([one.weights for one in choices], 1)


def like_x(gate_inputs: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    require_dense("gate_inputs", gate_inputs)
    if gate_inputs.shape != x.shape or gate_inputs.dtype != x.dtype:
        raise InvalidInput(
            f"gate_inputs must be {x.dtype} {tuple(x.shape)} like x, got {gate_inputs.dtype} "
            f"{tuple(gate_inputs.shape)}; pass one row for each of x"
        )
    return gate_inputs


def given_ids(
    layer: Any, x: torch.Tensor, expert_ids: torch.Tensor | None, input_ids: torch.Tensor | None
) -> torch.Tensor | None:
    """The caller's ids int32 `[T, K]`, or the table's. None: the router chooses."""
    table = own_part(layer.router, "router").table
    require_ids(layer.spec, expert_ids, input_ids)
    if expert_ids is not None:
        require_dense("expert_ids", expert_ids)
        shape, expert_ids = (*x.shape[:-1], layer.spec.top_k), as_int32(expert_ids)
        if expert_ids.shape != shape or expert_ids.dtype != torch.int32:
            raise InvalidInput(
                f"expert_ids must be integers {shape}, top_k for each token of x, got {expert_ids.dtype} "
                f"{tuple(expert_ids.shape)}; convert them with .int() and give them that shape"
            )
        return expert_ids.reshape(-1, layer.spec.top_k).contiguous()
    if table is None or input_ids is None:
        return None
    require_dense("input_ids", input_ids)
    input_ids = as_int32(input_ids)
    if input_ids.shape != x.shape[:-1] or input_ids.dtype != torch.int32:
        raise InvalidInput(
            f"input_ids must be integers {tuple(x.shape[:-1])}, one for each token of x, got "
            f"{input_ids.dtype} {tuple(input_ids.shape)}; convert them and give them that shape"
        )
    flat = input_ids.reshape(-1).long()
    inside = (flat >= 0) & (flat < len(table))
    # A token outside of the table counts as an invalid id.
    return torch.where(inside[:, None], table[flat.where(inside, 0)], layer.spec.num_experts)


def _within_capacity(ids: torch.Tensor, layout: RaggedLayout, layer: Any) -> torch.Tensor:
    """ids, with -1 for slots of a full expert, which keeps the first C = `spec.capacity(T)`. On several ranks, tokens
    of all ranks count in their order. A layout of all slots avoids E * C rows, and takes a symbolic number of tokens.
    """
    ratio, exchange = layer.spec.capacity_ratio(), own_part(layer.experts, "experts").exchange
    assert ratio is not None
    numerator, denominator = ratio
    capacity, flat = -(-ids.shape[0] * numerator // denominator), ids.view(-1)
    # -1 for all slots but the first of an expert.
    row_in_expert = layout.row_of_slot - layout.group_start[flat.clamp(min=0)]
    kept = row_in_expert < capacity
    if exchange is not None:
        kept = exchange.within_capacity(ids, row_in_expert, layout.group_sizes, ratio)
    return torch.where(kept, flat, -1).view(ids.shape)


def mask_of_tokens(x: torch.Tensor, token_mask: torch.Tensor) -> torch.Tensor:
    require_dense("token_mask", token_mask)
    if token_mask.dtype != torch.bool or token_mask.shape != x.shape[:-1]:
        raise InvalidInput(
            f"token_mask must be bool {tuple(x.shape[:-1])}, one for each token of x, got {token_mask.dtype} "
            f"{tuple(token_mask.shape)}; compare it with 0 and give it that shape"
        )
    return token_mask.reshape(-1).contiguous()
