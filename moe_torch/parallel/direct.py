"""Mode `peer` where every token has its place at every owner, so that ranks need not know what others send.

    dispatch   rows of tokens go to their owners, with ids, weights and the header of their rank; barrier
    combine    results by slot go to the homes of their tokens, each to its own place; barrier; homes add them up

Row `home * max_tokens + t` of an owner is of token t. The owner's op groups these rows by their ids: by (expert, home,
slot), the order of one device. What a rank stores into is not read any more: rows have been read before the barrier
behind the results of the call before, and results before the barrier behind the rows of this one.

With training, a forward and its backward both begin with a barrier: a backward need not be a whole one. Rows of tokens
are copied where they arrived, because a backward reads them. Those of the output's gradient are read where they are.
"""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple, cast

import torch

from moe_core.ops.exchange.direct import TOLD
from moe_core.ops.exchange.reference_direct import last_told
from moe_core.parallel.bounds import tokens_at_once
from moe_core.parallel.plan import ExchangePlan
from moe_torch.bridge.options import TORCH_DTYPES
from moe_torch.parallel import exchange, peer_ops, symmetric
from moe_torch.parallel.group import Arriving, Ranks
from moe_torch.parallel.peer import Summing, scales_of
from moe_torch.parallel.symmetric import Part, Region


class Memory(NamedTuple):
    """What others store at a rank, M tokens of each of W: headers int32 `[2 * W + 1, 12]`; rows `[W * M, D]`, and their
    scales where they are quantised; ids int32 and weights fp32 `[W * M, K]`; returned `[M * K, D]`, results that come
    home; d_weights fp32 `[W * M, K]`: what others load, with training alone."""

    memory: symmetric.Symmetric
    headers: Region
    rows: Region
    scales: Region
    ids: Region
    weights: Region
    returned: Region
    d_weights: Region


def memory_of(ranks: Ranks, plan: ExchangePlan, device: torch.device, number: int = 0) -> Memory:
    """The buffers of a plan, made by its first call. number: of the set of buffers."""
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
    found = symmetric.symmetric(ranks, parts, device, number)
    return Memory(found, *found.regions)


def _most(plan: ExchangePlan) -> int:
    """Tokens of a rank that there is memory for; no buffer is empty, so that each has an address."""
    return max(1, tokens_at_once(plan.brought, plan.spec))


class _Constants(NamedTuple):
    """What does not change for a memory: results_at int64 `[W * M * K]`, where the results of all ranks' slots go.
    Int32: rows `[W * M, 1]`, their numbers; start `[2]`, where they begin and end; slots `[M, K]`, the numbers of this
    rank's slots among those of all ranks."""

    results_at: torch.Tensor
    rows: torch.Tensor
    start: torch.Tensor
    slots: torch.Tensor


#: By the memory: captured graphs read them.
_constants: weakref.WeakKeyDictionary[symmetric.Symmetric, _Constants] = weakref.WeakKeyDictionary()


def _constants_of(memory: Memory, rank: int) -> _Constants:
    found = _constants.get(memory.memory)
    if found is None:
        returned, rows, device = memory.returned, len(memory.rows.own), memory.returned.own.device
        size = returned.own.shape[1] * returned.own.element_size()
        with torch.inference_mode(False):
            places = torch.arange(len(returned.own), dtype=torch.int64, device=device) * size
            numbers = torch.arange(rows, dtype=torch.int32, device=device).view(-1, 1)
            start = torch.tensor([0, rows], dtype=torch.int32, device=device)
            slots = torch.arange(memory.ids.own.numel(), dtype=torch.int32, device=device)
            slots = slots.view(len(returned.addresses), -1, memory.ids.own.shape[1])[rank]
            found = _Constants((returned.addresses[:, None] + places).view(-1), numbers, start, slots)
        _constants[memory.memory] = found
    return found


