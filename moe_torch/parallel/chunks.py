"""Mode `peer` in pieces of the tokens: while one is computed, the next travels, and so does the result of the last.

Without gradients, and with results that product 2 stores at their homes, product 2 of a piece also runs beside product
1 of the next, on some of the multiprocessors each: the links are then busy all the time.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from moe_core.base.arrays import ALIGNMENT
from moe_core.parallel.bounds import runs_in_lanes, second_multiprocessors, sets_of_buffers
from moe_core.parallel.placement import Placement
from moe_core.parallel.plan import ExchangePlan
from moe_core.specs.moe import MoESpec
from moe_core.specs.operands import ExpertWeights, MoEOutput, TopK
from moe_core.specs.tuning import Tuning
from moe_torch import ops
from moe_torch.parallel import peer_ops
from moe_torch.parallel.direct import DirectRoutes
from moe_torch.parallel.exchange import Places, constants, physical_ids
from moe_torch.parallel.function import awaited, combine, dispatch
from moe_torch.parallel.group import Ranks
from moe_torch.parallel.moving import MovingPlacement
from moe_torch.parallel.peer import PeerRoutes
from moe_torch.parallel.routes import check_headers
from moe_torch.parallel.streams import Beside, Streams

#: Rows of the shared expert and the logits of its gate.
Shared = Callable[[], tuple[torch.Tensor | None, torch.Tensor | None]]
#: Of each chunk: x, wide, and what its routes are made of.
Chunks = Sequence[Sequence[Any]]
#: Programs of kernels that copy rows beside others that compute: enough for most of a link's bandwidth.
_COPY_PROGRAMS = 32
#: The same beside a shared expert in training, docs/notebook/parallel.md.
_FEW_COPY_PROGRAMS = 16
#: Of each product, None = all.
Multiprocessors = tuple[int | None, int | None]


class Owner(NamedTuple):
    """The experts of this rank. top_k: of tokens at home. by_gradient: whether rows of d_x go where results went."""

    experts: ExpertWeights
    spec: MoESpec
    placement: Placement
    top_k: int
    by_gradient: bool

    def __call__(
        self, rows: torch.Tensor, routing: TopK, group_tokens: int, results_at: torch.Tensor | None = None
    ) -> MoEOutput:
        """Rows are slots, or tokens with all their ids. group_tokens: of all ranks. results_at: of the routes, where
        results are stored instead of returned, None = nowhere."""
        own = self._spec(routing, group_tokens)
        if results_at is None:
            return ops.moe(rows, self.experts, routing, own)
        gradients_at = results_at if self.by_gradient else None
        return peer_ops.experts_push(rows, self.experts, routing, own, results_at, gradients_at=gradients_at)

    def begin(
        self, rows: torch.Tensor, routing: TopK, group_tokens: int, results_at: Any, multiprocessors: Multiprocessors
    ) -> Any:
        """Product 1 of such a call without gradients; product 2 follows with `finish` of what it returns."""
        own = self._spec(routing, group_tokens)
        options: Any = {"multiprocessors": multiprocessors}
        return peer_ops.experts_begin(rows, self.experts, routing, own, results_at, **options)

    def _spec(self, routing: TopK, group_tokens: int) -> MoESpec:
        told = None if self.spec.tuning is None else self.spec.tuning.expected_tokens
        each = self.top_k // routing.ids.shape[1]
        return owner_spec(self.spec, (told or group_tokens) * each, self.placement)


@functools.lru_cache(maxsize=256)
def owner_spec(spec: MoESpec, group_slots: int, placement: Placement) -> MoESpec:
    """The options of the experts, whose rows are slots: tiles and sums are those of all ranks' slots and experts."""
    tuning = Tuning() if spec.tuning is None else spec.tuning
    expected: dict[str, Any] = {"expected_tokens": max(1, group_slots), "expected_experts": placement.num_experts}
    tuning = dataclasses.replace(tuning, **expected)
    return dataclasses.replace(spec, router=None, out_dtype=None, shared_activation=None, tuning=tuning)


