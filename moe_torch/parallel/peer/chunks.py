"""The forward of mode `peer`, at once or in chunks without gradients: one is computed while the next travels.

Product 2 of a chunk also runs beside product 1 of the next, each on some multiprocessors, so that links stay busy.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import torch

from moe_core.parallel import ExchangePlan, Placement
from moe_core.parallel.bounds import runs_in_lanes, second_multiprocessors, sets_of_buffers
from moe_core.specs.operands import MoEOutput, TopK
from moe_torch import ops
from moe_torch.parallel.exchange import Places, constants, physical_ids
from moe_torch.parallel.function import awaited, combine, dispatch
from moe_torch.parallel.owner import Multiprocessors, Owner, Results
from moe_torch.parallel.peer import again
from moe_torch.parallel.peer.counted import CountedRoutes
from moe_torch.parallel.peer.direct import DirectRoutes
from moe_torch.parallel.peer.interface import PeerCall, PeerRoutes
from moe_torch.parallel.peer.streams import GradientOverlap, Streams
from moe_torch.parallel.route import ExchangeCall, Planner, check_headers
from moe_torch.parallel.tensor import Brought

Shared = Callable[[], tuple[torch.Tensor | None, torch.Tensor | None]]
#: Of each chunk: x, wide, and arrays for its routes.
Chunks = Sequence[Sequence[Any]]
#: Blocks that copy rows while others compute: enough for most of a link's bandwidth.
_COPY_PROGRAMS = 32
#: The same while a shared expert computes in training, docs/notebook/parallel.md.
_FEW_COPY_PROGRAMS = 16


class _Part(NamedTuple):
    """One chunk. received int32 `[L]`: rows of experts here."""

    received: torch.Tensor
    routes: PeerRoutes


class _Way(NamedTuple):
    """Makes the routes of chunks.

    make: takes arrays of a chunk's tokens, number and programs. arrays: of all tokens. counts: tokens_per_expert `[E]`
    and invalid_ids `[1]`, None if the routes have them.
    """

    make: Callable[..., Any]
    arrays: tuple[Any, ...]
    counts: tuple[torch.Tensor, torch.Tensor] | None


class PeerPlanner(Planner):
    """See `Planner`. returns: owners return rows, so ranks tell each other counts. Chunks, and a shared expert beside
    rows that travel, have schedules of their own."""

    def __init__(self, call: ExchangeCall, *routing: Any) -> None:
        self.call, self._like = call, None
        *self._routing, self._returns = routing

    def _way(self) -> _Way:
        direct = self.call.plan.direct and not self._returns
        return (_direct if direct else _counted)(self.call, *self._routing)

    def start(self, values: torch.Tensor | None = None) -> Callable[[], Any]:
        way = self._way()
        if self.call.steps is not None and values is not None:
            # Gathered rows are not kept.
            self._like = values.shape, values.stride()
        routes = way.make(*way.arrays)
        if way.counts is not None:
            routes.tokens_per_expert, routes.invalid_ids = way.counts
        return lambda: routes

    def ended(self, routes: PeerRoutes, dtype: torch.dtype) -> None:
        if self._like is not None:
            again.remember(self.call, self._like, routes, dtype)

    def schedule(self, brought: Brought, owner: Owner, shared: Shared | None, dtype: torch.dtype) -> Results | None:
        """shared: called while rows travel, if possible. dtype: of the output."""
        spec = self.call.plan.spec
        if spec.chunks == 1 and shared is None:
            return None
        way, x = self._way(), brought.x
        size = -(-len(x) // spec.chunks)
        bounds = [min(number * size, len(x)) for number in range(spec.chunks + 1)]
        chunks = _cut((x, brought.wide, *way.arrays), bounds)
        if len(chunks) > 1 or shared is None or (x.is_cuda and not torch.is_grad_enabled()):
            with torch.no_grad():
                output, parts = _in_chunks(chunks, way.make, owner, shared, dtype, self.call.plan)
        else:
            output, part = _beside_shared(chunks[0], way.make, owner, shared, dtype)
            parts = [part]
        received, overflow = _total([part.received for part in parts]), _total([part.routes.overflow for part in parts])
        counts: Any = way.counts
        if counts is None:
            pushed = [cast(DirectRoutes, part.routes).pushed for part in parts]
            counts = _total([one.tokens_per_expert for one in pushed]), _total([one.invalid_ids for one in pushed])
        return Results(output, received, overflow, *counts)


def _beside_shared(
    chunk: Sequence[Any], make: Callable[..., Any], owner: Owner, shared: Shared, dtype: torch.dtype
) -> tuple[torch.Tensor, _Part]:
    """The output and its part, with gradients. On a GPU the shared expert overlaps with rows that travel.

    Its backward overlaps with gradients of results: autograd runs a backward on its forward's stream, last call first.
    So the shared expert is called last, on a stream that does not wait for rows.
    """
    x, wide, *routing = chunk
    streams = Streams(x.device)
    begun = streams.marked(streams.computes)
    streams.wait(streams.copies, begun)
    streams.wait(streams.stores, begun)
    with streams.on(streams.copies):
        routes = make(*routing, number=0, programs=_FEW_COPY_PROGRAMS)
        arrived = routes.start_push(x.detach(), "rows")()
    streams.wait(streams.computes, streams.marked(streams.copies))
    arriving = functools.partial(torch.Tensor.detach, arrived)
    rows, row_weights = dispatch(routes, arriving, wide, routing[1], stored=True)
    results = owner(rows, TopK(routes.ids, row_weights), routes.group_tokens, routes.results_at())
    del rows, arrived, arriving
    overlap = GradientOverlap(streams)
    output = awaited(results.output, overlap)
    with streams.on(streams.stores):
        dense = shared()
    streams.wait(streams.computes, streams.marked(streams.stores))
    output = combine(routes, output, dense, dtype, stored=True, overlap=overlap)
    return output, _Part(results.tokens_per_expert, routes)


def _counted(call: ExchangeCall, ids: torch.Tensor, weights: torch.Tensor, token_mask: torch.Tensor | None) -> _Way:
    places, invalid, counts = _places(call, ids, token_mask)
    make = functools.partial(CountedRoutes, PeerCall.of(call, places))
    return _Way(make, (places, weights), (counts, invalid))


def _direct(call: ExchangeCall, ids: torch.Tensor, weights: torch.Tensor, token_mask: torch.Tensor | None) -> _Way:
    placement, moving, table, places = call.plan.placement, call.moving, None, None
    check_headers(call, ids)
    if placement.num_places > placement.num_experts and (placement.has_replicas or moving is not None):
        places, _ = _physical_ids(call, ids, token_mask)
    elif moving is not None:
        table = moving.places
    elif in_places := _places_of_experts(placement):
        (table,) = constants((in_places,), ids.device)
    make = functools.partial(DirectRoutes, PeerCall.of(call, ids), places_of_experts=table)
    return _Way(make, (ids, weights, token_mask, places), None)


@functools.lru_cache(maxsize=256)
def _places_of_experts(placement: Placement) -> tuple[int, ...] | None:
    """None if expert e has place e."""
    _, places, start = placement.tables
    in_order = placement.num_places == placement.num_experts and places.tolist() == list(range(placement.num_experts))
    return None if in_order else tuple(places[start[:-1]].tolist())


def _places(
    call: ExchangeCall, ids: torch.Tensor, token_mask: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Places `[T, K]`, invalid_ids `[1]`, tokens_per_expert `[E]`. Sends the first messages, if any."""
    placement = call.plan.placement
    check_headers(call, ids)
    if call.moving is None and _places_of_experts(placement) is None:
        layout = ops.make_layout(ids, placement.num_experts, token_mask=token_mask)
        places = torch.where(layout.row_of_slot.view(ids.shape) < 0, -1, ids)
        return places, layout.invalid_ids, layout.group_sizes
    places, invalid = _physical_ids(call, ids, token_mask)
    return places, invalid, ops.make_layout(torch.where(places < 0, -1, ids), placement.num_experts).group_sizes


