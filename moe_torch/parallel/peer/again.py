"""Calls of mode `peer` without counts that are like an earlier one: three launches of known plans between barriers."""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

import torch

from moe_core.base.arrays import ALIGNMENT
from moe_core.ops.exchange.operands import Checks, HomeTokens
from moe_core.specs.operands import TopK
from moe_torch.bridge.options import dtype_name
from moe_torch.operators import exchange as operators
from moe_torch.parallel.calls.known import Step, Steps
from moe_torch.parallel.exchange import kept
from moe_torch.parallel.owner import Owner, Results
from moe_torch.parallel.peer.direct import DirectRoutes, Memory, group_tokens
from moe_torch.parallel.peer.interface import PeerRoutes
from moe_torch.parallel.route import ExchangeCall, check_headers
from moe_torch.parallel.tensor import Brought

_PUSHED, _SUMMED = ("x", "ids", "weights", "header"), ("row_of_slot",)


class _Again(NamedTuple):
    """steps: of the call, with push as long as plans are kept. results_at: where experts store. constants: of push,
    besides memory."""

    steps: Steps
    push: Step
    total: Step
    memory: Memory
    results_at: torch.Tensor
    constants: tuple[torch.Tensor, ...]


_KEY = ("direct",)


_MOST = 256
#: By the group, which its memory must not outlive.
_known: weakref.WeakKeyDictionary[Any, dict[int, _Again]] = weakref.WeakKeyDictionary()


def remember(call: ExchangeCall, x: torch.Tensor, routes: PeerRoutes, dtype: torch.dtype) -> None:
    """Remember a call of one chunk without a shared expert that has run."""
    if call.steps is None or call.moving is not None or not isinstance(routes, DirectRoutes):
        return
    (ids, weights, mask, places_of_experts, given), placement = routes.routing, call.plan.placement
    if mask is not None or given is not None or routes.format is not None:
        return
    memory, header = routes.memory, call.header(x.device)
    tokens = HomeTokens(x, ids, weights, None, places_of_experts, None)._asdict()
    tables = {f"{name}_at": getattr(memory, name).addresses for name in ("rows", "ids", "weights", "headers")}
    sizes: Any = {"rank": call.ranks.rank, "per_rank": placement.per_rank, "num_experts": placement.num_experts}
    sizes |= {"most": routes.most, "programs": None, "visits": False}
    pushed = operators.PUSH_TOKENS_ONCE.arguments(**tokens, **tables, **sizes, header=header, memory=None)
    push = Step.of(operators.PUSH_TOKENS_ONCE, pushed, _PUSHED, ())
    summed = Checks(memory.headers.own)._asdict() | {"y": memory.returned.own, "row_of_slot": routes.pushed.places}
    summed |= {"shared": None, "shared_gate": None, "memory": None, "out_dtype": dtype_name("out_dtype", dtype)}
    total = Step.of(operators.SUM_RESULTS, operators.SUM_RESULTS.arguments(**summed), _SUMMED, ())
    if push is not None and total is not None:
        known = _known.setdefault(call.ranks.group, {})
        if len(known) >= _MOST:
            known.clear()
        constants = () if places_of_experts is None else (places_of_experts,)
        known[id(call.steps)] = _Again(call.steps, push, total, memory, routes.results_at(), constants)
        call.steps.put(_KEY, push)


def run_again(call: ExchangeCall, brought: Brought, owner: Owner) -> Results | None:
    """Run such a call. None: it is another one, and nothing has run."""
    known = None if call.steps is None or call.moving is not None else _known.get(call.ranks.group)
    again = None if known is None else known.get(id(call.steps))
    if again is None or call.steps is None or call.steps.get(_KEY) is not again.push:
        return None
    x, ranks, memory, header = brought.x, call.ranks, again.memory, call.header(brought.x.device)
    given = x.data_ptr(), brought.ids.data_ptr(), brought.weights.data_ptr(), header.data_ptr()
    if (given[0] | given[1] | given[2] | given[3]) % ALIGNMENT:
        return None
    check_headers(call, brought.ids)
    kept(again.constants, x.device)
    places, tokens_per_expert, invalid_ids, overflow = again.push.run((), *given)
    memory.memory.barrier(ranks, "rows")
    routing, tokens = TopK(memory.ids.own, memory.weights.own), group_tokens(memory, ranks.size * len(x))
    del x, brought.x  # Experts need no gathered rows.
    result = owner(memory.rows.own, routing, tokens, again.results_at)
    memory.memory.barrier(ranks, "results")
    (output,) = again.total.run((), places.data_ptr())
    return Results(output, result.tokens_per_expert, overflow, tokens_per_expert, invalid_ids)
