"""Routing together with the layout: the same bits as routing, then layout, in fewer launches."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from moe_core import InvalidInput
from moe_core.base.arrays import ArraySpec
from moe_core.base.target import Target
from moe_core.ops.routing import reference
from moe_core.ops.routing.layout import plan_layout
from moe_core.ops.routing.topk import FEW_TOKENS, plan_route_and_layout, plan_routing
from moe_core.plan.steps import Constant, KernelLaunch, LaunchPlan, ReferenceCall, Scalar
from moe_core.specs.operands import RouterLogits
from moe_core.specs.routing import LayoutSpec, RouterSpec
from tests.support import strategies
from tests.support.harness import H200, engine_target, run_plan
from tests.support.strategies import RouterCase

#: One launch takes so many tokens on the engine under test.
FEW = FEW_TOKENS[engine_target().engine]
#: Local experts that several global ones share, some twice in one token, with entries that mean "not here".
SHARED_MAP = np.array([3, 0, -1, 1, 0, 2, 0, -5, 9, 1, 1, 0], np.int32)

pytestmark = pytest.mark.usefixtures("visible_poison")


def kernels(plan: LaunchPlan) -> list[str]:
    return [step.kernel.function for step in plan.steps if isinstance(step, KernelLaunch)]


def check(
    case: RouterCase,
    layout: LayoutSpec | None = None,
    expert_map: np.ndarray | None = None,
    block_ms: tuple[int, ...] = (16, 128),
) -> list[str]:
    """Both results equal those of the two plans bit by bit, and the layout that of the reference; the kernels."""
    logits, bias, mask = case.arrays()
    layout = layout or LayoutSpec(case.num_tokens, case.spec.require_top_k(), case.num_experts)
    optional = {"correction_bias": bias, "token_mask": mask}
    routed = {name: array for name, array in optional.items() if array is not None}
    mapped = {} if expert_map is None else {"expert_map": expert_map}
    specs = {name: ArraySpec(array.shape, array.dtype.name) for name, array in (routed | mapped).items()}
    array, target = ArraySpec(logits.shape, "float32"), engine_target()
    scores, others = RouterLogits(array, specs.get("correction_bias")), dict(specs)
    others.pop("correction_bias", None)
    plan = plan_route_and_layout(scores, case.spec, layout, target, block_ms=block_ms, **others)
    found = run_plan(plan, {"logits": logits} | routed | mapped)
    expert_map_spec = specs.pop("expert_map", None)
    apart = run_plan(plan_routing(array, case.spec, target, **specs), {"logits": logits} | routed)
    ids = apart["ids"]
    placed = plan_layout(ArraySpec(ids.shape, "int32"), layout, target, expert_map=expert_map_spec, block_ms=block_ms)
    apart |= run_plan(placed, {"ids": ids} | mapped)
    assert list(found) == list(apart)
    for name, value in apart.items():
        assert found[name].tobytes() == value.tobytes(), name
    expected = reference.layout(ids, expert_map, layout=layout, block_ms=block_ms)
    for buffer, wanted in zip(placed.outputs, expected, strict=True):
        np.testing.assert_array_equal(found[buffer.name], wanted, err_msg=buffer.name)
    return kernels(plan)


@given(strategies.router_cases(max_tokens=2 * FEW), st.sampled_from([(), (16,), (128, 16), (1, 64, 32, 5)]))
@example(RouterCase(RouterSpec(3, slot_order="expert"), FEW, 16, False, "ties", True, 0), (16,))
@example(RouterCase(RouterSpec(384, "sigmoid", renormalize=True), 1, 384, False, "ties", False, 0), (16,))
def test_same_bits_as_apart(case: RouterCase, block_ms: tuple[int, ...]) -> None:
    check(case, block_ms=block_ms)


@pytest.mark.parametrize("tokens", [0, 1, 3, 4, 16, 17, 33, FEW, FEW + 1, 5 * FEW + 3])
@pytest.mark.parametrize(("alignment", "max_rows"), [(1, None), (16, None), (100, None), (1, 5), (1, 3000)])
def test_every_number_of_tokens_and_layout(tokens: int, alignment: int, max_rows: int | None) -> None:
    case = RouterCase(RouterSpec(3, renormalize=True), tokens, 24, False, "ties", True, 1)
    found = check(case, LayoutSpec(tokens, 3, 24, alignment, max_rows))
    assert found == (["route_and_layout"] if tokens <= FEW else ["route", "place_blocks"])


@pytest.mark.parametrize("tokens", [FEW - 1, 2 * FEW])
@pytest.mark.parametrize("slot_order", ["score", "expert"])
@pytest.mark.parametrize("masked", [False, True])
def test_a_map_that_gives_a_token_one_expert_twice(tokens: int, slot_order: str, masked: bool) -> None:
    case = RouterCase(RouterSpec(6, slot_order=slot_order), tokens, 12, True, "normal", masked, 2)
    check(case, LayoutSpec(tokens, 6, 4), SHARED_MAP)
    check(case, LayoutSpec(tokens, 6, 4, max_rows=7), SHARED_MAP)


@pytest.mark.parametrize("num_experts", [1, 2, 33, 256, 384, 512, 1000])
@pytest.mark.parametrize("tokens", [2, 16, 50, 200])
def test_any_number_of_experts(num_experts: int, tokens: int) -> None:
    check(RouterCase(RouterSpec(min(num_experts, 6)), tokens, num_experts, False, "normal", False, 3))


@pytest.mark.parametrize("num_experts", [4, 48, 128, 512])
@pytest.mark.parametrize("top_k", [1, 2, 3])
def test_few_choices_of_many_tokens(num_experts: int, top_k: int) -> None:
    """A thread's registers along the experts outnumber the choices: each is still counted once."""
    for tokens in (5, 65, 200):
        check(RouterCase(RouterSpec(top_k), tokens, num_experts, False, "normal", False, 6), block_ms=(16,))


