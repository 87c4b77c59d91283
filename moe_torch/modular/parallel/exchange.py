"""Prepare and finalize across ranks, with the bits of one device."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple, TypeVar, cast

import torch

from moe_core.errors import InvalidInput, Unsupported
from moe_core.modular.quant_config import FusedMoEQuantConfig
from moe_core.modular.types import FusedMoEActivationFormat
from moe_core.modular.weights import rows_are_alone
from moe_core.parallel.placement import Placement
from moe_core.parallel.plan import ExchangePlan
from moe_core.parallel.spec import ExchangeSpec
from moe_torch.bridge.options import require_instance
from moe_torch.bridge.private import graph_break, uncompiled
from moe_torch.modular.calls import FinalizeCall, PrepareCall, PreparedTokens, finished, handle_of, taking
from moe_torch.modular.newest.lora import ids_to_move
from moe_torch.modular.prepare_finalize import FusedMoEPrepareAndFinalize, require_deferred, weighted_input
from moe_torch.modular.stages import as_ids, as_weights, sum_by_token
from moe_torch.modular.weight_and_reduce import (
    TopKWeightAndReduceContiguous,
    TopKWeightAndReduceDelegate,
)
from moe_torch.parallel.axes import ExpertParallel, tell_peers
from moe_torch.parallel.forward import plan_of
from moe_torch.parallel.function import Combine, Dispatch, uses_of
from moe_torch.parallel.hosts import plan_routes
from moe_torch.parallel.route import ExchangeCall, Routes

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
#: (hook to call while messages travel, receiver)
Halves = tuple[Callable[[], None], Callable[[], Any]]
Function = TypeVar("Function", bound=Callable[..., Any])


def _eager(function: Function) -> Function:
    """Calls in compiled programs are graph breaks."""

    @functools.wraps(function)
    def run(*arguments: Any, **named: Any) -> Any:
        return uncompiled(function)(*arguments, **named)

    return cast(Function, graph_break(run))


class _Sent(NamedTuple):
    routes: Routes


class _Attached(torch.autograd.Function):
    """`(rows, source) -> rows`, with a zero gradient of source."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(source)
        return rows.clone()

    @staticmethod
    def backward(ctx: Any, d_rows: torch.Tensor) -> Any:
        return None, torch.zeros_like(*ctx.saved_tensors)


class InHalves(FusedMoEPrepareAndFinalize):
    """The methods without async call both halves."""

    def post_init_setup(self, fused_experts: Any) -> None:
        require_deferred(self, fused_experts)

    def supports_async(self) -> bool:
        return True

    def output_is_reduced(self) -> bool:
        return True

    def prepare(self, *arguments: Any, **named: Any) -> PreparedTokens:
        return finished(self.prepare_async(*arguments, **named))

    def finalize(self, *arguments: Any, **named: Any) -> None:
        finished(self.finalize_async(*arguments, **named))


def require_lone_rows(quant_config: FusedMoEQuantConfig) -> None:
    """Raise Unsupported if activations have one scale that is computed from all rows."""
    if not rows_are_alone(quant_config):
        raise Unsupported(
            f"activations of {quant_config.scheme} must have a scale for each row across ranks, or given scales: "
            "one of all rows would be each rank's own; give a1_scale and a2_scale"
        )