def _physical_ids(call: ExchangeCall, ids: torch.Tensor, token_mask: torch.Tensor | None) -> Places:
    """Replicas depend on the tokens of ranks ahead."""
    ranks, plan, moving, first_token = *call[:3], cast(Any, 0)
    if plan.placement.has_replicas or moving is not None:
        (tokens,) = constants(((len(ids),),), ids.device)
        first_token = ranks.all_gather(tokens, "tokens")[: ranks.rank].sum()
    tables = None if moving is None else (moving.places, moving.start)
    return physical_ids(ids, plan.placement, first_token=first_token, token_mask=token_mask, tables=tables)


def _total(counts: list[torch.Tensor]) -> torch.Tensor:
    return functools.reduce(torch.add, counts)


def _cut(arrays: tuple[Any, ...], bounds: list[int]) -> list[Any]:
    if len(bounds) == 2:
        # A slice of everything would copy the gradient.
        return [arrays]
    return [tuple(one if one is None else one[a:b] for one in arrays) for a, b in itertools.pairwise(bounds)]


def _limits(number: int, count: int, owner: Owner, device: torch.device) -> Multiprocessors:
    if device.type != "cuda":
        return None, None
    most = torch.cuda.get_device_properties(device).multi_processor_count
    second = second_multiprocessors(most, owner.spec.activation)
    return None if number == 0 else most - second, None if number == count - 1 else second


def _in_chunks(
    chunks: Chunks,
    make: Callable[..., Any],
    owner: Owner,
    shared: Shared | None,
    dtype: torch.dtype,
    plan: ExchangePlan,
) -> tuple[torch.Tensor, list[_Part]]:
    """The output and all parts, without gradients.

    On a GPU, copies of later rows and of chunk n - 1's results run beside the products of chunk n, and in lanes product
    2 of chunk n - 1 beside product 1 of chunk n. Streams wait for each other at both ends of the call. In between,
    memory that another stream used is released once its stream was told to wait.
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
        x, _, *rest = chunks[number]
        with streams.on(copies):
            # The last chunk with these buffers has been added, so all owners have read them.
            routes = make(*rest, number=number % sets, programs=_COPY_PROGRAMS)
            routes.send(x)
            routes.arrive("rows")
            arrived[number] = routes, marked(copies)

    def compute(number: int, routes: Any) -> tuple[MoEOutput, Any]:
        """Results, and memory that must stay until they are complete."""
        arguments = routes.rows(), TopK(routes.ids, routes.weights), routes.group_tokens, routes.results_at()
        if not in_lanes:
            return owner(*arguments), arguments
        begun = owner.begin(*arguments, _limits(number, len(chunks), owner, source.device))
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
        results, memory = compute(number, routes)
        computed = marked(stores)
        dispatch(number + ahead)
        with streams.on(copies):
            wait(copies, computed)
            total = routes.start_total(None, "results")
            rows, gate = dense[number]
            total(shared=rows, shared_gate=gate, out=part)
            kept[number] = (memory, results, routes), computed
        parts.append(_Part(results.tokens_per_expert, routes))
        if number:
            wait(computes, kept.pop(number - 1)[1])
    wait(computes, marked(copies))
    return output, parts
