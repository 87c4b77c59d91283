"""Swapped operands of the `sm90` family: what is planned and refused, and that results are those of its blocks of 128,
bit by bit, on an sm_90 GPU."""

from __future__ import annotations

import dataclasses
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given

from moe_core import InvalidInput
from moe_core.base.arrays import ArraySpec
from moe_core.ops.matmul.forward import plan_matmul_ogs
from moe_core.ops.matmul.sm90.plan import SM90_SWAPPED_MATMUL_OGS
from moe_core.ops.moe.forward import plan_moe
from moe_core.ops.moe.options import ForwardOptions
from moe_core.parity.tolerance import assert_close, matmul_tolerance
from moe_core.plan.steps import KernelLaunch, TensorMap
from moe_core.specs import Activation, LayoutSpec, MatmulSpec, TileConfig
from moe_core.specs.operands import MatmulOperands
from tests.support.matmul.cases import Case, build, expected_matmul, run_matmul
from tests.support.matmul.composed import filled_rows, run_composed
from tests.support.matmul.sm90 import ACTIVATIONS, SM_90, cases, config_of, moe_arguments, needs_sm_90, swapped

#: Rows around every height that has a loop, and around the cuts of several blocks.
HEIGHTS = sorted({height + more for height in (*range(16, 96, 16), *range(96, 161, 8)) for more in (-1, 0, 1)} - {15})
HEIGHTS += [1, 8, 168, 304, 320, 321, 480, 481, 1500]


@pytest.mark.parametrize("save", [False, True])
@pytest.mark.parametrize("gate_layout", ["halves", "separate", "interleaved"])
def test_both_products_are_planned(gate_layout: str, save: bool) -> None:
    """Training keeps the pre-activation in the same blocks. Boxes are 32 rows of 64 columns, weights as in `matmul`."""
    plan = plan_moe(*moe_arguments(gate_layout, (160, 160)), SM_90, options=ForwardOptions(save=save))
    first, second = [
        cast("dict[str, Any]", dict(step.arguments))
        for step in plan.steps
        if isinstance(step, KernelLaunch) and step.kernel == SM90_SWAPPED_MATMUL_OGS
    ]
    assert first["schedule"].buffer == second["schedule"].buffer == "schedule_160"
    assert second["x_map"].box == (32, 64) and second["y_map"].box == (32, 64) == first["y_map"].box
    assert first["weight_map"].box == (64, 256 if gate_layout == "interleaved" else 128)
    assert isinstance(first["pre_map"], TensorMap) == save
    assert "(8 to 160) x 16 of swapped operands" in plan.explain()


def test_row_weights_and_gathered_rows_leave_room_for_three_stages() -> None:
    layout, rows = LayoutSpec(40, 1, 4), ArraySpec((40,), "float32")
    operands = MatmulOperands(ArraySpec((40, 128), "bfloat16"), ArraySpec((4, 128, 256), "bfloat16"), row_weight=rows)
    config = TileConfig(160, 256, 64, 4, 4, 4, "sm90")
    with pytest.raises(InvalidInput, match="num_stages must be 2 to 3"):
        plan_matmul_ogs(operands, layout, MatmulSpec("in_out", "token"), SM_90, config=config)
    plan_matmul_ogs(operands, layout, MatmulSpec("in_out", "row"), SM_90, config=config)
    with pytest.raises(InvalidInput, match="or the same with block_m 160 or 192, got"):
        config = dataclasses.replace(config, block_m=144)
        plan_matmul_ogs(operands, layout, MatmulSpec("in_out", "row"), SM_90, config=config)


def both(case: Case) -> tuple[np.ndarray, np.ndarray]:
    """(swapped operands, blocks of 128) of one product on the GPU."""
    operands, layout, arrays = build(case)
    low = dataclasses.replace(config_of(case), group_m=4)
    results = [run_matmul(operands, layout, arrays, case.spec, config=config) for config in (swapped(case), low)]
    return results[0], results[1]


def check(case: Case) -> None:
    actual, low = both(case)
    assert actual.tobytes() == low.tobytes()
    operands, layout, arrays = build(case)
    tolerance = matmul_tolerance(case.dtype, case.dtype, case.d, activation=case.spec.activation)
    assert_close(actual, expected_matmul(operands, layout, arrays, case.spec), tolerance, label="y")


@pytest.mark.gpu
@given(cases())
def test_matches_the_reference_and_blocks_of_128(case: Case) -> None:
    needs_sm_90()
    check(case)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", HEIGHTS)
def test_every_height_of_a_group(rows: int) -> None:
    """The only group that has rows, twice, because buffers of other tiles come before in the second run."""
    needs_sm_90()
    for gather, activation in (("row", None), ("token", Activation("swiglu_oai", gate_layout="interleaved"))):
        spec = MatmulSpec("out_in" if rows % 2 else "in_out", gather, "row", activation)
        case = Case(rows, 1, 4, 512, 640, "bfloat16", spec, "one_expert", bias="float32")
        check(case)
        actual, low = both(case)
        assert actual.tobytes() == low.tobytes()


@pytest.mark.gpu
@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
def test_layouts_of_our_own(activation: Activation | None) -> None:
    """Whole pieces are stored by TMA, and no row that no expert has is written. Pre-activations too."""
    needs_sm_90()
    for n, in_out in ((72, True), (328, False), (640, True), (1000, False)):
        spec = MatmulSpec("in_out" if in_out else "out_in", "row" if activation is None else "token", "row", activation)
        weighted = activation is None
        case = Case(
            900, 2, 5, 256, n, "bfloat16", spec, "some_absent", bias="float32", row_weight=weighted, stacked=n == 72
        )
        operands, layout, arrays = build(case)
        outputs = ("y",) if activation is None else ("y", "pre")
        filled = filled_rows(layout, arrays)
        found, low = (
            run_composed(operands, layout, arrays, spec, config, outputs) for config in (swapped(case), config_of(case))
        )
        for name in outputs:
            assert found[name].tobytes() == low[name].tobytes(), (name, n)
            assert (found[name][~filled].view(np.uint16) == 0xFFFF).all(), (name, n)
