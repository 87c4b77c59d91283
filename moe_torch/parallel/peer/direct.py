"""Mode `peer` without counts: every token has a row of its own at every owner.

    dispatch   rows of tokens go to their owners, with ids, weights and their rank's header; barrier
    combine    results go to their own row at the homes of their tokens; barrier; homes add them

Row `home * max_tokens + t` of an owner is of token t. The owner's op groups rows by their ids: by (expert, home, slot),
the order of one device. No unread memory is overwritten: rows are read before the barrier behind the previous call's
results, and results before the barrier behind this call's rows.

In training a forward and its backward both begin with a barrier, since a backward may stop early. Arrived rows of
tokens are copied for the backward. Rows of the output's gradient are read in the buffer.
"""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

import torch

from moe_core.ops.exchange.direct import TOLD
from moe_core.ops.exchange.reference import last_told
from moe_core.parallel.bounds import tokens_at_once
from moe_core.parallel.plan import ExchangePlan
from moe_torch.bridge.options import TORCH_DTYPES
from moe_torch.parallel import exchange, peer_ops
from moe_torch.parallel.group import Arriving, Ranks
from moe_torch.parallel.peer import symmetric
from moe_torch.parallel.peer.interface import PeerCall, Stored, scales_of
from moe_torch.parallel.peer.symmetric import Part, Region
from moe_torch.parallel.route import Gradients, Total


class Memory(NamedTuple):
    """Buffers that others store into, with the shapes of `memory_of`. d_weights, in training: others load it."""

    memory: symmetric.Symmetric
    headers: Region
    rows: Region
    scales: Region
    ids: Region
    weights: Region
    returned: Region
    d_weights: Region


@symmetric.once_for_plan
def memory_of(ranks: Ranks, plan: ExchangePlan, device: torch.device, number: int) -> Memory:
    most, top_k, spec = _most(plan), plan.top_k, plan.spec
    rows, dtype, scales = ranks.size * most, TORCH_DTYPES[plan.dtype], scales_of(spec.format, plan.d_model)
    parts = (
        Part((2 * ranks.size + 1, TOLD), torch.int32),
        Part((rows, plan.d_model), torch.float8_e4m3fn if scales else dtype),
        Part((rows * (scales > 0), scales), torch.float32),
        Part((rows, top_k), torch.int32),
        Part((rows, top_k), torch.float32),
        Part((most * top_k, plan.d_model), dtype),
        Part((rows * plan.training, top_k), torch.float32),
    )
    memory = symmetric.symmetric(ranks, parts, device, number)
    return Memory(memory, *memory.regions)


def _most(plan: ExchangePlan) -> int:
    """A rank's most tokens, at least 1, so that buffers have addresses."""
    return max(1, tokens_at_once(plan.brought, plan.spec))


class _Constants(NamedTuple):
    """Constant arrays of a memory, of M tokens for each rank.

    results_at int64 `[W * M * K]`: where the results of all ranks' slots go. rows `[W * M, 1]`: their numbers. start
    `[2]`: their first and end. slots `[M, K]`: numbers of this rank's slots among all ranks'.
    """

    results_at: torch.Tensor
    rows: torch.Tensor
    start: torch.Tensor
    slots: torch.Tensor


#: By the memory: captured graphs read them.
_constants: weakref.WeakKeyDictionary[symmetric.Symmetric, _Constants] = weakref.WeakKeyDictionary()


def _constants_of(memory: Memory, rank: int) -> _Constants:
    constants = _constants.get(memory.memory)
    if constants is None:
        returned, rows, device = memory.returned, len(memory.rows.own), memory.returned.own.device
        size = returned.own.shape[1] * returned.own.element_size()
        with torch.inference_mode(False):
            places = torch.arange(len(returned.own), dtype=torch.int64, device=device) * size
            numbers = torch.arange(rows, dtype=torch.int32, device=device).view(-1, 1)
            start = torch.tensor([0, rows], dtype=torch.int32, device=device)
            slots = torch.arange(memory.ids.own.numel(), dtype=torch.int32, device=device)
            slots = slots.view(len(returned.addresses), -1, memory.ids.own.shape[1])[rank]
            constants = _Constants((returned.addresses[:, None] + places).view(-1), numbers, start, slots)
        _constants[memory.memory] = constants
    return constants


