"""Mode `peer` with counts: ranks tell each other how many rows go where. The host reads nothing on a GPU.

    counts     every rank stores its counts at all others; barrier
    dispatch   rows of tokens, and the routing of slots, go to their owners; barrier
    combine    results go to their own row at the homes of their tokens; barrier; homes add them

One set of buffers is enough: a rank has read its buffers before the barrier behind the counts, or before a backward's
first barrier.
"""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch

from moe_core.ops.exchange.direct import TOLD
from moe_core.parallel.bounds import rows_received, slots_received, tokens_at_once
from moe_core.parallel.header import Header
from moe_core.parallel.plan import ExchangePlan
from moe_core.specs.operands import RaggedLayout
from moe_torch import ops
from moe_torch.bridge.options import TORCH_DTYPES
from moe_torch.parallel import exchange, peer_ops
from moe_torch.parallel.group import Arriving, Ranks
from moe_torch.parallel.peer import symmetric
from moe_torch.parallel.peer.interface import PeerCall, Stored, scales_of
from moe_torch.parallel.peer.symmetric import Part, Region
from moe_torch.parallel.route import Gradients, Total

_HEADER = len(Header._fields)


class Sizes(NamedTuple):
    """Rows of the buffers: that travel, that an owner computes, and results at home."""

    rows: int
    computed: int
    returned: int

    @classmethod
    def of(cls, plan: ExchangePlan) -> Sizes:
        """Sizes of a plan, at least 1, so that each buffer has an address."""
        spec, placement, top_k = plan.spec, plan.placement, plan.top_k
        tokens = tokens_at_once(plan.brought, spec)
        rows = rows_received(spec, tokens, top_k, placement)
        computed = slots_received(spec, rows, top_k, placement)
        return cls(max(1, rows), max(1, computed), max(1, tokens * top_k))


class Memory(NamedTuple):
    """Buffers that others store into, with the shapes of `memory_of`.

    counts: a row from every rank. fitting: the same of slots with a token that fits, for bounded tokens. rows that
    arrive, and their scales. For each computed row: weights; tokens, the row of a slot's token; sources, its home and
    slot there. returned: results that come home. d_weights: others load it.
    """

    memory: symmetric.Symmetric
    counts: Region
    fitting: Region
    rows: Region
    scales: Region
    weights: Region
    tokens: Region
    sources: Region
    returned: Region
    d_weights: Region


@symmetric.once_for_plan
def memory_of(ranks: Ranks, plan: ExchangePlan, device: torch.device, number: int) -> Memory:
    """Buffers of a plan, allocated by the first call. number: of the set."""
    sizes, placement, dtype, spec = Sizes.of(plan), plan.placement, TORCH_DTYPES[plan.dtype], plan.spec
    by_token = spec.rows == "tokens"
    groups = placement.num_places + placement.num_ranks * by_token
    bounded = by_token and spec.receive is not None
    scales = scales_of(spec.format, plan.d_model)
    incoming = torch.float8_e4m3fn if scales else dtype
    parts = (
        Part((ranks.size, TOLD + groups), torch.int32),
        Part((ranks.size, placement.num_places * bounded), torch.int32),
        Part((sizes.rows, plan.d_model), incoming),
        Part((sizes.rows * (scales > 0), scales), torch.float32),
        Part((sizes.computed, 1), torch.float32),
        Part((sizes.computed * by_token, 1), torch.int32),
        Part((sizes.computed, 2), torch.int32),
        Part((sizes.returned, plan.d_model), dtype),
        Part((sizes.computed * plan.training,), torch.float32),
    )
    memory = symmetric.symmetric(ranks, parts, device, number)
    return Memory(memory, *memory.regions)


