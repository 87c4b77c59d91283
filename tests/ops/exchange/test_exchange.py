"""Exchanges through peers' memory, against the twin of all ranks and against one device, bit by bit."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from moe_core.base.dtypes import numpy_dtype
from moe_core.base.target import Target
from moe_core.formats import Format, format_named
from moe_core.ops.common.rounding import round_to
from moe_core.ops.exchange.checks import copy_tile
from moe_core.ops.exchange.push import plan_result_addresses
from moe_core.ops.quantize.reference import quantize_rows
from moe_core.ops.reduction.reference import reduce
from moe_core.parallel import ExchangeSpec, Placement
from moe_core.specs.operands import OutputGradients
from tests.support.harness import H200, run_plan, spec_of
from tests.support.parallel.peers import ENGINES, Peers, Places, poisoned
from tests.support.parallel.placements import placement_of
from tests.support.parallel.twin.arithmetic import first_owners
from tests.support.parallel.twin.ranks import GroupForward, _at_owner, moe, numpy_backward
from tests.support.parallel.twins import LOADS, PLAIN, Problem, draw_problem
from tests.support.strategies import draw_array

on_engines = pytest.mark.parametrize("target", ENGINES, ids=lambda target: target.kind)
D = 24


def require_bits(found: np.ndarray, expected: np.ndarray, label: str) -> None:
    """Same bits, NaN payloads included."""
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape), label
    np.testing.assert_array_equal(found.view(np.uint8), np.ascontiguousarray(expected).view(np.uint8), label)


def require_arrived(found: np.ndarray, expected: np.ndarray, label: str) -> None:
    """Rows that should be there are, and those behind them were not touched."""
    require_bits(found[: len(expected)], expected, label)
    rest = found[len(expected) :]
    require_bits(rest, poisoned(rest.shape, rest.dtype.name), f"behind the last row, {label}")


class Exchange:
    """A forward and a backward of all ranks whose rows travel through peers' memory; owners compute as the twin does.

    receive: the bound, None = a few rows more than come.
    """

    def __init__(self, problem: Problem, target: Target, receive: int | None, label: str) -> None:
        way = ExchangeSpec("peer", "slots", receive=receive, on_overflow="drop")
        self.problem, self.label = problem, label
        self.forward: GroupForward = moe(problem.ranks(), problem.spec, problem.placement, way)
        self.routes = self.forward.routes
        self.ranks = range(problem.placement.num_ranks)
        self.num_rows = 3 + max(len(own) for own in self.routes.sources) if receive is None else receive
        self.peers = Peers(len(self.ranks), target)
        ids = [home.places for home in self.routes.homes]
        self.places: list[Places] = self.peers.places(ids, problem.placement.num_places, self.num_rows)

    def push(self, values: list[np.ndarray], what: str, programs: int | None = None) -> None:
        """Rows by token of every home to the arrays `rows` of owners."""
        self.peers.make("rows", (self.num_rows, values[0].shape[1]), values[0].dtype.name)
        for rank in self.ranks:
            self.peers.dispatch(values[rank], self.places[rank], self.num_rows, programs=programs)
        for rank in self.ranks:
            require_arrived(self.peers.of("rows", rank), self.routes.push(rank, values), f"{what}, {self.label}")

    def push_slots(self) -> None:
        """What goes beside the rows."""
        weights = [stages["weights"] for stages in self.forward.stages]
        self.peers.make("weights", (self.num_rows, 1), "float32")
        self.peers.make("sources", (self.num_rows, 2), "int32")
        for rank in self.ranks:
            self.peers.push_slots(weights[rank], self.places[rank], rank, self.num_rows)
        for rank in self.ranks:
            expected = self.routes.push_weights(rank, weights)
            require_arrived(self.peers.of("weights", rank), expected, f"weights, {self.label}")
            sources = np.full((len(expected), 2), -1, np.int32)
            for number, home in enumerate(self.routes.homes):
                row, _, slot = home.arrivals.to(rank)
                sources[row] = np.stack([np.full_like(slot, number), slot], axis=1)
            require_arrived(self.peers.of("sources", rank), sources, f"sources, {self.label}")
            # As an earlier call may have left them: those behind the last row say nothing.
            self.peers.of("sources", rank)[len(sources) :] = 0

    def give(self, values: list[np.ndarray]) -> None:
        """Every owner's rows by slot, where peers load them; NaN behind them."""
        self.peers.make("results", (self.num_rows, values[0].shape[1]), values[0].dtype.name)
        for rank in self.ranks:
            self.peers.of("results", rank)[: len(values[rank])] = values[rank]

    def pushed_home(self, num_slots: int, programs: int | None = None, **options: Any) -> list[np.ndarray]:
        """What homes add up where owners store their results in slots."""
        given, outputs = self.peers.of("results", 0), []
        self.peers.make("slots", (num_slots, given.shape[1]), given.dtype.name)
        for rank in self.ranks:
            start = np.concatenate([[0], np.cumsum(self.forward.received_per_expert[rank])]).astype(np.int32)
            self.peers.combine_push(rank, start, num_slots, programs=programs)
        for rank in self.ranks:
            order = self.places[rank].rows
            stored = self.peers.of("slots", rank)[: order.size]
            outputs.append(reduce(stored, order.reshape(-1), top_k=order.shape[1], order="slot", **options))
        return outputs

    def run(self, programs: int | None = None) -> None:
        """Compare every step with the twin, and the whole with one device where nothing was dropped."""
        problem, forward, label = self.problem, self.forward, self.label
        assert [own.overflow.tolist() for own in self.places] == [forward.overflow.tolist()] * len(self.ranks), label
        self.push([own.x for own in problem.ranks()], "rows", programs)
        self.push_slots()
        self.give([owner.stages["matmul2"] for owner in forward.owners])
        top_k = self.places[0].rows.shape[1]
        num_slots = max(problem.tokens) * top_k
        outputs = self.pushed_home(num_slots, programs)
        for rank in self.ranks:
            require_bits(outputs[rank], forward.outputs[rank].output, f"output of {rank}, {label}")
        whole = not forward.overflow[0]
        if whole:
            require_bits(np.concatenate(outputs), problem.alone()["output"], f"output, {label}")
        if problem.placement.has_replicas:
            return
        self.push([round_to(own.output, problem.x.dtype) for own in problem.gradients()], "d_output")
        d_slots, d_weights = [], []
        for rank, owner in enumerate(forward.owners):
            arrived = self.peers.of("rows", rank)[: len(owner.operands.x)]
            gradients = OutputGradients(np.ascontiguousarray(arrived))
            own = numpy_backward(gradients, owner.operands, _at_owner(problem.spec), owner.stages)
            d_slots.append(own["d_slots"])
            d_weights.append(own["d_routing.weights"].reshape(-1, 1))
        self.give(d_slots)
        self.peers.make("weights", (self.num_rows, 1), "float32")
        for rank in self.ranks:
            self.peers.of("weights", rank)[: len(d_weights[rank])] = d_weights[rank]
        wide = self.pushed_home(num_slots, out_dtype="float32")
        by_slot = [self.peers.combine_weights(own, self.num_rows) for own in self.places]
        if whole:
            expected = problem.alone_backward(problem.alone())
            d_x = round_to(np.concatenate(wide), problem.x.dtype)
            require_bits(d_x, expected["d_x"], f"d_x, {label}")
            require_bits(np.concatenate(by_slot), expected["d_routing.weights"], f"d_weights, {label}")


