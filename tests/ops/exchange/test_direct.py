"""Tokens at places that follow from their numbers, with all that owners need, and the sums at home."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_core.base.arrays import ArraySpec
from moe_core.base.target import Target
from moe_core.errors import InvalidInput, Unsupported
from moe_core.ops.exchange import direct
from moe_core.ops.exchange.direct import TOLD
from moe_core.ops.exchange.operands import Checks, HomeTokens, TokenSizes, TokenTables, in_records
from moe_core.ops.reduction.reduce import plan_reduce
from moe_core.parallel import Placement
from moe_core.parallel.exchange import physical_ids
from moe_core.specs.routing import LayoutSpec
from tests.support.harness import run_plan, spec_of
from tests.support.parallel.peers import ENGINES, Peers
from tests.support.parallel.placements import placement_of
from tests.support.strategies import draw_array, seeds

on_engines = pytest.mark.parametrize("target", ENGINES, ids=lambda target: target.kind)
D = 24
plan_push_tokens_once = in_records(
    direct.plan_push_tokens_once, operands=HomeTokens, tables=TokenTables, sizes=TokenSizes
)
plan_sum_results = in_records(direct.plan_sum_results, checks=Checks)


class Home(dict[str, Any]):
    """Arrays of a rank's tokens."""

    def __init__(self, random: Any, tokens: int, top_k: int, experts: int, dtype: str, *, masked: bool) -> None:
        x = draw_array(random, (tokens, D), dtype)
        ids = random.integers(-2, experts + 1, (tokens, top_k)).astype(np.int32)
        weights = random.random((tokens, top_k), np.float32)
        mask = random.random(tokens) < 0.7 if masked else None
        super().__init__(x=x, ids=ids, weights=weights, token_mask=mask)


