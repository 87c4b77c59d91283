"""The tables of a rank that has tokens, against the index arithmetic of `moe_core.parallel.exchange`."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_core import InvalidInput, Unsupported
from moe_core.base.arrays import ArraySpec
from moe_core.base.target import Target
from moe_core.ops.exchange import tables
from moe_core.ops.exchange.operands import SendOperands, in_records
from moe_core.parallel import Placement
from moe_core.plan.steps import Constant, KernelLaunch
from moe_core.specs.exchange import TableSpec
from tests.support.harness import H200, engine_target, run_plan, spec_of
from tests.support.parallel.placements import placement_of
from tests.support.parallel.tables import WAYS, Sends, draw_sends, expected_tables, table_spec
from tests.support.strategies import seeds

ENGINES = (engine_target(), Target("reference"))
plan_send_tables = in_records(tables.plan_send_tables, operands=SendOperands)
on_engines = pytest.mark.parametrize("target", ENGINES, ids=lambda target: target.kind)
STORED = ("all_to_all", "tokens")
LOADS = ("random", "hot", "none", "invalid")

pytestmark = pytest.mark.usefixtures("visible_poison")


def check(sends: Sends, target: Target, label: str = "", expected: dict[str, np.ndarray] | None = None) -> None:
    arrays, _, spec, rank = sends
    specs = {name: spec_of(array) for name, array in arrays.items()}
    found = run_plan(plan_send_tables(**specs, spec=spec, rank=rank, target=target), arrays)
    expected = expected_tables(sends) if expected is None else expected
    assert set(found) == set(expected)
    if target.kind == "reference" and "table" in found:
        # The twin leaves nothing open.
        assert not found["table"][len(expected["table"]) :].any()
    for name, wanted in expected.items():
        got = found[name][: len(wanted)] if name == "table" else found[name]
        np.testing.assert_array_equal(got, wanted, err_msg=f"{name}, {spec}, {label}")


@on_engines
@given(seed=seeds(), way=st.sampled_from(WAYS), load=st.sampled_from(LOADS), masked=st.booleans())
def test_drawn_routings(target: Target, seed: int, way: tuple[str, str], load: str, masked: bool) -> None:
    """Any sizes, with bounds that are exceeded or not; replicas."""
    random = np.random.default_rng(seed)
    experts, ranks, top_k = (int(random.integers(1, most)) for most in (12, 5, 8))
    tokens = int(random.choice([0, 1, 3, 17, 150]))
    placement = placement_of(("linear", "round_robin", "balanced", "replicas")[seed % 4], experts, ranks, seed % 99)
    receive = int(random.integers(0, 3 * tokens + 1)) if way[0] == "padded" and seed % 3 else None
    spec = table_spec(way, placement, tokens, top_k, receive)
    spec = dataclasses.replace(spec, own_first=way == STORED and seed % 3 > 0)
    sends = draw_sends(seed, placement, spec, tokens, top_k, load, masked=masked)
    if way[0] == "all_to_all" and seed % 2:
        limits = random.integers(0, tokens + 2, (2, ranks)).astype(np.int32)
        sends.arrays["limits"] = limits
    check(sends, target, f"{seed}, {load}, {placement}")


@on_engines
@pytest.mark.parametrize("way", WAYS, ids="-".join)
@pytest.mark.parametrize("tokens, top_k", [(400, 1), (70, 6), (130, 5)])
def test_several_blocks(target: Target, way: tuple[str, str], tokens: int, top_k: int) -> None:
    """More tokens than a program takes, and numbers of slots that fill no tile."""
    for seed, load in enumerate(("random", "hot", "random", "random")[: 4 if way == STORED else 2]):
        placement = placement_of("round_robin", 9, 4)
        spec = table_spec(way, placement, tokens, top_k, 2 * tokens if way[0] == "padded" else None)
        spec = dataclasses.replace(spec, own_first=seed > 1)
        sends = draw_sends(seed, placement, spec, tokens, top_k, load, masked=True)
        if way[0] == "all_to_all" and load == "hot":
            sends.arrays["limits"] = np.array([[0, 7, tokens, 3], [5, 100, 0, 7]], np.int32)
        check(sends, target, load)


def test_worked_example() -> None:
    """That of `moe_core.parallel.exchange`: rank 0, places [[2, 3], [0, 2]]."""
    placement = Placement.linear(4, 2)
    arrays = draw_sends(0, placement, TableSpec("all_to_all", "tokens", 2, 2, 4), 2, 2, "random").arrays
    arrays |= {"ids": np.array([[2, 3], [0, 2]], np.int32), "weights": np.ones((2, 2), np.float32)}
    found = {}
    for rows in ("slots", "tokens"):
        spec = TableSpec("all_to_all", rows, 2, 2, 4)
        specs = {name: spec_of(array) for name, array in arrays.items()}
        plan = plan_send_tables(**specs, spec=spec, rank=0, target=engine_target())
        found[rows] = {name: array.ravel().tolist() for name, array in run_plan(plan, arrays).items()}
    behind = {rows: [one["message"][begin : begin + 2] for begin in (8, 18)] for rows, one in found.items()}
    assert behind == {"slots": [[1, 0], [2, 1]], "tokens": [[1, 1], [2, 3]]}
    assert found["slots"]["slot_of_row"] == [2, 0, 3, 1] and found["tokens"]["slot_of_row"] == [2, 0, 3, -1]
    assert found["slots"]["row_of_slot"] == [1, 3, 0, 2] and found["tokens"]["row_of_slot"] == [1, 2, 0, 3]
    one = np.ones(1, np.float32).view(np.int32).item()
    assert found["tokens"]["table"][:12] == [0, 2, one, one, 2, 3, one, one, 0, 2, one, one]
    assert found["slots"]["table"] == [one] * 4 and found["slots"]["counted"] == [1, 3]


@pytest.mark.parametrize("way", WAYS, ids="-".join)
def test_tokens_and_ranks_compile_nothing(way: tuple[str, str]) -> None:
    placement, found = Placement.linear(32, 4), set()
    for rank, tokens in enumerate((64, 500, 8192)):
        spec = table_spec(way, placement, tokens, 4, 2 * tokens if way[0] == "padded" else None)
        sends = draw_sends(0, placement, spec, tokens, 4, "random")
        specs = {name: spec_of(array) for name, array in sends.arrays.items()}
        launches = plan_send_tables(**specs, spec=spec, rank=rank, target=H200).steps
        for number, launch in enumerate(launches):
            assert isinstance(launch, KernelLaunch)
            constants = tuple((name, value) for name, value in launch.arguments if isinstance(value, Constant))
            found.add((number, constants, launch.num_warps))
    assert len(found) == 2


@pytest.mark.parametrize("fault", ["ids", "weights", "places_of_experts", "tokens", "token_mask"])
def test_planted_faults_are_found(fault: str) -> None:
    placement = placement_of("replicas", 6, 3, 0)
    sends = draw_sends(2, placement, table_spec(("padded", "tokens"), placement, 9, 3), 9, 3, "random", masked=True)
    sends = sends._replace(rank=1)
    check(sends, engine_target())
    expected = expected_tables(sends)
    wrong = sends.arrays[fault]
    sends.arrays[fault] = wrong + 1 if fault == "tokens" else np.roll(wrong, 1, axis=0)
    with pytest.raises(AssertionError):
        check(sends, engine_target(), fault, expected)


def test_wrong_arguments() -> None:
    placement = Placement.linear(4, 2)
    spec = TableSpec("all_to_all", "tokens", 2, 2, 4)
    arrays = {name: spec_of(one) for name, one in draw_sends(0, placement, spec, 3, 2, "random").arrays.items()}
    for name, wrong, match in (
        ("weights", ArraySpec((3, 3), "float32"), r"weights must be"),
        ("start", ArraySpec((4,), "int32"), r"start must be"),
        ("header", ArraySpec((7,), "int32"), r"header must be"),
        ("token_mask", ArraySpec((2,), "bool"), r"token_mask must be"),
        ("limits", ArraySpec((2,), "int32"), r"limits must be"),
    ):
        with pytest.raises(InvalidInput, match=match):
            plan_send_tables(**arrays | {name: wrong}, spec=spec, rank=0, target=H200)
    with pytest.raises(InvalidInput, match="rank must be"):
        plan_send_tables(**arrays, spec=spec, rank=2, target=H200)
    with pytest.raises(InvalidInput, match="block must be given with modes 'padded' and 'all_gather' alone"):
        dataclasses.replace(spec, block=3)
    with pytest.raises(InvalidInput, match="rows must be 'tokens' with mode='all_gather'"):
        TableSpec("all_gather", "slots", 2, 2, 4, 3, 3)
    with pytest.raises(InvalidInput, match="own_first must be False"):
        TableSpec("all_to_all", "slots", 2, 2, 4, own_first=True)
    blocks = TableSpec("padded", "tokens", 2, 2, 4, 3, 3)
    with pytest.raises(Unsupported, match="limits are for mode 'all_to_all'"):
        plan_send_tables(**arrays, limits=ArraySpec((2, 2), "int32"), spec=blocks, rank=0, target=H200)
    many = {"ids": ArraySpec((3, 200), "int32"), "weights": ArraySpec((3, 200), "float32")}
    with pytest.raises(Unsupported, match="at most 128, got top_k = 200"):
        plan_send_tables(**arrays | many, spec=spec, rank=0, target=H200)