def test_groups_that_are_padded() -> None:
    """Three groups of eight in four of eight columns; groups of six in eight columns."""
    for num_experts, num_groups in ((24, 3), (24, 4)):
        spec = RouterSpec(5, "sigmoid", renormalize=True, scale=2.5, num_groups=num_groups, topk_group=2)
        for tokens in (FEW, FEW + 20):
            check(RouterCase(spec, tokens, num_experts, True, "normal", True, 4))


@pytest.mark.gpu
@pytest.mark.parametrize("num_experts", [128, 256, 512])
@pytest.mark.parametrize("tokens", [1, 4, 64, 65, 1024, 4097, 16384])
@pytest.mark.parametrize("spec", [RouterSpec(8, renormalize=True), RouterSpec(8, "sigmoid", slot_order="expert")])
def test_sizes_of_models(num_experts: int, tokens: int, spec: RouterSpec) -> None:
    check(RouterCase(spec, tokens, num_experts, True, "normal", False, 5))


def test_reference_engine_routes_then_lays_out() -> None:
    logits = ArraySpec((5, 8), "float32")
    plan = plan_route_and_layout(
        RouterLogits(logits), RouterSpec(2), LayoutSpec(5, 2, 8), Target("reference"), block_ms=(16,)
    )
    functions = [step.function for step in plan.steps if isinstance(step, ReferenceCall)]
    assert functions == ["routing.reference:route", "routing.reference:layout"]
    values = strategies.draw_logits(np.random.default_rng(0), "normal", 5, 8)
    found = run_plan(plan, {"logits": values})
    ids, weights = reference.route(values, spec=RouterSpec(2))
    assert (found["ids"] == ids).all() and (found["weights"] == weights).all()
    expected = reference.layout(ids, layout=LayoutSpec(5, 2, 8), block_ms=(16,))
    assert all((found[name] == wanted).all() for name, wanted in zip(list(found)[2:], expected, strict=True))


def plan_on_h200(tokens: int, num_experts: int, top_k: int = 8, **options) -> LaunchPlan:
    logits, layout = ArraySpec((tokens, num_experts), "float32"), LayoutSpec(tokens, top_k, num_experts)
    return plan_route_and_layout(RouterLogits(logits), RouterSpec(top_k), layout, H200, block_ms=(16, 128), **options)


