"""Dispatch and combine for schedules of a trainer: each starts a message, and its `wait` ends it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from moe_core.errors import InvalidInput, Unsupported
from moe_core.parallel import Placement
from moe_core.parallel.operands import require_given
from moe_core.specs.moe import MoESpec
from moe_torch.bridge.arrays import array_spec, require_same_device
from moe_torch.bridge.options import require_instance
from moe_torch.operators.kinds import as_float32, as_int32
from moe_torch.parallel.axes import ExpertParallel, require_ranks, require_tokens, tell_peers
from moe_torch.parallel.forward import asks_gradients, plan_of
from moe_torch.parallel.function import combine as combined
from moe_torch.parallel.function import dispatch as dispatched
from moe_torch.parallel.function import uses_of
from moe_torch.parallel.hosts import plan_routes
from moe_torch.parallel.owner import owner_spec
from moe_torch.parallel.route import ExchangeCall, require_room


@dataclass(frozen=True)
class Arrived:
    """Rows of slots at their experts: rows `[R, D]`; ids int32 `[R, 1]`, places here, -1 for rows that hold anything;
    weights fp32 `[R, 1]` (`[R, K]` where DeepEP moves tokens); overflow int32 `[1]`: rows of all ranks beyond a bound.
    """

    rows: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor
    overflow: torch.Tensor
    _routes: Any
    _top_k: int

    @property
    def rows_of_slots(self) -> int:
        """Number of rows with an id. Raises Unsupported where only the device knows it."""
        sent = getattr(getattr(self._routes, "home", None), "sent", None)
        if sent is None:
            raise Unsupported("rows_of_slots needs exact counts of rows; pass ExchangeSpec('all_to_all')")
        return sum(sent)

    def spec(self, spec: MoESpec) -> MoESpec:
        """Options of `moe_torch.moe` on these rows, with the order of sums of one device."""
        expected = None if spec.tuning is None else spec.tuning.expected_tokens
        tokens = (expected or self._routes.group_tokens) * self._top_k // self.ids.shape[1]
        return owner_spec(spec, tokens, self._routes.call.plan.placement)


class Dispatching:
    """Rows under way. `wait` may be called once."""

    def __init__(self, planner: Any, x: torch.Tensor, weights: torch.Tensor) -> None:
        self._routes, self._weights, (self._wide,) = planner.start(x.detach())(), weights, uses_of(x, 1)
        self._arriving: Any = planner.arriving or self._routes.start_push(x.detach(), "rows")
        planner.arriving = None
        self._overflow = self._routes.overflow  # may be a message, so ranks may wait in any order

    def wait(self) -> Arrived:
        """The rows, differentiable by x and weights. Raises InvalidInput for a second call."""
        arriving, self._arriving = self._arriving, None
        if arriving is None:
            raise InvalidInput("wait must be called once for each dispatch, got a second call; keep its result")
        routes = self._routes
        rows, weights = dispatched(routes, arriving, self._wide, self._weights)
        return Arrived(rows, routes.ids, weights, self._overflow, routes, routes.call.plan.top_k)


class Combining:
    """Results under way. `wait` may be called once."""

    def __init__(self, rows: torch.Tensor, routes: Any) -> None:
        self._rows, self._routes = rows, routes
        self._total: Any = routes.start_total(rows.detach().contiguous(), "results")

    def wait(self) -> torch.Tensor:
        """The sum of each token's results, `[T, D]`, differentiable. Raises InvalidInput for a second call."""
        total, self._total = self._total, None
        if total is None:
            raise InvalidInput("wait must be called once for each combine, got a second call; keep its result")
        routes, rows = self._routes, self._rows
        output = combined(routes, rows, (None, None), rows.dtype, total=total)
        plan = routes.call.plan
        if not rows.is_cuda and plan.spec.on_overflow == "error":
            require_room(plan, int(routes.overflow.numpy()[0]))
        return output


def dispatch(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    *,
    parallel: ExpertParallel,
    placement: Placement,
    token_mask: torch.Tensor | None = None,
    number: int = 0,
) -> Dispatching:
    """Send rows to their experts' ranks, as `moe` does. All ranks call it and `combine`, in the same order.

        sent = dispatch(x, ids, weights, parallel=parallel, placement=placement)
        arrived = sent.wait()
        results = moe_torch.moe(arrived.rows, experts, TopK(arrived.ids, arrived.weights), arrived.spec(spec)).output
        y = combine(results, arrived).wait()

    Output and gradients have the bits of `moe`. Other dispatches and combines may start before `wait`. A backward does
    not overlap with others.

    Args:
        x: bf16, fp16 or fp32 `[T, D]`, the tokens of this rank.
        ids, weights: `[T, K]`, integers for experts of all E, -1 for none.
        parallel: the ranks, and how rows travel. With mode `all_to_all` the host waits for counts here.
        token_mask: bool `[T]`, False for padding.
        number: of the micro-batch or layer. Ranks compare it.

    Raises:
        InvalidInput: wrong arguments, or ranks that disagree.
        PeerFailed: another rank raised before the exchange.
        Unsupported: mode `peer` (all calls share buffers), a tensor axis, and gradients="mean" (it divides gradients of
            experts, which are not passed here).
    """
    require_instance("parallel", parallel, ExpertParallel)
    require_instance("placement", placement, Placement)
    for name, wrong, instead in (
        ("exchange.mode='peer'", parallel.exchange.mode == "peer", "'all_to_all' or 'padded'"),
        ("tensor", parallel.split.size > 1, "None"),
        ("gradients='mean'", parallel.gradients == "mean", "'sum' and parallel.gradient_divisor"),
    ):
        if wrong:
            raise Unsupported(f"{name} of parallel cannot be had in dispatch; pass {instead}, or call moe")
    try:
        _check(x, ids, weights, parallel)
        ids, weights = as_int32(ids), as_float32(weights)
        plan = plan_of(parallel, placement, x, ids.shape[1], training=asks_gradients((x, weights)))
        where = f"micro-batch {number}" if number else ""
        ranks, levels = parallel.ranks(where, True), parallel.levels(where, True)
        call = ExchangeCall(ranks, plan, None, 0, number, levels, parallel.buffer)
        require_ranks(placement, call.ranks)
        planner = plan_routes(call, ids, weights, token_mask, returns=True)
    except Exception:
        tell_peers(parallel, placement, x.device if isinstance(x, torch.Tensor) else torch.device("cpu"))
        raise
    return Dispatching(planner, x, weights)


def combine(rows: torch.Tensor, arrived: Arrived) -> Combining:
    """Send the results `[R, D]` of `arrived.rows` home, in their dtype and order. See `dispatch`."""
    require_instance("rows", rows, torch.Tensor)
    require_instance("arrived", arrived, Arrived)
    if rows.shape != arrived.rows.shape or rows.dtype != arrived.rows.dtype or rows.device != arrived.rows.device:
        raise InvalidInput(
            f"rows must be {arrived.rows.dtype} {list(arrived.rows.shape)} on {arrived.rows.device}, "
            f"got {rows.dtype} {list(rows.shape)} on {rows.device}; pass a result for every row"
        )
    return Combining(rows, arrived._routes)


def _check(x: Any, ids: Any, weights: Any, parallel: ExpertParallel) -> None:
    require_tokens(x, parallel)
    require_given(array_spec("ids", ids), array_spec("weights", weights), len(x))
    for name, array in (("ids", ids), ("weights", weights)):
        require_same_device(name, array, "x", x)