@on_engines
@pytest.mark.parametrize("load", LOADS)
def test_every_bit_is_that_of_one_device(target: Target, load: str) -> None:
    for ranks, dtype in itertools.product((1, 2, 3, 4) if load == "random" else (2, 4), ("float32", "bfloat16")):
        random = np.random.default_rng(ranks)
        tokens, top_k = tuple(random.integers(0, 7, ranks).tolist()), int(random.integers(1, 4))
        placement = placement_of(("linear", "round_robin", "balanced")[ranks % 3], 5, ranks, 3)
        label = f"{load}, {ranks} ranks, {dtype}, {tokens} tokens, top {top_k}"
        problem = draw_problem(7 * ranks, placement, tokens, top_k, load, dtype, PLAIN, sizes=(D, 8))
        Exchange(problem, target, None, label).run()


@on_engines
@pytest.mark.parametrize("tokens", [(1,), (0, 1), (1, 0, 0), (0, 0)])
def test_a_token_or_none(target: Target, tokens: tuple[int, ...]) -> None:
    """K = 1 too."""
    for top_k in (1, 4):
        problem = draw_problem(
            1, Placement.linear(4, len(tokens)), tokens, top_k, "random", "bfloat16", PLAIN, sizes=(8, 8)
        )
        Exchange(problem, target, None, f"{tokens} tokens, top {top_k}").run()


