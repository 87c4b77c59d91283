"""Tiles of 256 rows for prepacked weights: what is legal and explained, and on an sm_90 GPU the bits of lower tiles."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from moe_core.base.arrays import ArraySpec
from moe_core.base.target import Target
from moe_core.formats import MXFP4, format_named
from moe_core.ops.matmul.forward import plan_matmul_ogs
from moe_core.ops.matmul.sm90_packed.plan import mixed_input_config, why_illegal_mixed_input
from moe_core.parity.tolerance import assert_close, quantized_matmul_tolerance
from moe_core.plan.steps import Constant, KernelLaunch, TensorMap
from moe_core.specs import Activation, LayoutSpec, MatmulSpec, MatmulTuning
from moe_core.specs.operands import MatmulOperands, map_arrays
from tests.support.compile_gate.prepacked_plans import EPILOGUES, INTEGERS, tall_config, tiled_weight
from tests.support.harness import engine_target, spec_of
from tests.support.matmul.sm90 import SM_90, needs_sm_90
from tests.support.matmul.sm90_packed import draw_product, prepacked, run_product
from tests.support.strategies import layout_arrays

#: Rows of experts, on each side of every height that a tile is multiplied by, of one tile and of several.
ROWS = (
    1, 31, 33, 63, 64, 65, 96, 97, 127, 128, 129, 160, 161, 191, 192, 193, 255, 256, 257, 300, 320, 417, 512, 0, 513,
)  # fmt: skip
FORMATS = (("mxfp4", None), *INTEGERS)


@pytest.mark.parametrize(("name", "scale_dtype"), FORMATS)
@pytest.mark.parametrize("activation", [None, Activation("silu")])
def test_configurations(name: str, scale_dtype: str | None, activation: Activation | None) -> None:
    """Every format has room for two stages and more; others are refused with the reason."""
    spec = MatmulSpec("out_in", "token", activation=activation)
    format = MXFP4 if name == "mxfp4" else format_named(name)
    weight = tiled_weight((8, 256, 768), activation, format, scale_dtype)
    config = tall_config(weight, spec)
    assert why_illegal_mixed_input(config, weight, spec, SM_90) is None
    assert config.num_stages >= (5 if "int8" in name else 3 if name in ("mxfp4", "int4_g128", "int4_row_zp") else 2)
    for change, reason in (
        ({"block_m": 192}, "block_m must be one of 16, 32, 64, 128, 256, got 192"),
        ({"block_n": 2 * config.block_n}, f"block_n must be {config.block_n}, 2 blocks of weight rows"),
        ({"block_k": 256}, "block_k must be"),
        ({"num_warps": 8}, "num_warps must be 4"),
        ({"num_stages": 1}, "num_stages must be at least 2: tiles of 256 rows decode a stage ahead, got 1"),
        ({"num_stages": config.num_stages + 1}, f"num_stages must be at most {config.num_stages}"),
    ):
        found = why_illegal_mixed_input(dataclasses.replace(config, **change), weight, spec, SM_90)
        assert found is not None and reason in found


def test_plans() -> None:
    """Rows in layout order come in boxes of 64, so that those that do not exist are not loaded."""
    layout = LayoutSpec(4096, 4, 16)
    for gather, warps in (("row", 1), ("token", 4)):
        weight, spec = tiled_weight((16, 256, 384), None), MatmulSpec("out_in", gather)
        rows = layout.capacity if gather == "row" else layout.num_tokens
        config = tall_config(weight, spec)
        spec = dataclasses.replace(spec, tuning=MatmulTuning(config))
        plan = plan_matmul_ogs(MatmulOperands(ArraySpec((rows, 384), "bfloat16"), weight), layout, spec, SM_90)
        (launch,) = [
            step for step in plan.steps if isinstance(step, KernelLaunch) and "mixed_input" in step.kernel.name
        ]
        found = dict(launch.arguments)
        wanted = {"BLOCK_M": 256, "PAIRS": 2, "PRODUCER_WARPS": warps, "REGISTERS": None}
        assert {name: found[name] for name in wanted} == {name: Constant(value) for name, value in wanted.items()}
        assert launch.grid[0] == SM_90.num_sms
        box = found["x_map"].box if isinstance(found["x_map"], TensorMap) else None
        assert box == ((64, 64) if gather == "row" else None)
        assert "wgmma of 64 weight rows and 32 to 256 tokens; no split" in plan.explain()
        assert f"{config}" in plan.explain()


def experts_with(rows: tuple[int, ...], seed: int) -> tuple[LayoutSpec, dict[str, np.ndarray]]:
    """A layout in which expert e has rows[e] of the slots, in no order; a few slots have no expert."""
    ids = np.concatenate([np.repeat(np.arange(len(rows)), rows), np.full(7, -1)]).astype(np.int32)
    np.random.default_rng(seed).shuffle(ids)
    layout = LayoutSpec(len(ids), 1, len(rows))
    return layout, layout_arrays(ids[:, None], layout)


@pytest.mark.gpu
@pytest.mark.parametrize("number", range(len(EPILOGUES)))
def test_matches_the_reference_and_lower_tiles(number: int) -> None:
    """Every height, sizes that end inside of blocks; rows that the arrays hide from the layout stay hidden."""
    needs_sm_90()
    layout, arrays = experts_with(ROWS, number)
    operands, spec = draw_product(EPILOGUES[number], layout, 416, 352, number)
    expected = run_product(operands, layout, arrays, spec, Target("reference"))
    ours = prepacked(operands, spec)
    weight = map_arrays(ours.weight, spec_of)
    hidden = dict(arrays)
    hidden["slot_of_row"] = arrays["slot_of_row"].copy()
    hidden["slot_of_row"][5::11] = np.where(np.arange(hidden["slot_of_row"][5::11].size) % 2, -1, layout.num_slots + 3)
    found = {}
    for height in (128, 256):
        config = tall_config(weight, spec) if height == 256 else mixed_input_config(48.5, weight, spec, SM_90)
        assert config.block_m == height
        tuned = dataclasses.replace(spec, tuning=MatmulTuning(config))
        found[height] = [run_product(ours, layout, given, tuned, engine_target()) for given in (arrays, hidden)]
    tolerance = quantized_matmul_tolerance("bfloat16", 416, MXFP4, spec)
    assert_close(found[256][0], expected, tolerance, label="y")
    for low, tall in zip(found[128], found[256], strict=True):
        np.testing.assert_array_equal(tall.view(np.uint16), low.view(np.uint16))


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "scale_dtype"), INTEGERS)
def test_integers_match_lower_tiles(name: str, scale_dtype: str) -> None:
    """Reductions of an odd number of stages and of a single one."""
    needs_sm_90()
    layout, arrays = experts_with(ROWS, 3)
    group = format_named(name).group_columns or 128
    for number, d in ((0, 3 * max(128, group)), (4, 128)):
        operands, spec = draw_product(EPILOGUES[number], layout, d, 96, 1, format_named(name), scale_dtype)
        ours = prepacked(operands, spec)
        weight = map_arrays(ours.weight, spec_of)
        found = []
        for config in (mixed_input_config(48.5, weight, spec, SM_90), tall_config(weight, spec)):
            tuned = dataclasses.replace(spec, tuning=MatmulTuning(config))
            found.append(run_product(ours, layout, arrays, tuned, engine_target()).view(np.uint16))
        np.testing.assert_array_equal(found[1], found[0])