class CountedRoutes(Stored):
    """The routes of one rank for one chunk, see `interface.PeerRoutes`.

    Making them stores everything but rows. places int32 and weights fp32 `[T, K]`: of slots. number: of the set of
    buffers. programs: the most blocks of copies. tokens_per_expert, invalid_ids: set by a planner.
    """

    tokens_per_expert: torch.Tensor
    invalid_ids: torch.Tensor

    def __init__(
        self,
        call: PeerCall,
        places: torch.Tensor,
        weights: torch.Tensor,
        *,
        number: int = 0,
        programs: int | None = None,
    ) -> None:
        self.call, self.tokens, self.header = call
        plan, self.programs = self.plan, programs
        self.by_token = plan.spec.rows == "tokens"
        self.sizes, self.memory = Sizes.of(plan), memory_of(self.ranks, plan, weights.device, number)
        self.ids, self.weights = cast(Any, None), cast(Any, None)
        self._rows: torch.Tensor | None = None
        self.owners = exchange.owners_of(places, plan.placement.per_rank) if self.by_token else None
        self._count(places)
        self._push_routing(weights.detach())

    def _count(self, places: torch.Tensor) -> None:
        plan, placement, device = self.plan, self.plan.placement, places.device
        told = [self.header, *exchange.constants(((self.tokens, 0, 0, 0),), device)]
        count, going = placement.num_places, places
        slots = ops.make_layout(places, count)
        told.append(slots.group_sizes)
        if self.by_token:
            (everyone,) = exchange.constants((tuple(range(placement.num_ranks)),), device)
            assert self.owners is not None
            visits = torch.where((self.owners[:, :, None] == everyone).any(dim=1), everyone, -1)
            sent = ops.make_layout(visits, placement.num_ranks)
            told.append(sent.group_sizes)
        known = self._told_by_all(torch.cat(told), self.memory.counts, "header and counts")
        self._agree = (known[:, :_HEADER] == self.header).all().view(1)
        self.group_tokens = self.ranks.size * self.tokens
        if device.type == "cpu":
            self.group_tokens = int(known[:, _HEADER].sum())
        known = known[:, TOLD:]
        # If ranks disagree, rows still stay within the buffers, and the output is NaN.
        if self.by_token:
            self.sent = self._places(visits, sent, known[:, count:], self._bound(self.sizes.rows))
            assert self.owners is not None
            rows = self.sent.rows.gather(1, self.owners.clamp(min=0).long())
            #: int32 `[T, K]`: the row of a slot's token at its owner, -1: none.
            self._of_tokens = torch.where(self.owners < 0, -1, rows)
            if plan.spec.receive is not None:
                going = torch.where(self._of_tokens < 0, -1, places)
                slots = ops.make_layout(going, count)
                known = self._told_by_all(slots.group_sizes, self.memory.fitting, "counts of what fits")
        most = self.sizes.computed if self.by_token else self._bound(self.sizes.computed)
        self.back = self._places(going, slots, known[:, :count], most)
        self.overflow = self.back.overflow + self.sent.overflow if self.by_token else self.back.overflow
        if not self.by_token:
            self.sent = self.back
        received = self.back.received
        if plan.spec.receive == 0:
            received = torch.zeros_like(received)
        self._local, self._received = ops.layout_of_runs(received, self.sizes.computed)
        self._wanted = None if plan.spec.on_overflow == "drop" else places

    def _told_by_all(self, counts: torch.Tensor, region: Region, what: str) -> torch.Tensor:
        """Exchange counts int32 `[N]` for all ranks' `[W, N]`."""
        peer_ops.push_counts(counts, region.addresses, rank=self.ranks.rank)
        self.arrive(what)
        return region.own

    def _bound(self, rows: int) -> int:
        return rows if self.plan.spec.receive is None else min(self.plan.spec.receive, rows)

    def _places(
        self, ids: torch.Tensor, layout: RaggedLayout, counts: torch.Tensor, receive: int
    ) -> peer_ops.PeerPlaces:
        return peer_ops.peer_places(ids, layout, counts, rank=self.ranks.rank, receive=receive)

    def _push_routing(self, weights: torch.Tensor) -> None:
        memory = self.memory
        options: Any = {"rank": self.ranks.rank, "num_rows": self.sizes.computed}
        peer_ops.push_routing(weights, self.back, memory.weights.addresses, memory.sources.addresses, **options)
        if self.by_token:
            bits = self._of_tokens.view(torch.float32)
            peer_ops.push_routing(bits, self.back, memory.tokens.addresses, None, **options)

    def send(self, values: torch.Tensor) -> None:
        options: Any = {"num_rows": self.sizes.rows, "programs": self.programs}
        if self.plan.spec.format is not None:
            options |= {"format": self.plan.spec.format, "scales_at": self.memory.scales.addresses}
        peer_ops.dispatch_push(values, self.sent, self.memory.rows.addresses, **options)

    def rows(self) -> torch.Tensor:
        if self.weights is None:
            self._take_routing()
        memory, scales = self.memory, None if self.plan.spec.format is None else self.memory.scales.own
        if self._rows is None:
            return memory.rows.own
        options: Any = {"scales": scales, "dtype": TORCH_DTYPES[self.plan.dtype]}
        return peer_ops.take_rows(memory.rows.own, self._rows, self._received.group_start, **options)

    def start_push(self, values: torch.Tensor, what: str) -> Arriving:
        if self.weights is not None:
            self.arrive(f"arrival before {what}")
        self.send(values)

        def arrived() -> torch.Tensor:
            self.arrive(what)
            rows = self.rows()
            if torch.is_anomaly_enabled():  # A search for NaN in gradients reads all rows that there is room for.
                rows.masked_fill_(self.ids.view(-1, 1) < 0, 0)
            return rows

        return arrived

    def push_ids(self, ids: torch.Tensor) -> torch.Tensor:
        """Give every rank all ids once rows have arrived. It finds its rows' ids by homes and slots."""
        most = self.plan.brought
        told = self.ranks.all_gather(torch.nn.functional.pad(ids, (0, most - len(ids))), "adapter ids").view(-1)
        home, slot = self._sources.unbind(1)
        at = home * most + slot // self.plan.top_k
        return told[torch.where(self.ids.view(-1) < 0, 0, at).long()]

    def _take_routing(self) -> None:
        """Take the routing of rows, as copies if a backward needs it."""
        memory, training = self.memory, self.plan.training
        kept = torch.Tensor.clone if training else torch.Tensor.detach
        self._sources, self.ids, self.weights = kept(memory.sources.own), self._local, memory.weights.own
        if self.by_token:
            self._rows = kept(memory.tokens.own)
        elif training or self.plan.spec.format is not None:
            self._rows = self._received.slot_of_row.view(-1, 1)

    def results_at(self) -> torch.Tensor:
        sizes: Any = {"num_slots": self.sizes.returned, "width": self.plan.d_model}
        arrays = self._sources, self._received.group_start, self.memory.returned.addresses
        return peer_ops.result_addresses(*arrays, **sizes, dtype=TORCH_DTYPES[self.plan.dtype])

    def start_total(self, rows: torch.Tensor | None, what: str) -> Total:
        return self._start_total(rows, what, peer_ops.Checks(agree=self._agree, wanted=self._wanted))

    def _start_total(self, rows: torch.Tensor | None, what: str, checks: peer_ops.Checks) -> Total:
        if rows is not None:
            sizes: Any = {"num_slots": self.sizes.returned, "programs": self.programs}
            arrays = rows, self._sources, self._received.group_start, self.memory.returned.addresses
            peer_ops.combine_push(*arrays, **sizes)
        return self.total_of(self.back.rows, checks, what)

    def gradients(self, of: Gradients, *, dtype: torch.dtype | None, stored: bool) -> Gradients:
        (d_rows, d_weights), memory, d_x, by_slot, total = of, self.memory, None, None, None
        if d_rows is not None:
            total = self._start_total(None if stored else d_rows, "d_x and d_weights", peer_ops.Checks())
        if d_weights is not None:
            memory.d_weights.own.copy_(d_weights.view(-1))
        if total is not None:
            d_x = total(out_dtype=dtype)
        elif d_weights is not None:
            self.arrive("d_weights")
        if d_weights is not None:
            addresses = memory.d_weights.addresses
            by_slot = peer_ops.combine_pull_weights(self.back, addresses, num_rows=self.sizes.computed)
        return Gradients(d_x, by_slot)
