"""Routes of two levels: a token crosses to a host once, to the rank with its home's number. The host reads thrice."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch

from moe_core.parallel import ExchangePlan, ExchangeSpec, Placement, plan_exchange
from moe_core.parallel.exchange import levels_of
from moe_core.parallel.header import Header
from moe_torch.parallel import exchange
from moe_torch.parallel.calls.blocks import Blocks
from moe_torch.parallel.calls.counted import Counted
from moe_torch.parallel.deep_ep import BufferPlanner
from moe_torch.parallel.group import Arriving, Ranks
from moe_torch.parallel.peer.chunks import PeerPlanner
from moe_torch.parallel.route import ExchangeCall, Planner
from moe_torch.parallel.routes import CollectiveRoutes, take_slots
from moe_torch.parallel.tensor import counts_of

_TOKENS = Header._fields.index("tokens")


@dataclasses.dataclass(frozen=True)
class HostRoutes(CollectiveRoutes):
    """As at home, with the gateway between.

    between: rows of tokens to gateways. inside: from a gateway to owners. passed int32 `[S]`: the row at this gateway
    of each result that it sends home, -1: none. as_sent int32 `[R]`: an owner's rows in the order in which they
    arrived.
    """

    between: CollectiveRoutes = dataclasses.field(kw_only=True)
    inside: CollectiveRoutes = dataclasses.field(kw_only=True)
    passed: torch.Tensor = dataclasses.field(kw_only=True)
    as_sent: torch.Tensor = dataclasses.field(kw_only=True)

    def start_push(self, values: torch.Tensor, what: str) -> Arriving:
        arriving = self.between.start_push(values, what)
        return lambda: self.inside.start_push(arriving(), what)()

    def start_pull(self, rows: torch.Tensor, what: str) -> Arriving:
        arriving = self.inside.start_pull(take_slots(rows, self.as_sent), what)
        return lambda: self.between.start_pull(take_slots(arriving(), self.passed), what)()


class _Level(Counted):
    """Ranks have compared headers. came int32 `[R, 2 * K]`: places and weights of tokens."""

    came: torch.Tensor

    def first_tables(self) -> Any:
        return self._first

    def received(self, came: torch.Tensor, num_rows: int, **options: Any) -> list[torch.Tensor]:
        self.came = came
        return super().received(came, num_rows, **options)


@functools.lru_cache(maxsize=256)
def _plan(plan: ExchangePlan, placement: Placement, tokens: int) -> ExchangePlan:
    sizes = tokens, plan.top_k, plan.d_model, plan.dtype
    return plan_exchange(*sizes, placement, ExchangeSpec(), training=plan.training).of_experts(plan.experts)


class HostPlanner(Planner):
    """See `plan_routes`."""

    def __init__(
        self, call: ExchangeCall, ids: torch.Tensor, weights: torch.Tensor, token_mask: torch.Tensor | None
    ) -> None:
        self.call, self.ids, self.weights, self.token_mask = call, ids, weights.detach().contiguous(), token_mask

    def start(self, values: torch.Tensor | None = None) -> Callable[[], CollectiveRoutes]:
        """Send a header. The result plans both levels. Raises as `compare_headers`."""
        arriving = self.call.ranks.start_all_gather(self.call.header(self.ids.device), "header")
        return lambda: self._routes(arriving())

    def _level(self, ranks: Ranks, placement: Placement, tokens: int) -> ExchangeCall:
        call = self.call
        return ExchangeCall(ranks, _plan(call.plan, placement, tokens), None, call.layer, call.number)

    def _routes(self, headers: torch.Tensor) -> CollectiveRoutes:
        call, device = self.call, self.ids.device
        assert call.levels is not None
        (outer, inner), told, placement = call.levels, headers.cpu().numpy(), call.plan.placement
        group_tokens = call.ranks.compare(told)
        first = int(told[: call.ranks.rank, _TOKENS].sum())
        host = exchange.placement_tables(placement, device, (outer.rank, outer.size))
        options: Any = {"first_token": first, "token_mask": self.token_mask, "tables": host}
        places, _ = exchange.physical_ids(self.ids, placement, **options)
        of_hosts, of_host = levels_of(placement, outer.size)
        # Between hosts.
        planner = _Level(self._level(outer, of_hosts, len(places)), places.int(), self.weights, None, returns=True)
        between = planner.start()()
        local, bits = planner.came.chunk(2, dim=1)
        local = local - outer.rank * of_host.num_experts
        local = torch.where((local >= 0) & (local < of_host.num_experts), local, -1)
        # Inside this one.
        call_inside = self._level(inner, of_host, len(local))
        inside = _Level(call_inside, local, bits.contiguous().view(torch.float32), None, returns=True).start()()
        assert between.slots is not None and inside.slots is not None and between.out.received is not None
        # An owner's sums need rows by home, and they arrived by gateway.
        homes = torch.zeros(len(local), 1, device=device)  # fp32, as rows are
        counts = torch.tensor(between.out.received, device=device)
        of_rows = torch.arange(outer.size, dtype=torch.int32, device=device).repeat_interleave(counts)
        homes[: len(of_rows), 0] = of_rows * inner.size + inner.rank
        key = inside.start_push(homes, "homes")().view(-1)
        order = torch.where(inside.ids.view(-1) < 0, call.ranks.size, key).argsort(stable=True)
        as_sent = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=device))
        counted = counts_of(self.ids, placement, self.token_mask)
        base = {field.name: getattr(between, field.name) for field in dataclasses.fields(between)}
        base |= {"call": call, "ids": inside.ids[order], "weights": inside.weights[order], "slots": None}
        base |= {"group_tokens": group_tokens, "tokens_per_expert": counted[0], "invalid_ids": counted[1]}
        return HostRoutes(
            **base,
            between=dataclasses.replace(between, slots=None),
            inside=dataclasses.replace(inside, slots=inside.slots[order]),
            passed=torch.where(between.slots < 0, -1, inside.at_home.row_of_slot[between.slots.clamp(min=0).long()]),
            as_sent=as_sent.int(),
        )


def plan_routes(
    call: ExchangeCall,
    ids: torch.Tensor,
    weights: torch.Tensor,
    token_mask: torch.Tensor | None = None,
    *,
    returns: bool = False,
) -> Planner:
    """Plan the routes of ids int32 and weights fp32 `[T, K]`. returns: owners return results as rows."""
    if call.plan.spec.mode == "peer":
        return PeerPlanner(call, ids, weights, token_mask, returns)
    if call.buffer is not None:
        return BufferPlanner(call, ids, weights, token_mask)
    if call.levels is not None:
        return HostPlanner(call, ids, weights, token_mask)
    if call.plan.spec.mode == "all_to_all":
        return Counted(call, ids, weights, token_mask, returns=returns)
    return Blocks(call, ids, weights, token_mask)
