"""Which row becomes which row of another rank, and the two ways on which rows move: of tokens out, of slots back.

At an owner there is one row for each slot, whatever travelled: its op has K = 1, and gives back a row for each slot.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from moe_core.parallel.bounds import bounds_of
from moe_core.parallel.exchange import splits
from moe_core.parallel.header import Header, compare_headers
from moe_core.parallel.placement import Placement
from moe_core.parallel.plan import ExchangePlan
from moe_core.parallel.spec import ExchangeSpec
from moe_core.specs.operands import RaggedLayout
from moe_core.specs.routing import LayoutSpec
from moe_torch import ops
from moe_torch.parallel import exchange
from moe_torch.parallel.exchange import take
from moe_torch.parallel.group import Arriving, Ranks

_HEADER = len(Header._fields)


class Way(NamedTuple):
    """Rows that go to each rank and come from each; None: equally many."""

    sent: Sequence[int] | None = None
    received: Sequence[int] | None = None

    @property
    def back(self) -> Way:
        """The same rows, returned."""
        return Way(self.received, self.sent)


@dataclass(frozen=True)
class Routes:
    """The routes of one rank for one call.

    send: the rows that go out, among the rows of tokens here; None: every token goes to every rank. slots: the rows of
    slots at the owner, among the received rows; None: what is received are slots. out, home: how many of both go. ids
    int32 and weights fp32 `[R, 1]`: what the owner's op is given. at_home: how the rows that come home are added up.
    spoilt bool `[T]`: tokens whose output is to be NaN, because a slot did not fit or ranks disagree; None = none.
    overflow int32 `[1]`: rows of all ranks that did not fit. group_tokens: of all ranks.
    """

    ranks: Ranks
    plan: ExchangePlan
    send: RaggedLayout | None
    slots: RaggedLayout | None
    out: Way
    home: Way
    ids: torch.Tensor
    weights: torch.Tensor
    at_home: RaggedLayout
    spoilt: torch.Tensor | None
    overflow: torch.Tensor
    group_tokens: int

    def push(self, values: torch.Tensor, what: str) -> torch.Tensor:
        """Rows of slots at their owners, `[R, D]`, of rows of tokens at home, `[T, D]`."""
        return self.start_push(values, what)()

    def start_push(self, values: torch.Tensor, what: str) -> Arriving:
        """`push` that waits where what it returns is called."""
        if self.send is None:
            start = self.ranks.start_all_gather(values, what)
        else:
            start = self.ranks.start_all_to_all(ops.gather_rows(values, self.send), what, *self.out)

        def arrived() -> torch.Tensor:
            came = start().flatten(0, 1) if self.send is None else start()
            return came if self.slots is None else ops.gather_rows(came, self.slots)

        return arrived

    def pull(self, rows: torch.Tensor, what: str) -> torch.Tensor:
        """Rows of slots at home, as `at_home` says, of rows of slots at their owners, `[R, N]`."""
        return self.start_pull(rows, what)()

    def start_pull(self, rows: torch.Tensor, what: str) -> Arriving:
        """`pull` that waits where what it returns is called."""
        return self.ranks.start_all_to_all(rows, what, *self.home)

    def start_total(self, rows: torch.Tensor, what: str) -> Callable[..., torch.Tensor]:
        """What sums each token's rows of slots, `[T, N]`, with the options of `ops.reduce`; of rows of slots at their
        owners, `[R, N]`, which set off."""
        arriving = self.start_pull(rows, what)

        def total(**options: Any) -> torch.Tensor:
            return ops.reduce(arriving(), self.at_home, order="row", **options)

        return total

    def gradients(
        self, d_rows: torch.Tensor | None, d_weights: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """d_x fp32 `[T, D]` and the gradients of weights fp32 `[T, K]`, of those by slot at their owners."""
        wide = by_slot = None
        if d_rows is not None:
            rows = self.pull(d_rows, "d_x")
            wide = ops.reduce(rows, self.at_home, order="row", out_dtype=torch.float32)
        if d_weights is not None:
            came = self.pull(d_weights, "d_weights")
            by_slot = take(came, self.at_home.row_of_slot, 0).view(-1, self.at_home.spec.top_k)
        return wide, by_slot


def make_routes(
    ranks: Ranks,
    plan: ExchangePlan,
    places: torch.Tensor,
    weights: torch.Tensor,
    header: torch.Tensor | None = None,
) -> Routes:
    """From the places of this rank's slots, int32 `[T, K]`, and their weights, fp32 `[T, K]`.

    header: int32 `[8]` on the device, None = the plan's. A collective. Raises PeerFailed and InvalidInput as
    `compare_headers` does.
    """
    return start_routes(ranks, plan, places, weights, header)()


def start_routes(
    ranks: Ranks,
    plan: ExchangePlan,
    places: torch.Tensor,
    weights: torch.Tensor,
    header: torch.Tensor | None = None,
) -> Callable[[], Routes]:
    """`make_routes` that waits for the other ranks' counts where what it returns is called; where nothing is counted,
    all is done there."""
    if header is None:
        (header,) = exchange.constants((tuple(plan.header),), places.device)
    if plan.spec.mode == "all_to_all":
        return _Counted(ranks, plan, places, weights, header).start()
    return _Blocks(ranks, plan, places, weights, header).routes


def check_headers(ranks: Ranks, header: Sequence[int], device: torch.device) -> None:
    """Raise where a rank failed or has other sizes or options; the host waits for the message."""
    (own,) = exchange.constants((tuple(header),), device)
    compare_headers(ranks.all_gather(own, "header").cpu().numpy(), ranks.where)


def tell_failure(ranks: Ranks, spec: ExchangeSpec, placement: Placement, device: torch.device) -> None:
    """Send a header of zeros instead of one's own, so that no peer waits for a rank that failed."""
    counts = counts_sent(spec, placement) if spec.mode == "all_to_all" else 0
    ranks.all_gather(torch.zeros(_HEADER + counts, dtype=torch.int32, device=device), "header")