@on_engines
def test_replicas(target: Target) -> None:
    placement = placement_of("replicas", 5, 3, 1)
    problem = draw_problem(3, placement, (4, 1, 6), 2, "hot_expert", "float16", PLAIN, sizes=(D, 8))
    Exchange(problem, target, None, "replicas").run()


@on_engines
@pytest.mark.parametrize("load", ["random", "hot_rank"])
def test_rows_beyond_a_bound_are_counted_and_stay_away(target: Target, load: str) -> None:
    placement = Placement.linear(5, 3)
    problem = draw_problem(5, placement, (6, 2, 5), 2, load, "bfloat16", PLAIN, sizes=(D, 8))
    most = max(len(own) for own in Exchange(problem, Target("reference"), None, "").routes.sources)
    for receive in (0, 1, most - 1, most):
        exchange = Exchange(problem, target, receive, f"{load}, at most {receive} of {most} rows")
        assert (exchange.forward.overflow[0] > 0) == (receive < most)
        exchange.run()


@on_engines
@pytest.mark.parametrize("programs", [1, 3, 1000])
def test_programs_change_nothing(target: Target, programs: int) -> None:
    """Rows of several tiles, the last one cut, and K = 9, more than are looked up together."""
    placement = Placement.linear(12, 2)
    problem = draw_problem(2, placement, (37, 5), 9, "random", "bfloat16", PLAIN, sizes=(1032, 8))
    Exchange(problem, target, None, f"{programs} programs").run(programs)


