"""The routes of collective modes: tokens go out, results of slots come home. An owner's op has K = 1."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch

from moe_core.ops.exchange.operands import SendOperands
from moe_core.parallel import ExchangePlan
from moe_core.parallel.exchange import first_rows
from moe_core.parallel.header import STATIC_MODES, Header
from moe_core.specs.exchange import packed_row
from moe_core.specs.operands import RaggedLayout
from moe_core.specs.routing import LayoutSpec
from moe_torch import ops
from moe_torch.bridge.options import dtype_name
from moe_torch.bridge.ready import Begun
from moe_torch.operators import routes as operators
from moe_torch.operators.requests import layout_sizes
from moe_torch.operators.stages import REDUCE
from moe_torch.parallel.calls.known import repeated
from moe_torch.parallel.exchange import constants, placement_tables, rows_that_fit
from moe_torch.parallel.group import Arriving, Ranks, Way, read_by_host
from moe_torch.parallel.route import ExchangeCall, Gradients, Planner, Total, require_room

_HEADER = len(Header._fields)
#: Key of the numbers of a call: rows that came, an owner's rows, all ranks' tokens.
_LAST = ("last",)
#: Bytes of rows that are copied before the host knows how many leave: in less time than it takes to read that.
_AHEAD = 1 << 26


def rounded(rows: int) -> int:
    """Round rows up by at most 1/32, and not up to 63: every number has its plans. Examples: 65 -> 66, 1000 -> 1008."""
    step = 1 << max(0, rows.bit_length() - 6)
    return -(-rows // step) * step


@dataclass(frozen=True)
class CollectiveRoutes:
    """The routes of one rank for one call, see `moe_torch.parallel.route.Routes`.

    send int32: slots of rows that go out, -1: none or behind those. None: every token goes to every rank. slots int32
    `[R]`: the slots of received rows, K each, of the owner's rows. None: received rows are slots. at_home: how rows
    that come home are added. spoilt bool `[T]` or None: tokens that become NaN, because a slot did not fit or ranks
    disagree. excess: makes overflow. tokens_per_expert int32 `[E]` and invalid_ids int32 `[1]`: of this rank.
    """

    call: ExchangeCall
    send: torch.Tensor | None
    slots: torch.Tensor | None
    out: Way
    home: Way
    ids: torch.Tensor
    weights: torch.Tensor
    at_home: RaggedLayout
    spoilt: torch.Tensor | None
    excess: Callable[[], torch.Tensor]
    group_tokens: int
    tokens_per_expert: torch.Tensor
    invalid_ids: torch.Tensor

    stores: ClassVar[bool] = False

    @functools.cached_property
    def overflow(self) -> torch.Tensor:
        """Made where it is first read, behind the products: no kernel waits for it."""
        return self.excess()

    @property
    def ranks(self) -> Ranks:
        return self.call.ranks

    @property
    def plan(self) -> ExchangePlan:
        return self.call.plan

    def start_push(self, values: torch.Tensor, what: str) -> Arriving:
        if self.send is None:
            start = self.ranks.start_all_gather(values, what)
        else:
            slots = self.send if self.out.sent is None else self.send[: rounded(sum(self.out.sent))]
            values = take_slots(values, slots, self.plan.top_k, self.call.steps, f"leaving {what}")
            start = self.ranks.start_all_to_all(values, what, self.out)
        return functools.partial(self.arrived, start, what)

    def arrived(self, arriving: Arriving, what: str = "rows") -> torch.Tensor:
        """Wait for rows that `start_push` or a planner sent; `[R, D]`."""
        came = arriving().flatten(0, 1) if self.send is None else arriving()
        return came if self.slots is None else take_slots(came, self.slots, self.plan.top_k, self.call.steps, what)

    def push_ids(self, ids: torch.Tensor) -> torch.Tensor:
        return self.start_push(ids[:, None].float(), "adapter ids")().view(-1).int()  # fp32, as rows are

    def start_pull(self, rows: torch.Tensor, what: str) -> Arriving:
        """Send rows of slots home, `[R, N]`. The result waits and returns rows for `at_home`."""
        return self.ranks.start_all_to_all(rows, what, self.home)

    def start_total(self, rows: torch.Tensor | None, what: str) -> Total:
        assert rows is not None, "owners return their results"
        arriving = self.start_pull(rows, what)

        def total(*, out_dtype: torch.dtype | None = None, **shared: Any) -> torch.Tensor:
            y, layout = arriving(), self.at_home
            key = "total", y.shape, layout.spec, out_dtype, *[one is None for one in shared.values()]
            given: Any = {"shared": None, "shared_gate": None, **shared, "row_of_slot": layout.row_of_slot, "y": y}
            given |= {"sizes": layout_sizes(layout), "order": "row", "out_dtype": dtype_name("out_dtype", out_dtype)}
            return self.spoil(repeated(self.call.steps, key, REDUCE, **given))

        return total

    def spoil(self, y: torch.Tensor) -> torch.Tensor:
        return y if self.spoilt is None else y.masked_fill_(self.spoilt[:, None], torch.nan)

    def gradients(self, of: Gradients, *, dtype: torch.dtype | None, stored: bool) -> Gradients:
        assert not stored, "owners return the gradients of rows"
        (d_rows, d_weights), d_x, by_slot = of, None, None
        if d_rows is not None:
            d_x = ops.reduce(self.start_pull(d_rows, "d_x")(), self.at_home, order="row", out_dtype=dtype)
        if d_weights is not None:
            came = self.start_pull(d_weights, "d_weights")()
            by_slot = take_slots(came, self.at_home.row_of_slot).view(-1, self.at_home.spec.top_k)
        return Gradients(d_x, by_slot)


def take_slots(
    rows: torch.Tensor, slots: torch.Tensor, each: int = 1, steps: Any = None, what: str = "rows"
) -> torch.Tensor:
    """Row `slot // each` of rows for each of slots int32 `[S]`; zeros for slots below 0. steps: of a like call.
    what: of its arrays, as x may have other strides than rows that arrive, and ids of adapters the shape of rows."""
    given = {"x": rows, "slot_of_row": slots, "table": None, "each": each}
    return repeated(steps, (what, rows.shape, len(slots)), operators.TAKE_ROWS, **given)


def tokens_of_ranks(call: ExchangeCall, device: torch.device) -> torch.Tensor | None:
    """Send the first messages. Returns all ranks' tokens int32 `[W]` if replicas need them."""
    if device.type == "cpu":
        # Waiting costs nothing here, so the host compares before messages of different sizes. On a GPU headers travel
        # with the counts or the routing. If they differ and the host does not read them, the output is NaN.
        call.check(device)
    plan = call.plan
    if plan.spec.mode in STATIC_MODES or not plan.placement.has_replicas:
        return None
    (tokens,) = constants(((plan.brought,),), device)
    return call.ranks.all_gather(tokens, "tokens").view(-1)