def counts_sent(spec: ExchangeSpec, placement: Placement) -> int:
    """The counts beside the header: of slots by place; of tokens and their slots by owner."""
    return placement.num_places if spec.rows == "slots" else 2 * placement.num_ranks


def _layout(tokens: int, top_k: int, capacity: int, slot_of_row: Any, row_of_slot: Any) -> RaggedLayout:
    """Rows in any order as the layout of one group, for `gather_rows` and `reduce`."""
    # The batched form may have more rows than there are slots.
    sizes = {"rows": capacity} if capacity <= tokens * top_k else {"max_rows": capacity}
    nothing = torch.empty(0, dtype=torch.int32)
    return RaggedLayout(LayoutSpec(tokens, top_k, 1, **sizes), nothing, nothing, slot_of_row, row_of_slot, None)


class _Planner:
    """What both kinds of routes have in common."""

    def __init__(
        self,
        ranks: Ranks,
        plan: ExchangePlan,
        places: torch.Tensor,
        weights: torch.Tensor,
        header: torch.Tensor,
    ) -> None:
        self.ranks, self.plan, self.places, self.weights, self.header = ranks, plan, places, weights, header
        self.tokens, self.top_k = places.shape
        self.num_ranks, self.per_rank = plan.placement.num_ranks, plan.placement.per_rank
        self.owners = exchange.owners_of(places, self.per_rank)
        self.by_slot = plan.spec.rows == "slots"

    def layout(self, capacity: int, slot_of_row: torch.Tensor, row_of_slot: torch.Tensor) -> RaggedLayout:
        return _layout(self.tokens, self.top_k, capacity, slot_of_row, row_of_slot.reshape(-1))

    def table(self, slots: torch.Tensor | None) -> torch.Tensor:
        """int32: places, and weights as their bits, of slots or of the tokens of slots; None: of all tokens."""
        places, weights = self.places, self.weights.detach()
        if self.by_slot:
            places, weights = places.reshape(-1, 1), weights.reshape(-1, 1)
        table = torch.cat([places, weights.contiguous().view(torch.int32)], dim=1)
        if slots is None:
            return table
        return take(table, slots if self.by_slot else torch.where(slots < 0, -1, slots // self.top_k), -1)

    def local(self, table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """ids int32 of the experts here, -1 = none, and weights, of a table that was received."""
        places, bits = table.chunk(2, dim=1)
        ids = places - self.ranks.rank * self.per_rank
        ids = torch.where((places >= 0) & (ids >= 0) & (ids < self.per_rank), ids, -1).contiguous()
        return ids, torch.where(ids < 0, 0.0, bits.contiguous().view(torch.float32))

    def of_slots(self, table: torch.Tensor, layout: Any) -> tuple[RaggedLayout, torch.Tensor, torch.Tensor]:
        """The rows of slots among received rows of tokens, their ids and weights; layout: of ids, a RaggedLayout."""
        ids, weights = self.local(table)
        found = layout(ids)
        capacity = len(found.slot_of_row)
        slots = _layout(len(ids), self.top_k, capacity, found.slot_of_row, found.row_of_slot)
        own = take(ids.reshape(-1, 1), found.slot_of_row, -1)
        return slots, own, take(weights.reshape(-1, 1), found.slot_of_row, 0.0)


class _Counted(_Planner):
    """Ranks tell each other how many rows come; the host reads it."""

    def start(self) -> Callable[[], Routes]:
        groups = self.places if self.by_slot else exchange.first_owners(self.owners)
        sent = ops.make_layout(groups, self.num_ranks * (self.per_rank if self.by_slot else 1))
        counts = [sent.group_sizes]
        back = sent
        if not self.by_slot:
            back = ops.make_layout(self.owners, self.num_ranks)
            counts.append(back.group_sizes)
        arriving = self.ranks.start_all_gather(torch.cat([self.header, *counts]), "header and counts")
        return lambda: self.routes(groups, sent, back, arriving())

    def routes(self, groups: torch.Tensor, sent: RaggedLayout, back: RaggedLayout, on_device: torch.Tensor) -> Routes:
        """groups int32 `[T, K]`, in whose order rows are sent; sent, back: the layouts of what goes and of what comes
        home; on_device int32 `[W, ...]`: header and counts of all ranks."""
        plan, ranks, device = self.plan, self.ranks, self.places.device
        message = on_device.cpu().numpy()
        group_tokens = compare_headers(message[:, :_HEADER], ranks.where)
        told = message[:, _HEADER:]
        rows, slots = (told, told) if self.by_slot else np.split(told, 2, axis=1)
        way, whole = (splits(rows, ranks.rank, receive) for receive in (plan.spec.receive, None))
        overflow = int(self._pairs(rows).sum() - self._kept(rows).sum())
        send, row_of_slot = sent.slot_of_row[: whole.sent.sum()], back.row_of_slot
        spoilt = None
        if overflow:
            number = exchange.rows_in_runs(sent, groups, self.num_ranks)
            kept = torch.tensor(way.sent, device=device)[self.owners.clamp(min=0).long()]
            fits = (number >= 0) & (number < kept)
            went = [np.arange(first, first + count) for first, count in zip(way.sent_start, way.sent, strict=True)]
            send = send[torch.tensor(np.concatenate(went), device=device)]
            arrived = torch.where(fits, groups, -1)
            if not self.by_slot:
                dropped = torch.where((number >= 0) & ~fits, groups, -2)
                gone = (self.owners[:, :, None] == dropped[:, None, :]).any(dim=2)
                arrived = torch.where(gone, -1, self.owners)
            if plan.spec.on_overflow == "error":
                spoilt = ((self.places >= 0) & (arrived < 0)).any(dim=1)
            back = ops.make_layout(arrived, len(sent.group_sizes) if self.by_slot else self.num_ranks)
            row_of_slot = back.row_of_slot
            if not self.by_slot:
                # Only now is it known how many slots the tokens have that fit.
                slots = ranks.all_gather(back.group_sizes, "counts of what fits").cpu().numpy()
        out = Way(way.sent.tolist(), way.received.tolist())
        home = out.back
        received = sum(out.received or ())
        if self.by_slot:
            own_places = slice(ranks.rank * self.per_rank, (ranks.rank + 1) * self.per_rank)
            runs = on_device[:, _HEADER:][:, own_places].contiguous()
            if overflow:
                runs = torch.tensor(_first_rows(rows[:, own_places], self._limit()), device=device)
            ids, _ = ops.layout_of_runs(runs, received)
            bits = self.table(send)[:, 1:]
            own = ranks.all_to_all(bits, "weights", *out).view(torch.float32)
            at_owner = None
        else:
            came = ranks.all_to_all(self.table(send), "ids and weights", *out)
            home = Way(slots[:, ranks.rank].tolist(), slots[ranks.rank].tolist())
            most = sum(home.sent or ())

            def layout(ids: torch.Tensor) -> RaggedLayout:
                return ops.make_layout(ids.clamp(max=0), 1, rows=most)

            at_owner, ids, own = self.of_slots(came, layout)
        returned = sum(home.received or ())
        at_home = self.layout(returned, back.slot_of_row[:returned], row_of_slot)
        leaving = self.layout(len(send), send, sent.row_of_slot)
        counted = torch.full((1,), overflow, dtype=torch.int32, device=device)
        return Routes(ranks, plan, leaving, at_owner, out, home, ids, own, at_home, spoilt, counted, group_tokens)

    def _limit(self) -> int:
        receive = self.plan.spec.receive
        return np.iinfo(np.int32).max if receive is None else receive

    def _pairs(self, counts: np.ndarray) -> np.ndarray:
        return counts.astype(np.int64).reshape(self.num_ranks, self.num_ranks, -1).sum(axis=2)

    def _kept(self, counts: np.ndarray) -> np.ndarray:
        """Rows of every (home, owner) that fit."""
        return np.minimum(self._pairs(counts).sum(axis=0), self._limit())


def _first_rows(runs: np.ndarray, most: int) -> np.ndarray:
    """The rows of runs int32 `[W, L]`, one run after another, that are among the first `most`."""
    flat = runs.reshape(-1).astype(np.int64)
    start = np.cumsum(flat) - flat
    return np.clip(most - start, 0, flat).reshape(runs.shape).astype(np.int32)


class _Blocks(_Planner):
    """Blocks of one size between every two ranks, which follow from the sizes alone: the host reads nothing."""

    def routes(self) -> Routes:
        plan, ranks = self.plan, self.ranks
        bounds = bounds_of(plan.spec, self.tokens, self.top_k, plan.placement)
        assert bounds.block is not None and bounds.back is not None
        # Arrays have a row at least, which nothing may be in.
        block, most_back = max(1, bounds.block), max(1, bounds.back)
        gathers = plan.spec.mode == "all_gather"
        arrived, overflow, send, leaving = self.owners, 0, None, None
        if not gathers:
            groups = self.places if self.by_slot else exchange.first_owners(self.owners)
            sent = ops.make_layout(groups, self.num_ranks * (self.per_rank if self.by_slot else 1))
            number = exchange.rows_in_runs(sent, groups, self.num_ranks)
            send = exchange.rows_of_blocks(sent, self.num_ranks, block, bounds.block)
            leaving = self.layout(self.num_ranks * block, send, sent.row_of_slot)
            fits = number < bounds.block
            if self.by_slot:
                arrived = torch.where(fits, self.owners, -1)
            else:
                dropped = torch.where(fits, -2, groups)
                gone = (self.owners[:, :, None] == dropped[:, None, :]).any(dim=2) & (self.owners >= 0)
                arrived = torch.where(gone, -1, self.owners)
                # A token's row counts once, however many slots are lost with it.
                overflow = (~fits).sum() - gone.sum()
        if self.by_slot:
            number = torch.where(arrived < 0, -1, number)
            at_owner = None
            agree, came = self.exchanged(self.table(send))
            ids, own = self.local(came)
        else:
            back = ops.make_layout(arrived, self.num_ranks)
            number = exchange.rows_in_runs(back, arrived, self.num_ranks)
            table = self.table(send)
            agree, came = self.exchanged(table)

            def layout(ids: torch.Tensor) -> RaggedLayout:
                row = torch.arange(len(ids), dtype=torch.int32, device=ids.device)[:, None]
                sources = torch.where(ids < 0, -1, row // max(1, len(ids) // self.num_ranks))
                # Slots beyond what the block takes are cut off, as at home.
                return ops.make_layout(sources, self.num_ranks, max_rows=most_back)

            at_owner, ids, own = self.of_slots(came, layout)
        fits = (number >= 0) & (number < bounds.back)
        row_of_slot = torch.where(fits, self.owners * most_back + number, -1)
        lost = (self.places >= 0) & ~fits
        spoilt = (~agree).repeat(self.tokens)
        if plan.spec.on_overflow == "error":
            spoilt |= lost.any(dim=1)
        counted = ranks.total((lost.sum() + overflow).to(torch.int32).view(1), "overflow")
        at_home = self.layout(self.num_ranks * most_back, _no_rows(self.num_ranks * most_back, lost), row_of_slot)
        group = self.num_ranks * self.tokens
        return Routes(ranks, plan, leaving, at_owner, Way(), Way(), ids, own, at_home, spoilt, counted, group)

    def exchanged(self, table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Whether all ranks have this rank's header, on the device, and the rows of a table that come here."""
        header = self.header
        what = "header, ids and weights"
        if self.plan.spec.mode == "all_gather":
            came = self.ranks.all_gather(torch.cat([header, table.view(-1)]), what)
        else:
            rows = torch.cat([header.expand(self.num_ranks, -1), table.view(self.num_ranks, -1)], dim=1)
            came = self.ranks.all_to_all(rows, what)
        agree = (came[:, :_HEADER] == header).all()
        return agree, came[:, _HEADER:].reshape(-1, table.shape[1])


def _no_rows(capacity: int, like: torch.Tensor) -> torch.Tensor:
    """slot_of_row where nothing is gathered."""
    return torch.empty(capacity, dtype=torch.int32, device=like.device)