def test_few_rows_are_spread_over_programs_of_one_warp() -> None:
    """Where a device has two programs at most for each multiprocessor, and nothing limits them."""
    few, most = (1, 256, 1), 2 * H200.num_sms
    # Of 3072 columns a row has three blocks.
    assert copy_tile(most - 1, 2048, 2, None, H200) == copy_tile(most // 3 - 1, 3072, 2, None, H200) == few
    for tile in (copy_tile(most, 2048, 2, None, H200), copy_tile(most // 3, 3072, 2, None, H200)):
        assert tile[2] == 4 and tile[0] * tile[1] == 4 * 32 * 64 // 2
    assert copy_tile(1, 2048, 2, 24, H200)[2] == 16


@on_engines
def test_tokens_go_to_an_owner_once(target: Target) -> None:
    """Rows of tokens: places of `first_owners`, among W."""
    placement, random = Placement.linear(6, 3), np.random.default_rng(0)
    problem = draw_problem(4, placement, (5, 0, 9), 4, "random", "float32", PLAIN, sizes=(D, 8))
    routes = moe(problem.ranks(), problem.spec, placement, ExchangeSpec("peer", "tokens")).routes
    peers = Peers(3, target)
    places = peers.places([first_owners(home.places, placement.per_rank) for home in routes.homes], 3, 20)
    values = [draw_array(random, (tokens, 8), "float16") for tokens in problem.tokens]
    peers.make("rows", (20, 8), "float16")
    for number, rows in enumerate(places):
        peers.dispatch(values[number], rows, 20)
    for rank in range(3):
        require_arrived(peers.of("rows", rank), routes.push(rank, values), f"rows of {rank}")


@on_engines
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(
    "format", [format_named("fp8_group"), format_named("fp8_group_pow2")], ids=lambda one: one.name
)
@pytest.mark.parametrize("width", [16, 128, 208, 2448])
def test_rows_are_quantised_as_they_go(target: Target, format: Format, width: int, dtype: str) -> None:
    """To the bits of `quantize_rows`: NaN, infinities and rows of zeros too, and the last group cut. K = 9 too."""
    random = np.random.default_rng(width)
    x = draw_array(random, (9, width), dtype)
    x[0, 3], x[1, 0], x[2] = np.nan, -np.inf, 0
    x[3:5] *= numpy_dtype(dtype).type(1e-4)
    top_k = 9 if width == 16 else 3
    ids = [random.integers(-1, 4, (len(x), top_k)).astype(np.int32), np.zeros((0, top_k), np.int32)]
    peers = Peers(2, target)
    places = peers.places(ids, 4, 30)[0]
    groups = -(-width // 128)
    peers.make("rows", (30, width), "float8_e4m3fn")
    peers.make("scales", (30, groups), "float32")
    peers.dispatch(x, places, 30, format=format, programs=2)
    codes, scales = quantize_rows(x, format=format)
    for rank, (name, values) in itertools.product(range(2), (("rows", codes), ("scales", scales))):
        expected = poisoned((30, values.shape[1]), values.dtype.name)
        token, k = np.nonzero(places.owners == rank)
        expected[places.rows[token, k]] = values[token]
        require_bits(peers.of(name, rank), expected, f"{name} of {rank}")


@on_engines
def test_addresses_are_of_rows_alone(target: Target) -> None:
    """Nothing behind the sources is read."""
    arrays = {"sources": np.array([[1, 4], [0, 0], [1, 2]], np.int32), "group_start": np.array([0, 2], np.int32)}
    arrays |= {"slots_at": np.array([1 << 40, 1 << 50])}
    specs = [spec_of(array) for array in arrays.values()]
    plan = plan_result_addresses(*specs, target, num_slots=5, width=24, dtype="bfloat16")
    assert run_plan(plan, arrays)["results_at"].tolist() == [(1 << 50) + 4 * 48, 1 << 40, 0]


@on_engines
def test_weights_may_hold_any_bits(target: Target) -> None:
    """NaN payloads, infinities and negative zeros arrive as they are."""
    peers, bits = Peers(1, target), np.array([[0x7F800001], [-1], [-0x80000000], [1], [0x7F800000]], np.int32)
    places = peers.places([np.zeros((5, 1), np.int32)], 1, 5)[0]
    peers.make("weights", (5, 1), "float32")
    peers.make("sources", (5, 2), "int32")
    peers.push_slots(bits.view(np.float32), places, 0, 5)
    require_bits(peers.of("weights", 0).view(np.int32), bits, "weights")
    require_bits(peers.combine_weights(places, 5).view(np.int32), bits, "weights that came back")


@on_engines
def test_places_outside_of_the_arrays_reach_nothing(target: Target) -> None:
    """Owners and rows that nobody has: guard zones stay untouched, and what is loaded is zero."""
    peers, random = Peers(2, target), np.random.default_rng(0)
    owners = np.array([[0, 2, -1], [1, -7, 2**31 - 1]], np.int32)
    rows = np.array([[5, 0, 0], [-2, 0, 1]], np.int32)
    places = Places(owners, rows, np.zeros((1, 1), np.int32), np.zeros(1, np.int32))
    for name, shape, dtype in (
        ("rows", (5, 8), "bfloat16"),
        ("weights", (5, 1), "float32"),
        ("sources", (5, 2), "int32"),
    ):
        peers.make(name, shape, dtype)
    peers.make("results", (5, 8), "bfloat16")
    peers.make("slots", (4, 8), "bfloat16")
    peers.dispatch(draw_array(random, (2, 8), "bfloat16"), places, 5)
    peers.push_slots(np.ones((2, 3), np.float32), places, 1, 5)
    for rank in range(2):
        for name in ("rows", "weights", "sources"):
            require_arrived(peers.of(name, rank), peers.of(name, rank)[:0], name)
        peers.of("sources", rank)[...] = [[0, 4], [2, 0], [-1, 1], [0, -1], [1, 2**31 - 1]]
        peers.combine_push(rank, np.array([0, 3, 2**31 - 1], np.int32), 4)
        require_arrived(peers.of("slots", rank), peers.of("slots", rank)[:0], "slots")
    assert not peers.combine_weights(places, 5).any()
