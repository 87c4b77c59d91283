"""Ragged layouts and schedules against their NumPy twins and their own definition, and how they are planned."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_core import InvalidInput, Unsupported
from moe_core.base.arrays import ArraySpec
from moe_core.base.target import Target
from moe_core.ops.routing import reference
from moe_core.ops.routing.layout import (
    COUNT_BLOCKS,
    LAYOUT_AT_ONCE,
    MAX_EXPERTS,
    PLACE_BLOCKS,
    SLOTS_AT_ONCE,
    plan_layout,
    plan_schedule,
)
from moe_core.plan.steps import Constant, KernelLaunch, LaunchPlan
from moe_core.specs.routing import LayoutSpec
from tests.support import strategies
from tests.support.harness import H200, engine_target, run_plan
from tests.support.strategies import HARD_ROUTINGS, RoutingCase, draw_ids, hard_routing

BLOCK_MS = st.sampled_from([(), (16,), (128, 16), (1, 64, 32, 5)])

pytestmark = pytest.mark.usefixtures("visible_poison")


def inputs_of(case: RoutingCase) -> dict[str, np.ndarray]:
    arrays = {"ids": case.ids, "expert_map": case.expert_map, "token_mask": case.token_mask}
    return {name: array for name, array in arrays.items() if array is not None}


def plan_of(case: RoutingCase, layout: LayoutSpec, block_ms: tuple[int, ...], target: Target) -> LaunchPlan:
    specs = {name: ArraySpec(array.shape, array.dtype.name) for name, array in inputs_of(case).items()}
    return plan_layout(specs.pop("ids"), layout, target, block_ms=block_ms, **specs)


def assert_matches_reference(case: RoutingCase, layout: LayoutSpec, block_ms: tuple[int, ...] = ()) -> LaunchPlan:
    plan = plan_of(case, layout, block_ms, engine_target())
    found = run_plan(plan, inputs_of(case))
    expected = reference.layout(**inputs_of(case), layout=layout, block_ms=block_ms)
    for buffer, wanted in zip(plan.outputs, expected, strict=True):
        np.testing.assert_array_equal(found[buffer.name], wanted, err_msg=buffer.name, strict=True)
    return plan


def launches(plan: LaunchPlan) -> list[KernelLaunch]:
    found = [step for step in plan.steps if isinstance(step, KernelLaunch)]
    assert len(found) == len(plan.steps)
    return found


@given(st.data(), strategies.routings(), BLOCK_MS)
def test_matches_the_reference(data: st.DataObject, case: RoutingCase, block_ms: tuple[int, ...]) -> None:
    assert_matches_reference(case, data.draw(strategies.layouts(case)), block_ms)


@pytest.mark.parametrize("name", HARD_ROUTINGS)
@pytest.mark.parametrize(("alignment", "max_rows"), [(1, None), (16, None), (1, 3), (1, 64)])
def test_hard_routings(name: str, alignment: int, max_rows: int | None) -> None:
    case = hard_routing(name)
    assert_matches_reference(case, case.layout(alignment, max_rows), (16, 128))


@pytest.mark.parametrize("name", ["missing_ids", "out_of_range", "map_mask_and_bad_ids"])
@pytest.mark.parametrize(("alignment", "max_rows"), [(1, None), (100, None), (1, 40), (1, 5000)])
@pytest.mark.parametrize("more", [0, 1, 700])
def test_both_ways_around_the_threshold(name: str, alignment: int, max_rows: int | None, more: int) -> None:
    """The hard routing, repeated: SLOTS_AT_ONCE slots and fewer take one launch, more take two."""
    case, threshold = hard_routing(name), SLOTS_AT_ONCE[engine_target().engine]
    tokens = threshold // case.top_k + more
    repeats = -(-tokens // case.num_tokens)
    mask = None if case.token_mask is None else np.tile(case.token_mask, repeats)[:tokens]
    ids = np.tile(case.ids, (repeats, 1))[:tokens]
    case = RoutingCase(ids, np.ones(ids.shape, np.float32), case.num_experts, case.expert_map, mask)
    plan = assert_matches_reference(case, case.layout(alignment, max_rows), (16,))
    kernels = [launch.kernel for launch in launches(plan)]
    if tokens * case.top_k <= threshold:
        assert kernels == [LAYOUT_AT_ONCE]
    else:
        assert kernels == [COUNT_BLOCKS, PLACE_BLOCKS]


def test_a_gpu_counts_4096_slots_at_once() -> None:
    plans = (plan_layout(ArraySpec((n, 1), "int32"), LayoutSpec(n, 1, 8, 1, None, None), H200) for n in (4096, 4097))
    assert [[one.kernel for one in launches(plan)] for plan in plans] == [
        [LAYOUT_AT_ONCE],
        [COUNT_BLOCKS, PLACE_BLOCKS],
    ]


@pytest.mark.parametrize("num_experts", [1, 32, 33, 1000])
def test_any_number_of_experts(num_experts: int) -> None:
    rng = np.random.default_rng(0)
    for tokens in (3, 200):
        ids = rng.integers(0, num_experts, (tokens, 3)).astype(np.int32)
        case = RoutingCase(ids, np.ones(ids.shape, np.float32), num_experts)
        assert_matches_reference(case, case.layout(), (16,))


@given(strategies.routings(max_tokens=90))
def test_rows_are_the_slots_of_each_expert_in_order(case: RoutingCase) -> None:
    """Without the twin: from ids to rows by the definition."""
    arrays = run_plan(plan_of(case, case.layout(), (), engine_target()), inputs_of(case))
    ids = case.ids.astype(np.int64)
    num_global = case.num_experts if case.expert_map is None else len(case.expert_map)
    if case.token_mask is not None:
        ids = np.where(case.token_mask[:, None], ids, -1)
    known = (ids >= 0) & (ids < num_global)
    assert arrays["invalid_ids"].tolist() == [int((~known & (ids != -1)).sum())]
    local = np.where(known, ids, 0)
    local = np.where(known, local if case.expert_map is None else case.expert_map[local], -1).reshape(-1)
    for expert in range(case.num_experts):
        first = arrays["group_start"][expert]
        rows = arrays["slot_of_row"][first : first + arrays["group_sizes"][expert]]
        assert rows.tolist() == np.flatnonzero(local == expert).tolist()
    filled = np.flatnonzero(arrays["slot_of_row"] >= 0)
    assert len(filled) == (local >= 0).sum()
    assert (arrays["row_of_slot"][arrays["slot_of_row"][filled]] == filled).all()
    assert (arrays["row_of_slot"] >= 0).tolist() == (local >= 0).tolist()


def test_worked_example() -> None:
    ids = np.array([[2, 0], [0, -1]], np.int32)
    case = RoutingCase(ids, np.ones((2, 2), np.float32), 3)
    arrays = run_plan(plan_of(case, case.layout(), (1,), engine_target()), inputs_of(case))
    assert {name: array.tolist() for name, array in arrays.items()} == {
        "group_sizes": [2, 0, 1],
        "group_start": [0, 2, 2, 3],
        "slot_of_row": [1, 2, 0, -1],
        "row_of_slot": [2, 0, 1, -1],
        "invalid_ids": [0],
        "schedule_1": [[0, 0], [1, 0], [0, 2], [-1, -1]],
    }


def test_expert_map_entries_outside_the_local_experts_mean_not_here() -> None:
    expert_map = np.array([1, 2, -7, 0, 2**31 - 1, -(2**31)], np.int32)
    ids = np.arange(6, dtype=np.int32)[:, None]
    case = RoutingCase(ids, np.ones(ids.shape, np.float32), 2, expert_map)
    arrays = run_plan(plan_of(case, case.layout(), (), engine_target()), inputs_of(case))
    assert arrays["group_sizes"].tolist() == [1, 1] and arrays["invalid_ids"].tolist() == [0]
    assert arrays["row_of_slot"].tolist() == [1, -1, -1, 0, -1, -1]
    assert_matches_reference(case, case.layout())


def test_ids_beyond_the_expert_map_are_invalid() -> None:
    """Even those below the number of local experts."""
    ids = np.array([0, 1, 2, 3, 2**31 - 1, -1], np.int32)[:, None]
    case = RoutingCase(ids, np.ones(ids.shape, np.float32), 4, np.array([3, 0], np.int32))
    arrays = run_plan(plan_of(case, case.layout(), (), engine_target()), inputs_of(case))
    assert arrays["group_sizes"].tolist() == [1, 0, 0, 1] and arrays["invalid_ids"].tolist() == [3]
    assert_matches_reference(case, case.layout())


@given(strategies.routings(max_tokens=90), st.sampled_from([1, 16, 128]))
def test_schedule_of_given_sizes(case: RoutingCase, block_m: int) -> None:
    layout = case.layout()
    sizes = reference.layout(**inputs_of(case), layout=layout)[0]
    found = run_plan(plan_schedule(layout, block_m, engine_target()), {"group_sizes": sizes})["schedule"]
    np.testing.assert_array_equal(found, reference.schedule(sizes, layout=layout, block_m=block_m), strict=True)


@pytest.mark.parametrize("num_experts", [1, 5, 300])
def test_schedule_of_the_worst_sizes_fills_its_bound(num_experts: int) -> None:
    """One row too many in every group: as many blocks as any routing can need."""
    layout = LayoutSpec(17 * num_experts, 1, num_experts)
    sizes = np.full(num_experts, 17, np.int32)
    found = run_plan(plan_schedule(layout, 16, engine_target()), {"group_sizes": sizes})["schedule"]
    assert found.tolist() == [[block, expert] for expert in range(num_experts) for block in (0, 1)]


@pytest.mark.parametrize("block_m", [1, 16, 128])
@pytest.mark.parametrize(
    "sizes",
    [
        [10**6] * 5, [2**31 - 1] * 5, [-5] * 5, [-(2**31)] * 5, [3, 10**6, 4, 0, 9], [0, 0, 0, 0, 2**31 - 1],
        [2**31 - 1, -5, 20, 10**6, -(2**31)],
    ],
)  # fmt: skip
def test_sizes_that_lie_fill_the_schedule_and_no_more(sizes: list[int], block_m: int) -> None:
    """The harness's guard zones must stay untouched, and what is scheduled must exist."""
    layout = LayoutSpec(40, 2, 5)
    plan = plan_schedule(layout, block_m, engine_target())
    found = run_plan(plan, {"group_sizes": np.array(sizes, np.int32)})["schedule"]
    most = layout.max_blocks(block_m)
    blocks = [min(most, -(-max(size, 0) // block_m)) for size in sizes]
    rows = [[block, expert] for expert, count in enumerate(blocks) for block in range(count)][:most]
    assert found.tolist() == rows + [[-1, -1]] * (most - len(rows))


@pytest.mark.parametrize("wrong", [10**6, 2**31 - 1, -5])
@pytest.mark.parametrize("tokens", [40, 600])
def test_ids_that_lie_get_no_row(wrong: int, tokens: int) -> None:
    """Every schedule of a layout stays inside, those written by launches of their own too."""
    ids = np.full((tokens, 2), wrong, np.int32)
    ids[::3] = [0, 4]
    case = RoutingCase(ids, np.ones(ids.shape, np.float32), 5)
    assert_matches_reference(case, case.layout(), (1, 16, 64, 128))


def test_reference_engine_is_the_twin() -> None:
    case = hard_routing("map_mask_and_bad_ids")
    found = run_plan(plan_of(case, case.layout(), (16,), Target("reference")), inputs_of(case))
    expected = reference.layout(**inputs_of(case), layout=case.layout(), block_ms=(16,))
    assert all((left == right).all() for left, right in zip(found.values(), expected, strict=True))
    (sizes, *_) = expected
    plan = plan_schedule(case.layout(), 16, Target("reference"))
    assert (run_plan(plan, {"group_sizes": sizes})["schedule"] == expected[-1]).all()


@pytest.mark.parametrize(("tokens", "steps"), [(1, 1), (512, 1), (513, 2), (16384, 2)])
def test_launches_on_a_gpu(tokens: int, steps: int) -> None:
    ids, layout = ArraySpec((tokens, 8), "int32"), LayoutSpec(tokens, 8, 128)
    assert len(plan_layout(ids, layout, H200).steps) == steps
    assert len(plan_layout(ids, layout, H200, block_ms=(16, 128)).steps) == steps
    assert len(plan_layout(ids, layout, H200, block_ms=(16, 128, 64, 32)).steps) == steps + 2


@pytest.mark.parametrize("alignment", [1, 128])
@pytest.mark.parametrize("tokens", [(33, 40, 500), (600, 1024), (1100, 16384, 100_000)])
def test_the_number_of_tokens_is_no_constant(tokens: tuple[int, ...], alignment: int) -> None:
    found = set()
    for count in tokens:
        layout = LayoutSpec(count, 8, 128, alignment)
        plan = plan_layout(ArraySpec((count, 8), "int32"), layout, H200, block_ms=(16, 64, 128))
        found.add(
            tuple(
                (launch.kernel, launch.num_warps, name, value)
                for launch in launches(plan)
                for name, value in launch.arguments
                if isinstance(value, Constant)
            )
        )
    assert len(found) == 1


def test_padding_is_shared_out_over_the_device() -> None:
    """One token: up to 127 rows of each of 128 experts are left for -1, 4096 for each program."""
    layout = LayoutSpec(1, 8, 128, alignment=128)
    (launch,) = launches(plan_layout(ArraySpec((1, 8), "int32"), layout, H200))
    assert launch.grid == (4, 1, 1)


@pytest.mark.parametrize("tokens", [513, 2000, 16384, 1_000_000])
def test_counted_blocks_are_no_more_than_multiprocessors(tokens: int) -> None:
    """Every placing program adds up the counts of all blocks."""
    layout = LayoutSpec(tokens, 8, 128)
    count, place = launches(plan_layout(ArraySpec((tokens, 8), "int32"), layout, H200))
    sharing = max(4, min(-(-layout.capacity // 4096), 132))
    assert place.grid[0] == count.grid[0] + sharing and count.grid[0] <= 132
    (block_slots,) = [value.value for name, value in count.arguments if name == "block_slots"]
    assert count.grid[0] == -(-layout.num_slots // block_slots) and block_slots % 256 == 0


LAYOUT = LayoutSpec(3, 2, 4)


@pytest.mark.parametrize(
    ("ids", "extras", "message"),
    [
        (((3, 4), "int32"), {}, r"ids must be \[3, 2\], got \(3, 4\)"),
        (((3, 2), "int32"), {"block_ms": (16, 0)}, "block_ms must be an integer of at least 1, got 0"),
        (((3, 2), "int32"), {"block_ms": (16, 16)}, "block_ms must be distinct"),
    ],
)
def test_wrong_arguments(ids, extras, message) -> None:
    with pytest.raises(InvalidInput, match=message):
        plan_layout(ArraySpec(*ids), LAYOUT, H200, **extras)


def test_wrong_block_height() -> None:
    with pytest.raises(InvalidInput, match="block_m must be an integer of at least 1, got 0"):
        plan_schedule(LAYOUT, 0, H200)


def test_too_many_experts_are_refused_by_the_kernels_only() -> None:
    layout = LayoutSpec(3, 2, MAX_EXPERTS + 1)
    for plan in (lambda t: plan_layout(ArraySpec((3, 2), "int32"), layout, t), lambda t: plan_schedule(layout, 16, t)):
        with pytest.raises(Unsupported, match=f"at most {MAX_EXPERTS}, got {MAX_EXPERTS + 1}"):
            plan(H200)
        assert plan(Target("reference")).steps


def test_tile_counters_start_at_zero() -> None:
    """In every kernel that may write them: one launch for few slots, two for many."""
    for num_tokens in (3, 400):
        layout = LayoutSpec(num_tokens, 2, 4)
        ids = draw_ids("uniform", num_tokens, 2, 4, 0)
        for counters in (2, 64):
            plan = plan_layout(ArraySpec(ids.shape, "int32"), layout, engine_target(), tile_counters=counters)
            assert run_plan(plan, {"ids": ids})["tile_counters"].tolist() == [0] * counters


def test_schedules_whose_sums_would_leave_32_bits_are_unsupported() -> None:
    layout = LayoutSpec(2**26, 1, 2048)
    with pytest.raises(Unsupported, match=r"blocks times experts, got .*; split the batch"):
        plan_schedule(layout, 16, Target("cuda", 90, 132))
