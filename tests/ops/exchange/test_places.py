"""Where rows of slots go, against the index arithmetic of exchanges, for hard loads and every bound."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_core import InvalidInput, Unsupported
from moe_core.base.arrays import ArraySpec
from moe_core.base.target import Target
from moe_core.ops.exchange.operands import Places
from moe_core.ops.exchange.push import plan_push_slots
from moe_core.ops.exchange.tables import MAX_COUNTS, plan_peer_places
from moe_core.plan.steps import Constant, KernelLaunch
from tests.support import harness
from tests.support.harness import H200, run_plan, spec_of
from tests.support.parallel.peers import ENGINES, Peers
from tests.support.parallel.twin.arithmetic import destinations, first_owners, owners_of, run_starts, sends

on_engines = pytest.mark.parametrize("target", ENGINES, ids=lambda target: target.kind)

pytestmark = pytest.mark.usefixtures("visible_poison")


def check(ids: list[np.ndarray], num_places: int, receive: int, target: Target) -> None:
    num_ranks = len(ids)
    found = Peers(num_ranks, target).places(ids, num_places, receive)
    sent = [sends(own, num_places) for own in ids]
    counts = np.stack([layout.group_sizes for layout in sent])
    starts, per_rank = run_starts(counts, "expert"), num_places // num_ranks
    expected = [destinations(*one, receive) for one in zip(sent, ids, starts, strict=True)]
    missing = sum(int(one.overflow[0]) for one in expected)
    for rank, (own, wanted) in enumerate(zip(found, expected, strict=True)):
        np.testing.assert_array_equal(own.rows, wanted.row, strict=True)
        np.testing.assert_array_equal(own.owners, np.where(wanted.row < 0, -1, owners_of(ids[rank], per_rank)))
        mine = counts[:, rank * per_rank : (rank + 1) * per_rank].sum(axis=0)
        np.testing.assert_array_equal(own.received, mine[None].astype(np.int32), strict=True)
        assert own.overflow.tolist() == [missing]


@on_engines
@given(st.data())
def test_any_routing(target: Target, data: st.DataObject) -> None:
    num_ranks, per_rank, top_k = (
        data.draw(st.integers(1, 4)),
        data.draw(st.integers(1, 5)),
        data.draw(st.integers(1, 4)),
    )
    num_places = num_ranks * per_rank
    random = np.random.default_rng(data.draw(st.integers(0, 2**31)))
    ids = []
    for _ in range(num_ranks):
        shape = data.draw(st.sampled_from((0, 1, 2, 30))), top_k
        choices = np.arange(-1, num_places) if data.draw(st.booleans()) else random.integers(-1, num_places, 1)
        ids.append(random.choice(choices, shape).astype(np.int32))
    if data.draw(st.booleans()):
        ids, num_places = [first_owners(own, per_rank) for own in ids], num_ranks
    most = max(
        sum(int((owners_of(own, num_places // num_ranks) == rank).sum()) for own in ids) for rank in range(num_ranks)
    )
    for receive in {0, 1, max(0, most - 1), most, most + 40}:
        check(ids, num_places, receive, target)


def test_worked_example() -> None:
    """Of the twin's arithmetic: W = 2, L = 2, K = 2, and rank 1 sends nothing."""
    ids = [np.array([[2, 3], [0, 2]], np.int32), np.zeros((0, 2), np.int32)]
    own, other = Peers(2, ENGINES[0]).places(ids, 4, 2)
    assert own.owners.tolist() == [[1, -1], [0, 1]]
    assert own.rows.tolist() == [[0, -1], [0, 1]]
    assert (own.received.tolist(), other.received.tolist()) == ([[1, 0]], [[2, 1]])
    assert own.overflow.tolist() == other.overflow.tolist() == [1]


