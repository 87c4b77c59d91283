"""Layouts whose arrays say what cannot be, in the kernels of sm_90: nothing outside of any buffer is written, and the
kernel ends. (The portable kernel's are in tests/ops/matmul/test_forward.py.)"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest

from moe_core.ops.matmul.sm90_packed.few_rows_plan import few_rows_config
from moe_core.ops.matmul.sm90_packed.plan import mixed_input_config
from moe_core.specs import LayoutSpec, MatmulSpec, MatmulTuning
from moe_core.specs.operands import map_arrays
from tests.support.compile_gate.prepacked_plans import EPILOGUES, tall_config
from tests.support.harness import engine_target, spec_of
from tests.support.matmul.cases import Case, build, run_matmul
from tests.support.matmul.sm90 import SM_90, config_of, needs_sm_90, swapped, tall
from tests.support.matmul.sm90_packed import HEIGHTS, draw_product, prepacked, run_product
from tests.support.strategies import draw_ids, layout_arrays

pytestmark = pytest.mark.gpu

Arrays = dict[str, np.ndarray]


def lies(arrays: Arrays, rows: int) -> dict[str, Arrays]:
    """The layout with one array changed; sizes and starts of three groups at most."""

    def changed(name: str, place: slice, values: object) -> Arrays:
        array = arrays[name].copy()
        array[place] = values
        return arrays | {name: array}

    first = slice(0, 1)
    return {
        "groups start at the last row": changed("group_start", slice(None), rows - 1),
        "groups start before the rows": changed("group_start", slice(None), -(2**31)),
        "groups start behind the rows": changed("group_start", slice(None), 2**31 - 1),
        "a group starts in the middle": changed("group_start", first, rows // 2 + 3),
        "a huge group": changed("group_sizes", first, 2**31 - 1),
        "a negative group": changed("group_sizes", first, -(2**31)),
        "a group longer than the rows": changed("group_sizes", first, rows + 1),
        "slots outside": changed("slot_of_row", slice(0, None, 3), 2**31 - 1),
        "negative slots": changed("slot_of_row", slice(0, None, 5), -(2**31)),
    }


def run_all(run: Callable[[Arrays], np.ndarray], arrays: Arrays, rows: int) -> None:
    """`run` looks at the guard zones; the arrays as they are give the same before and after."""
    before = run(arrays)
    for wrong in lies(arrays, rows).values():
        run(wrong)
    np.testing.assert_array_equal(run(arrays), before)


@pytest.mark.parametrize("height", [128, 160, 192])
@pytest.mark.parametrize("scatter", ["row", "slot"])
@pytest.mark.parametrize("gather", ["row", "token", "slot"])
@pytest.mark.parametrize("gated", [True, False])
def test_16_bit_weights(gated: bool, gather: str, scatter: str, height: int) -> None:
    needs_sm_90()
    activation = EPILOGUES[0][0] if gated else None
    spec = MatmulSpec("in_out", gather, scatter, activation)
    case = Case(400, 2, 3, 192, 264, "bfloat16", spec, "uniform", row_weight=True)
    operands, layout, arrays = build(case)
    config = {128: config_of(case), 160: swapped(case), 192: tall(config_of(case))}[height]
    run_all(lambda given: run_matmul(operands, layout, given, spec, config=config), arrays, layout.capacity)


@pytest.mark.parametrize("tile", ["few_rows", *map(str, HEIGHTS), "256"])
@pytest.mark.parametrize("number", [0, 1, 4])
def test_prepared_weights(number: int, tile: str) -> None:
    needs_sm_90()
    layout = LayoutSpec(700, 2, 3)
    arrays = layout_arrays(draw_ids("uniform", 700, 2, 3, number), layout)
    operands, spec = draw_product(EPILOGUES[number], layout, 384, 320, number)
    operands = prepacked(operands, spec)
    weight = map_arrays(operands.weight, spec_of)
    if tile == "few_rows":
        config = few_rows_config(weight, spec)
    else:
        config = (
            tall_config(weight, spec) if tile == "256" else mixed_input_config(HEIGHTS[int(tile)], weight, spec, SM_90)
        )
        assert config.block_m == int(tile)
    tuned = dataclasses.replace(spec, tuning=MatmulTuning(config))
    run_all(lambda given: run_product(operands, layout, given, tuned, engine_target()), arrays, layout.capacity)
