"""Chunks of mode `peer` on the streams of a GPU: everything that one step stores and another loads is in order."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Hashable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

torch = pytest.importorskip("torch")

from moe_core.parallel import ExchangeSpec
from moe_core.specs.matmul import Activation
from moe_torch.parallel.peer import chunks, streams
from tests.support.parallel.order import Recorder, Scratch, Stream

RANKS, TOKENS, CALLS = 3, 4, 2
EVERY = range(RANKS)
DIRECT = ExchangeSpec("peer")


class Rank:
    """A rank's streams, the current one, and how often it has used each set of buffers."""

    def __init__(self, recorder: Recorder, number: int, spec: ExchangeSpec, counted: bool) -> None:
        self.number, self.recorder, self.spec, self.counted = number, recorder, spec, counted
        self.streams = {name: Stream(recorder, number, name) for name in ("computes", "copies", "stores")}
        self.now = self.streams["computes"]
        self.barriers: dict[int, int] = {}
        self.turns: dict[int, int] = {}

    def barrier(self, memory: int) -> None:
        self.barriers[memory] = turn = self.barriers.get(memory, 0) + 1
        steps = self.now.step("arrival"), self.now.step("departure")
        self.recorder.barriers.setdefault((memory, turn), []).append(steps)

    def at(self, what: str, memory: int, *beside: Hashable) -> list[Hashable]:
        """Of this rank's memory, what each of the others stores."""
        return [(what, self.number, memory, peer, *beside) for peer in EVERY]

    def at_peers(self, what: str, memory: int, *beside: Hashable) -> list[Hashable]:
        return [(what, peer, memory, self.number, *beside) for peer in EVERY]


class Routes:
    """What `DirectRoutes`, or `CountedRoutes`, read and write."""

    group_tokens, ids, weights = 1, None, None

    def __init__(self, rank: Rank, memory: int) -> None:
        self.rank, self.memory = rank, memory
        self.overflow = Scratch("places", rank.now)
        if rank.counted:
            rank.now.step("counts", (), rank.at_peers("counts", memory))
            rank.barrier(memory)
            rank.now.step("places", rank.at("counts", memory), [self.overflow.key])
            rank.now.step("routing", [self.overflow.key], rank.at_peers("routing", memory))

    def send(self, x: Hashable) -> None:
        rank, memory = self.rank, self.memory
        writes = rank.at_peers("rows", memory)
        if not rank.counted:
            self.turn = rank.turns[memory] = rank.turns.get(memory, 0) + 1
            writes += rank.at_peers("routing", memory) + rank.at_peers("header", memory, self.turn % 2)
            writes += [("turn", rank.number, memory), self.overflow.key]
        rank.now.step("rows", [("x", rank.number)], writes)

    def arrive(self, what: str) -> None:
        self.rank.barrier(self.memory)

    def rows(self) -> Routes:
        return self

    def results_at(self) -> Scratch:
        found = Scratch("addresses", self.rank.now)
        self.rank.now.step("addresses", [*self.rank.at("routing", self.memory), self.overflow.key], [found.key])
        return found

    def start_total(self, rows: None, what: str) -> Any:
        rank, memory = self.rank, self.memory

        def total(*, out: Any, shared: Any, **_: Any) -> None:
            rank.barrier(memory)
            reads = [
                self.overflow.key,
                *rank.at("returned", memory),
                *([] if shared is None else [("dense", rank.number)]),
            ]
            if not rank.counted:
                reads += [*rank.at("header", memory, self.turn % 2), ("turn", rank.number, memory)]
            rank.now.step("total", reads, [("output", rank.number, out.data_ptr())])

        return total


@dataclasses.dataclass
class Begun:
    """Product 1 of some rows is under way."""

    routes: Routes
    results_at: Scratch
    hidden: Scratch
    counts: Scratch

    def finish(self) -> SimpleNamespace:
        rank, memory = self.routes.rank, self.routes.memory
        reads = [self.hidden.key, *rank.at("routing", memory), self.results_at.key]
        rank.now.step("product 2", reads, rank.at_peers("returned", memory))
        return SimpleNamespace(output=None, tokens_per_expert=self.counts)


class Experts:
    """The owner's op."""

    spec = SimpleNamespace(activation=Activation("silu"))

    def begin(self, routes: Routes, routing: Any, tokens: int, results_at: Scratch, limits: Any) -> Begun:
        rank = routes.rank
        hidden, counts = Scratch("hidden", rank.now), Scratch("counts of rows", rank.now)
        reads = [*rank.at("rows", routes.memory), *rank.at("routing", routes.memory)]
        rank.now.step("product 1", reads, [hidden.key, counts.key])
        return Begun(routes, results_at, hidden, counts)

    def __call__(self, routes: Routes, *others: Any) -> SimpleNamespace:
        routing, tokens, results_at = others
        return self.begin(routes, routing, tokens, results_at, None).finish()