def pushed(
    target: Target,
    homes: list[Home],
    placement: Placement,
    most: int,
    way: str,
    turn: int,
    programs: int | None,
    *,
    visits: bool,
) -> tuple[Peers, list[dict[str, np.ndarray]], list[np.ndarray]]:
    """The memory behind the stores of all ranks, what each call returned, and the places of all slots."""
    ranks, per_rank, top_k = placement.num_ranks, placement.per_rank, homes[0]["ids"].shape[1]
    peers = Peers(ranks, target)
    peers.make("rows", (ranks * most, D), homes[0]["x"].dtype.name)
    peers.make("ids", (ranks * most, top_k), "int32")
    peers.make("weights", (ranks * most, top_k), "float32")
    peers.make("headers", (2 * ranks + 1, TOLD), "int32")
    for rank in range(ranks):
        peers.of("headers", rank)[-1, 0] = turn
        # Not what means none: it has to be stored.
        peers.of("ids", rank)[...] = 7
    names = ("rows", "ids", "weights", "headers")
    tables = {f"{name}_at": peers.at(name) for name in names if way != "apart" or name != "rows"}
    found, places, first = [], [], 0
    for rank, home in enumerate(homes):
        of_slots = physical_ids(home["ids"], placement, first_token=first, token_mask=home["token_mask"]).places
        first += len(home["x"])
        by_expert = placement.tables.places[placement.tables.start[:-1]]
        beside = {"places_of_experts": by_expert if way == "table" else None}
        beside["given"] = of_slots if way == "given" else None
        arrays = {**home, **beside, "header": np.arange(8, dtype=np.int32) + rank // 2}
        sizes = {"rank": rank, "per_rank": per_rank, "num_experts": placement.num_experts, "most": most}
        arrays |= tables | ({"x": None} if way == "apart" else {})
        specs = {name: spec_of(array) for name, array in arrays.items()}
        # Tiles on an interpreter otherwise hold all tokens.
        small = mock.patch.object(direct, "copy_tile", return_value=(8, 16, 4))
        with small if programs == 3 else contextlib.nullcontext():
            plan = plan_push_tokens_once(**specs, target=target, **sizes, programs=programs, visits=visits)
        found.append(peers.run(plan, arrays))
        places.append(of_slots)
    return peers, found, places


@on_engines
@given(seed=seeds(), way=st.sampled_from(("in_order", "table", "given", "apart")))
def test_owners_know_all(target: Target, seed: int, way: str) -> None:
    """Rows where a token visits, ids of what is here, weights, headers; nothing else is touched."""
    random = np.random.default_rng(seed)
    ranks, top_k, experts = (int(random.integers(1, most)) for most in (5, 4, 9))
    kind = {"in_order": "linear", "table": "round_robin", "given": "balanced", "apart": "linear"}[way]
    if way in ("in_order", "apart"):
        experts = -(-experts // ranks) * ranks
    placement = placement_of(kind, experts, ranks, seed % 99)
    tokens, dtype = random.integers(0, 40, ranks), ("float32", "bfloat16")[seed % 2]
    most = int(tokens.max()) + seed % 3
    masked, programs = seed % 5 < 3, (None, 1, 3)[seed % 3]
    homes = [Home(random, int(count), top_k, experts, dtype, masked=masked) for count in tokens]
    turn, visits = (0, 7, -1)[seed % 3], seed % 7 < 4
    peers, found, places = pushed(target, homes, placement, most, way, turn, programs, visits=visits)
    for owner in range(ranks):
        rows, ids, weights, told = (peers.of(name, owner) for name in ("rows", "ids", "weights", "headers"))
        assert told[-1, 0] == turn + 1
        now, other = np.split(told[:-1], 2)[:: 1 - 2 * (turn & 1)]
        assert (other == -1).all()
        nothing = np.full_like(rows.view(np.uint8), 0xFF)
        for rank, (home, own) in enumerate(zip(homes, places, strict=True)):
            here, count = (own >= 0) & (own // placement.per_rank == owner), len(own)
            mine = slice(rank * most, rank * most + count)
            np.testing.assert_array_equal(ids[mine], np.where(here, own % placement.per_rank, -1))
            np.testing.assert_array_equal(weights[mine], home["weights"])
            row = np.arange(mine.start, mine.stop)
            if visits:
                np.testing.assert_array_equal(found[rank]["owners"][:, owner], np.where(here.any(axis=1), owner, -1))
                np.testing.assert_array_equal(found[rank]["rows"][:, owner], np.where(here.any(axis=1), row, -1))
            if way != "apart":
                nothing[mine][here.any(axis=1)] = home["x"][here.any(axis=1)].view(np.uint8)
            assert (ids[rank * most + count : (rank + 1) * most] == -1).all()
            assert now[rank].tolist() == [*(np.arange(8) + rank // 2), count, 0, 0, 0]
        np.testing.assert_array_equal(rows.view(np.uint8), nothing)
    for home, own, call in zip(homes, places, found, strict=True):
        known = home["ids"] if home["token_mask"] is None else np.where(home["token_mask"][:, None], home["ids"], -1)
        valid = known[(known >= 0) & (known < experts)]
        np.testing.assert_array_equal(call["places"], own)
        np.testing.assert_array_equal(call["tokens_per_expert"], np.bincount(valid, minlength=experts))
        assert call["invalid_ids"].tolist() == [((known < -1) | (known >= experts)).sum()]
        assert call["overflow"].tolist() == [0]


@on_engines
@pytest.mark.parametrize("tokens", [0, 1, 4, 7])
def test_sums_are_those_of_reduce(target: Target, tokens: int) -> None:
    random = np.random.default_rng(tokens)
    y = draw_array(random, (3 * 7, D), "bfloat16")
    order = np.where(random.random((tokens, 3)) < 0.3, -1, 5).astype(np.int32)
    shared, gate = draw_array(random, (tokens, D), "float32"), draw_array(random, (tokens, 1), "float32")
    y[: order.size][order.reshape(-1) < 0] = np.nan
    headers = np.tile(np.arange(TOLD, dtype=np.int32), (7, 1))
    headers[:, -4:] = random.integers(0, 9, (7, 4))
    now = 3 * (tokens % 2)
    headers[3 - now : 6 - now], headers[-1, 0] = random.integers(0, 9, (3, TOLD)), 1 + tokens % 2
    for extra in ({}, {"shared": shared}, {"shared": shared, "shared_gate": gate}):
        for out_dtype in ("bfloat16", "float32"):
            for disagreeing in (None, *range(3)):
                told = headers.copy()
                if disagreeing is not None:
                    told[now + disagreeing, tokens] += 1
                wrong = {"headers": told}
                if out_dtype == "float32" and disagreeing in (None, 0):
                    wrong = {"agree": np.array([disagreeing is None])}
                arrays = {"y": y, "row_of_slot": order, **wrong, **extra}
                specs = {name: spec_of(array) for name, array in arrays.items()}
                plan = plan_sum_results(**specs, target=target, out_dtype=out_dtype)
                alone = {"y": y[: order.size], "row_of_slot": order.reshape(-1), **extra}
                specs = {name: spec_of(array) for name, array in alone.items()}
                layout = LayoutSpec(tokens, 3, 1)
                alone_plan = plan_reduce(**specs, layout=layout, target=target, out_dtype=out_dtype)
                expected = run_plan(alone_plan, alone)["out"].copy()
                if disagreeing is not None:
                    expected[...] = np.nan
                found = run_plan(plan, arrays)["out"]
                np.testing.assert_array_equal(found.astype(np.float32), expected.astype(np.float32))


@on_engines
def test_tokens_that_lost_a_slot_are_not_numbers(target: Target) -> None:
    random = np.random.default_rng(0)
    y, wanted = draw_array(random, (4 * 3, D), "float32"), random.integers(-1, 4, (4, 3)).astype(np.int32)
    wanted[0], wanted[3] = -1, 2
    order = np.where(wanted < 0, -1, wanted)
    order[1, np.argmax(wanted[1] >= 0)] = -1
    found = []
    for beside in ({}, {"wanted": wanted}):
        arrays = {"y": y, "row_of_slot": order, **beside}
        specs = {name: spec_of(array) for name, array in arrays.items()}
        found.append(run_plan(plan_sum_results(**specs, target=target), arrays)["out"].copy())
    found[0][1] = np.nan
    np.testing.assert_array_equal(found[0], found[1])


@on_engines
def test_places_beyond_the_ranks_are_none(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """Places of the caller: the first behind the last rank, far ones and negative ones."""
    random, placement = np.random.default_rng(3), placement_of("linear", 6, 2, 1)
    homes = [Home(random, 4, 2, 6, "float32", masked=False) for _ in range(2)]
    places = np.array([[6, 0], [5, -1], [2**31 - 1, 3], [-7, 7]], np.int32)
    monkeypatch.setitem(globals(), "physical_ids", lambda *_, **options: SimpleNamespace(places=places))
    peers, found, _ = pushed(target, homes, placement, 4, "given", 0, None, visits=False)
    wanted = np.array([[-1, 0], [5, -1], [-1, 3], [-1, -1]], np.int32)
    for owner in range(2):
        np.testing.assert_array_equal(found[owner]["places"], wanted)
        here = np.where((wanted >= 0) & (wanted // 3 == owner), wanted % 3, -1)
        np.testing.assert_array_equal(peers.of("ids", owner), np.concatenate([here, here]))


def test_wrong_arguments() -> None:
    arrays = {"x": ArraySpec((4, D), "bfloat16"), "ids": ArraySpec((4, 2), "int32")}
    arrays |= {"weights": ArraySpec((4, 2), "float32"), "header": ArraySpec((8,), "int32")}
    arrays |= {f"{name}_at": ArraySpec((2,), "int64") for name in ("rows", "ids", "weights", "headers")}
    sizes: dict[str, Any] = {"rank": 1, "per_rank": 3, "num_experts": 5, "most": 4, "target": Target("reference")}
    assert plan_push_tokens_once(**arrays, **sizes).outputs[0].spec == arrays["ids"]
    for changed, error, message in (
        ({"most": 3}, InvalidInput, "most must be"),
        ({"most": 2**29}, Unsupported, "slots of all ranks must stay below"),
        ({"rank": 2}, InvalidInput, "rank must be"),
        ({"x": None}, InvalidInput, "rows_at must be given with x alone"),
        ({"x": ArraySpec((4, 12), "bfloat16")}, InvalidInput, "rows of x must be a multiple of 16 bytes"),
        ({"weights": ArraySpec((4, 3), "float32")}, InvalidInput, r"weights must be \[4, 2\], got"),
        ({"ids": ArraySpec((4, 0), "int32")}, InvalidInput, "top_k of ids must be"),
        ({"ids_at": ArraySpec((3,), "int64")}, InvalidInput, r"_at must be \[3\], got"),
        ({"given": arrays["ids"], "places_of_experts": ArraySpec((5,), "int32")}, InvalidInput, "got both"),
        ({"places_of_experts": ArraySpec((4,), "int32")}, InvalidInput, r"places_of_experts must be \[5\], got"),
        ({"token_mask": ArraySpec((4,), "int32")}, InvalidInput, "token_mask must be bool"),
        ({"programs": 0}, InvalidInput, "programs must be"),
        ({"visits": 1}, InvalidInput, "visits must be"),
    ):
        with pytest.raises(error, match=message):
            plan_push_tokens_once(**(arrays | sizes | changed))
    y, order, headers = ArraySpec((8, D), "bfloat16"), ArraySpec((4, 2), "int32"), ArraySpec((5, TOLD), "int32")
    options: dict[str, Any] = {"target": Target("reference")}
    assert plan_sum_results(y=y, row_of_slot=order, headers=headers, **options).outputs[0].spec == ArraySpec(
        (4, D), "bfloat16"
    )
    for bad, message in (
        ({"y": ArraySpec((7, D), "bfloat16")}, "y must have a row for each of the 8 slots, got 7"),
        ({"headers": ArraySpec((5, 8), "int32")}, r"headers must be \["),
        ({"headers": ArraySpec((4, TOLD), "int32")}, "headers must have two rows for each rank and one more"),
        ({"agree": ArraySpec((2,), "bool")}, "agree must be"),
        ({"wanted": ArraySpec((4, 3), "int32")}, "wanted must be"),
    ):
        with pytest.raises(InvalidInput, match=message):
            plan_sum_results(**({"y": y, "row_of_slot": order} | bad), **options)
    with pytest.raises(InvalidInput, match="shared_gate must be None without shared"):
        plan_sum_results(y=y, row_of_slot=order, shared_gate=ArraySpec((4, 1), "float32"), **options)