class _Tables(NamedTuple):
    """Of `plan_send_tables`; some modes have no slot_of_row and table."""

    places: torch.Tensor
    invalid_ids: torch.Tensor
    tokens_per_expert: torch.Tensor
    row_of_slot: torch.Tensor
    lost: torch.Tensor
    counted: torch.Tensor
    message: torch.Tensor
    slot_of_row: torch.Tensor | None = None
    table: torch.Tensor | None = None


class RoutesPlanner(Planner):
    def __init__(
        self, call: ExchangeCall, ids: torch.Tensor, weights: torch.Tensor, token_mask: torch.Tensor | None
    ) -> None:
        ranks, plan, moving, *_ = call
        self.call, self.ranks, self.plan, self.spec, self.rank = call, ranks, plan, plan.tables, ranks.rank
        self.num_tokens, self.top_k, self.header = plan.brought, plan.top_k, call.header(ids.device)
        places, start = (
            placement_tables(plan.placement, ids.device) if moving is None else (moving.places, moving.start)
        )
        mask = None if token_mask is None else token_mask.contiguous()
        weights = (weights.detach() if weights.requires_grad else weights).contiguous()
        self._operands = SendOperands(ids.contiguous(), weights, places, start, self.header, mask)
        self.tokens: torch.Tensor | None = None
        if plan.spec.mode in STATIC_MODES and (moving is not None or plan.placement.has_replicas):
            # Ranks have equally many. Captured graphs must work for later placements.
            (self.tokens,) = constants(((plan.brought,) * ranks.size,), ids.device)
        self.step = functools.partial(repeated, call.steps)
        # Replicas need the ranks' numbers of tokens first.
        asks = plan.placement.has_replicas and plan.spec.mode not in STATIC_MODES
        self._first = None if asks else self.tables()

    def tables(self, limits: torch.Tensor | None = None) -> _Tables:
        arrays = self._operands._replace(tokens=self.tokens, limits=limits)._asdict()
        key = "send", self.tokens is None, limits is None
        return _Tables(*self.step(key, operators.SEND_TABLES, **arrays, spec=self.spec, rank=self.rank))

    def first_tables(self) -> _Tables:
        tokens = tokens_of_ranks(self.call, self.header.device)
        self.tokens = self.tokens if tokens is None else tokens
        return self.tables() if self._first is None else self._first

    def received(
        self,
        came: torch.Tensor,
        num_rows: int,
        header: torch.Tensor | None = None,
        lost: torch.Tensor | None = None,
        counts: torch.Tensor | None = None,
        rows: torch.Tensor | None = None,
    ) -> list[torch.Tensor]:
        return self.step(
            ("receive", len(came), num_rows, rows is None), operators.RECEIVE_TABLES, came=came, header=header,
            lost=lost, counts=counts, x=rows, spec=self.spec, rank=self.rank, top_k=self.top_k, num_rows=num_rows,
            num_tokens=self.num_tokens,
        )  # fmt: skip

    def routes(
        self, tables: _Tables, ways: tuple[Way, Way], owner: Sequence[torch.Tensor], returned: int, **counted: Any
    ) -> CollectiveRoutes:
        """ways: out and home. owner: ids, weights and slots, if any. returned: rows that come home."""
        (out, home), (ids, weights, *slots) = ways, owner
        return CollectiveRoutes(
            self.call, tables.slot_of_row, slots[0] if slots else None, out, home, ids, weights,
            one_group(self.num_tokens, self.top_k, returned, tables.row_of_slot),
            tokens_per_expert=tables.tokens_per_expert, invalid_ids=tables.invalid_ids, **counted,
        )  # fmt: skip


