"""Routes of exact counts, which ranks exchange and the host reads."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from moe_core.parallel.exchange import first_rows
from moe_core.parallel.header import Header
from moe_core.specs.exchange import packed_row
from moe_torch import ops
from moe_torch.bridge.options import TORCH_DTYPES
from moe_torch.bridge.ready import Begun
from moe_torch.operators import routes as operators
from moe_torch.parallel.calls.stored import StoredResults
from moe_torch.parallel.exchange import rows_that_fit
from moe_torch.parallel.group import Way, read_by_host
from moe_torch.parallel.route import ExchangeCall, require_room
from moe_torch.parallel.routes import CollectiveRoutes, RoutesPlanner, SendTables, rounded

_HEADER = len(Header._fields)
#: Key of the numbers of a call: rows that came, an owner's rows, all ranks' tokens.
_LAST = ("last",)
#: Bytes that may be copied for nobody before the host knows how many rows leave: in less time than it takes to read
#: that. Products of as many bytes, which a host would keep waiting, are prepared meanwhile.
_AHEAD = 1 << 26


class Counted(RoutesPlanner):
    """Plans them. Experts store their results, and this rank's own do not travel, unless owners return rows."""

    _begun: tuple[Any, Begun] | None = None

    def __init__(self, call: ExchangeCall, *routing: Any, returns: bool = False) -> None:
        """returns: owners return results as rows."""
        self.stores = not returns and call.plan.stores
        super().__init__(call, *routing)

    @property
    def _alone(self) -> bool:
        return self.ranks.size == 1 and self.plan.spec.receive is None  # it keeps all rows, and counts nothing

    def _room(self, rows: Sequence[int]) -> int:
        return sum(rows) if self._alone else rounded(sum(rows))

    def start(self, values: torch.Tensor | None = None) -> Callable[[], CollectiveRoutes]:
        """Send the counts. The result waits for others' and returns the routes. Raises as `compare_headers`."""
        tables, ranks = self.first_tables(), self.ranks
        told, ahead = ranks.start_all_to_all(tables.message, "header and counts"), []

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
        if values is not None and self._unwanted * values[:1].nbytes <= _AHEAD:
            ahead.append(self._leaving(values, tables))
        return lambda: self.counted(tables, *(arrived or arrive()), values, ahead)

    @property
    def _unwanted(self) -> float:
        """Rows for which there is room, less those that leave if each slot has any owner."""
        owners, top_k = self.ranks.size, self.top_k
        wanted = owners * (1 - (1 - 1 / owners) ** top_k)
        return 0 if self.spec.by_slot else self.num_tokens * (min(top_k, owners) - wanted)

    def _expect(self) -> None:
        """Prepare to receive and compute as many rows as in the last such call, while the host waits for the counts."""
        steps, owner = self.call.steps, self.owner
        if steps is None or owner is None or (last := steps.get(_LAST)) is None:
            return
        if (ready := steps.get(("receive", *last[:2], True))) is not None:
            self._begun = last, ready.begin([0, 0, 0])
            owner.expect(last[0], last[2])

    def _leaving(self, values: torch.Tensor, tables: SendTables, count: int | None = None) -> torch.Tensor:
        """The first rows to go, with their numbers unless rows are to overlap with other work. count: None: all."""
        slots, table = tables.slot_of_row, tables.table
        assert slots is not None and table is not None
        if count is not None:
            slots, table = slots[:count], table[:count]
        table, key = None if self.ranks.overlaps else table, ("leaving", len(slots))
        return self.step(key, operators.TAKE_ROWS, x=values, slot_of_row=slots, table=table, each=self.top_k)

    def counted(
        self, tables: SendTables, on_device: torch.Tensor, counts: Callable[[], Sequence[np.ndarray]],
        values: torch.Tensor | None, ahead: list[torch.Tensor],
    ) -> CollectiveRoutes:  # fmt: skip
        """counts: waits for header and counts int32 `[W, ...]` for each owner, and from each rank. With a bound also
        `rows_that_fit` here, and of this rank at each owner. on_device: the second. ahead: rows that may leave."""
        if ahead and ahead[0].nbytes <= _AHEAD:
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
            back, here, limits = leave, arrive, np.zeros((2, ranks.size), np.int32)
            ahead.clear()
            limits[0] = leave
            tables = self.tables(torch.tensor(limits, device=self.header.device))
            if not by_slot:
                # Results begin at home by the slots of tokens that fit.
                here = ranks.all_to_all(tables.counted, "counts of what fits").tolist()
                back = tables.counted.tolist()
                limits[1] = np.cumsum(back) - back
                if self.stores:
                    limits[1, : self.rank] += back[self.rank]
                    limits[1, self.rank] = 0
                tables = self.tables(torch.tensor(limits, device=self.header.device))
            if plan.spec.on_overflow != "drop":
                spoilt = tables.lost
            fits = np.stack([arrive, here], 1) if not by_slot else first_rows(came[:, _HEADER:], sum(arrive))
            fitting = np.concatenate([came[:, :_HEADER], fits], 1, dtype=np.int32)
            on_device = torch.tensor(fitting, device=on_device.device)
        out, leaving, came_rows = Way(leave, arrive, self._room(arrive)), None, None
        returned, results = min(self._room(back), self.num_tokens * self.top_k), None
        assert tables.table is not None
        if values is not None:
            # First: everything below takes the host longer than few rows travel.
            rows = ahead.pop() if ahead else self._leaving(values, tables, self._room(leave))
            leaving = ranks.start_all_to_all(rows, "rows", out)
            del rows
        if self.stores:
            row = on_device.new_empty((0, plan.d_model), dtype=TORCH_DTYPES[plan.dtype])
            results = StoredResults(self.rank, here, back, returned, row)
        if leaving is None or ranks.overlaps:
            numbers = ranks.all_to_all(tables.table, "weights" if by_slot else "ids and weights", out)
            numbers[sum(arrive) :] = -1
            owner = self._owner(on_device, here, numbers, results)
        else:
            came_rows, owner = self._unpacked(leaving(), on_device, here, group_tokens, results)
        ways = out, Way(here, back, returned)
        overflow = functools.partial(torch.full, (1,), excess, dtype=torch.int32, device=on_device.device)
        counted: Any = {"spoilt": spoilt, "excess": overflow, "group_tokens": group_tokens, "results": results}
        routes = self.routes(tables, ways, owner, returned, **counted)
        if came_rows is not None:
            self.arriving = functools.partial(routes.taken, came_rows)
        elif leaving is not None:
            self.arriving = functools.partial(routes.arrived, leaving)
        return routes

    def _owner(
        self, counts: torch.Tensor, here: Sequence[int], numbers: torch.Tensor, results: StoredResults | None
    ) -> Sequence[torch.Tensor]:
        """Ids and weights of an owner's rows, and with rows of tokens its slots, unless results are stored."""
        if self.spec.by_slot:
            ids, _ = ops.layout_of_runs(counts[:, _HEADER:].contiguous(), len(numbers))
            return ids, numbers.contiguous().view(torch.float32)
        if results is None:
            return self.received(numbers, self._room(here), counts=counts)
        *owner, results.slots, results.at = self.received(
            numbers, self._room(here), counts=counts, results=results.first
        )
        return owner

    def _unpacked(
        self, packed: torch.Tensor, counts: torch.Tensor, here: Sequence[int], group_tokens: int,
        results: StoredResults | None,
    ) -> tuple[torch.Tensor, Sequence[torch.Tensor]]:  # fmt: skip
        """Rows with numbers behind, and what `_owner` returns."""
        width, steps, values = self.spec.width(self.top_k), self.call.steps, packed[:, : self.plan.d_model]
        first = packed_row(self.plan.d_model, self.plan.dtype, width)[1]
        if steps is not None and results is not None:
            rows, (last, begun) = (packed.shape[0], self._room(here)), self._begun or (None, None)
            if (expected := (*rows, group_tokens)) != last:
                steps.put(_LAST, expected)
                ready = steps.get(("receive", *rows, True))
                begun = None if ready is None else ready.begin([0, 0, 0])
            if begun is not None:
                # Without views, which cost as much as a launch.
                address = packed.data_ptr()
                begun.pointers[:3] = address + 4 * first, counts.data_ptr(), results.first.data_ptr()
                *owner, results.slots, results.at = begun.run()
                if expected == last:
                    # Before all else that the host does with them.
                    self.owner.compute(address, *[one.data_ptr() for one in (*owner, results.at)])
                return values, owner
        return values, self._owner(counts, here, packed.view(torch.int32)[:, first : first + width], results)
