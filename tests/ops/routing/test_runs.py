"""The layout of rows that arrived as runs: against its definition, a layout of the ids that the counts imply."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_core import InvalidInput, Unsupported
from moe_core.base.arrays import ArraySpec
from moe_core.base.target import Target
from moe_core.ops.routing import reference
from moe_core.ops.routing.layout import MAX_COUNTS, plan_layout_of_runs, runs_spec
from moe_core.plan.steps import Constant
from tests.support.harness import H200, engine_target, run_plan, spec_of

ENGINES = (engine_target(), Target("reference"))
on_engines = pytest.mark.parametrize("target", ENGINES, ids=lambda target: target.kind)

pytestmark = pytest.mark.usefixtures("visible_poison")


def implied_ids(counts: np.ndarray, num_rows: int, stride: int | None) -> tuple[np.ndarray, int]:
    """The ids of rows in the order of arrival, cut, -1 behind each source's; how many are missing."""
    runs = [np.repeat(np.arange(counts.shape[1]), np.maximum(source, 0)) for source in counts]
    whole = sum(len(run) for run in runs)
    if stride is None:
        ids = np.concatenate(runs)[:num_rows]
        missing = whole - len(ids)
    else:
        missing = whole - sum(min(len(run), stride) for run in runs)
        ids = np.concatenate([np.pad(run[:stride], (0, max(0, stride - len(run))), constant_values=-1) for run in runs])
    padded = np.full((num_rows, 1), -1, np.int32)
    padded[: len(ids), 0] = ids
    return padded, missing


def check(counts: np.ndarray, num_rows: int, stride: int | None, target: Target) -> None:
    plan = plan_layout_of_runs(spec_of(counts), num_rows, target, stride=stride)
    found = run_plan(plan, {"counts": counts})
    ids, missing = implied_ids(counts, num_rows, stride)
    names = ("group_sizes", "group_start", "slot_of_row", "row_of_slot")
    expected = dict(zip(names, reference.layout(ids, layout=runs_spec(num_rows, counts.shape[1])), strict=False))
    expected |= {"ids": ids, "overflow": np.array([missing], np.int32)}
    assert set(found) == set(expected)
    for name, wanted in expected.items():
        np.testing.assert_array_equal(found[name], wanted, err_msg=name, strict=True)


@on_engines
@given(st.data())
def test_any_counts(target: Target, data: st.DataObject) -> None:
    num_sources, num_experts = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 9))
    sizes = st.sampled_from((0, 0, 1, 2, 7, 70))
    row = st.lists(sizes, min_size=num_experts, max_size=num_experts)
    table = st.lists(row, min_size=num_sources, max_size=num_sources)
    counts = np.array(data.draw(table), np.int32).reshape(num_sources, num_experts)
    most, total = int(counts.sum(axis=1).max()), int(counts.sum())
    check(counts, max(0, total + data.draw(st.sampled_from((-9, -1, 0, 1, 200)))), None, target)
    stride = max(0, most + data.draw(st.sampled_from((-5, -1, 0, 1, 100))))
    check(counts, num_sources * stride, stride, target)


@on_engines
@pytest.mark.parametrize("wrong", [2**31 - 1, -1, -(2**31)])
def test_counts_that_lie_stay_inside(target: Target, wrong: int) -> None:
    """The harness's guard zones must stay untouched."""
    counts = np.array([[3, wrong, 2], [wrong, wrong, 1], [4, 0, wrong]], np.int32)
    for num_rows, stride in ((40, None), (60, 20), (0, None)):
        plan = plan_layout_of_runs(spec_of(counts), num_rows, target, stride=stride)
        found = run_plan(plan, {"counts": counts})
        assert found["group_start"][-1] <= num_rows
        placed = found["slot_of_row"][found["slot_of_row"] >= 0]
        np.testing.assert_array_equal(np.sort(found["row_of_slot"][placed]), np.arange(len(placed)))
        assert (found["overflow"][0] > 0) == (wrong > 0 or num_rows == 0)


def test_worked_example() -> None:
    counts = np.array([[1, 2], [2, 0]], np.int32)
    found = run_plan(plan_layout_of_runs(spec_of(counts), 6, engine_target()), {"counts": counts})
    assert {name: array.ravel().tolist() for name, array in found.items()} == {
        "ids": [0, 1, 1, 0, 0, -1],
        "group_sizes": [3, 2],
        "group_start": [0, 3, 5],
        "slot_of_row": [0, 3, 4, 1, 2, -1],
        "row_of_slot": [0, 3, 4, 1, 2, -1],
        "overflow": [0],
    }


def test_rows_compile_nothing() -> None:
    counts, found = ArraySpec((4, 32), "int32"), set()
    for num_rows, stride in ((400, 100), (4096, 1024)):
        (launch,) = plan_layout_of_runs(counts, num_rows, H200, stride=stride).steps
        found.add(tuple((name, value) for name, value in launch.arguments if isinstance(value, Constant)))
    assert len(found) == 1


def test_wrong_arguments() -> None:
    counts = ArraySpec((4, 8), "int32")
    with pytest.raises(InvalidInput, match=r"stride must be num_rows / num_sources = 10 / 4, got 3"):
        plan_layout_of_runs(counts, 10, H200, stride=3)
    with pytest.raises(InvalidInput, match="num_rows must be an integer of at least 0, got -1"):
        plan_layout_of_runs(counts, -1, H200)
    with pytest.raises(InvalidInput, match=r"counts must be \[num_sources, num_experts\]"):
        plan_layout_of_runs(ArraySpec((8,), "int32"), 10, H200)
    with pytest.raises(Unsupported, match=f"at most {MAX_COUNTS}, got 300 x 300"):
        plan_layout_of_runs(ArraySpec((300, 300), "int32"), 10, H200)
