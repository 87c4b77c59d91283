"""The expert-parallel forward of one rank."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable
from typing import Any, cast

import torch

from moe_core.base.arrays import require_spec
from moe_core.errors import InvalidInput, Unsupported
from moe_core.parallel import ExchangePlan, ParallelOutput, Placement, plan_exchange
from moe_core.parallel.bounds import is_direct
from moe_core.parallel.operands import (
    experts_digest,
    require_adapters,
    require_given,
    require_row_scales,
    require_scores,
)
from moe_core.parallel.spec import refuse_chunks
from moe_core.specs.moe import MoESpec
from moe_core.specs.operands import (
    ExpertWeights,
    LoRAFactors,
    MoEOperands,
    RouterLogits,
    RouterWeights,
    SharedExpert,
    TopK,
    map_arrays,
    named_arrays,
)
from moe_core.specs.routing import LogitsSpec
from moe_torch import ops
from moe_torch.bridge.arrays import array_spec, require_dense, require_same_device
from moe_torch.bridge.options import DTYPE_NAMES, TORCH_DTYPES, require_instance
from moe_torch.bridge.private import graph_break, uncompiled
from moe_torch.operators.kinds import as_float32, as_int32
from moe_torch.operators.routed import routed
from moe_torch.operators.stages import ROUTE
from moe_torch.parallel.adapters import RankAdapters
from moe_torch.parallel.axes import ExpertParallel as ExpertParallel
from moe_torch.parallel.axes import require_ranks, require_tokens, tell_peers
from moe_torch.parallel.calls.compiled import Calls as Calls
from moe_torch.parallel.calls.compiled import across_ranks, run_by_operators, traceable
from moe_torch.parallel.calls.joined import run_again
from moe_torch.parallel.calls.known import Call, Steps, repeated
from moe_torch.parallel.dense import shared_output
from moe_torch.parallel.function import combine, dispatch, divided, uses_of
from moe_torch.parallel.group import Ranks
from moe_torch.parallel.hosts import plan_routes
from moe_torch.parallel.moving import MovingPlacement
from moe_torch.parallel.owner import Owner, Results
from moe_torch.parallel.route import ExchangeCall, require_room
from moe_torch.parallel.tensor import Brought, bias_once, counts_of


def moe(
    x: torch.Tensor,
    experts: ExpertWeights,
    routing: RouterWeights | RouterLogits | TopK,
    spec: MoESpec,
    *,
    parallel: ExpertParallel,
    placement: Placement | MovingPlacement,
    shared: SharedExpert | None = None,
    token_mask: torch.Tensor | None = None,
    lora: LoRAFactors | None = None,
    adapter_ids: torch.Tensor | None = None,
) -> ParallelOutput:
    """Run `moe_torch.moe` over ranks that share the experts. All of them call it, in the same order.

    Output and gradients have the bits of `moe_torch.moe` on one device with all experts and all ranks' tokens, in
    the order of ranks (`moe_core.parallel.plan_exchange` names exceptions). Gradients of a router are of this rank's
    tokens: add them over ranks, as data parallelism does. With modes `all_to_all` and `peer`, ranks may have different
    numbers of tokens. The router's tiles, and with `peer` on a GPU also the experts', are then chosen for W times this
    rank's tokens, unless `spec.tuning` has the expected_tokens of all ranks.

    Args:
        x: bf16, fp16 or fp32 `[T, D]`, the tokens of this rank.
        experts: of this rank, `[L, ...]`, in the order of `placement.owners[rank]`. Empty places are not read, and may
            be left out at the end. With `parallel.tensor`, the rank's slices of
            `moe_core.parallel.tensor.split_experts`; down_bias is whole.
        routing: over all E experts, of this rank's tokens.
        spec: as for `moe_torch.moe`.
        parallel: the ranks, and how rows travel.
        placement: the experts of each rank. A `MovingPlacement` may change between calls, for inference.
        shared: a dense expert that every token visits, on its own rank.
        token_mask: bool `[T]`, as for `moe_torch.moe`.
        lora: adapters. Factors are of this rank's experts, `[S, L, ...]`, or shared by all, with gradients as a
            router's; scale and ranks are of all E experts. With `parallel.tensor`, the slices of
            `moe_core.parallel.tensor.split_factors`. Dropout has a mask for each rank's rows.
        adapter_ids: int32 `[T]`, with lora: the adapter of each token here, -1 = none.

    Returns:
        a ParallelOutput. `overflow` counts rows beyond a bound, see `exchange.on_overflow`.

    Raises:
        InvalidInput: wrong arguments, or ranks that disagree about sizes, options or the placement.
        PeerFailed: another rank raised before the exchange. On a GPU, the host never waits with `all_gather`, `padded`
            and `peer`: there the output is NaN if ranks disagree, and if a rank raised, the others wait for their
            group's timeout.
        Unsupported: requests that exchanges cannot serve, and training of experts with replicas.
        RuntimeError: a message failed, because a rank died or is late.
    """
    operands = MoEOperands(x, experts, routing, token_mask, None, shared, lora, adapter_ids)
    return called(operands, spec, parallel, placement, Calls())


def called(
    operands: MoEOperands, spec: MoESpec, parallel: Any, placement: Placement | MovingPlacement, calls: Calls
) -> ParallelOutput:
    """See `moe`. Traced code has an operator where it can, else a graph break."""
    if torch.compiler.is_compiling() and traceable(operands, parallel, placement):
        return across_ranks(operands, spec, parallel, cast(Placement, placement), calls)
    return exchanged(operands, spec, parallel, placement, calls)


@run_by_operators
@graph_break
def exchanged(
    operands: MoEOperands,
    spec: MoESpec,
    parallel: ExpertParallel,
    placement: Placement | MovingPlacement,
    calls: Calls,
) -> ParallelOutput:
    """Run the call, and count it."""
    require_instance("parallel", parallel, ExpertParallel)
    require_instance("placement", placement, (Placement, MovingPlacement))
    moving = placement if isinstance(placement, MovingPlacement) else None
    placement = placement.current if isinstance(placement, MovingPlacement) else placement
    if moving is not None and parallel.split.size > 1:
        raise Unsupported("placement must be a Placement beside a tensor axis, got a MovingPlacement; leave tensor out")
    if moving is not None and operands.lora is not None:
        raise Unsupported("lora must be None with a MovingPlacement, as factors stay on their ranks; pass a Placement")
    if operands.lora is None and operands.adapter_ids is not None:
        raise InvalidInput("adapter_ids must be None without lora, got an array; pass lora too")
    ranks = parallel.ranks((calls.layer and f"layer {calls.layer}") or "")
    require_ranks(placement, ranks)
    # Compiled code that calls it compiles nothing here.
    exchange = Exchange(parallel, placement, ranks, moving, calls)
    result = uncompiled(Exchange.run)(exchange, operands.x, operands, spec)
    # Only what all ranks have done: failed calls are told, and do not count.
    calls.number += 1
    return result


class Exchange:
    """One call. A rank that raises before the first message sends a header of zeros, so that no peer waits."""

    def __init__(
        self, parallel: ExpertParallel, placement: Placement, ranks: Ranks, moving: MovingPlacement | None, calls: Calls
    ) -> None:
        self.parallel, self.placement, self.ranks, self.moving, self.calls = parallel, placement, ranks, moving, calls
        where = f"layer {calls.layer}" if calls.layer else ""
        self.tensor, self.levels = parallel.tensor_ranks(where), parallel.levels(where)

    def run(self, x: torch.Tensor, operands: MoEOperands, spec: MoESpec) -> ParallelOutput:
        placement, exchange = self.placement, self.parallel.exchange
        experts, routing, mask, shared = operands.experts, operands.routing, operands.token_mask, operands.shared
        like = Call(operands, self.parallel.name, spec, placement)
        try:
            known, digest = like.find(), 0
            steps = None if known is None else known.plain_steps
            if known is None:
                self._check(operands, spec)
            adapters, lora, arrays = None, None, []
            if operands.lora is not None:
                where = placement, self.ranks.rank, experts.down.shape[experts.layer_index is not None]
                adapters = RankAdapters.of(operands.lora, operands.adapter_ids, mask, self.parallel, where)
                lora, arrays = adapters.lora, list(named_arrays(adapters.lora))
            if known is None:
                digest = experts_digest(x, experts, shared, spec, array_spec, lora)
            uses = 1 + (shared is not None) + isinstance(routing, RouterWeights)
            wide = uses_of(x, uses, summed=self.tensor is not None)
            dense: Any = None
            if shared is not None:
                plain = dataclasses.replace(spec, lora_dropout=0.0)
                arguments = x.detach(), wide[1], shared, experts, plain, len(x) * self.parallel.token_ranks
                dense = functools.cache(functools.partial(shared_output, *arguments))
                if exchange.mode not in ("peer", "all_to_all") or not x.is_cuda:
                    dense()  # Nothing overlaps with it.
                if exchange.chunks > 1 and asks_gradients([array for _, array in named_arrays(shared)]):
                    refuse_chunks(exchange)
            ids, weights, logits = self._route(x, wide[-1], routing, spec, mask, known is not None, steps)
            ids, weights = routed(ids, weights, placement.num_experts)
            given = (x, weights, *[one for _, one in (*named_arrays(experts), *arrays)]) if known is None else ()
            asked = known.asked if known else asks_gradients(given)
            if asked and self.parallel.gradients == "mean":
                experts = map_arrays(experts, lambda array: divided(array, self.parallel.token_ranks))
            if self.moving is not None:
                self.moving.require_usable(asked)
            if adapters is not None:
                shared_factors = self.calls.shares_factors
                if shared_factors is None:
                    shared_factors = placement.per_rank > 1 and all(
                        one.shape[1] == 1 for name, one in arrays if name[0] in "ab"
                    )
                lora = adapters.trained(self.parallel, self.tensor, shared_factors)
            if known is None:
                plan = plan_of(self.parallel, placement, x, ids.shape[1], training=asked, experts=digest, lora=lora)
                like.remember(plan, asked)
            else:
                plan = known.plan
            tensor, ids_of_adapters = self.tensor, None if adapters is None else adapters.ids
            brought = Brought(x, wide[0], ids, weights, mask, ids_of_adapters)
            numbers = self.calls.layer, self.calls.number
            call = ExchangeCall(self.ranks, plan, self.moving, *numbers, self.levels, self.parallel.buffer, steps)
            if tensor is not None:
                brought = tensor.gather(call, brought)
                experts = bias_once(experts, tensor.split)
            results = run_again(call, brought, like.tensors)
            if results is None:
                planner = plan_routes(call, brought.ids, brought.weights, brought.token_mask, returns=lora is not None)
        except Exception:
            device = x.device if isinstance(x, torch.Tensor) else torch.device("cpu")
            tell_peers(self.parallel, placement, device, self.tensor)
            raise
        dtype = x.dtype if spec.out_dtype is None else TORCH_DTYPES[spec.out_dtype]
        dense_of_parts, of_parts = (dense, dtype) if tensor is None else (None, torch.float32)
        if results is None:
            owner = Owner(experts, spec, placement, ids.shape[1], brought.wide is not None, lora, steps, like.tensors)
            results = None if lora is not None else planner.schedule(brought, owner, dense_of_parts, of_parts)
        if results is None:
            routes_of = planner.start(brought.x.detach() if brought.x.requires_grad else brought.x)
            if dense is not None:
                dense()  # The host waits for counts behind it.
            planner.owner = owner
            routes: Any = routes_of()
            # Rows that have left or arrived are not kept.
            values, planner.arriving = planner.arriving or brought.x, None
            del routes_of
            stored = lora is None and routes.stores
            rows, row_weights = dispatch(routes, values, brought.wide, brought.weights, stored=stored)
            del values
            own = None if brought.adapter_ids is None else routes.push_ids(brought.adapter_ids)
            del brought
            results_at = routes.results_at() if stored else None
            gradients_at = routes.gradients_at(results_at) if stored and owner.stores_gradients else None
            arrived = rows, TopK(routes.ids, row_weights), routes.group_tokens
            result = owner(*arrived, results_at, own, gradients_at)
            # Without training, rows that come home can use this memory.
            del rows, arrived
            dense_rows = dense_of_parts() if dense_of_parts else (None, None)
            output = combine(routes, result.output, dense_rows, of_parts, stored=stored)
            if lora is None:
                planner.ended(routes, of_parts)
            counted = routes.tokens_per_expert, routes.invalid_ids
            results = Results(output, result.tokens_per_expert, routes.overflow, *counted)
        if tensor is not None:
            output = tensor.total(results.output, x, dense() if dense else (None, None), dtype)
            # The exchange counts all tokens of the axis.
            results = Results(output, results.received, results.overflow, *counts_of(ids, placement, mask))
        if not x.is_cuda and call.plan.spec.on_overflow == "error":
            require_room(call.plan, int(results.overflow.numpy()[0]))
        if self.moving is not None:
            self.moving.load.add_(results.tokens_per_expert)
        if adapters is not None:
            results = results._replace(invalid_ids=results.invalid_ids + adapters.invalid)
        missing = placement.per_rank - results.received.shape[0]
        received = torch.nn.functional.pad(results.received, (0, missing)) if missing else results.received
        counts = results.tokens_per_expert, results.invalid_ids, received, results.overflow
        return ParallelOutput(results.output, ids, weights, logits, *counts)

    def _check(self, operands: Any, spec: Any) -> None:
        x, experts, routing, mask, _, shared, lora, ids = vars(operands).values()
        require_tokens(x, self.parallel)
        require_instance("experts", experts, ExpertWeights)
        require_instance("routing", routing, (RouterWeights, RouterLogits, TopK))
        require_instance("spec", spec, MoESpec)
        if isinstance(routing, TopK) and spec.router is not None:
            raise InvalidInput("spec.router must be None when ids and weights are given; remove one of the two")
        if shared is not None:
            require_instance("shared", shared, SharedExpert)
        if mask is not None:
            require_spec("token_mask", array_spec("token_mask", mask), (len(x),), "bool", contiguous=False)
        if lora is not None:
            require_instance("lora", lora, LoRAFactors)
        given = {"experts.": experts, "routing.": routing, "shared.": shared, "lora.": lora}
        arrays = [pair for prefix, one in given.items() if one is not None for pair in named_arrays(one, prefix)]
        arrays += [(name, one) for name, one in (("token_mask", mask), ("adapter_ids", ids)) if one is not None]
        for name, array in arrays:
            if getattr(array, "device", None) != x.device:
                require_dense(name, array)
                require_same_device(name, array, "x", x)
        held, stacked = list(experts.down.shape), experts.layer_index is not None
        most, least = self.placement.per_rank, self.placement.occupied[self.ranks.rank]
        if len(held) < 3 + stacked or not least <= held[stacked] <= most:
            raise InvalidInput(
                f"experts must be the {most} places of this rank, got down {held}; take those of "
                "placement.owners[rank], in that order"
            )
        if spec.apply_router_weight_on_input:
            raise Unsupported("apply_router_weight_on_input must be False across ranks, got True; weight x beforehand")
        require_row_scales(spec, experts)
        if lora is not None:
            require_adapters(lora, ids, len(x), self.placement, self.parallel.split.size)

    def _route(
        self, x: torch.Tensor, wide: Any, routing: Any, spec: MoESpec, mask: Any, known: bool, steps: Steps | None
    ) -> tuple[torch.Tensor, torch.Tensor, Any]:
        if isinstance(routing, TopK):
            if not known:
                ids, weights = array_spec("routing.ids", routing.ids), array_spec("routing.weights", routing.weights)
                require_given(ids, weights, len(x))
            return as_int32(routing.ids), as_float32(routing.weights), None
        if spec.router is None:
            raise InvalidInput("spec.router must be a RouterSpec to route with, got None; pass RouterSpec(top_k=...)")
        if isinstance(routing, RouterWeights):
            rows = x.detach()
            if mask is not None:
                # The router's backward multiplies masked rows, which may hold NaN, by a gradient of 0.
                rows = rows.masked_fill(~mask[:, None], 0)
                wide = None if wide is None else wide.masked_fill(~mask[:, None], 0)
            options = spec.logits_spec()
            if options.expected_tokens is None:
                group = max(1, len(x) * self.parallel.token_ranks)
                options = _expecting(options, group)
            logits = ops.router(rows, routing.weight, bias=routing.bias, spec=options, wide=wide)
        else:
            logits = routing.logits
        bias: dict[str, Any] = {"correction_bias": routing.correction_bias, "token_mask": mask}
        if steps is None:
            ids, weights = ops.route(logits, spec.router, **bias)
        else:
            ids, weights = repeated(steps, ("route",), ROUTE, logits=logits, **bias, given=None, spec=spec.router)
        if not known:
            require_scores(logits.shape, len(x), self.placement)
        return ids, weights, logits


@functools.lru_cache(maxsize=256)
def _expecting(options: LogitsSpec, tokens: int) -> LogitsSpec:
    return dataclasses.replace(options, expected_tokens=tokens)


def asks_gradients(arrays: Iterable[Any]) -> bool:
    return torch.is_grad_enabled() and any(isinstance(array, torch.Tensor) and array.requires_grad for array in arrays)


def plan_of(
    parallel: ExpertParallel,
    placement: Placement,
    x: torch.Tensor,
    top_k: int,
    *,
    training: bool,
    experts: int = 0,
    lora: LoRAFactors | None = None,
) -> ExchangePlan:
    """Plan the exchange of x `[T, D]`, or with mode `peer` of max_tokens. experts: an `experts_digest`."""
    exchange = parallel.exchange
    if lora is not None and is_direct(exchange):
        # Ids of adapters go to rows with a home and a slot, which have counts.
        exchange = dataclasses.replace(exchange, rows="slots")
    tokens = parallel.max_tokens if parallel.exchange.mode == "peer" and parallel.max_tokens is not None else len(x)
    sizes = tokens, top_k, x.shape[1], DTYPE_NAMES[x.dtype]
    split = parallel.split
    plan = plan_exchange(*sizes, placement, exchange, training=training, tensor=split)
    return plan.of_experts(experts)
