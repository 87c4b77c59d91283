"""Routes through a caller's DeepEP buffer, of either kind. Written to its documentation, not run on its kernels."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch

from moe_core.errors import InvalidInput, Unsupported
from moe_core.parallel.header import Header
from moe_core.parallel.messages import deep_ep_unit
from moe_core.specs.operands import RaggedLayout
from moe_torch import ops
from moe_torch.parallel.exchange import physical_ids
from moe_torch.parallel.group import Arriving, Ranks
from moe_torch.parallel.route import ExchangeCall, Gradients, Planner, Total
from moe_torch.parallel.routes import one_group, take_slots
from moe_torch.parallel.tensor import counts_of

_TOKENS = Header._fields.index("tokens")
#: Methods of both generations.
METHODS, OLDER = ("dispatch", "combine"), "get_dispatch_layout"


def ids_dtype() -> torch.dtype:
    """`deep_ep.topk_idx_t`, int64 unless the package was built otherwise."""
    return getattr(sys.modules.get("deep_ep"), "topk_idx_t", torch.int64)


def require_buffer(buffer: Any, ranks: Ranks) -> None:
    """Raise InvalidInput unless it is a buffer of these ranks."""
    missing = [name for name in METHODS if not callable(getattr(buffer, name, None))]
    if missing:
        raise InvalidInput(
            f"buffer must be a deep_ep.ElasticBuffer or deep_ep.Buffer with transport='deep_ep', got "
            f"{type(buffer).__name__} without {', '.join(missing)}; make one of the mesh's group"
        )
    size = buffer.group_size if hasattr(buffer, OLDER) else buffer.num_ranks
    if size != ranks.size:
        raise InvalidInput(f"buffer must be of the {ranks.size} ranks of mesh, got {size}; make it of the mesh's group")


class Layout(NamedTuple):
    """The buffer with the handle of a first dispatch, in either generation's calls."""

    buffer: Any
    handle: Any
    older: bool

    @classmethod
    def begin(
        cls, buffer: Any, rows: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, num_experts: int
    ) -> tuple[Layout, Callable[[], tuple[torch.Tensor, torch.Tensor, torch.Tensor]]]:
        """Dispatch rows bf16 `[T, N]` by ids `[T, K]`. The result waits: rows, ids of this rank's experts, weights."""
        routing = {"topk_idx": ids, "topk_weights": weights}
        if older := hasattr(buffer, OLDER):
            per_rank, per_node, per_expert, in_rank, _ = buffer.get_dispatch_layout(ids, num_experts)
            counts = {"num_tokens_per_rank": per_rank, "num_tokens_per_rdma_rank": per_node}
            counts |= {"is_token_in_rank": in_rank, "num_tokens_per_expert": per_expert}
            came, *routed, _, handle, event = buffer.dispatch(rows, **counts, **routing, async_finish=True)
        else:
            came, *routed, handle, event = buffer.dispatch(
                rows, **routing, num_experts=num_experts, async_with_compute_stream=True
            )

        def arrived() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            event.current_stream_wait()
            return came, *routed

        return cls(buffer, handle, older), arrived

    @property
    def _options(self) -> dict[str, Any]:
        return {"handle": self.handle, "async_finish" if self.older else "async_with_compute_stream": True}

    def push(self, rows: torch.Tensor) -> Arriving:
        came, *_, event = self.buffer.dispatch(rows, **self._options)

        def arrived() -> torch.Tensor:
            event.current_stream_wait()
            return came

        return arrived

    def pull(
        self, rows: torch.Tensor, weights: torch.Tensor | None = None
    ) -> Callable[[], tuple[torch.Tensor, torch.Tensor]]:
        """Add rows, and weights fp32 `[R, K]`, at their homes."""
        sums, weight_sums, event = self.buffer.combine(rows, topk_weights=weights, **self._options)

        def arrived() -> tuple[torch.Tensor, torch.Tensor]:
            event.current_stream_wait()
            return sums, weight_sums

        return arrived