class Given(NamedTuple):
    """Of a rank's tokens: x `[T, D]`, wide for its gradient (see `Uses`), ids and weights `[T, K]`, token_mask bool
    `[T]`; and where experts are when this is replayed, None = where the plan says."""

    x: torch.Tensor
    wide: torch.Tensor | None
    ids: torch.Tensor
    weights: torch.Tensor
    token_mask: torch.Tensor | None
    moving: MovingPlacement | None


class Found(NamedTuple):
    """y `[T, D]`. Int32 counts: received `[L]`, rows of experts here; overflow `[1]`, rows of all ranks that did not
    fit; of this rank's tokens tokens_per_expert `[E]`, and invalid_ids `[1]`."""

    output: torch.Tensor
    received: torch.Tensor
    overflow: torch.Tensor
    tokens_per_expert: torch.Tensor
    invalid_ids: torch.Tensor


def run_chunks(
    ranks: Ranks, plan: ExchangePlan, given: Given, experts: Owner, shared: Shared | None, dtype: torch.dtype
) -> Found:
    """The forward of a rank. shared: called while rows travel, where that can be; dtype: of the output."""
    make, arrays, counted = (_direct if plan.direct else _counted)(ranks, plan, given)
    x, size = given.x, -(-len(given.x) // plan.spec.chunks)
    bounds = [min(number * size, len(x)) for number in range(plan.spec.chunks + 1)]
    chunks = _cut((x, given.wide, *arrays), bounds)
    if len(chunks) > 1 or (shared is not None and x.is_cuda and not torch.is_grad_enabled()):
        with torch.no_grad():
            output, parts = _in_chunks(chunks, make, experts, shared, dtype, plan)
    elif shared is not None:
        output, part = _beside_shared(chunks[0], make, experts, shared, dtype)
        parts = [part]
    else:
        ((rows, wide, *own),) = chunks
        routes = make(*own, number=0)
        rows, row_weights = dispatch(routes, rows, wide, own[1], stored=True)
        found = experts(rows, TopK(routes.ids, row_weights), routes.group_tokens, routes.results_at())
        # Training keeps them; else their memory is for the rows that come home.
        del rows
        output = combine(routes, found.output, (None, None), dtype, stored=True)
        parts = [_Part(found.tokens_per_expert, routes)]
    received, overflow = _total([part.received for part in parts]), _total([part.routes.overflow for part in parts])
    if counted is None:
        pushed = [part.routes.pushed for part in parts]
        counted = _total([one.tokens_per_expert for one in pushed]), _total([one.invalid_ids for one in pushed])
    return Found(output, received, overflow, *counted)


def _beside_shared(
    chunk: Sequence[Any], make: Callable[..., Any], experts: Owner, shared: Shared, dtype: torch.dtype
) -> tuple[torch.Tensor, _Part]:
    """The output, and all of a call, with gradients: on a GPU the shared expert runs while rows travel, and its
    backward while the gradients of their results do.

    Autograd runs a backward on the stream of its forward, and what was called last first: so the shared expert is
    called behind the experts, on a stream that does not wait for their rows.
    """
    x, wide, *own = chunk
    streams = Streams(x.device)
    begun = streams.marked(streams.computes)
    streams.wait(streams.copies, begun)
    streams.wait(streams.stores, begun)
    with streams.on(streams.copies):
        routes = make(*own, number=0, programs=_FEW_COPY_PROGRAMS)
        arrived = routes.start_push(x.detach(), "rows")()
    streams.wait(streams.computes, streams.marked(streams.copies))
    arriving = functools.partial(torch.Tensor.detach, arrived)
    rows, row_weights = dispatch(routes, arriving, wide, own[1], stored=True)
    found = experts(rows, TopK(routes.ids, row_weights), routes.group_tokens, routes.results_at())
    del rows, arrived, arriving
    gradients = Beside(streams)
    results = awaited(found.output, gradients)
    with streams.on(streams.stores):
        dense = shared()
    streams.wait(streams.computes, streams.marked(streams.stores))
    output = combine(routes, results, dense, dtype, stored=True, beside=gradients)
    return output, _Part(found.tokens_per_expert, routes)


class _Part(NamedTuple):
    """Of a chunk: received int32 `[L]`, rows of experts here, and its routes."""

    received: torch.Tensor
    routes: Any


#: What makes the routes of a chunk, arrays by token that it takes, and tokens_per_expert and invalid_ids, None = the
#: routes know them.
_Way = tuple[Callable[..., Any], tuple[Any, ...], tuple[torch.Tensor, torch.Tensor] | None]


def _counted(ranks: Ranks, plan: ExchangePlan, given: Given) -> _Way:
    """Ranks tell each other how many rows go where."""
    places, invalid, counts = _places(ranks, plan, given.ids, given.token_mask, given.moving)
    header = None if given.moving is None else given.moving.header(plan.header)
    make = functools.partial(PeerRoutes, ranks, plan, tokens=len(given.x), header=header)
    return make, (places, given.weights), (counts, invalid)


def _direct(ranks: Ranks, plan: ExchangePlan, given: Given) -> _Way:
    """Every token has its place."""
    moving, placement, ids, table, places, header = given.moving, plan.placement, given.ids, None, None, None
    _check_headers(ranks, plan, ids)
    if moving is not None:
        header = moving.header(plan.header)
    if placement.num_places > placement.num_experts and (placement.has_replicas or moving is not None):
        places, _ = _physical_ids(ranks, plan, ids, given.token_mask, moving)
    elif moving is not None:
        table = moving.places
    elif not _is_in_order(placement):
        (table,) = constants((_places_of_experts(placement),), ids.device)
    make = functools.partial(DirectRoutes, ranks, plan, places_of_experts=table, header=header, tokens=len(ids))
    return make, (ids, given.weights, given.token_mask, places), None


@functools.lru_cache(maxsize=256)
def _places_of_experts(placement: Placement) -> tuple[int, ...]:
    """The place of every expert; none has several."""
    _, places, start = placement.tables
    return tuple(places[start[:-1]].tolist())


def routes_at_once(ranks: Ranks, plan: ExchangePlan, ids: torch.Tensor, weights: torch.Tensor) -> PeerRoutes:
    """The routes of all tokens of this rank, ids and weights `[T, K]`. A collective."""
    places, *_ = _places(ranks, plan, ids, None, None)
    return PeerRoutes(ranks, plan, places, weights, tokens=len(ids))


@functools.lru_cache(maxsize=256)
def _is_in_order(placement: Placement) -> bool:
    """Whether every expert's place has the expert's number."""
    return placement.num_places == placement.num_experts and placement.tables.places.tolist() == list(
        range(placement.num_experts)
    )


def _places(
    ranks: Ranks, plan: ExchangePlan, ids: torch.Tensor, token_mask: torch.Tensor | None, moving: MovingPlacement | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """places `[T, K]` of this rank's slots, invalid_ids `[1]` and tokens_per_expert `[E]`, after the first messages, if
    there are any."""
    experts = plan.placement.num_experts
    _check_headers(ranks, plan, ids)
    if moving is None and _is_in_order(plan.placement):
        found = ops.make_layout(ids, experts, token_mask=token_mask)
        places = torch.where(found.row_of_slot.view(ids.shape) < 0, -1, ids)
        return places, found.invalid_ids, found.group_sizes
    places, invalid = _physical_ids(ranks, plan, ids, token_mask, moving)
    return places, invalid, ops.make_layout(torch.where(places < 0, -1, ids), experts).group_sizes


def _check_headers(ranks: Ranks, plan: ExchangePlan, ids: torch.Tensor) -> None:
    if not ids.is_cuda:
        # Where waiting costs nothing, the host compares before anything else is sent. On a GPU the headers travel with
        # what goes first, and the output is NaN where they differ.
        check_headers(ranks, plan.header, ids.device)


def _physical_ids(
    ranks: Ranks, plan: ExchangePlan, ids: torch.Tensor, token_mask: torch.Tensor | None, moving: MovingPlacement | None
) -> Places:
    """Of this rank's slots; which replica is theirs depends on how many tokens the ranks ahead have."""
    first_token: Any = 0
    if plan.placement.has_replicas or moving is not None:
        (own,) = constants(((len(ids),),), ids.device)
        first_token = ranks.all_gather(own, "tokens")[: ranks.rank].sum()
    tables = None if moving is None else (moving.places, moving.start)
    return physical_ids(ids, plan.placement, first_token=first_token, token_mask=token_mask, tables=tables)


def _total(counts: list[torch.Tensor]) -> torch.Tensor:
    return functools.reduce(torch.add, counts)


def _cut(arrays: tuple[Any, ...], bounds: list[int]) -> list[Any]:
    """The rows of each chunk, from one bound to the next, of arrays by token, some of them None."""
    if len(bounds) == 2:
        # The gradient of a slice, though it be of all, is a copy.
        return [arrays]
    return [tuple(one if one is None else one[a:b] for one in arrays) for a, b in itertools.pairwise(bounds)]


def _sum_into(part: torch.Tensor, total: Callable[..., torch.Tensor], shared: Any, gate: Any) -> None:
    """Write the sum to rows of the output."""
    if part.data_ptr() % ALIGNMENT:
        # Rows of fewer than 16 bytes, of fp32 tokens for example.
        part.copy_(total(shared=shared, shared_gate=gate, out_dtype=part.dtype))
    else:
        total(shared=shared, shared_gate=gate, out=part)


def _limits(number: int, count: int, experts: Owner, device: torch.device) -> Multiprocessors:
    """Of the products of a chunk. Nothing runs beside the first product 1, nor beside the last product 2."""
    if device.type != "cuda":
        return None, None
    most = torch.cuda.get_device_properties(device).multi_processor_count
    second = second_multiprocessors(most, experts.spec.activation)
    return None if number == 0 else most - second, None if number == count - 1 else second


def _in_chunks(
    chunks: Chunks,
    make: Callable[..., Any],
    experts: Owner,
    shared: Shared | None,
    dtype: torch.dtype,
    plan: ExchangePlan,
) -> tuple[torch.Tensor, list[_Part]]:
    """The output, and all chunks, without gradients. On a GPU copies of later chunks, and of the results of chunk
    n - 1, run beside the products of chunk n; in lanes product 2 of chunk n - 1 runs beside product 1 of chunk n.

    Each stream waits for the others when the call begins and ends. In between, what one has used and another has made
    is let go of when the other was told to wait.
    """
    source, bounds = chunks[0][0], [*itertools.accumulate((len(x) for x, *_ in chunks), initial=0)]
    sets, in_lanes = sets_of_buffers(plan.spec), runs_in_lanes(plan.spec)
    streams = Streams(source.device)
    computes, copies, marked, wait = streams.computes, streams.copies, streams.marked, streams.wait
    stores = streams.stores if in_lanes else computes
    output = source.new_empty((bounds[-1], source.shape[1]), dtype=dtype)
    arrived: dict[int, tuple[Any, torch.cuda.Event | None]] = {}
    kept: dict[int, tuple[Any, torch.cuda.Event | None]] = {}
    parts: list[_Part] = []
    wait(copies, marked(computes))

    def dispatch(number: int) -> None:
        if number >= len(chunks):
            return
        x, _, *own = chunks[number]
        with streams.on(copies):
            # The chunk that had its buffers has been added up here, so all owners have read them.
            routes = make(*own, number=number % sets, programs=_COPY_PROGRAMS)
            routes.send(x)
            routes.arrive("rows")
            arrived[number] = routes, marked(copies)

    def compute(number: int, routes: Any) -> tuple[MoEOutput, Any]:
        """The results, and what has to stay until they are there."""
        given = routes.rows(), TopK(routes.ids, routes.weights), routes.group_tokens, routes.results_at()
        if not in_lanes:
            return experts(*given), given
        begun = experts.begin(*given, _limits(number, len(chunks), experts, source.device))
        wait(stores, marked(computes))
        with streams.on(stores):
            return begun.finish(), begun

    dispatch(0)
    dense = _cut(shared() if shared else (None, None), bounds)
    ahead = max(1, sets - 1)
    for number in range(1, ahead):
        dispatch(number)
    for number, (part,) in enumerate(_cut((output,), bounds)):
        routes, event = arrived.pop(number)
        wait(computes, event)
        found, memory = compute(number, routes)
        computed = marked(stores)
        dispatch(number + ahead)
        with streams.on(copies):
            wait(copies, computed)
            total = routes.start_total(None, "results")
            _sum_into(part, total, *dense[number])
            kept[number] = (memory, found, routes), computed
        parts.append(_Part(found.tokens_per_expert, routes))
        if number:
            wait(computes, kept.pop(number - 1)[1])
    wait(computes, marked(copies))
    return output, parts