class AcrossRanks(InHalves):
    """The base of both exchanges, format Standard. All ranks of a group call the kernel, in the same order.

    An owner receives one row per slot, and the weighted result travels home. There a token's rows are added in fp32 in
    the order k = 0..topk-1, with one cast. Output and gradients have the bits of the same kernel on one device, with
    the tokens of all ranks in rank order and all experts. A call's expert_map must agree with placement. It is compared
    once. Rows beyond a bound of the exchange make the output of their tokens NaN.

    Args:
        mesh: a DeviceMesh of one axis, such as `mesh["ep"]`, or a process group.
        placement: experts of each rank. w1 and w2 hold this rank's `placement.per_rank` experts in the order of
            `placement.owners[rank]`. Empty places are not read.
        exchange: how rows travel. None: `ExchangeSpec(mode)` of the class's mode.
        max_tokens: the most tokens of a rank in one call. None: any number.
        timeout: seconds that a message may take on a CPU. None: the group's.

    Raises:
        InvalidInput: arguments that do not fit together, ranks that disagree.
        PeerFailed: another rank raised before it sent anything.
        Unsupported: all that `moe_torch.parallel.ExpertParallel` cannot do, `on_overflow="drop"`, activations with one
            scale that is computed from all rows, and gradients of replicas.
        RuntimeError: a message failed, because a rank died or is late.
    """

    mode: ClassVar[str]
    activation_format = property(lambda self: FusedMoEActivationFormat.Standard)
    maps_experts = property(lambda self: True)

    def __init__(
        self,
        mesh: Any,
        placement: Placement,
        *,
        exchange: ExchangeSpec | None = None,
        max_tokens: int | None = None,
        timeout: float | None = None,
    ) -> None:
        require_instance("placement", placement, Placement)
        exchange = ExchangeSpec(self.mode) if exchange is None else exchange
        self.parallel = ExpertParallel(mesh, exchange, max_tokens, timeout=timeout)
        self.placement = placement
        name, ranks = type(self).__name__, self.parallel.ranks()
        if exchange.mode != self.mode:
            raise InvalidInput(f"exchange.mode must be {self.mode!r} for {name}, got {exchange.mode!r}; leave it out")
        if exchange.on_overflow == "drop":
            raise Unsupported(
                f"exchange.on_overflow must be 'error' for {name}, which has nobody to tell, got 'drop'; pass 'error'"
            )
        if placement.num_ranks != ranks.size:
            raise InvalidInput(
                f"placement must be of the {ranks.size} ranks of the mesh, got {placement}; make it for them"
            )
        self._known_map: Callable[[], torch.Tensor | None] | None = None

    def max_num_tokens_per_rank(self) -> int | None:
        return self.parallel.max_tokens

    def num_dispatchers(self) -> int:
        return self.placement.num_ranks

    def tell_failure(self, device: torch.device) -> None:
        tell_peers(self.parallel, self.placement, device)

    @_eager
    @taking(PrepareCall)
    def prepare_async(self, call: PrepareCall) -> Halves:
        """Return (hook, receiver). The hook sends rows once the counts are known, the receiver waits for arriving rows.

        a1 and its weights and ids `[M, topk]` are this rank's. Rows travel unquantised: experts quantise each row
        alike. num_experts: of all ranks.
        """
        try:
            # The kernel's default num_experts is this rank's own number.
            if call.num_experts not in (self.placement.num_experts, call.num_local_experts, -1):
                raise InvalidInput(
                    f"num_experts must be {self.placement.num_experts}, those of {self.placement}, got "
                    f"{call.num_experts}; pass global_num_experts"
                )
            self._check_experts(call.expert_map, call.num_local_experts, call.quant_config)
            ids = as_ids(call.topk_ids)
            weights = as_weights(call.topk_weights, ids)
            x = weighted_input(call.a1, weights, call.apply_router_weight_on_input)
            plan = self._plan(x, ids)
            wide, adapter_ids = uses_of(x, 1)[0], ids_to_move(self._lora_context, x)
            begin = self._begin(plan, ids, weights)
        except Exception:
            self.tell_failure(call.a1.device)
            raise
        pending = begin()
        begun: list[Any] = []

        def hook() -> None:
            if not begun:
                routes = pending()
                begun.extend((routes, routes.start_push(x.detach(), "rows")))

        def receiver() -> PreparedTokens:
            hook()
            routes, arriving = begun
            rows, row_weights = Dispatch.apply(routes, arriving, wide, weights)
            batch = routes.group_tokens * plan.top_k, self.placement.num_experts
            moved = None if adapter_ids is None else routes.push_ids(adapter_ids)
            return PreparedTokens(rows, None, None, routes.ids, row_weights, _Sent(routes), batch, moved)

        if self.mode != "all_to_all":
            hook()
        return _eager(hook), _eager(receiver)

    @_eager
    @taking(FinalizeCall)
    def finalize_async(self, call: FinalizeCall) -> Callable[[], None]:
        """Return the receiver, which adds up the rows that come home into output `[M, K]`."""
        prepared, output, impl = call.prepared, call.output, call.weight_and_reduce_impl
        sent = handle_of(self, prepared, _Sent)
        assert prepared is not None, "it has a handle"
        if isinstance(impl, TopKWeightAndReduceDelegate):
            impl = TopKWeightAndReduceContiguous()
        weights, ids = prepared.topk_weights, prepared.topk_ids
        assert weights is not None and ids is not None
        rows = impl.apply(None, call.fused_expert_output, weights, ids, call.apply_router_weight_on_input)
        rows = rows.to(output.dtype)
        if torch.is_grad_enabled() and prepared.a1q.requires_grad and not rows.requires_grad:
            # Without rows, other ranks still wait for this one's backward.
            rows = cast(torch.Tensor, _Attached.apply(rows, prepared.a1q))
        routes, rows = sent.routes, rows.contiguous()
        if not (torch.is_grad_enabled() and rows.requires_grad):
            write_sum = self._start_sum(routes, rows)
            return _eager(lambda: write_sum(output))
        total = routes.start_total(rows.detach(), "results")

        def receiver() -> None:
            sums: Any = Combine.apply(routes, rows, None, None, output.dtype, total, None)
            output.copy_(sums)

        return _eager(receiver)

    def _start_sum(self, routes: Any, rows: torch.Tensor) -> Callable[[torch.Tensor], Any]:
        arriving, at_home = routes.start_pull(rows, "results"), routes.at_home

        def write_sum(output: torch.Tensor) -> None:
            came = arriving()
            if len(came):
                sum_by_token(output, came, at_home.row_of_slot, at_home.spec.top_k, "row")
            else:
                output.zero_()
            routes.spoil(output)

        return write_sum

    def _begin(
        self, plan: ExchangePlan, ids: torch.Tensor, weights: torch.Tensor
    ) -> Callable[[], Callable[[], Routes]]:
        """Begin an exchange; the returned function waits for the routes."""
        ranks, levels = self.parallel.ranks("", True), self.parallel.levels("", True)
        return plan_routes(ExchangeCall(ranks, plan, levels=levels), ids, weights, returns=True).start

    def _check_experts(
        self, expert_map: torch.Tensor | None, num_local_experts: int | None, quant_config: FusedMoEQuantConfig
    ) -> None:
        if num_local_experts not in (None, self.placement.per_rank):
            raise InvalidInput(
                f"w1 must have the {self.placement.per_rank} places of this rank, got {num_local_experts} experts; "
                "take those of placement.owners[rank], in that order"
            )
        require_lone_rows(quant_config)
        known = None if self._known_map is None else self._known_map()
        if expert_map is None or known is expert_map:
            return
        owned = self.placement.owners[self.parallel.ranks().rank]
        local = [owned.index(expert) if expert in owned else -1 for expert in range(self.placement.num_experts)]
        if expert_map.tolist() != local:
            raise InvalidInput(
                f"expert_map must be {local}, as {self.placement} has this rank's experts, got {expert_map.tolist()}; "
                "leave it out, or make the placement that it is of"
            )
        self._known_map = weakref.ref(expert_map)

    def _plan(self, x: torch.Tensor, ids: torch.Tensor) -> ExchangePlan:
        most = self.parallel.max_tokens
        if most is not None and len(x) > most:
            raise InvalidInput(f"a1 must have at most max_tokens = {most} rows, got {len(x)}; raise max_tokens")
        if x.dtype not in _DTYPES or x.dim() != 2 or len(ids) != len(x):
            raise InvalidInput(
                f"a1 must be bf16, fp16 or fp32 [{len(ids)}, K], a row for each of topk_ids, got {x.dtype} "
                f"{list(x.shape)}; prepare tokens as they are"
            )
        return plan_of(self.parallel, self.placement, x, ids.shape[1], training=torch.is_grad_enabled())


class MoEPrepareAndFinalizeNaiveEP(AcrossRanks):
    """Give every rank the tokens of all ranks in an all-gather. Each computes its experts' slots.

    For few tokens, equally many on every rank. The host reads nothing, so CUDA graphs work, but ranks that disagree
    make the output NaN.
    """

    mode = "all_gather"


class MoEPrepareAndFinalizeAllToAll(AcrossRanks):
    """Exchange the numbers of rows, which the host reads once, then the rows. Ranks may have any numbers of tokens."""

    mode = "all_to_all"