@functools.lru_cache(maxsize=1024)
def _layout_spec(tokens: int, top_k: int, capacity: int) -> LayoutSpec:
    # The batched form may have more rows than slots.
    sizes: Any = {"rows": capacity} if capacity <= tokens * top_k else {"max_rows": capacity}
    return LayoutSpec(tokens, top_k, 1, **sizes)


def one_group(tokens: int, top_k: int, capacity: int, row_of_slot: torch.Tensor) -> RaggedLayout:
    """One group for `reduce`, rows in any order."""
    return RaggedLayout(_layout_spec(tokens, top_k, capacity), None, None, None, row_of_slot, None)


class Counted(RoutesPlanner):
    """Routes of exact counts, which ranks exchange and the host reads."""

    _begun: tuple[Any, Begun] | None = None

    @property
    def _alone(self) -> bool:
        return self.ranks.size == 1 and self.plan.spec.receive is None  # it keeps all rows, and counts nothing

    def _room(self, rows: Sequence[int]) -> int:
        return sum(rows) if self._alone else rounded(sum(rows))

    def start(self, values: torch.Tensor | None = None) -> Callable[[], CollectiveRoutes]:
        """Send the counts. The result waits for others' and returns the routes. Raises as `compare_headers`."""
        tables, ranks = self.first_tables(), self.ranks
        told, rows = ranks.start_all_to_all(tables.message, "header and counts"), None

        def arrive() -> tuple[torch.Tensor, Callable[[], list[np.ndarray]]]:
            arrays = [tables.message, came := told()]
            if self._alone:
                most = [self.num_tokens, self.num_tokens * self.top_k][self.spec.by_slot :]
                return came, lambda: [np.array([[*self.plan.header, *most]])] * 2
            if (receive := self.plan.spec.receive) is not None:
                arrays.append(rows_that_fit(came, receive, self.spec.by_slot))
                arrays.append(ranks.all_to_all(arrays[-1], "rows that fit"))
            return came, read_by_host(*arrays)

        # A GPU copies before all that follows, a CPU waits behind it.
        arrived = arrive() if tables.message.is_cuda else None
        slots = tables.slot_of_row
        if values is not None and slots is not None and len(slots) * values[:1].nbytes <= _AHEAD:
            rows = self._leaving(values, tables)
        return lambda: self.counted(tables, *(arrived or arrive()), values, rows)

    def _expect(self) -> None:
        """Prepare to receive and compute as many rows as in the last such call, while the host waits for the counts."""
        steps, owner = self.call.steps, self.owner
        if steps is None or owner is None or (last := steps.get(_LAST)) is None:
            return
        if (ready := steps.get(("receive", *last[:2], False))) is not None:
            self._begun = last, ready.begin([0, 0, 0])
            owner.expect(*last[1:])

    def _leaving(self, values: torch.Tensor, tables: _Tables, count: int | None = None) -> torch.Tensor:
        """The first rows to go, with their numbers unless rows are to overlap with other work. count: None: all."""
        slots, table = tables.slot_of_row, tables.table
        assert slots is not None and table is not None
        if count is not None:
            slots, table = slots[:count], table[:count]
        table, key = None if self.ranks.overlaps else table, ("leaving", len(slots))
        return self.step(key, operators.TAKE_ROWS, x=values, slot_of_row=slots, table=table, each=self.top_k)

    def counted(
        self, tables: _Tables, on_device: torch.Tensor, counts: Callable[[], Sequence[np.ndarray]],
        values: torch.Tensor | None, ahead: torch.Tensor | None,
    ) -> CollectiveRoutes:  # fmt: skip
        """counts: waits for header and counts int32 `[W, ...]` for each owner, and from each rank. With a bound also
        `rows_that_fit` here, and of this rank at each owner. on_device: the second. ahead: rows that may leave."""
        if ahead is not None:
            self._expect()
        plan, ranks, by_slot, (own, came, *bounded) = self.plan, self.ranks, self.spec.by_slot, counts()
        spoilt, excess = None, 0
        group_tokens = ranks.compare(came[:, :_HEADER])
        if by_slot:
            leave = back = own[:, _HEADER:].sum(1).tolist()
            arrive = here = came[:, _HEADER:].sum(1).tolist()
        else:
            (leave, back), (arrive, here) = own[:, _HEADER:].T.tolist(), came[:, _HEADER:].T.tolist()
        if bounded:
            require_room(plan, excess := int(bounded[1][:, 1].sum()))
        if excess:
            arrive, leave = (one[:, 0].tolist() for one in bounded)
            back, here, limits, ahead = leave, arrive, np.zeros((2, ranks.size), np.int32), None
            limits[0] = leave
            tables = self.tables(torch.tensor(limits, device=self.header.device))
            if not by_slot:
                # Results begin at home by the slots of tokens that fit.
                here = ranks.all_to_all(tables.counted, "counts of what fits").tolist()
                back = tables.counted.tolist()
                limits[1] = np.cumsum(back) - back
                tables = self.tables(torch.tensor(limits, device=self.header.device))
            if plan.spec.on_overflow != "drop":
                spoilt = tables.lost
            fits = np.stack([arrive, here], 1) if not by_slot else first_rows(came[:, _HEADER:], sum(arrive))
            fitting = np.concatenate([came[:, :_HEADER], fits], 1, dtype=np.int32)
            on_device = torch.tensor(fitting, device=on_device.device)
        out, leaving, came_rows = Way(leave, arrive, self._room(arrive)), None, None
        assert tables.table is not None
        if values is not None:
            # First: everything below takes the host longer than few rows travel.
            rows_out = self._leaving(values, tables, self._room(leave)) if ahead is None else ahead
            leaving = ranks.start_all_to_all(rows_out, "rows", out)
        if leaving is None or ranks.overlaps:
            numbers = ranks.all_to_all(tables.table, "weights" if by_slot else "ids and weights", out)
            numbers[sum(arrive) :] = -1
            owner = self._owner(on_device, here, numbers)
        else:
            *owner, came_rows = self._unpacked(leaving(), on_device, here, group_tokens)
        returned = min(self._room(back), self.num_tokens * self.top_k)
        ways = out, Way(here, back, returned)
        overflow = functools.partial(torch.full, (1,), excess, dtype=torch.int32, device=on_device.device)
        routes = self.routes(tables, ways, owner, returned, spoilt=spoilt, excess=overflow, group_tokens=group_tokens)
        if leaving is not None:
            self.arriving = functools.partial(routes.arrived, leaving) if came_rows is None else lambda: came_rows
        return routes

    def _owner(
        self, counts: torch.Tensor, here: Sequence[int], numbers: torch.Tensor, rows: torch.Tensor | None = None
    ) -> Sequence[torch.Tensor]:
        """Of an owner's slots: ids, weights, with rows of tokens slots, and their rows if rows have come."""
        if not self.spec.by_slot:
            return self.received(numbers, self._room(here), counts=counts, rows=rows)
        ids, _ = ops.layout_of_runs(counts[:, _HEADER:].contiguous(), len(numbers))
        return ids, numbers.contiguous().view(torch.float32), *([] if rows is None else [rows])

    def _unpacked(
        self, packed: torch.Tensor, counts: torch.Tensor, here: Sequence[int], group_tokens: int
    ) -> Sequence[torch.Tensor]:
        """See `_owner`, of rows with numbers behind."""
        width, steps = self.spec.width(self.top_k), self.call.steps
        first = packed_row(self.plan.d_model, self.plan.dtype, width)[1]
        if steps is not None and not self.spec.by_slot:
            rows, (last, begun) = (packed.shape[0], self._room(here)), self._begun or (None, None)
            if (expected := (*rows, group_tokens)) != last:
                steps.put(_LAST, expected)
                ready = steps.get(("receive", *rows, False))
                begun = None if ready is None else ready.begin([0, 0, 0])
            if begun is not None:
                # Without views, which cost as much as a launch: came, counts, x.
                address = packed.data_ptr()
                begun.pointers[:3] = address + 4 * first, counts.data_ptr(), address
                came = begun.run()
                if expected == last:
                    # Before all else that the host does with them.
                    self.owner.compute(came)
                return came
        numbers, values = packed.view(torch.int32)[:, first : first + width], packed[:, : self.plan.d_model]
        return self._owner(counts, here, numbers, values)
