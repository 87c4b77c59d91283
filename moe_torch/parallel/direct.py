"""Mode `peer` where every token has its place at every owner, so that ranks need not know what others send.

    dispatch   rows of tokens go to their owners, with ids, weights and the header of their rank; barrier
    combine    results by slot go to the homes of their tokens, each to its own place; barrier; homes add them up

Row `home * max_tokens + t` of an owner is of token t. The owner's op groups these rows by their ids: by (expert, home,
slot), the order of one device. What a rank stores into is not read any more: rows have been read before the barrier
behind the results of the call before, and results before the barrier behind the rows of this one.
"""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple, cast

import torch

from moe_core.ops.exchange.reference_direct import last_told
from moe_core.parallel.bounds import tokens_at_once
from moe_core.parallel.header import Header
from moe_core.parallel.plan import ExchangePlan
from moe_torch.bridge.options import TORCH_DTYPES
from moe_torch.parallel import exchange, peer_ops, symmetric
from moe_torch.parallel.group import Arriving, Ranks
from moe_torch.parallel.peer import Summing
from moe_torch.parallel.symmetric import Part, Region

_TOLD = len(Header._fields) + 4


class Memory(NamedTuple):
    """What others store at a rank, M tokens of each of W: headers int32 `[2 * W + 1, 12]`; rows `[W * M, D]`; ids int32
    and weights fp32 `[W * M, K]`; returned `[M * K, D]`, results that come home."""

    memory: symmetric.Symmetric
    headers: Region
    rows: Region
    ids: Region
    weights: Region
    returned: Region


def memory_of(ranks: Ranks, plan: ExchangePlan, device: torch.device, number: int = 0) -> Memory:
    """The buffers of a plan, made by its first call. number: of the set of buffers."""
    most, dtype, top_k = _most(plan), TORCH_DTYPES[plan.dtype], plan.top_k
    parts = (
        Part((2 * ranks.size + 1, _TOLD), torch.int32),
        Part((ranks.size * most, plan.d_model), dtype),
        Part((ranks.size * most, top_k), torch.int32),
        Part((ranks.size * most, top_k), torch.float32),
        Part((most * top_k, plan.d_model), dtype),
    )
    found = symmetric.symmetric(ranks, parts, device, number)
    return Memory(found, *found.regions)


def _most(plan: ExchangePlan) -> int:
    """Tokens of a rank that there is memory for; no buffer is empty, so that each has an address."""
    return max(1, tokens_at_once(plan.brought, plan.spec))


#: By the memory, for which they do not change: captured graphs read them.
_addresses: weakref.WeakKeyDictionary[symmetric.Symmetric, torch.Tensor] = weakref.WeakKeyDictionary()


def _results_at(memory: Memory, slots: int) -> torch.Tensor:
    """Where the results of all ranks' slots go, `slots` of each."""
    found = _addresses.get(memory.memory)
    if found is None:
        returned = memory.returned
        size = returned.own.shape[1] * returned.own.element_size()
        with torch.inference_mode(False):
            places = torch.arange(slots, dtype=torch.int64, device=returned.own.device) * size
            found = _addresses[memory.memory] = (returned.addresses[:, None] + places).view(-1)
    return found


class DirectRoutes:
    """The routes of one rank for one call, without gradients; as `PeerRoutes`, whose names these are.

    places_of_experts, given, token_mask: of `peer_ops.push_tokens_once`. header int32 `[8]` on the device, None = the
    plan's. number: of the set of buffers. programs: of kernels that copy rows. `send` stores all and finds `pushed`.
    ids and weights: of each row, of all its slots.
    """

    #: Of tokens whose output has to become NaN: `start_total` sees to it.
    spoilt = None
    #: Experts store their results at their homes.
    stores_results = True

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
    ) -> None:
        self.ranks, self.plan, self.programs = ranks, plan, programs
        self.memory = memory_of(ranks, plan, weights.device, number)
        if header is None:
            (header,) = exchange.constants((tuple(plan.header),), weights.device)
        self._own = ids, weights.detach(), header
        self._beside = {"places_of_experts": places_of_experts, "given": given, "token_mask": token_mask}
        self.ids, self.weights = self.memory.ids.own, self.memory.weights.own
        self.pushed = cast(peer_ops.PushedTokens, None)

    @property
    def group_tokens(self) -> int:
        """The tokens of all ranks, once they have arrived; on a GPU W times this rank's."""
        headers = self.memory.headers.own
        return self.ranks.size * len(self._own[0]) if headers.is_cuda else int(last_told(headers)[:, -4].sum())

    @property
    def overflow(self) -> torch.Tensor:
        return self.pushed.overflow

    def send(self, values: torch.Tensor) -> None:
        """Rows of tokens at home, `[T, D]`, set off, with all that goes beside them."""
        memory, sizes = self.memory, {"rank": self.ranks.rank, "most": _most(self.plan), "programs": self.programs}
        regions = memory.rows, memory.ids, memory.weights, memory.headers
        at = peer_ops.TokensAt(*(region.addresses for region in regions))
        options: Any = {**self._beside, **sizes, "placement": self.plan.placement}
        self.pushed = peer_ops.push_tokens_once(values, *self._own, at, **options)

    def arrive(self, what: str) -> None:
        """The stream waits for what all ranks have sent."""
        self.memory.memory.barrier(self.ranks, what)

    def rows(self) -> torch.Tensor:
        """Rows of tokens, `[W * M, D]`, once they have arrived; those without ids hold anything."""
        return self.memory.rows.own

    def start_push(self, values: torch.Tensor, what: str) -> Arriving:
        """`send`; what it returns waits, and gives `rows`."""
        self.send(values)

        def arrived() -> torch.Tensor:
            self.arrive(what)
            return self.rows()

        return arrived

    def push(self, values: torch.Tensor, what: str) -> torch.Tensor:
        """`start_push`, and what it returns, called."""
        return self.start_push(values, what)()

    def results_at(self) -> torch.Tensor:
        """Of `peer_ops.experts_push`, int64 `[W * M * K]`: the place of every slot's result at its home."""
        return _results_at(self.memory, _most(self.plan) * self.plan.top_k)

    def start_total(self, rows: torch.Tensor | None, what: str) -> Summing:
        """What sums each token's results, `[T, D]`, with the options of `ops.reduce`. rows: None, since they have been
        stored at `results_at`."""
        assert rows is None, "experts store their results at their homes"
        returned = self.memory.returned.own

        def total(**options: Any) -> torch.Tensor:
            self.arrive(what)
            return peer_ops.sum_results(returned, self.pushed.places, headers=self.memory.headers.own, **options)

        return total

    def gradients(self, *_: Any) -> Any:
        """There are none."""
        raise AssertionError("a plan for training counts its rows")