def streams_of(rank: Rank, left_out: tuple[str, str] | None) -> Any:
    """The place of `chunks.Streams`. left_out: names of a stream and of another for which it does not wait."""

    @contextlib.contextmanager
    def on(stream: Stream) -> Iterator[None]:
        before, rank.now = rank.now, stream
        try:
            yield
        finally:
            rank.now = before

    def marked(stream: Stream) -> tuple[Stream, int]:
        return stream, stream.step("event")

    def wait(stream: Stream, event: tuple[Stream, int]) -> None:
        if (stream.name, event[0].name) != left_out:
            stream.wait(event[1])

    return lambda _: SimpleNamespace(**rank.streams, on=on, marked=marked, wait=wait)


def forward(rank: Rank, sets: int) -> None:
    """A forward of a rank. sets: of buffers that there are."""
    x = torch.zeros(TOKENS * rank.spec.chunks, 16)
    rank.now.step("x", (), [("x", rank.number)])

    def dense() -> tuple[Any, None]:
        rank.now.step("dense", [("x", rank.number)], [("dense", rank.number)])
        return torch.zeros_like(x), None

    def make(*_: Any, number: int, **__: Any) -> Routes:
        return Routes(rank, number % sets)

    plan: Any = SimpleNamespace(spec=rank.spec, training=False)
    pieces = [[piece, None] for piece in x.split(TOKENS)]
    output, parts = chunks._in_chunks(pieces, make, Experts(), dense, torch.float32, plan)  # type: ignore[arg-type]
    counts: list[Any] = [one for part in parts for one in (part.received, part.routes.overflow)]
    written = [("output", rank.number, piece.data_ptr()) for piece in output.split(TOKENS)]
    # What follows reads the results, and may write to where x and the shared expert's rows were.
    own = [("x", rank.number), ("dense", rank.number)]
    rank.now.step("what follows", [one.key for one in counts], [*written, *own])


def unordered(
    spec: ExchangeSpec, *, counted: bool = False, left_out: tuple[str, str] | None = None, sets: int = 64
) -> list[str]:
    """What nothing orders in some forwards of all ranks."""
    recorder, orders = Recorder(), []
    for number in EVERY:
        rank = Rank(recorder, number, spec, counted)
        with mock.patch.object(chunks, "Streams", streams_of(rank, left_out)):
            for _ in range(CALLS):
                forward(rank, sets)
        orders.append([name for name in recorder.names if f"of rank {number} on copies" in name])
    # All ranks come to their barriers in one order.
    assert len({str(order).replace(f"rank {number}", "") for number, order in enumerate(orders)}) == 1
    return recorder.unordered()


@pytest.mark.parametrize("counted", [False, True], ids=["direct", "counted"])
def test_everything_is_in_order(counted: bool) -> None:
    for count in (1, 2, 3, 4, 5, 7):
        assert unordered(dataclasses.replace(DIRECT, chunks=count), counted=counted) == []


@pytest.mark.parametrize(
    "left_out",
    [
        ("copies", "computes"),
        ("computes", "copies"),
        ("copies", "stores"),
        ("stores", "computes"),
        ("computes", "stores"),
    ],
    ids=" waits not for ".join,
)
def test_a_wait_that_is_left_out_is_found(left_out: tuple[str, str]) -> None:
    assert unordered(dataclasses.replace(DIRECT, chunks=5), left_out=left_out)


def test_too_few_buffers_are_found() -> None:
    assert unordered(dataclasses.replace(DIRECT, chunks=5), sets=2)


class Trained:
    """What `DirectRoutes` read and write with training: a backward reads what its forward has copied."""

    group_tokens, spoilt = 1, None

    def __init__(self, rank: Rank) -> None:
        self.rank = rank
        self.ids, self.weights, self.overflow = None, torch.zeros(1, 1), torch.zeros(1)
        self.call = mock.Mock()
        self.places = Scratch("places", rank.now)
        self.arrived_rows: Scratch | None = None
        self.begin_gradients = lambda: None  # They go where results went.

    def start_push(self, values: Any, what: str) -> Any:
        rank, first = self.rank, self.arrived_rows is None
        rank.barrier(0)
        reads = [("x" if first else "d_y", rank.number), *([] if first else [self.places.key])]
        rank.now.step(what, reads, rank.at_peers("rows", 0) + ([self.places.key] if first else []))

        def arrived() -> Any:
            rank.barrier(0)
            if first:
                self.arrived_rows = Scratch("kept rows", rank.now)
                rank.now.step("kept rows", rank.at("rows", 0), [self.arrived_rows.key])
            return torch.zeros(TOKENS, 16)

        return arrived

    def results_at(self) -> None:
        return None

    def start_total(self, rows: None, what: str) -> Any:
        def total(**_: Any) -> Any:
            rank = self.rank
            rank.barrier(0)
            reads = [*rank.at("returned", 0), self.places.key, ("dense", rank.number)]
            rank.now.step("total", reads, [("y", rank.number)])
            return torch.zeros(TOKENS, 16)

        return total

    def gradients(self, of: Any, **_: Any) -> Any:
        rank = self.rank
        rank.barrier(0)
        rank.now.step("d_x", [*rank.at("returned", 0), self.places.key], [("d_x", rank.number)])
        return of.rows, None


