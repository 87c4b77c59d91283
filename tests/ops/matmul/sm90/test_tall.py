"""Row blocks of 192 of the `sm90` family: how groups are cut, what is planned and refused, and that results are those
of its blocks of 128, bit by bit, on an sm_90 GPU."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import numpy as np
import pytest
from hypothesis import given

from moe_core import InvalidInput
from moe_core.base.arrays import ArraySpec
from moe_core.base.target import Target
from moe_core.ops.matmul.families import why_illegal
from moe_core.ops.matmul.forward import plan_matmul_ogs
from moe_core.ops.matmul.problem import MatmulProblem
from moe_core.ops.matmul.sm90.plan import SM90_MATMUL_OGS, SM90_SWAPPED_MATMUL_OGS, SM90_TALL_MATMUL_OGS
from moe_core.ops.matmul.tile_choice import heuristic_tile
from moe_core.ops.moe.backward import plan_moe_backward
from moe_core.ops.moe.forward import plan_moe
from moe_core.ops.moe.options import BackwardOptions, ForwardOptions
from moe_core.ops.routing import reference
from moe_core.ops.routing.layout import plan_schedule
from moe_core.parity.tolerance import assert_close, matmul_tolerance
from moe_core.plan.steps import Constant, KernelLaunch, LaunchPlan, Pointer, TensorMap
from moe_core.specs import Activation, LayoutSpec, MatmulSpec, TileConfig
from moe_core.specs.operands import MatmulOperands, MoEOperands, OutputGradients
from tests.support.harness import engine_target, run_plan
from tests.support.matmul.cases import Case, build, expected_matmul, random_array, run_matmul
from tests.support.matmul.composed import filled_rows, run_composed
from tests.support.matmul.problems import plain_problem
from tests.support.matmul.sm90 import KEEPING, SM_90, cases, config_of, moe_arguments, needs_sm_90, tall

interpreted = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET", "0") != "1", reason="the GPU's results below depend on it"
)
FIRST, SECOND = (TileConfig(192, width, 64, 4, 3, 4, "sm90") for width in (128, 256))
#: Rows around every change of a group's blocks.
HEIGHTS = (1, 63, 64, 65, 127, 128, 129, 191, 192, 193, 256, 257, 320, 384, 385, 1500)


@interpreted
def test_groups_are_cut_evenly_between_chunks() -> None:
    """All of a group's rows once, as few blocks as hold them, and no low one beside others; sizes may lie."""
    from moe_core.runtime import interpreter
    from tests.support.runtime.interpreter_kernels import cut_kernel

    most = 8
    around = [64 * chunks + more for chunks in range(1, 3 * most) for more in (-1, 0, 1)]
    sizes = np.array([-(2**31) + 200, -1, 0, 1, *around, 2**31 - 400], np.int32)
    blocks = np.maximum(-(-sizes.astype(np.int64) // 192), 1)
    # Of more blocks than fit, the last ones.
    before = np.maximum(blocks - most, 0).astype(np.int32)
    found = {name: np.zeros((sizes.size, most), np.int32) for name in ("firsts", "rows")}
    arrays = {"sizes": sizes, "before": before} | found
    arguments = [(name, interpreter.HostPointer(array.ctypes.data, "int32")) for name, array in arrays.items()]
    interpreter.launch(cut_kernel, (sizes.size,), [*arguments, ("MOST", most)])
    for index, size in enumerate(sizes.tolist()):
        count = min(blocks[index], most)
        firsts, rows = (found[name][index, :count] for name in ("firsts", "rows"))
        if size <= 0:
            assert rows[0] <= 0, size
            continue
        assert before[index] or firsts[0] == 0
        assert (firsts % 64 == 0).all() and (firsts[1:] == firsts[:-1] + rows[:-1]).all(), size
        assert firsts[-1] + rows[-1] == size and (rows > 0).all() and (rows <= 192).all(), size
        assert np.isin(rows[:-1], (128, 192)).all() and (count == 1 or rows[-1] > 64), size


@interpreted
def test_the_schedule_has_a_row_for_each_block() -> None:
    sizes, layout = np.array([0, 1, 192, 193, 385, 12], np.int32), LayoutSpec(783, 1, 6)
    found = run_plan(plan_schedule(layout, 192, engine_target()), {"group_sizes": sizes})["schedule"]
    np.testing.assert_array_equal(found, reference.schedule(sizes, layout=layout, block_m=192), strict=True)
    blocks = [[0, 1], [0, 2], [0, 3], [1, 3], [0, 4], [1, 4], [2, 4], [0, 5]]
    assert found[: len(blocks)].tolist() == blocks and (found[len(blocks) :] == -1).all()


def launches(plan: LaunchPlan) -> list[tuple[Any, dict[str, Any]]]:
    """Kernel and arguments of both products."""
    steps = [step for step in plan.steps if isinstance(step, KernelLaunch)]
    return [(step.kernel, dict(step.arguments)) for step in steps if step.kernel.name.endswith(":matmul_ogs")]


@pytest.mark.parametrize("heights", [(128, 128), (128, 192), (192, 128), (192, 192)])
def test_a_height_for_each_product(heights: tuple[int, int]) -> None:
    plan = plan_moe(*moe_arguments(heights=heights), SM_90)
    names = {128: SM90_MATMUL_OGS, 192: SM90_TALL_MATMUL_OGS}
    assert [name for name, _ in launches(plan)] == [names[height] for height in heights]
    schedules = [arguments["schedule"].buffer for _, arguments in launches(plan)]
    assert schedules == [f"schedule_{height}" for height in heights]
    for height, schedule in zip(heights, schedules, strict=True):
        assert plan.spec(schedule).shape == (LayoutSpec(512, 2, 8).max_blocks(height), 2)
    assert len(plan.steps) == len(plan_moe(*moe_arguments(heights=(128, 128)), SM_90).steps), "no launch more"


@pytest.mark.parametrize("gate_layout", ["halves", "separate", "interleaved"])
def test_boxes_are_panels_where_gate_and_up_lie_apart(gate_layout: str) -> None:
    (_, first), (_, second) = launches(plan_moe(*moe_arguments(gate_layout), SM_90))
    columns = 256 if gate_layout == "interleaved" else 64
    assert first["weight_map"].box == (64, columns) and first["y_map"].box == (64, 64)
    if gate_layout == "separate":
        assert first["up_map"] == TensorMap("experts.up", (8 * 256, 192), 192, (64, 64))
    assert second["weight_map"].box == (64, 256) and second["y_map"].box == (64, 128)
    assert not {"pre", "pre_map", "gate_map"} & set(first)
    assert first["STAGES"] == second["STAGES"] == Constant(3)


def test_what_stores_the_pre_activation_refuses_it() -> None:
    x, experts, routing, spec = moe_arguments()
    with pytest.raises(InvalidInput, match="block_m 128 where the pre-activation is stored, as training does"):
        plan_moe(x, experts, routing, spec, SM_90, options=ForwardOptions(save=True))
    spec = moe_arguments(heights=(128, 192))[-1]
    kept = launches(plan_moe(x, experts, routing, spec, SM_90, options=ForwardOptions(save=True)))
    assert [name for name, _ in kept] == [SM90_MATMUL_OGS, SM90_TALL_MATMUL_OGS]


def test_a_backward_that_recomputes_has_lower_blocks() -> None:
    """To the forward's bits, which keeps no pre-activation and may have tall ones, chosen or given."""
    x, experts, routing, given = moe_arguments(heights=(192, 128))
    chosen = dataclasses.replace(given, recompute=True, tuning=None)
    for spec, forward, backward in (
        (dataclasses.replace(given, recompute=True), SM90_TALL_MATMUL_OGS, SM90_MATMUL_OGS),
        (chosen, SM90_SWAPPED_MATMUL_OGS, SM90_SWAPPED_MATMUL_OGS),
    ):
        first, _ = launches(plan_moe(x, experts, routing, spec, SM_90, options=ForwardOptions(save=True)))
        assert first[0] == forward
        operands = MoEOperands(x, experts, routing)
        again = launches(
            plan_moe_backward(OutputGradients(x), operands, spec, SM_90, options=BackwardOptions(wanted=("d_x",)))
        )[0]
        assert again[0] == backward and again[1]["pre"] == Pointer("pre_activation")


@pytest.mark.parametrize(
    ("change", "target", "reason"),
    [
        ({}, SM_90, None),
        ({"num_stages": 2}, SM_90, None),
        ({"num_stages": 4}, SM_90, "num_stages must be 2 to 3 "),
        ({"block_m": 256}, SM_90, "or the same with block_m 160 or 192, got"),
        ({"block_n": 128}, SM_90, "tiles are"),
        ({"group_m": 0}, SM_90, "group_m"),
        ({"family": "portable"}, SM_90, "block_m must be a power of two"),
        ({}, Target("cuda", 100, 148), "needs sm_90"),
    ],
)
def test_what_is_legal(change: dict[str, Any], target: Target, reason: str | None) -> None:
    layout, spec = LayoutSpec(40, 1, 4), MatmulSpec("in_out")
    operands = MatmulOperands(ArraySpec((40, 128), "bfloat16"), ArraySpec((4, 128, 256), "bfloat16"))
    problem, config = MatmulProblem(operands, layout, spec, target), dataclasses.replace(SECOND, **change)
    if reason is None:
        assert why_illegal(config, problem) is None
        return
    assert reason in str(why_illegal(config, problem))
    with pytest.raises(InvalidInput, match="config must be legal"):
        plan_matmul_ogs(operands, layout, spec, target, config=config)


def test_blocks_follow_the_mean_rows_of_a_group() -> None:
    """192 rows where most groups have 140 to 192, swapped operands where most have 100 to 160."""
    heights = {}
    for mean in (48, 100, 104, 128, 140, 160, 180, 192, 256, 8000):
        problem = plain_problem(mean * 128, 128, 2048, 768, target=SM_90)
        heights[mean] = heuristic_tile(problem).config.block_m
        assert why_illegal(heuristic_tile(problem).config, problem) is None
    assert [mean for mean, height in heights.items() if height == 192] == [160, 180]
    assert [mean for mean, height in heights.items() if height == 160] == [104, 128, 140]
    assert set(heights.values()) == {128, 160, 192}


def both(case: Case) -> tuple[np.ndarray, np.ndarray]:
    """(blocks of 192, blocks of 128) of one product on the GPU."""
    operands, layout, arrays = build(case)
    low = dataclasses.replace(config_of(case), group_m=4)
    found = [run_matmul(operands, layout, arrays, case.spec, config=config) for config in (tall(low), low)]
    return found[0], found[1]


@pytest.mark.gpu
@given(cases())
def test_matches_the_reference_and_blocks_of_128(case: Case) -> None:
    needs_sm_90()
    actual, low = both(case)
    assert actual.tobytes() == low.tobytes()
    operands, layout, arrays = build(case)
    expected = expected_matmul(operands, layout, arrays, case.spec)
    tolerance = matmul_tolerance(case.dtype, case.dtype, case.d, activation=case.spec.activation)
    assert_close(actual, expected, tolerance, label="y")


@pytest.mark.gpu
@pytest.mark.parametrize("rows", HEIGHTS)
@pytest.mark.parametrize("gather", ["row", "token"])
def test_every_height_of_a_group(rows: int, gather: str) -> None:
    """The only group that has rows; and again, when other multiprocessors compute the blocks."""
    needs_sm_90()
    spec = MatmulSpec("out_in", gather, "row", Activation("silu") if gather == "token" else None)
    case = Case(rows, 1, 4, 512, 640, "bfloat16", spec, "one_expert", bias="float32")
    actual, low = both(case)
    assert actual.tobytes() == low.tobytes()
    assert both(case)[0].tobytes() == actual.tobytes()
    operands, layout, arrays = build(case)
    tolerance = matmul_tolerance("bfloat16", "bfloat16", 512, activation=spec.activation)
    assert_close(actual, expected_matmul(operands, layout, arrays, case.spec), tolerance, label="y")


#: On layouts of our own, where whole chunks are stored by TMA; the third one with row weights, as products 2 are.
OWN = {name: dataclasses.replace(case, num_tokens=900) for name, case in KEEPING.items()} | {"weighted": Case(
    900, 2, 5, 256, 328, "bfloat16", MatmulSpec("in_out", "row", "row"), "some_absent", bias="float32", row_weight=True,
)}  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("name", OWN)
def test_layouts_of_our_own(name: str) -> None:
    """The bits of blocks of 128, and no row that no expert has is written."""
    needs_sm_90()
    case = OWN[name]
    operands, layout, arrays = build(case)
    low, filled = config_of(case), filled_rows(layout, arrays)
    found = [run_composed(operands, layout, arrays, case.spec, config, ("y",))["y"] for config in (tall(low), low)]
    assert found[0].tobytes() == found[1].tobytes()
    assert (found[0][~filled].view(np.uint16) == 0xFFFF).all()


@pytest.mark.gpu
@pytest.mark.parametrize("gate_layout", ["halves", "separate", "interleaved"])
@pytest.mark.parametrize("other", [160, 192])
def test_whole_forwards(other: int, gate_layout: str) -> None:
    """Either height for either product, of swapped operands too: the same bits."""
    needs_sm_90()
    target, random, found = engine_target(), np.random.default_rng(0), []
    arrays: dict[str, np.ndarray] = {}
    for heights in ((128, 128), (128, other), (other, 128), (other, other)):
        plan = plan_moe(*moe_arguments(gate_layout, heights, tokens=700), target)
        for buffer in plan.inputs:
            if buffer.name not in arrays:
                arrays[buffer.name] = random_array(random, buffer.spec.shape, buffer.spec.dtype)
        found.append(run_plan(plan, arrays)["output"])
    assert np.isfinite(found[0].astype(np.float32)).all()
    assert all(output.tobytes() == found[0].tobytes() for output in found)
