"""The tables of a rank that has experts, of what every rank sends as `plan_send_tables` has it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_core import InvalidInput
from moe_core.base.arrays import ArraySpec
from moe_core.base.target import Target
from moe_core.ops.exchange import tables
from moe_core.ops.exchange.operands import ReceiveOperands, in_records
from moe_core.parallel import Placement
from moe_core.plan.steps import Constant, KernelLaunch
from moe_core.specs.exchange import TableSpec
from tests.support.harness import H200, engine_target, run_plan, spec_of
from tests.support.parallel.placements import placement_of
from tests.support.parallel.tables import HEADER, WAYS, draw_sends, expected_tables, table_spec
from tests.support.strategies import seeds

ENGINES = (engine_target(), Target("reference"))
plan_receive_tables = in_records(tables.plan_receive_tables, operands=ReceiveOperands)
on_engines = pytest.mark.parametrize("target", ENGINES, ids=lambda target: target.kind)
STATIC = tuple(way for way in WAYS if way[0] != "all_to_all")

pytestmark = pytest.mark.usefixtures("visible_poison")


def messages(
    seed: int, placement: Placement, spec: TableSpec, num_tokens: int, top_k: int, load: str, owner: int
) -> tuple[np.ndarray, int]:
    """What comes to an owner of every rank, as `receive_tables` takes it, and how many slots for its experts."""
    came = []
    for rank in range(placement.num_ranks):
        sends = draw_sends(seed + rank, placement, spec, num_tokens, top_k, load)
        found = expected_tables(sends)
        if spec.mode == "all_gather":
            came.append(found["message"])
        elif spec.mode == "padded":
            came.append(found["message"][owner])
        else:
            sizes = found["message"][:, len(HEADER)]
            first = sizes[:owner].sum()
            came.append(found["table"][first : first + sizes[owner]])
    if spec.mode == "all_to_all":
        table = np.concatenate(came).astype(np.int32)
        return table, int(_here(table[:, :top_k], spec, owner).sum())
    rows = (len(came) * spec.block_rows) if spec.by_slot else len(came) * spec.back_rows
    return np.stack(came).astype(np.int32), rows


def _here(places: np.ndarray, spec: TableSpec, owner: int) -> np.ndarray:
    return (places >= 0) & (places // spec.per_rank == owner)


def expected(
    came: np.ndarray, spec: TableSpec, owner: int, top_k: int, num_rows: int, lost: np.ndarray | None
) -> dict[str, np.ndarray]:
    """Slot by slot."""
    width = 1 if spec.by_slot else top_k
    counted = spec.mode == "all_to_all"
    ids, weights = np.full((num_rows, 1), -1, np.int32), np.zeros((num_rows, 1), np.float32)
    slot_of_row = np.full(num_rows, -1, np.int32)
    sources = came[None] if counted else came[:, len(HEADER) :].reshape(len(came), -1, 2 * width)
    slot = 0
    for source, rows in enumerate(sources):
        found = source * (num_rows // len(sources))
        end = found + (num_rows if counted else spec.block_rows if spec.by_slot else spec.back or 0)
        for row in rows:
            for k in range(width):
                here = bool(_here(row[k], spec, owner))
                if (here or spec.by_slot) and found < end:
                    if here:
                        ids[found] = row[k] - owner * spec.per_rank
                        weights[found] = row[width + k : width + k + 1].view(np.float32)
                        slot_of_row[found] = slot
                    found += 1
                slot += 1
    results = {"ids": ids, "weights": weights}
    if not spec.by_slot:
        results["slot_of_row"] = slot_of_row
    if not counted:
        agree = (came[:, : len(HEADER)] == HEADER).all()
        results["spoilt"] = (lost if lost is not None else np.zeros(0, bool)) | ~agree
    return results


def split_counts(came: np.ndarray, spec: TableSpec, owner: int, top_k: int) -> np.ndarray:
    """Rows and slots of each rank, as if ranks had sent about equally many rows."""
    here = _here(came[:, :top_k], spec, owner).sum(1)
    return np.array([(len(rows), rows.sum()) for rows in np.array_split(here, spec.num_ranks)])


def check_stored(
    stored: dict[str, np.ndarray], plain: dict[str, np.ndarray], counts: np.ndarray, owner: int, rows: int, top_k: int
) -> None:
    """Where each slot's result is stored: the owner's own behind all others."""
    slots, first = plain["slot_of_row"], counts[:owner, -1].sum()
    own = slots[first : first + counts[owner, -1]]
    placed = np.concatenate([slots[:first], slots[first + len(own) :][: (slots >= 0).sum() - first - len(own)], own])
    wanted = {"slot_of_row": np.full_like(slots, -1), "ids": np.full((rows, top_k), -1, np.int32)}
    wanted |= {"weights": np.zeros((rows, top_k), np.float32), "results_at": np.zeros(rows * top_k, np.int64)}
    wanted["slot_of_row"][: len(placed)] = placed
    present = slots >= 0
    for name in ("ids", "weights"):
        wanted[name].reshape(-1)[slots[present]] = plain[name][present, 0]
    first_address = stored["results_at"][placed[0]] if len(placed) else 0
    wanted["results_at"][placed] = first_address + 16 * np.arange(len(placed))
    assert set(stored) == set(wanted) and first_address % 16 == 0
    for name, array in wanted.items():
        np.testing.assert_array_equal(stored[name], array, err_msg=name, strict=True)


def check(
    came: np.ndarray,
    spec: TableSpec,
    owner: int,
    top_k: int,
    num_rows: int,
    lost: np.ndarray | None,
    target: Target,
    wanted: dict[str, np.ndarray] | None = None,
) -> None:
    arrays = {"came": came}
    if spec.mode != "all_to_all":
        arrays["header"] = HEADER
    else:
        # Rows lie apart, and behind the last one is anything.
        arrays["counts"] = np.full((spec.num_ranks, len(HEADER) + 2), 9, np.int32)
        arrays["counts"][:, -2:] = split_counts(came, spec, owner, top_k)
        arrays["came"] = np.full((len(came) + 3, came.shape[1] + 5), owner * spec.per_rank, np.int32)[
            :, : came.shape[1]
        ]
        arrays["came"][: len(came)] = came
    if lost is not None:
        arrays["lost"] = lost
    num_tokens = 0 if lost is None else len(lost)
    options = {"spec": spec, "rank": owner, "top_k": top_k, "num_rows": num_rows, "num_tokens": num_tokens}

    def run(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        specs = {name: spec_of(array) for name, array in arrays.items()}
        return run_plan(plan_receive_tables(**specs, **options, target=target), arrays)

    found = run(arrays)
    wanted = expected(came, spec, owner, top_k, num_rows, lost) if wanted is None else wanted
    assert set(found) == set(wanted)
    for name, array in wanted.items():
        np.testing.assert_array_equal(found[name], array, err_msg=f"{name}, {spec}", strict=True)
    if spec.mode == "all_to_all":
        stored = run(arrays | {"results": np.zeros((1, 8), np.float16)})
        check_stored(stored, wanted, arrays["counts"], owner, len(arrays["came"]), top_k)


@on_engines
@given(seed=seeds(), way=st.sampled_from(WAYS[1:]), load=st.sampled_from(("random", "hot", "none", "invalid")))
def test_drawn_messages(target: Target, seed: int, way: tuple[str, str], load: str) -> None:
    random = np.random.default_rng(seed)
    experts, ranks, top_k = (int(random.integers(1, most)) for most in (12, 5, 8))
    tokens = int(random.choice([0, 1, 3, 17, 90]))
    placement = placement_of(("linear", "round_robin", "balanced", "replicas")[seed % 4], experts, ranks, seed % 99)
    receive = int(random.integers(0, 3 * tokens + 1)) if way[0] == "padded" and seed % 3 else None
    spec = table_spec(way, placement, tokens, top_k, receive)
    owner = seed % ranks
    came, num_rows = messages(seed, placement, spec, tokens, top_k, load, owner)
    lost = None
    if way[0] != "all_to_all":
        lost = random.random(tokens) < 0.3
        if seed % 5 == 0:
            came[ranks - 1, seed % len(HEADER)] += 1
    check(came, spec, owner, top_k, num_rows, lost, target)


@on_engines
@pytest.mark.parametrize("way", WAYS[1:], ids="-".join)
def test_several_blocks(target: Target, way: tuple[str, str]) -> None:
    """More rows than a program takes, and tokens that are more than rows."""
    placement = placement_of("linear", 6, 3)
    for load, receive in (("hot", 300), ("random", None)):
        spec = table_spec(way, placement, 300, 5, receive if way[0] == "padded" else None)
        came, num_rows = messages(1, placement, spec, 300, 5, load, 2)
        check(came, spec, 2, 5, num_rows, np.arange(300) % 7 == 0 if way[0] != "all_to_all" else None, target)


@pytest.mark.parametrize("way", WAYS[1:], ids="-".join)
def test_rows_compile_nothing(way: tuple[str, str]) -> None:
    placement, found = Placement.linear(32, 4), set()
    for rank, tokens in enumerate((64, 500, 8192)):
        spec = table_spec(way, placement, tokens, 4, 2 * tokens if way[0] == "padded" else None)
        came, num_rows, counts = ArraySpec((tokens, 8), "int32"), 3 * tokens, ArraySpec((4, 10), "int32")
        if way[0] != "all_to_all":
            block = tokens if way[0] == "all_gather" else spec.block_rows
            came = ArraySpec((4, 8 + block * spec.width(4)), "int32")
            num_rows = 4 * (spec.block_rows if spec.by_slot else spec.back_rows)
        header, counts = (None, counts) if way[0] == "all_to_all" else (ArraySpec((8,), "int32"), None)
        options = {"top_k": 4, "num_rows": num_rows, "num_tokens": tokens, "target": H200}
        plan = plan_receive_tables(came=came, header=header, counts=counts, spec=spec, rank=rank, **options)
        for number, launch in enumerate(plan.steps):
            assert isinstance(launch, KernelLaunch)
            found.add((number, tuple((name, one) for name, one in launch.arguments if isinstance(one, Constant))))
    # Few counted rows need one launch alone.
    assert len(found) == (1 if way[1] == "slots" else 2 + (way[0] == "all_to_all"))


@pytest.mark.parametrize("fault", ["place", "weight", "header", "lost"])
def test_planted_faults_are_found(fault: str) -> None:
    placement = placement_of("linear", 6, 2)
    spec = table_spec(("padded", "tokens"), placement, 9, 3)
    came, num_rows = messages(3, placement, spec, 9, 3, "random", 1)
    lost = np.arange(9) == 4
    check(came, spec, 1, 3, num_rows, lost, engine_target())
    wanted = expected(came, spec, 1, 3, num_rows, lost)
    # The first slot that is for an expert here, places 3 to 5.
    first = 8 + int(np.flatnonzero((came[0, 8:] >= 3) & (came[0, 8:] < 6))[0])
    if fault == "lost":
        lost = ~lost
    elif fault == "place":
        came[0, first] = 3 + (came[0, first] == 3)
    else:
        came[0, 0 if fault == "header" else first + 3] ^= 1
    with pytest.raises(AssertionError):
        check(came, spec, 1, 3, num_rows, lost, engine_target(), wanted)


def test_wrong_arguments() -> None:
    came, header = ArraySpec((2, 8 + 12), "int32"), ArraySpec((8,), "int32")
    spec = TableSpec("padded", "tokens", 2, 2, 4, 3, 3)
    for options, match in (
        ({"came": ArraySpec((2, 21), "int32")}, r"came must have 8 \+ n \* 4 columns"),
        ({"came": ArraySpec((3, 20), "int32")}, r"came must be"),
        ({"header": None}, "header must be given unless mode='all_to_all'"),
        ({"counts": header}, "counts must be given with mode='all_to_all'"),
        ({"num_rows": 5}, "num_rows must be 6"),
        ({"lost": ArraySpec((4,), "bool")}, "lost must be"),
        *(({name: value}, f"{name} must be") for name, value in (("rank", 2), ("rank", -1), ("top_k", 0))),
        *(({name: -1}, f"{name} must be") for name in ("num_rows", "num_tokens")),
        ({"spec": TableSpec("all_to_all", "slots", 2, 2, 4)}, "rows must be 'tokens' with mode='all_to_all'"),
        ({"spec": TableSpec("all_to_all", "tokens", 2, 2, 4), "came": ArraySpec((5, 4), "int32"), "header": None,
          "counts": ArraySpec((2, 10), "int32"), "results": ArraySpec((4, 6), "float32")},
         r"results must be \[1, d_model\]"),
    ):  # fmt: skip
        given = {"came": came, "spec": spec, "rank": 0, "top_k": 2, "num_rows": 6, "num_tokens": 3, "header": header}
        with pytest.raises(InvalidInput, match=match):
            plan_receive_tables(**given | options, target=H200)