class Steps(torch.autograd.Function):
    """A step of the forward, and one of the backward on the same stream, behind what the gradient comes from."""

    @staticmethod
    def forward(ctx: Any, rows: Any, rank: Rank, name: str, ways: tuple[Any, Any]) -> Any:
        ctx.rank, ctx.name, ctx.way, ctx.stream = rank, name, ways[1], rank.now
        rank.now.step(name, *ways[0])
        return rows + 1

    @staticmethod
    def backward(ctx: Any, d_rows: Any) -> Any:
        rank, stream = ctx.rank, ctx.stream
        if stream is not rank.streams["computes"]:
            stream.wait(rank.streams["computes"].steps[-1])
        stream.step(f"d {ctx.name}", *ctx.way)
        return d_rows, None, None, None


def trained(rank: Rank) -> list[str]:
    """A step of training of a rank; the names of its steps."""
    first, own = len(rank.recorder.names), ("x", rank.number)
    rank.now.step("x", (), [own])
    x = torch.zeros(TOKENS, 16)

    def experts(rows: Any, *_: Any) -> SimpleNamespace:
        kept = routes[-1].arrived_rows
        assert kept is not None
        ways = (
            ([kept.key], rank.at_peers("returned", 0)),
            ([*rank.at("rows", 0), kept.key], rank.at_peers("returned", 0)),
        )
        return SimpleNamespace(output=Steps.apply(rows, rank, "experts", ways), tokens_per_expert=None)

    def shared() -> tuple[Any, None]:
        ways = ([own], [("dense", rank.number)]), ([own, ("d_y", rank.number)], [("d_shared", rank.number)])
        return Steps.apply(x.clone().requires_grad_(), rank, "shared", ways), None

    routes: list[Trained] = []

    def make(*_: Any, number: int, **__: Any) -> Trained:
        assert number == 0, "the buffers of other calls"
        routes.append(Trained(rank))
        return routes[-1]

    chunk: Any = [x, x.clone().requires_grad_(), None, torch.zeros(1, 1)]
    arguments: Any = make, experts, shared, torch.float32
    output, part = chunks._beside_shared(chunk, *arguments)
    rank.now.step("loss", [("y", rank.number)], [("d_y", rank.number)])
    output.backward(torch.ones_like(output))
    # At its end a backward waits for all its streams.
    rank.now.wait(rank.streams["stores"].steps[-1])
    made = [(name, rank.number) for name in ("x", "dense", "y", "d_y", "d_x", "d_shared")]
    rank.now.step("what follows", [], made)
    del part, output
    routes.clear()
    return [name.split(" of rank")[0] for name in rank.recorder.names[first:]]


def unordered_training(left_out: tuple[str, str] | None = None) -> list[str]:
    """What nothing orders in some steps of all ranks."""
    recorder = Recorder()
    for number in EVERY:
        rank = Rank(recorder, number, DIRECT, False)
        with mock.patch.object(chunks, "Streams", streams_of(rank, left_out)):
            for _ in range(CALLS):
                names = trained(rank)
                # What runs beside rows that travel is called before what waits for them.
                assert names.index("d_output") < names.index("d shared") < names.index("d experts")
    return recorder.unordered()


def test_training_beside_a_shared_expert_is_in_order() -> None:
    assert unordered_training() == []


def test_a_search_for_nan_finds_rows_that_have_arrived() -> None:
    """It reads them before the experts' backward waits for them."""
    early = mock.patch.object(streams.GradientOverlap, "start", side_effect=AssertionError)
    with torch.autograd.set_detect_anomaly(True), early:
        assert unordered_training() == []
    with torch.autograd.set_detect_anomaly(True, check_nan=False), early, pytest.raises(AssertionError):
        unordered_training()


@pytest.mark.parametrize(
    "left_out",
    [("copies", "computes"), ("computes", "copies"), ("stores", "computes"), ("computes", "stores")],
    ids=" waits not for ".join,
)
def test_a_wait_that_training_leaves_out_is_found(left_out: tuple[str, str]) -> None:
    assert unordered_training(left_out)


def test_a_gradient_that_is_read_too_early_is_found() -> None:
    with mock.patch.object(streams.GradientOverlap, "wait", lambda _: None):
        found = unordered_training()
    assert any("('rows', 0" in one and "d experts" in one for one in found)
