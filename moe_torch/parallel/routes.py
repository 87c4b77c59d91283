"""The routes of collective modes: tokens go out, results of slots come home. Owners have K = 1 or store results."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from moe_core.ops.exchange.operands import SendOperands
from moe_core.parallel import ExchangePlan
from moe_core.parallel.header import STATIC_MODES
from moe_core.specs.exchange import TableSpec
from moe_core.specs.operands import RaggedLayout
from moe_core.specs.routing import LayoutSpec
from moe_torch import ops
from moe_torch.bridge.options import dtype_name
from moe_torch.operators import routes as operators
from moe_torch.operators.requests import layout_sizes
from moe_torch.operators.stages import REDUCE
from moe_torch.parallel.calls.known import repeated
from moe_torch.parallel.calls.stored import StoredResults
from moe_torch.parallel.exchange import constants, placement_tables
from moe_torch.parallel.group import Arriving, Ranks, Way
from moe_torch.parallel.route import ExchangeCall, Gradients, Planner, Total


def rounded(rows: int) -> int:
    """Round rows up by at most 1/32, and not up to 63: every number has its plans. Examples: 65 -> 66, 1000 -> 1008."""
    step = 1 << max(0, rows.bit_length() - 6)
    return -(-rows // step) * step


@dataclass(frozen=True)
class CollectiveRoutes:
    """The routes of one rank for one call, see `moe_torch.parallel.route.Routes`.

    send int32: slots of rows that go out, -1: none or behind those. None: every token goes to every rank. slots int32
    `[R]`: the slots of received rows, K each, of the owner's rows. None: experts take rows as they came. at_home: how
    rows that come home are added. spoilt bool `[T]` or None: tokens that become NaN, as a slot did not fit or ranks
    disagree. excess: makes overflow. tokens_per_expert int32 `[E]` and invalid_ids int32 `[1]`: of this rank.
    results: where experts store theirs, None: they return them.
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
    results: StoredResults | None = None

    @property
    def stores(self) -> bool:
        return self.results is not None

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
        return self.taken(arriving().flatten(0, 1) if self.send is None else arriving(), what)

    def taken(self, came: torch.Tensor, what: str = "rows") -> torch.Tensor:
        if self.slots is not None:
            return take_slots(came, self.slots, self.plan.top_k, self.call.steps, what)
        if torch.is_anomaly_enabled() and self.out.received is not None:
            came[sum(self.out.received) :] = 0  # A search for NaN in gradients reads all rows that there is room for.
        return came

    def push_ids(self, ids: torch.Tensor) -> torch.Tensor:
        return self.start_push(ids[:, None].float(), "adapter ids")().view(-1).int()  # fp32, as rows are

    def start_pull(self, rows: torch.Tensor, what: str) -> Arriving:
        """Send rows of slots home, `[R, N]`. The result waits and returns rows for `at_home`."""
        return self.ranks.start_all_to_all(rows, what, self.home)

    def results_at(self) -> torch.Tensor:
        assert self.results is not None
        return self.results.at

    def gradients_at(self, results_at: torch.Tensor) -> torch.Tensor:
        assert self.results is not None
        return self.results.gradients_at()

    def begin_gradients(self) -> None:
        if self.results is not None:
            self.results.begin_gradients()

    def start_total(self, rows: torch.Tensor | None, what: str) -> Total:
        if rows is None:
            assert self.results is not None
            arriving = self.results.start(self.ranks, what)
        else:
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
        (d_rows, d_weights), d_x, by_slot, results = of, None, None, self.results
        if d_rows is not None:
            came = self.start_pull(d_rows, "d_x") if results is None else results.start(self.ranks, "d_x")
            d_x = ops.reduce(came(), self.at_home, order="row", out_dtype=dtype)
        if d_weights is not None:
            if results is None:
                came = self.start_pull(d_weights, "d_weights")
            else:
                came = results.start(self.ranks, "d_weights", take_slots(d_weights.view(-1, 1), results.slots))
            came = came()
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


class SendTables(NamedTuple):
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


@functools.lru_cache(maxsize=256)
def _own_first(spec: TableSpec) -> TableSpec:
    return dataclasses.replace(spec, own_first=True)


class RoutesPlanner(Planner):
    """stores: experts store their results, and this rank's own do not travel."""

    stores = False

    def __init__(
        self, call: ExchangeCall, ids: torch.Tensor, weights: torch.Tensor, token_mask: torch.Tensor | None
    ) -> None:
        ranks, plan, moving, *_ = call
        self.call, self.ranks, self.plan, self.rank = call, ranks, plan, ranks.rank
        self.spec = _own_first(plan.tables) if self.stores else plan.tables
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

    def tables(self, limits: torch.Tensor | None = None) -> SendTables:
        arrays = self._operands._replace(tokens=self.tokens, limits=limits)._asdict()
        key = "send", self.tokens is None, limits is None
        return SendTables(*self.step(key, operators.SEND_TABLES, **arrays, spec=self.spec, rank=self.rank))

    def first_tables(self) -> SendTables:
        tokens = tokens_of_ranks(self.call, self.header.device)
        self.tokens = self.tokens if tokens is None else tokens
        return self.tables() if self._first is None else self._first

    def received(self, came: torch.Tensor, num_rows: int, **arrays: torch.Tensor | None) -> list[torch.Tensor]:
        """arrays: of `ReceiveOperands`, as given."""
        given: Any = dict.fromkeys(("header", "lost", "counts", "results")) | arrays
        return self.step(
            ("receive", len(came), num_rows, "results" in arrays), operators.RECEIVE_TABLES, came=came, **given,
            spec=self.spec, rank=self.rank, top_k=self.top_k, num_rows=num_rows, num_tokens=self.num_tokens,
        )  # fmt: skip

    def routes(
        self, tables: SendTables, ways: tuple[Way, Way], owner: Sequence[torch.Tensor], returned: int, **counted: Any
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
