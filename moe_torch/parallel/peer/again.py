"""Calls of mode `peer` without counts that are like an earlier one: one plan of all launches, with two barriers."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import torch

from moe_core.ops.exchange.operands import Checks, HomeTokens
from moe_core.parallel.header import CALLS
from moe_torch.bridge.options import dtype_name
from moe_torch.operators import exchange as operators
from moe_torch.parallel.calls import joined
from moe_torch.parallel.calls.known import Step
from moe_torch.parallel.exchange import header_rows, kept
from moe_torch.parallel.owner import Results
from moe_torch.parallel.peer.direct import DirectRoutes
from moe_torch.parallel.peer.interface import PeerRoutes
from moe_torch.parallel.peer.symmetric import Symmetric
from moe_torch.parallel.route import ExchangeCall
from moe_torch.parallel.tensor import Brought

#: Of push, of products, and the sums.
_RESULTS = ("0.tokens_per_expert", "0.invalid_ids", "0.overflow", "1.tokens_per_expert", "2.out")


class _Again(NamedTuple):
    """parts: launches, and the barrier behind them, if any. memory: a reference, as its group must not outlive it.
    headers: see `header_rows`. constants: arrays besides memory, with them."""

    step: Step
    parts: tuple[tuple[slice | None, str | None], ...]
    memory: Callable[[], Symmetric | None]
    headers: tuple[torch.Tensor, ...]
    constants: tuple[torch.Tensor, ...]

    def fits(self, call: ExchangeCall) -> bool:
        return self.memory() is not None and (call.layer + 1) * CALLS <= len(self.headers)

    def run(self, call: ExchangeCall, brought: Brought, tensors: Sequence[torch.Tensor]) -> Results:
        """See `joined.run_again`."""
        step, memory = self.step, cast(Symmetric, self.memory())
        arrays = brought.x, brought.ids, brought.weights, self.headers[call.layer * CALLS + call.number % CALLS]
        kept(self.constants, brought.x.device)
        begun = step.ready.begin(step.change(step.pointers(tensors), *[one.data_ptr() for one in arrays]))
        for part, barrier in self.parts:
            begun.run(part)
            arrays = brought.x = cast(Any, None)  # Experts need no gathered rows.
            if barrier is not None:
                memory.barrier(call.ranks, barrier)
        tokens_per_expert, invalid_ids, overflow, received, output = begun.outputs
        return Results(output, received, overflow, tokens_per_expert, invalid_ids)


def remember(call: ExchangeCall, like: tuple[Any, Any], routes: PeerRoutes, dtype: torch.dtype) -> None:
    """Remember a call of one chunk without a shared expert that has run. like: shape and strides of x."""
    steps, placement = call.steps, call.plan.placement
    if not isinstance(routes, DirectRoutes) or steps is None or routes.ids.device.type not in joined.DEVICES:
        return
    if joined.remembered(call):
        return
    (ids, weights, mask, places_of_experts, given), memory = routes.routing, routes.memory
    products = steps.get(("owner", len(memory.rows.own), routes.group_tokens))
    others = call.moving, mask, given, routes.format
    if products is None or any(one is not None for one in others):
        return
    x = memory.rows.own[: len(ids)]
    if (x.shape, x.stride()) != like:
        x = x.new_empty_strided(*like)
    header = call.header(x.device)
    tokens = HomeTokens(x, ids, weights, None, places_of_experts, None)._asdict()
    tables = {f"{name}_at": getattr(memory, name).addresses for name in ("rows", "ids", "weights", "headers")}
    sizes: Any = {"rank": call.ranks.rank, "per_rank": placement.per_rank, "num_experts": placement.num_experts}
    sizes |= {"most": routes.most, "programs": None, "visits": False}
    pushed = operators.PUSH_TOKENS_ONCE.arguments(**tokens, **tables, **sizes, header=header, memory=None)
    push = Step.of(operators.PUSH_TOKENS_ONCE, pushed, ("x", "ids", "weights", "header"), ())
    summed = Checks(memory.headers.own)._asdict() | {"y": memory.returned.own, "row_of_slot": routes.pushed.places}
    summed |= {"shared": None, "shared_gate": None, "memory": None, "out_dtype": dtype_name("out_dtype", dtype)}
    total = Step.of(operators.SUM_RESULTS, operators.SUM_RESULTS.arguments(**summed), ("row_of_slot",), ())
    if push is not None and total is not None:
        arrived = memory.rows.own, memory.ids.own, memory.weights.own, routes.results_at()
        products.change(products.addresses, *[one.data_ptr() for one in arrived])
        changing = "0.x", "0.ids", "0.weights", "0.header"
        links, parts = {"2.row_of_slot": "0.places"}, (push, products, total)
        step, (rows, results, _) = joined.joined(parts, links, _RESULTS, changing)
        cut: Any = (slice(rows), "rows"), (slice(rows, results), "results"), (slice(results, None), None)
        cut = cut if call.ranks.size > 1 else ((None, None),)
        headers = header_rows(call.plan.header, call.layer, x.device)
        constants = headers if places_of_experts is None else (*headers, places_of_experts)
        steps.put(joined.KEY, _Again(step, cut, weakref.ref(memory.memory), headers, constants))
