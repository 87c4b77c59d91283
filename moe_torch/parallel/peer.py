"""Mode `peer`: ranks store rows at each other's addresses, between barriers. The host reads nothing on a GPU.

    counts     every rank stores its counts at all others; barrier
    dispatch   rows of tokens, and what belongs to each slot, go to their owners; barrier
    combine    results by slot go to the homes of their tokens, each to its own place; barrier; homes add them up

What a rank stores into is not read any more: its owner has read it before the barrier behind the counts, or before the
barrier with which a backward begins. So one set of buffers does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch

from moe_core.errors import Unsupported
from moe_core.formats import Format, QuantizedSpec, quantized_shapes
from moe_core.ops.exchange.direct import TOLD
from moe_core.parallel.bounds import rows_received, slots_received, tokens_at_once
from moe_core.parallel.header import Header
from moe_core.parallel.plan import ExchangePlan
from moe_core.specs.operands import RaggedLayout
from moe_torch import ops
from moe_torch.bridge.options import TORCH_DTYPES
from moe_torch.parallel import exchange, peer_ops, symmetric
from moe_torch.parallel.group import Arriving, Ranks
from moe_torch.parallel.symmetric import Part, Region

_HEADER = len(Header._fields)
#: `(shared=, shared_gate=, out_dtype=) -> y`, see `ops.reduce`.
Summing = Callable[..., torch.Tensor]


class Sizes(NamedTuple):
    """Rows that there is memory for: of what travels, and of what an owner computes, slots or tokens; of results at
    home."""

    rows: int
    computed: int
    returned: int

    @classmethod
    def of(cls, plan: ExchangePlan) -> Sizes:
        """No buffer is empty, so that each has an address."""
        spec, placement, top_k = plan.spec, plan.placement, plan.top_k
        tokens = tokens_at_once(plan.brought, spec)
        rows = rows_received(spec, tokens, top_k, placement)
        computed = slots_received(spec, rows, top_k, placement)
        return cls(max(1, rows), max(1, computed), max(1, tokens * top_k))


class Memory(NamedTuple):
    """What others store at a rank. counts int32 `[W, N]`: a row from every rank. fitting int32 `[W, P]`: the same of
    slots whose token fits, where tokens have a bound. rows `[*, D]` that come, and their scales where they are
    quantised. By computed row: weights fp32 `[R, 1]`; tokens int32 `[R, 1]`, the row of a slot's token; sources int32
    `[R, 2]`, its home and number there. returned `[*, D]`: results that come home. d_weights fp32 `[R]`: what others
    load."""

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


def scales_of(format: Format | None, d_model: int) -> int:
    """Scales of a row, 0 without a format."""
    return 0 if format is None else quantized_shapes(QuantizedSpec(format), (1, d_model)).scales[1]


def memory_of(ranks: Ranks, plan: ExchangePlan, device: torch.device, number: int = 0) -> Memory:
    """The buffers of a plan, made by its first call. number: of the set of buffers."""
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
    found = symmetric.symmetric(ranks, parts, device, number)
    return Memory(found, *found.regions)


def require_peer_format(format: Format | None) -> None:
    """Raise Unsupported for rows in another format than e4m3 with a scale for each 128 columns."""
    if format is None:
        return
    if (format.element, format.group_rows, format.group_columns, format.has_e8m0_scales) != ("e4m3", 1, 128, False):
        raise Unsupported(
            f"exchange.format must be e4m3 with fp32 scales of 1 x 128 with mode 'peer', got {format}; pass "
            "format_named('fp8_group')"
        )


class PeerRoutes:
    """The routes of one rank for one call; as `moe_torch.parallel.routes.Routes`, whose names these are.

    Making them stores all but rows. tokens: of this rank in all chunks. header int32 `[8]` on the device, None = the
    plan's. number: of the set of buffers. programs: of kernels that copy rows. sent, back: the row at its owner of what
    travels, by (token, owner) or slot, and of the result that comes back, by slot. ids
    and weights, once rows have come: of the slot of each row that is computed.
    """

    def __init__(
        self,
        ranks: Ranks,
        plan: ExchangePlan,
        places: torch.Tensor,
        weights: torch.Tensor,
        *,
        tokens: int,
        header: torch.Tensor | None = None,
        number: int = 0,
        programs: int | None = None,
    ) -> None:
        self.ranks, self.plan, self.tokens, self.programs = ranks, plan, tokens, programs
        self.by_token = plan.spec.rows == "tokens"
        self.sizes, self.memory = Sizes.of(plan), memory_of(ranks, plan, weights.device, number)
        if header is None:
            (header,) = exchange.constants((tuple(plan.header),), weights.device)
        self.header, self.ids, self.weights = header, cast(Any, None), cast(Any, None)
        self._rows: torch.Tensor | None = None
        #: Tokens whose output has to become NaN: `start_total` sees to it.
        self.spoilt = None
        #: Of rows of tokens, the rank of every slot.
        self.owners = exchange.owners_of(places, plan.placement.per_rank) if self.by_token else None
        self._count(places)
        self._push_routing(weights.detach())

    def _count(self, places: torch.Tensor) -> None:
        """Tell all ranks how many rows go where; from what they tell, where they go."""
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
        # Where ranks disagree, what goes anywhere stays within the buffers, and the output is NaN.
        if self.by_token:
            self.sent = self._places(visits, sent, known[:, count:], self._bound(self.sizes.rows))
            assert self.owners is not None
            rows = self.sent.rows.gather(1, self.owners.clamp(min=0).long())
            #: int32 `[T, K]`: the row that a slot's token has at the slot's owner, -1 = none.
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
        #: What the sum is NaN without.
        self._wanted = None if plan.spec.on_overflow == "drop" else places

    def _told_by_all(self, counts: torch.Tensor, region: Region, what: str) -> torch.Tensor:
        """int32 `[W, N]`: the counts int32 `[N]` of all ranks."""
        peer_ops.push_counts(counts, region.addresses, rank=self.ranks.rank)
        self.arrive(what)
        return region.own

    def _bound(self, rows: int) -> int:
        """Rows that an owner takes at most, of so many that there is memory for."""
        return rows if self.plan.spec.receive is None else min(self.plan.spec.receive, rows)

    def _places(
        self, ids: torch.Tensor, layout: RaggedLayout, counts: torch.Tensor, receive: int
    ) -> peer_ops.PeerPlaces:
        return peer_ops.peer_places(ids, layout, counts, rank=self.ranks.rank, receive=receive)

    def _push_routing(self, weights: torch.Tensor) -> None:
        """What an owner has to know of each row that it computes."""
        memory = self.memory
        options: Any = {"rank": self.ranks.rank, "num_rows": self.sizes.computed}
        peer_ops.push_routing(weights, self.back, memory.weights.addresses, memory.sources.addresses, **options)
        if self.by_token:
            bits = self._of_tokens.view(torch.float32)
            peer_ops.push_routing(bits, self.back, memory.tokens.addresses, None, **options)

    def send(self, values: torch.Tensor) -> None:
        """Rows of tokens at home, `[T, D]`, set off."""
        options: Any = {"num_rows": self.sizes.rows, "programs": self.programs}
        if self.plan.spec.format is not None:
            options |= {"format": self.plan.spec.format, "scales_at": self.memory.scales.addresses}
        peer_ops.dispatch_push(values, self.sent, self.memory.rows.addresses, **options)

    def arrive(self, what: str) -> None:
        """The stream waits for what all ranks have sent."""
        self.memory.memory.barrier(self.ranks, what)

    def rows(self) -> torch.Tensor:
        """Rows that are computed here, `[R, D]`, once they have arrived."""
        if self.weights is None:
            self._take_routing()
        memory, scales = self.memory, None if self.plan.spec.format is None else self.memory.scales.own
        if self._rows is None:
            return memory.rows.own
        options: Any = {"scales": scales, "dtype": TORCH_DTYPES[self.plan.dtype]}
        return peer_ops.take_rows(memory.rows.own, self._rows, self._received.group_start, **options)

    def start_push(self, values: torch.Tensor, what: str) -> Arriving:
        """`send`; what it returns waits, and gives `rows`."""
        if self.weights is not None:
            self.arrive(f"arrival before {what}")
        self.send(values)

        def arrived() -> torch.Tensor:
            self.arrive(what)
            return self.rows()

        return arrived

    def _take_routing(self) -> None:
        """Copies of what was stored here and a backward needs."""
        memory, training = self.memory, self.plan.training
        kept = torch.Tensor.clone if training else torch.Tensor.detach
        self._sources, self.ids, self.weights = kept(memory.sources.own), self._local, memory.weights.own
        if self.by_token:
            self._rows = kept(memory.tokens.own)
        elif training or self.plan.spec.format is not None:
            # The op keeps its input, and rows in a format are given back theirs.
            self._rows = self._received.slot_of_row.view(-1, 1)

    def results_at(self) -> torch.Tensor:
        """Of `peer_ops.experts_push`, once rows have come."""
        sizes: Any = {"num_slots": self.sizes.returned, "width": self.plan.d_model}
        found = self._sources, self._received.group_start, self.memory.returned.addresses
        return peer_ops.result_addresses(*found, **sizes, dtype=TORCH_DTYPES[self.plan.dtype])

    def start_total(self, rows: torch.Tensor | None, what: str) -> Summing:
        """What sums each token's results, `[T, D]`, with the options of `peer_ops.sum_results`; of rows computed at
        their owners, `[R, D]`, which set off; None: they have been stored at `results_at`. It is NaN where ranks
        disagree, or a slot has no row."""
        own = self.memory.returned.addresses
        sizes: Any = {"num_slots": self.sizes.returned, "programs": self.programs}
        if rows is not None:
            peer_ops.combine_push(rows, self._sources, self._received.group_start, own, **sizes)

        def total(**options: Any) -> torch.Tensor:
            self.arrive(what)
            wrong = {"agree": self._agree, "wanted": self._wanted}
            return peer_ops.sum_results(self.memory.returned.own, self.back.rows, **(wrong | options))

        return total

    def gradients(
        self,
        d_rows: torch.Tensor | None,
        d_weights: torch.Tensor | None,
        *,
        dtype: torch.dtype | None,
        stored: bool = False,
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """d_x `[T, D]` of dtype and the gradients of weights fp32 `[T, K]`, of those by slot at their owners. stored:
        the rows that d_rows stands for have been stored at `results_at`."""
        memory, wide, by_slot = self.memory, None, None
        total: Any = None
        if d_rows is not None:
            total = self.start_total(None if stored else d_rows, "d_x and d_weights")
        if d_weights is not None:
            memory.d_weights.own.copy_(d_weights.view(-1))
        if total is not None:
            wide = total(out_dtype=dtype, agree=None, wanted=None)
        elif d_weights is not None:
            self.arrive("d_weights")
        if d_weights is not None:
            own = memory.d_weights.addresses
            by_slot = peer_ops.combine_pull_weights(self.back, own, num_rows=self.sizes.computed)
        return wide, by_slot