@on_engines
@pytest.mark.parametrize("wrong", [2**31 - 1, -1, -(2**31)])
def test_counts_that_lie_stay_inside(target: Target, wrong: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows stay below the bound, overflow is no negative number, and counts below 0 are 0."""
    # Memory behind the starts of places reads as a start.
    monkeypatch.setattr(harness, "POISON", 0)
    ids = np.array([[0, 1], [2, 3], [9, -7], [4, 4]], np.int32)
    layout = sends(ids, 4)
    counts = np.array([[1, wrong, 1, 1], [wrong, 3, wrong, wrong]], np.int32)
    # Ids of no place have rows, too.
    rows = np.where(layout.row_of_slot < 0, 9, layout.row_of_slot)
    arrays = {"ids": ids, "group_start": layout.group_start, "row_of_slot": rows, "counts": counts}
    for rank, receive in ((0, 3), (1, 50), (1, 0)):
        specs = [spec_of(array) for array in arrays.values()]
        found = run_plan(plan_peer_places(*specs, target, rank=rank, receive=receive), arrays)
        plan = plan_peer_places(*specs, Target("reference"), rank=rank, receive=receive)
        for name, wanted in run_plan(plan, arrays | {"counts": np.maximum(counts, 0)}).items():
            np.testing.assert_array_equal(found[name], wanted, err_msg=name)
        assert found["rows"].max() < max(receive, 1) and found["rows"].min() >= -1
        assert (found["owners"][2:] == -1).all() and found["owners"].max() < 2
        assert found["overflow"][0] >= 0 and found["received"].min() >= 0


@on_engines
def test_counts_behind_a_header(target: Target) -> None:
    """Rows of counts may be strided."""
    ids = np.array([[1, 0]], np.int32)
    layout, header = sends(ids, 2), 8
    whole = np.full((2, header + 4), -99, np.int32)
    whole[:, header : header + 2] = [[1, 1], [2, 5]]
    counts = whole[:, header : header + 2]
    specs = [spec_of(array) for array in (ids, layout.group_start, layout.row_of_slot)]
    plan = plan_peer_places(*specs, ArraySpec((2, 2), "int32", (header + 4, 1)), target, rank=1, receive=9)
    arrays = {"ids": ids, "group_start": layout.group_start, "row_of_slot": layout.row_of_slot, "counts": counts}
    assert run_plan(plan, arrays)["rows"].tolist() == [[1, 1]]


def test_tokens_compile_nothing() -> None:
    found, counts = set(), ArraySpec((4, 128), "int32")
    for tokens, receive, rank in ((64, 100, 0), (4096, 9999, 3)):
        ids = ArraySpec((tokens, 8), "int32")
        arrays = ids, ArraySpec((129,), "int32"), ArraySpec((ids.size,), "int32"), counts
        for launch in plan_peer_places(*arrays, H200, rank=rank, receive=receive).steps:
            assert isinstance(launch, KernelLaunch)
            found.add((launch.kernel.name, tuple(one for one in launch.arguments if isinstance(one[1], Constant))))
    assert len(found) == 2


def test_wrong_arguments() -> None:
    ids, start, rows, counts = (ArraySpec(shape, "int32") for shape in ((5, 2), (9,), (10,), (2, 8)))
    given = {"ids": ids, "group_start": start, "row_of_slot": rows, "counts": counts, "rank": 0, "receive": 4}
    for changes, error, message in (
        ({"counts": ArraySpec((2, 7), "int32")}, InvalidInput, "counts must have as many places for every one"),
        ({"counts": ArraySpec((8,), "int32")}, InvalidInput, r"counts must be \[num_ranks, num_places\]"),
        ({"group_start": rows}, InvalidInput, r"layout.group_start must be \[9\], got \(10,\)"),
        ({"row_of_slot": start}, InvalidInput, r"layout.row_of_slot must be \[10\], got \(9,\)"),
        ({"rank": 2}, InvalidInput, "rank must be below 2, got 2"),
        ({"receive": -1}, InvalidInput, "receive must be an integer of at least 0"),
        ({"ids": ArraySpec((5, 0), "int32")}, InvalidInput, "top_k of places.rows must be an integer of at least 1"),
        ({"counts": ArraySpec((300, 90000), "int32"), "group_start": ArraySpec((90001,), "int32")}, Unsupported,
         f"at most {MAX_COUNTS}, got 300 x 300"),
    ):  # fmt: skip
        with pytest.raises(error, match=message):
            plan_peer_places(**(given | changes), target=H200)
    at: dict[str, Any] = {"rank": 0, "num_rows": 0, "weights_at": ArraySpec((2,), "int64")}
    slots, weights = ArraySpec((5, 2), "int32"), ArraySpec((5, 2), "float32")
    for bad, message in (
        ({"rank": 2}, "rank must be below 2"),
        ({"rank": -1}, "rank must be"),
        ({"num_rows": -1}, "num_rows must be"),
        ({"weights_at": None}, "weights_at or sources_at must be given, got neither"),
        ({"sources_at": ArraySpec((3,), "int64")}, "as many ranks"),
    ):
        with pytest.raises(InvalidInput, match=message):
            plan_push_slots(weights, Places(slots, slots), H200, **at | bad)
    assert plan_push_slots(weights, Places(slots, slots), H200, **at | {"rank": 1}).steps