class DirectRoutes:
    """The routes of one rank for one call; as `PeerRoutes`, whose names these are.

    places_of_experts, given, token_mask: of `peer_ops.push_tokens_once`. header int32 `[8]` on the device, None = the
    plan's. number: of the set of buffers. programs: of kernels that copy rows. tokens: of this rank in all chunks.
    `send` stores all and finds `pushed`. ids and weights: of each row, of all its slots.
    """

    #: Of tokens whose output has to become NaN: `start_total` sees to it.
    spoilt = None

    def __init__(
        self,
        ranks: Ranks,
        plan: ExchangePlan,
        ids: torch.Tensor,
        weights: torch.Tensor,
        token_mask: torch.Tensor | None = None,
        given: torch.Tensor | None = None,
        *,
        places_of_experts: torch.Tensor | None = None,
        header: torch.Tensor | None = None,
        number: int = 0,
        programs: int | None = None,
        tokens: int,
    ) -> None:
        self.ranks, self.plan, self.programs, self.tokens = ranks, plan, programs, tokens
        self.format = plan.spec.format
        self.memory = memory_of(ranks, plan, weights.device, number)
        self._constants = _constants_of(self.memory, ranks.rank)
        if header is None:
            (header,) = exchange.constants((tuple(plan.header),), weights.device)
        self._own = ids, weights.detach(), header
        self._beside = {"places_of_experts": places_of_experts, "given": given, "token_mask": token_mask}
        self.ids, self.weights = self.memory.ids.own, self.memory.weights.own
        self.pushed = cast(peer_ops.PushedTokens, None)

    @property
    def group_tokens(self) -> int:
        """The tokens of all ranks, once they have arrived; on a GPU W times this rank's, in all chunks."""
        headers = self.memory.headers.own
        return self.ranks.size * self.tokens if headers.is_cuda else int(last_told(headers)[:, -4].sum())

    @property
    def overflow(self) -> torch.Tensor:
        return self.pushed.overflow

    def send(self, values: torch.Tensor) -> None:
        """Rows of tokens at home, `[T, D]`, set off, with all that goes beside them."""
        memory, sizes = self.memory, {"rank": self.ranks.rank, "most": _most(self.plan), "programs": self.programs}
        quantised, (ids, own_weights) = self.format is not None, (memory.ids.addresses, memory.weights.addresses)
        rows = None if quantised else memory.rows.addresses
        at = peer_ops.TokensAt(rows, ids, own_weights, memory.headers.addresses)
        # The rows of a token at its owners, where quantised rows and its gradient go.
        visits = quantised or self.plan.training
        options: Any = {**self._beside, **sizes, "placement": self.plan.placement, "visits": visits}
        self.pushed = peer_ops.push_tokens_once(values, *self._own, at, **options)
        if quantised:
            self._send_rows(values, format=self.format, scales_at=memory.scales.addresses)

    def _send_rows(self, values: torch.Tensor, **options: Any) -> None:
        """Rows alone, where those of the forward went."""
        memory, pushed = self.memory, self.pushed
        assert pushed.owners is not None and pushed.rows is not None
        places = peer_ops.PeerPlaces(pushed.owners, pushed.rows, pushed.overflow, pushed.overflow)
        options |= {"num_rows": len(memory.rows.own), "programs": self.programs}
        peer_ops.dispatch_push(values, places, memory.rows.addresses, **options)

    def arrive(self, what: str) -> None:
        """The stream waits for what all ranks have sent."""
        self.memory.memory.barrier(self.ranks, what)

    def rows(self) -> torch.Tensor:
        """Rows of tokens, `[W * M, D]`, once they have arrived; those without ids hold anything."""
        rows, scales = self.memory.rows.own, self.memory.scales.own
        if self.format is None:
            return rows.clone() if self.plan.training else rows
        constants, dtype = self._constants, TORCH_DTYPES[self.plan.dtype]
        return peer_ops.take_rows(rows, constants.rows, constants.start, scales=scales, dtype=dtype)

    def start_push(self, values: torch.Tensor, what: str) -> Arriving:
        """`send`; what it returns waits, and gives `rows`. Later values, of the output's gradient, stay where they
        arrived until the next call."""
        again = cast(Any, self.pushed) is not None
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

    def results_at(self) -> torch.Tensor:
        """Of `peer_ops.experts_push`: the place of every slot's result at its home."""
        return self._constants.results_at

    def start_total(self, rows: torch.Tensor | None, what: str) -> Summing:
        """What sums each token's results, `[T, D]`, with the options of `ops.reduce`. rows: None; results have been
        stored at `results_at`."""
        memory, places = self.memory, self.pushed.places
        assert rows is None, "experts store their results at their homes"

        def total(**options: Any) -> torch.Tensor:
            self.arrive(what)
            return peer_ops.sum_results(memory.returned.own, places, headers=memory.headers.own, **options)

        return total

    def gradients(
        self,
        d_rows: torch.Tensor | None,
        d_weights: torch.Tensor | None,
        *,
        dtype: torch.dtype | None,
        stored: bool = False,
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """As of `PeerRoutes`; rows of d_x have been stored at `results_at`."""
        assert stored, "experts store the gradients of their rows at their homes"
        memory, pushed, wide, by_slot = self.memory, self.pushed, None, None
        if d_weights is not None:
            memory.d_weights.own.copy_(d_weights)
        self.arrive("d_x and d_weights")
        if d_rows is not None:
            wide = peer_ops.sum_results(memory.returned.own, pushed.places, out_dtype=dtype)
        if d_weights is not None:
            owners, slots = exchange.owners_of(pushed.places, self.plan.placement.per_rank), self._constants.slots
            places = peer_ops.PeerPlaces(owners, slots[: len(owners)], pushed.overflow, pushed.overflow)
            num_rows, own = memory.d_weights.own.numel(), memory.d_weights.addresses
            by_slot = peer_ops.combine_pull_weights(places, own, num_rows=num_rows)
        return wide, by_slot