class DirectRoutes(Stored):
    """The routes of one rank for one chunk, see `interface.PeerRoutes`. ids and weights are of all slots of each row.

    ids to places_of_experts: see `peer_ops.HomeTokens`. number: of the set of buffers. programs: the most blocks of
    copies. `send` stores everything and sets `pushed`.
    """

    pushed: peer_ops.PushedTokens

    def __init__(
        self,
        call: PeerCall,
        ids: torch.Tensor,
        weights: torch.Tensor,
        token_mask: torch.Tensor | None = None,
        places: torch.Tensor | None = None,
        *,
        places_of_experts: torch.Tensor | None = None,
        number: int = 0,
        programs: int | None = None,
    ) -> None:
        self.call, self.tokens, self._header = call
        self.programs, self.format = programs, self.plan.spec.format
        self.memory = memory_of(self.ranks, self.plan, weights.device, number)
        self._constants = _constants_of(self.memory, self.ranks.rank)
        self.routing = ids, weights.detach(), token_mask, places_of_experts, places
        self.ids, self.weights = self.memory.ids.own, self.memory.weights.own
        self._was_sent = False

    @property
    def group_tokens(self) -> int:
        """Tokens of all ranks, once arrived; on a GPU as expected."""
        headers = self.memory.headers.own
        return self.ranks.size * self.tokens if headers.is_cuda else int(last_told(headers)[:, -4].sum())

    @property
    def overflow(self) -> torch.Tensor:
        return self.pushed.overflow

    @property
    def tokens_per_expert(self) -> torch.Tensor:
        return self.pushed.tokens_per_expert

    @property
    def invalid_ids(self) -> torch.Tensor:
        return self.pushed.invalid_ids

    @property
    def most(self) -> int:
        return _most(self.plan)

    def send(self, values: torch.Tensor) -> None:
        memory, quantised = self.memory, self.format is not None
        tables = memory.ids.addresses, memory.weights.addresses, memory.headers.addresses
        at = peer_ops.TokensAt(None if quantised else memory.rows.addresses, *tables, self.most)
        options: Any = {"rank": self.ranks.rank, "placement": self.plan.placement, "programs": self.programs}
        # Quantised rows and gradients need the rows of a token at its owners.
        options["visits"] = quantised or self.plan.training
        tokens = peer_ops.HomeTokens(values, *self.routing)
        self.pushed = peer_ops.push_tokens_once(tokens, self._header, at, **options)
        self._was_sent = True
        if quantised:
            self._send_rows(values, format=self.format, scales_at=memory.scales.addresses)

    def _send_rows(self, values: torch.Tensor, **options: Any) -> None:
        memory, pushed = self.memory, self.pushed
        assert pushed.owners is not None and pushed.rows is not None
        places = peer_ops.PeerPlaces(pushed.owners, pushed.rows, pushed.overflow, pushed.overflow)
        options |= {"num_rows": len(memory.rows.own), "programs": self.programs}
        peer_ops.dispatch_push(values, places, memory.rows.addresses, **options)

    def rows(self) -> torch.Tensor:
        rows, scales = self.memory.rows.own, self.memory.scales.own
        if self.format is None:
            return rows.clone() if self.plan.training else rows
        constants, dtype = self._constants, TORCH_DTYPES[self.plan.dtype]
        return peer_ops.take_rows(rows, constants.rows, constants.start, scales=scales, dtype=dtype)

    def start_push(self, values: torch.Tensor, what: str) -> Arriving:
        # Later values are the output's gradient. Its rows stay in the buffer until the next call.
        again = self._was_sent
        if again and torch.is_anomaly_enabled():
            self.memory.rows.own.zero_()  # A search for NaN in gradients reads all rows that there is room for.
        if self.plan.training:
            self.arrive(f"arrival before {what}")
        if again:
            self._send_rows(values)
        else:
            self.send(values)

        def arrived() -> torch.Tensor:
            self.arrive(what)
            return self.memory.rows.own if again else self.rows()

        return arrived

    def push_ids(self, ids: torch.Tensor) -> torch.Tensor:
        raise AssertionError("adapters have counted routes")

    def results_at(self) -> torch.Tensor:
        return self._constants.results_at

    def start_total(self, rows: torch.Tensor | None, what: str) -> Total:
        assert rows is None, "experts store their results at their homes"
        return self.total_of(self.pushed.places, peer_ops.Checks(self.memory.headers.own), what)

    def gradients(self, of: Gradients, *, dtype: torch.dtype | None, stored: bool) -> Gradients:
        assert stored, "experts store the gradients of their rows at their homes"
        (d_rows, d_weights), memory, pushed, d_x, by_slot = of, self.memory, self.pushed, None, None
        if d_weights is not None:
            memory.d_weights.own.copy_(d_weights)
        self.arrive("d_x and d_weights")
        if d_rows is not None:
            d_x = peer_ops.sum_results(memory.returned.own, pushed.places, out_dtype=dtype)
        if d_weights is not None:
            owners, slots = exchange.owners_of(pushed.places, self.plan.placement.per_rank), self._constants.slots
            places = peer_ops.PeerPlaces(owners, slots[: len(owners)], pushed.overflow, pushed.overflow)
            num_rows, addresses = memory.d_weights.own.numel(), memory.d_weights.addresses
            by_slot = peer_ops.combine_pull_weights(places, addresses, num_rows=num_rows)
        return Gradients(d_x, by_slot)
