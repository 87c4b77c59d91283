"""Layouts with fewer rows than slots (`LayoutSpec.rows`), and bounds that are no constants of kernels."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from moe_core import InvalidInput
from moe_core.base.arrays import ArraySpec
from moe_core.base.target import Target
from moe_core.ops.matmul.backward import plan_matmul_ogs_backward
from moe_core.ops.matmul.forward import plan_matmul_ogs
from moe_core.ops.reduction.reduce import plan_reduce
from moe_core.ops.routing import reference
from moe_core.ops.routing.layout import SLOTS_AT_ONCE, plan_layout
from moe_core.ops.routing.topk import plan_route_and_layout
from moe_core.plan.steps import Constant, KernelLaunch, LaunchPlan
from moe_core.specs import LayoutSpec, MatmulSpec, RouterSpec
from moe_core.specs.operands import MatmulOperands, RouterLogits
from moe_core.specs.routing import RowLimit
from tests.support.harness import H200, engine_target, run_plan, spec_of

ENGINES = (engine_target(), Target("reference"))
on_engines = pytest.mark.parametrize("target", ENGINES, ids=lambda target: target.kind)
K, E = 3, 7
#: Tokens of the largest layout that one launch makes.
AT_ONCE = SLOTS_AT_ONCE[engine_target().engine] // K

pytestmark = pytest.mark.usefixtures("visible_poison")


def sparse_ids(tokens: int, seed: int = 0) -> np.ndarray:
    """Ids of tokens that came once for all their experts: most are -1, some outside."""
    random = np.random.default_rng(seed)
    ids = random.integers(0, E, (tokens, K)).astype(np.int32)
    ids[random.random((tokens, K)) < 0.6] = -1
    ids[tokens // 2, 0] = E
    return ids


def cut(ids: np.ndarray, bound: int) -> dict[str, np.ndarray]:
    """By the definition: the rows of the whole layout, of which the first `bound` stay."""
    sizes, start, slot_of_row, row_of_slot, invalid = reference.layout(ids, layout=LayoutSpec(len(ids), K, E))
    start = np.minimum(start, bound)
    capacity = min(bound, ids.size)
    return {
        "group_sizes": np.diff(start),
        "group_start": start,
        "slot_of_row": slot_of_row[:capacity],
        "row_of_slot": np.where(row_of_slot < capacity, row_of_slot, -1),
        "invalid_ids": invalid,
        "overflow": np.array([max(0, sizes.sum() - bound)]),
    }


@on_engines
@pytest.mark.parametrize("tokens", [5, AT_ONCE + 5, 4 * AT_ONCE])
def test_rows_past_the_bound_are_counted_and_not_written(target: Target, tokens: int) -> None:
    ids = sparse_ids(tokens)
    received = int(((ids >= 0) & (ids < E)).sum())
    bounds = (0, 1, received // 2, received - 1, received, received + 1, 10**6)
    limited = LayoutSpec(tokens, K, E, limit=RowLimit(1))
    for layout in (limited, *(LayoutSpec(tokens, K, E, rows=bound) for bound in bounds)):
        bound = layout.capacity if layout.rows is None else layout.rows
        plan = plan_layout(spec_of(ids), layout, target, block_ms=(16,))
        found = run_plan(plan, {"ids": ids})
        expected = cut(ids, bound)
        if layout is limited:
            expected["invalid_ids"] = expected["invalid_ids"] + expected["overflow"]
        schedule = reference.schedule(expected["group_sizes"], layout=layout, block_m=16)
        for name, wanted in (expected | {"schedule_16": schedule}).items():
            np.testing.assert_array_equal(found[name], wanted, err_msg=f"{name} of bound {bound}")


@on_engines
@pytest.mark.parametrize("tokens", [3, 300])
def test_routing_with_a_bound(target: Target, tokens: int) -> None:
    logits = np.random.default_rng(1).standard_normal((tokens, E), np.float32)
    layout = LayoutSpec(tokens, K, E, rows=tokens)
    found = run_plan(
        plan_route_and_layout(RouterLogits(spec_of(logits)), RouterSpec(K), layout, target), {"logits": logits}
    )
    for name, wanted in cut(found["ids"], tokens).items():
        np.testing.assert_array_equal(found[name], wanted, err_msg=name)


@on_engines
def test_products_follow_the_bound(target: Target) -> None:
    """Rows that are there are those of the whole layout, slots without one add nothing and have no gradient."""
    random, tokens, d, n = np.random.default_rng(2), 60, 32, 48
    ids = sparse_ids(tokens)
    x = random.standard_normal((tokens, d)).astype(np.float32)
    weight = random.standard_normal((E, d, n)).astype(np.float32)
    spec, results = MatmulSpec("in_out", "token", "row"), {}
    bound = int(((ids >= 0) & (ids < E)).sum()) - 5
    for rows in (None, bound):
        layout = LayoutSpec(tokens, K, E, rows=rows)
        arrays = run_plan(plan_layout(spec_of(ids), layout, target), {"ids": ids})
        operands = MatmulOperands(spec_of(x), spec_of(weight))
        plan = plan_matmul_ogs(operands, layout, spec, target)
        given = {"x": x, "weight": weight} | arrays
        y = run_plan(plan, {buffer.name: given[buffer.name] for buffer in plan.inputs})["y"]
        plan = plan_reduce(spec_of(y), spec_of(arrays["row_of_slot"]), layout, target, order="row")
        total = run_plan(plan, {"y": y, "row_of_slot": arrays["row_of_slot"]})["out"]
        d_y = np.ones_like(y)
        wanted = ("d_x", "d_weight")
        plan = plan_matmul_ogs_backward(spec_of(d_y), operands, layout, spec, target, wanted=wanted)
        given |= {"d_y": d_y}
        found = run_plan(plan, {buffer.name: given[buffer.name] for buffer in plan.inputs})
        results[rows] = {"y": y, "total": total, **found}
    whole, part = results[None], results[bound]
    assert len(part["y"]) == bound
    np.testing.assert_array_equal(part["y"], whole["y"][:bound])
    # What a token's dropped slots would have added, and nothing else, is missing.
    row_of_slot = reference.layout(ids, layout=LayoutSpec(tokens, K, E))[3].reshape(tokens, K)
    untouched = ~((row_of_slot >= bound).any(axis=1))
    assert 0 < (~untouched).sum() <= 5
    for name in ("total", "d_x"):
        np.testing.assert_array_equal(part[name][untouched], whole[name][untouched], err_msg=name)
        assert (part[name][~untouched] != whole[name][~untouched]).any(), name
    first = [expert for expert in range(E) if cut(ids, bound)["group_start"][expert + 1] < bound]
    np.testing.assert_array_equal(part["d_weight"][first], whole["d_weight"][first])


def constants(plan: LaunchPlan) -> set[tuple[object, ...]]:
    return {
        (step.kernel, step.num_warps, name, value)
        for step in plan.steps
        if isinstance(step, KernelLaunch)
        for name, value in step.arguments
        if isinstance(value, Constant)
    }


@pytest.mark.parametrize("name", ["max_rows", "rows"])
@pytest.mark.parametrize("tokens", [50, 5000])
def test_a_changing_bound_compiles_nothing(name: str, tokens: int) -> None:
    """Bounds follow the number of tokens: both are scalars of a launch."""
    ids, layout = ArraySpec((tokens, 8), "int32"), LayoutSpec(tokens, 8, 64)
    found = [constants(plan_layout(ids, dataclasses.replace(layout, **{name: n}), H200)) for n in (1, 3, 64, 6000)]
    assert all(one == found[0] for one in found)
    logits, routed = ArraySpec((tokens, 64), "float32"), RouterSpec(8)
    plans = [
        plan_route_and_layout(RouterLogits(logits), routed, dataclasses.replace(layout, **{name: n}), H200)
        for n in (5, 77)
    ]
    assert constants(plans[0]) == constants(plans[1])


def test_scratch_follows_the_bound() -> None:
    whole, part = LayoutSpec(16384, 8, 64), LayoutSpec(16384, 8, 64, rows=40000)
    assert (whole.capacity, part.capacity, part.num_slots) == (131072, 40000, 131072)
    assert part.max_blocks(128) < whole.max_blocks(128)


@pytest.mark.parametrize("options", [{"alignment": 16}, {"max_rows": 4}])
def test_contradictions(options: dict[str, int]) -> None:
    with pytest.raises(InvalidInput, match="rows must be None unless alignment is 1 and max_rows None, got 8"):
        LayoutSpec(4, 2, 3, rows=8, **options)
    with pytest.raises(InvalidInput, match="rows must be an integer of at least 0, got -1"):
        LayoutSpec(4, 2, 3, rows=-1)