@pytest.mark.parametrize("num_experts", [8, 60, 128, 256, 384, 512])
def test_launches_on_a_gpu(num_experts: int) -> None:
    for tokens, top_k in ((0, 8), (1, 8), (16, 8), (64, 4)):
        assert kernels(plan_on_h200(tokens, num_experts, top_k)) == ["route_and_layout"]
    for tokens, top_k in ((64, 8), (65, 4), (1024, 8), (16384, 8)):
        assert kernels(plan_on_h200(tokens, num_experts, top_k)) == ["route", "place_blocks"]


@pytest.mark.parametrize(
    ("tokens", "num_experts", "top_k", "reason"),
    [
        (64, 1024, 4, "64 tokens, as 64 of 1024 columns, one launch takes 32768 logits"),
        (16, 512, 300, "16 tokens, as 16 of 512 slots, one launch takes 256 slots"),
        (65, 128, 8, "65 tokens, one launch takes 64"),
    ],
)
def test_plans_say_why_two_launches(tokens: int, num_experts: int, top_k: int, reason: str) -> None:
    plan = plan_on_h200(tokens, num_experts, top_k)
    assert kernels(plan) == ["route", "place_blocks"]
    assert f"{reason}: routed and counted, then placed" in plan.explain()


def test_further_schedules_are_launches_of_their_own() -> None:
    logits, layout = ArraySpec((9, 8), "float32"), LayoutSpec(9, 2, 8)
    plan = plan_route_and_layout(RouterLogits(logits), RouterSpec(2), layout, H200, block_ms=(16, 32, 64))
    assert kernels(plan) == ["route_and_layout", "schedule"]


@pytest.mark.parametrize("tokens", [(17, 40, 64), (2200, 16384, 100_000)])
def test_the_number_of_tokens_is_no_constant(tokens: tuple[int, ...]) -> None:
    found = {
        tuple(
            (step.kernel.name, step.num_warps, name, value)
            for step in plan_on_h200(count, 128).steps
            if isinstance(step, KernelLaunch)
            for name, value in step.arguments
            if isinstance(value, Constant)
        )
        for count in tokens
    }
    assert len(found) == 1


@pytest.mark.parametrize("tokens", [65, 1024, 1057, 5000, 1_000_000])
def test_blocks_of_tokens(tokens: int) -> None:
    """Whole steps, together all tokens, and no more blocks than multiprocessors."""
    route, place = (step for step in plan_on_h200(tokens, 128).steps if isinstance(step, KernelLaunch))
    arguments = {name: value.value for name, value in route.arguments if isinstance(value, Scalar | Constant)}
    block_tokens, block_t = int(arguments["block_tokens"] or 0), int(arguments["BLOCK_T"] or 0)
    assert block_tokens % block_t == 0 and route.grid[0] == -(-tokens // block_tokens) <= 132
    assert place.grid[0] - route.grid[0] == max(4, min(-(-8 * tokens // 4096), 132)), "programs that place no slots"


@pytest.mark.parametrize(
    ("layout", "expert_map", "message"),
    [
        (LayoutSpec(8, 2, 8), None, "layout must be of 9 tokens and top_k = 2, got 8 and 2"),
        (LayoutSpec(9, 3, 8), None, "layout must be of 9 tokens and top_k = 2, got 9 and 3"),
        (LayoutSpec(9, 2, 4), None, "layout must have the 8 experts of logits, got 4; pass expert_map"),
        (LayoutSpec(9, 2, 4), ArraySpec((9,), "int32"), r"expert_map must be \[8\], got \(9,\)"),
    ],
)
def test_wrong_arguments(layout: LayoutSpec, expert_map: ArraySpec | None, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        plan_route_and_layout(
            RouterLogits(ArraySpec((9, 8), "float32")), RouterSpec(2), layout, H200, expert_map=expert_map
        )


def test_routing_alone_says_the_same() -> None:
    """The order of sums and what is selected on are those of routing alone."""
    alone = plan_routing(ArraySpec((9, 8), "float32"), RouterSpec(2), H200)
    both = dataclasses.replace(plan_on_h200(9, 8, 2), name="routing")
    assert both.summation == alone.summation and alone.notes[0] == both.notes[0]