@dataclass(frozen=True)
class BufferRoutes:
    """The routes of one rank for one call, see `moe_torch.parallel.route.Routes`.

    order `[R]`: arrived rows in the order of one device, back: its inverse. slots int32 `[T * K]`: that travel, -1:
    none. None: tokens travel. at_home: how rows that come home are added.
    """

    call: ExchangeCall
    layout: Layout
    order: torch.Tensor
    back: torch.Tensor
    slots: torch.Tensor | None
    ids: torch.Tensor
    weights: torch.Tensor
    at_home: RaggedLayout
    group_tokens: int
    overflow: torch.Tensor
    tokens_per_expert: torch.Tensor
    invalid_ids: torch.Tensor

    stores: ClassVar[bool] = False

    def start_push(self, values: torch.Tensor, what: str) -> Arriving:
        rows = values if self.slots is None else take_slots(values, self.slots, self.call.plan.top_k)
        arriving = self.layout.push(rows.contiguous())
        return lambda: arriving()[self.order]

    def push_ids(self, ids: torch.Tensor) -> torch.Tensor:
        rows = ids.new_zeros(len(ids), _columns(self.call) // 2)
        rows[:, 0] = ids
        return (
            self.start_push(rows.view(torch.bfloat16), "adapter ids")()
            .contiguous()
            .view(torch.int32)[:, 0]
            .contiguous()
        )

    def start_total(self, rows: torch.Tensor | None, what: str) -> Total:
        assert rows is not None, "owners return their results"
        arriving = self.layout.pull(rows[self.back])

        def total(**options: Any) -> torch.Tensor:
            return ops.reduce(arriving()[0], self.at_home, order="row", **options)

        return total

    def begin_gradients(self) -> None:
        """The handle has all that a backward needs."""

    def gradients(self, of: Gradients, *, dtype: torch.dtype | None, stored: bool) -> Gradients:
        assert not stored, "owners return the gradients of rows"
        rows = self.ids.new_zeros((len(self.ids), _columns(self.call)), dtype=torch.bfloat16)
        rows = rows if of.rows is None else of.rows[self.back]
        weights = None if of.weights is None else of.weights.masked_fill(self.ids < 0, 0)[self.back]
        sums, weight_sums = self.layout.pull(rows, weights)()
        d_x = None if of.rows is None else ops.reduce(sums, self.at_home, order="row", out_dtype=dtype)
        return Gradients(d_x, None if weights is None else weight_sums.view(-1, self.call.plan.top_k))


def _columns(call: ExchangeCall) -> int:
    """Of the narrowest bf16 rows."""
    return deep_ep_unit(call.ranks.size) // 2


class BufferPlanner(Planner):
    """See `Planner`. Ranks compare headers over the group before the buffer is used."""

    def __init__(
        self, call: ExchangeCall, ids: torch.Tensor, weights: torch.Tensor, token_mask: torch.Tensor | None
    ) -> None:
        self.call, self.ids, self.weights, self.token_mask = call, ids, weights.detach().contiguous(), token_mask
        plan, each = call.plan, 1 if call.plan.spec.rows == "tokens" else call.plan.top_k
        most = getattr(call.buffer, "num_max_tokens_per_rank", None)
        if plan.dtype != "bfloat16" or plan.d_model % _columns(call):
            raise Unsupported(
                f"x must be bf16 with a multiple of {_columns(call)} columns, which DeepEP moves, got {plan.dtype} "
                f"[{plan.d_model}]; cast x, or leave transport out"
            )
        if most is not None and len(ids) * each > most:
            raise InvalidInput(
                f"buffer must be made for {len(ids) * each} rows of rows={plan.spec.rows!r} (num_max_tokens_per_rank), "
                f"got {most}; make a larger one"
            )

    def start(self, values: torch.Tensor | None = None) -> Callable[[], BufferRoutes]:
        """Send a header. The result dispatches the rows' numbers. Raises as `compare_headers`."""
        arriving = self.call.ranks.start_all_gather(self.call.header(self.ids.device), "header")
        return lambda: self._routes(arriving())

    def _routes(self, headers: torch.Tensor) -> BufferRoutes:
        call, device, told = self.call, self.ids.device, headers.cpu().numpy()
        group_tokens = call.ranks.compare(told)
        placement, moving, first = call.plan.placement, call.moving, int(told[: call.ranks.rank, _TOKENS].sum())
        tables = None if moving is None else (moving.places, moving.start)
        places, _ = physical_ids(self.ids, placement, first_token=first, token_mask=self.token_mask, tables=tables)
        (tokens, top_k), slots, number, weights = places.shape, None, first, self.weights
        if call.plan.spec.rows == "slots":
            slots = torch.arange(tokens * top_k, dtype=torch.int32, device=device)
            slots = slots.masked_fill(places.flatten() < 0, -1)
            places, weights, number = places.view(-1, 1), weights.view(-1, 1), first * top_k
        # The bits of an int32 are two columns, which a dispatch copies.
        numbers = torch.zeros(len(places), _columns(call) // 2, dtype=torch.int32, device=device)
        numbers[:, 0] = torch.arange(number, number + len(places), device=device)
        layout, arriving = Layout.begin(
            call.buffer, numbers.view(torch.bfloat16), places.to(ids_dtype()), weights, placement.num_places
        )
        came, ids, weights = arriving()
        order = came.contiguous().view(torch.int32)[:, 0].argsort()
        back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=device))
        at_home = torch.arange(len(places), dtype=torch.int32, device=device) if slots is None else slots
        counted = counts_of(self.ids, placement, self.token_mask)
        return BufferRoutes(
            call,
            layout,
            order,
            back,
            slots,
            ids[order].int(),
            weights[order],
            one_group(tokens, 1 if slots is None else top_k, len(places), at_home),
            group_tokens,
            torch.zeros(1, dtype=torch.int32, device=device),
            *counted,
        )
