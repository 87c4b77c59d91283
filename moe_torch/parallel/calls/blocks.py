"""Blocks of one size between every two ranks: the host reads nothing."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from moe_core.parallel.header import CALLS
from moe_torch.parallel.calls import joined
from moe_torch.parallel.calls.known import Step
from moe_torch.parallel.exchange import header_rows, kept
from moe_torch.parallel.group import Ranks, Way
from moe_torch.parallel.owner import Results
from moe_torch.parallel.route import ExchangeCall
from moe_torch.parallel.routes import CollectiveRoutes, RoutesPlanner
from moe_torch.parallel.tensor import Brought

_MESSAGE = "header, ids and weights"
#: The most numbers in sent rows for which like calls are one plan. All its arrays live until its end.
_FEW = 1 << 21
#: Steps: tables, rows, tables of what came, rows of slots, products, sums.
_LINKS = {
    "1.slot_of_row": "0.slot_of_row", "2.header": "0.header", "2.lost": "0.lost", "3.slot_of_row": "2.slot_of_row",
    "4.x": "3.y", "4.routing.ids": "2.ids", "4.routing.weights": "2.weights", "5.row_of_slot": "0.row_of_slot",
}  # fmt: skip
_CHANGING = (
    "0.ids", "0.weights", "0.places_of_experts", "0.start", "0.header", "1.x", "2.came", "3.x", "5.y",
)  # fmt: skip
_RESULTS = (
    "0.invalid_ids", "0.tokens_per_expert", "0.counted", "0.message", "1.y", "2.spoilt", "4.output",
    "4.tokens_per_expert", "5.out",
)  # fmt: skip


class Blocks(RoutesPlanner):
    """Routes of blocks of one size between every two ranks."""

    def start(self, values: torch.Tensor | None = None) -> Callable[[], CollectiveRoutes]:
        """The result sends everything but rows and returns the routes. A collective."""
        return self._exchanged

    def _exchanged(self) -> CollectiveRoutes:
        spec, ranks, tables = self.spec, self.ranks, self.first_tables()
        came = (ranks.all_gather if spec.mode == "all_gather" else ranks.all_to_all)(tables.message, _MESSAGE)
        lost = tables.lost if self.plan.spec.on_overflow != "drop" else None
        back, group, ways = ranks.size * spec.back_rows, ranks.size * self.num_tokens, (Way(), Way())
        rows = ranks.size * spec.block_rows if spec.by_slot else back
        *owner, spoilt = self.received(came, rows, header=self.header, lost=lost)
        return self.routes(
            tables, ways, owner, back, spoilt=spoilt, group_tokens=group,
            excess=functools.partial(_overflow, ranks, tables.counted),
        )  # fmt: skip

    def ended(self, routes: Any, dtype: torch.dtype) -> None:
        """Make one plan of the call for like ones, if few rows leave."""
        steps, spec, width, operands = self.call.steps, self.spec, self.plan.d_model, self._operands
        rows, back = spec.num_ranks * spec.block_rows, spec.num_ranks * spec.back_rows
        if steps is None or routes.slots is None or routes.send is None or operands.token_mask is not None:
            return
        if operands.ids.device.type not in joined.DEVICES or rows * width > _FEW or joined.remembered(self.call):
            return
        keys: tuple[Any, ...] = (
            ("send", True, True), ("leaving rows", (self.num_tokens, width), rows),
            ("receive", spec.num_ranks, back, False), ("rows", (rows, width), back),
            ("owner", back, routes.group_tokens), ("total", (back, width), routes.at_home.spec, dtype, True, True),
        )  # fmt: skip
        found = [one for one in map(steps.get, keys) if one is not None]
        if len(found) == len(keys):
            parts = [one if isinstance(one, Step) else Step.plain(one) for one in found]
            step, ends = joined.joined(parts, _LINKS, _RESULTS, _CHANGING)
            headers = header_rows(self.plan.header, self.call.layer, operands.ids.device)
            constants = operands.places_of_experts, operands.start, *headers
            steps.put(joined.KEY, _Again(step, ends[1], ends[4], constants))


def _overflow(ranks: Ranks, counted: torch.Tensor) -> torch.Tensor:
    return ranks.total(torch.sum(counted, 0, keepdim=True, dtype=torch.int32), "overflow")


class _Again(NamedTuple):
    """sent, computed: launches before rows leave, and before results do. constants: two tables of the placement, and
    `header_rows`."""

    step: Step
    sent: int
    computed: int
    constants: tuple[torch.Tensor, ...]

    def fits(self, call: ExchangeCall) -> bool:
        return 2 + (call.layer + 1) * CALLS <= len(self.constants)

    def run(self, call: ExchangeCall, brought: Brought, tensors: Sequence[torch.Tensor]) -> Results | None:
        """See `joined.run_again`."""
        step, ranks, x, ids, weights = self.step, call.ranks, brought.x, brought.ids, brought.weights
        if not (ids.is_contiguous() and weights.is_contiguous()):
            return None
        header = self.constants[2 + call.layer * CALLS + call.number % CALLS]
        given = ids, weights, *kept(self.constants, x.device)[:2], header, *[x] * 4
        # x stands for arrays that have no memory yet.
        begun = step.ready.begin(step.change(step.pointers(tensors), *[one.data_ptr() for one in given]))
        invalid_ids, tokens_per_expert, counted, message, rows, spoilt, results, received, output = begun.outputs
        begun.run(slice(self.sent))
        came, arrived = ranks.all_to_all(message, _MESSAGE), ranks.all_to_all(rows, "rows")
        *_, first, second, third = step.changing
        begun.pointers[first], begun.pointers[second] = came.data_ptr(), arrived.data_ptr()
        begun.run(slice(self.sent, self.computed))
        back = ranks.all_to_all(results, "results")
        begun.pointers[third] = back.data_ptr()
        begun.run(slice(self.computed, None))
        output.masked_fill_(spoilt[:, None], torch.nan)
        return Results(output, received, _overflow(ranks, counted), tokens_per_expert, invalid_ids)
