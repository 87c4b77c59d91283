"""Gradients of weights and biases, ragged and dense, against their NumPy twins."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_core import InvalidInput, Unsupported
from moe_core.base.arrays import ArraySpec
from moe_core.base.target import Target
from moe_core.ops.matmul.sm90.weight_gradient_plan import SM90_GRADIENT_TILE
from moe_core.ops.matmul.weight_gradient import SUM_PARTS, _faster_family, plan_weight_gradient
from moe_core.parity.tolerance import assert_close, matmul_tolerance
from moe_core.plan.steps import KernelLaunch
from moe_core.specs import LayoutSpec, TileConfig, WeightGradientSpec
from moe_core.specs.operands import WeightGradientOperands
from tests.support import strategies
from tests.support.harness import H200
from tests.support.matmul.weight_gradient import Ragged, run_op
from tests.support.strategies import draw_array, hard_routing


@pytest.mark.parametrize("name", strategies.HARD_ROUTINGS)
def test_hard_routings(name: str) -> None:
    drawn = Ragged.draw(hard_routing(name), ("token", "row"), (20, 33), "float32")
    found = drawn.check(WeightGradientSpec("float32", ("token", "row"), bias_side="right"))
    for gradient in found.values():
        assert np.isfinite(gradient).all()
        assert not gradient[drawn.groups["group_sizes"] == 0].any(), "an expert without rows"


@given(st.data())
def test_layouts_sides_and_dtypes(data: st.DataObject) -> None:
    case = data.draw(strategies.routings(max_tokens=24))
    gather = (data.draw(st.sampled_from(("row", "slot", "token"))), data.draw(st.sampled_from(("row", "token"))))
    dtype, out_dtype = data.draw(strategies.matmul_dtypes()), data.draw(strategies.matmul_dtypes())
    shape = (data.draw(st.sampled_from((1, 17, 130))), data.draw(st.sampled_from((1, 40, 260))))
    bias_side = data.draw(st.sampled_from((None, "left", "right")))
    drawn = Ragged.draw(case, gather, shape, dtype, data.draw(strategies.seeds()))
    weighted = {} if bias_side is not None and data.draw(st.booleans()) else {"row_weight": None}
    drawn.check(WeightGradientSpec(out_dtype, gather, bias_side=bias_side, bias_dtype=dtype), **weighted)


def test_columns_of_one_side() -> None:
    drawn = Ragged.draw(hard_routing("missing_ids"), ("row", "token"), (12, 40), "float32")
    for taken in ((0, 20), (20, 20), (7, 1)):
        spec = WeightGradientSpec("float32", ("row", "token"), right_columns=taken, bias_side="right")
        drawn.check(spec)
        drawn.check(dataclasses.replace(spec, left_columns=(3, 9), bias_side="left"))


def test_the_bias_alone_reads_nothing_else() -> None:
    drawn = Ragged.draw(hard_routing("missing_ids"), ("row", "token"), (12, 40), "float32")
    untouched = np.full_like(drawn.operands.left, np.nan)
    drawn.check(WeightGradientSpec(None, ("row", "token"), bias_side="right"), left=untouched)


def test_added_to_what_is_there() -> None:
    drawn = Ragged.draw(hard_routing("missing_ids"), ("token", "row"), (12, 40), "bfloat16")
    into = draw_array(np.random.default_rng(1), (drawn.layout.num_experts, 12, 40))
    spec = WeightGradientSpec("float32", ("token", "row"))
    found = drawn.check(spec, into=into, row_weight=None)
    alone = drawn.check(spec, row_weight=None)
    np.testing.assert_array_equal(found["d_weight"], into + alone["d_weight"])


@pytest.mark.parametrize("layer", [0, 2, -1, 3])
def test_one_layer_of_a_stack(layer: int) -> None:
    drawn = Ragged.draw(hard_routing("missing_ids"), ("token", "row"), (12, 40), "float32")
    spec = WeightGradientSpec("float32", ("token", "row"), bias_side="right")
    alone = drawn.check(spec)
    operands = dataclasses.replace(drawn.operands, layer_index=np.array([layer], np.int32))
    found = run_op(operands, drawn.layout, dataclasses.replace(spec, num_layers=3), drawn.groups)
    for name, gradient in alone.items():
        wanted = np.zeros((3, *gradient.shape), np.float32)
        if 0 <= layer < 3:
            wanted[layer] = gradient
        np.testing.assert_array_equal(found[name], wanted, name)


@pytest.mark.parametrize("dtypes", [("bfloat16", "float32"), ("float32", "bfloat16"), ("float16", "float32")], ids=str)
@pytest.mark.parametrize("rows", [0, 1, 63, 2000])
def test_dense_of_mixed_dtypes_is_exact_to_fp32(dtypes: tuple[str, str], rows: int) -> None:
    """As the router's: the fp32 side counts with all its bits."""
    rng = np.random.default_rng(0)
    left, right = (draw_array(rng, (rows, width), dtype) for width, dtype in zip((24, 12), dtypes, strict=True))
    mask = rng.random(rows) < 0.7
    left[~mask], right[~mask] = np.nan, np.inf
    operands = WeightGradientOperands(left, right, row_mask=mask)
    found = run_op(operands, None, WeightGradientSpec("float32", bias_side="right"))
    exact = left[mask].astype(np.float64).T @ right[mask].astype(np.float64)
    tolerance = matmul_tolerance("float32", "float32", max(rows, 1))
    rms = np.sqrt(np.square(exact).mean()) if rows else 0.0
    assert_close(found["d_weight"], exact.astype(np.float32), tolerance, "d_weight", scale=np.full(exact.shape, rms))
    sums = right[mask].astype(np.float64).sum(axis=0).astype(np.float32)
    assert_close(found["d_bias"], sums, tolerance, "d_bias", scale=np.full(sums.shape, max(np.abs(sums).max(), 1e-30)))


def test_dense_in_parts_of_a_stack_added_to_what_is_there() -> None:
    rng = np.random.default_rng(0)
    # The last part is shorter.
    left, right = draw_array(rng, (1501, 8)), draw_array(rng, (1501, 20))
    into, layer = draw_array(rng, (2, 8, 20)), np.array([1], np.int32)
    operands = WeightGradientOperands(left, right, layer_index=layer, into=into)
    found = run_op(operands, None, WeightGradientSpec("float32", num_layers=2))["d_weight"]
    np.testing.assert_array_equal(found[0], into[0])
    alone = run_op(WeightGradientOperands(left, right), None, WeightGradientSpec("float32"))["d_weight"]
    np.testing.assert_array_equal(found[1], into[1] + alone)


def test_two_runs_are_bitwise_equal() -> None:
    drawn = Ragged.draw(hard_routing("missing_ids"), ("token", "row"), (20, 33), "bfloat16")
    spec = WeightGradientSpec("float32", ("token", "row"), bias_side="right")
    first, second = (run_op(drawn.operands, drawn.layout, spec, drawn.groups) for _ in range(2))
    for name in first:
        np.testing.assert_array_equal(first[name], second[name])


def test_a_part_has_eight_steps_at_least() -> None:
    """One part where a second would be shorter; fewer steps would only move work into the sum of parts."""
    for rows, parts in ((15 * 64, 1), (16 * 64, 2)):
        operands = WeightGradientOperands(ArraySpec((rows, 32), "bfloat16"), ArraySpec((rows, 32), "bfloat16"))
        plan = plan_weight_gradient(operands, None, WeightGradientSpec("float32"), Target("interpreter"))
        assert len(plan.steps) == parts, rows


def test_the_sm90_family_is_taken_where_its_tiles_are_not_mostly_padding() -> None:
    """Where they cover less than twice the area that the portable ones do."""
    height, width = SM90_GRADIENT_TILE
    spec, tile, layout = WeightGradientSpec("bfloat16"), TileConfig(height // 2, width // 4, 64), LayoutSpec(4096, 1, 8)
    found = [
        _faster_family(layout, spec, shape, tile)
        for shape in ((height, width), (height, 3 * width // 4), (height, width // 2), (height // 2, width))
    ]
    assert found == ["sm90", "sm90", "portable", "portable"]
    few = [_faster_family(LayoutSpec(rows, 1, 8), spec, (height, width), tile) for rows in (511, 512)]
    assert few == ["portable", "sm90"]


def test_parts_fill_the_device() -> None:
    """A router's gradient has few tiles and many rows; an expert's has tiles enough."""
    x, d_logits = ArraySpec((16384, 2048), "bfloat16"), ArraySpec((16384, 128), "float32")
    spec = WeightGradientSpec("bfloat16", bias_side="right")
    plan = plan_weight_gradient(WeightGradientOperands(x, d_logits), None, spec, H200)
    (product, *sums) = [step for step in plan.steps if isinstance(step, KernelLaunch)]
    assert product.grid[1] > 1 and product.grid[0] * product.grid[1] <= 4 * H200.num_sms
    assert [step.kernel for step in sums] == [SUM_PARTS] * 2
    wide = ArraySpec((16384, 4096), "bfloat16")
    assert len(plan_weight_gradient(WeightGradientOperands(x, wide), None, spec, H200).steps) == 1


LAYOUT = LayoutSpec(4, 2, 3)
ROWS, TOKENS = ArraySpec((8, 16), "float32"), ArraySpec((4, 16), "float32")


@pytest.mark.parametrize(
    ("operands", "layout", "spec", "message"),
    [
        ((ROWS, TOKENS), None, WeightGradientSpec("float32"), r"right must be \[8, right\]"),
        ((TOKENS, ROWS), LAYOUT, WeightGradientSpec("float32"), r"left must be \[8, left\]"),
        ((ROWS, ROWS), None, WeightGradientSpec("float32", ("row", "token")), "gather must be"),
        ((ROWS, ROWS), None, WeightGradientSpec("float32", right_columns=(10, 7)), "right_columns must lie within 16"),
        ((ROWS, ROWS), LAYOUT, WeightGradientSpec("float32", num_layers=2), "num_layers must be 1 without layer"),
    ],
)
def test_wrong_operands(operands: tuple, layout: LayoutSpec | None, spec: WeightGradientSpec, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        plan_weight_gradient(WeightGradientOperands(*operands), layout, spec, Target("interpreter"))


def test_wrong_masks_weights_and_options() -> None:
    target, spec = Target("interpreter"), WeightGradientSpec("float32")
    weight, mask = ArraySpec((8,), "float32"), ArraySpec((8,), "bool")
    with pytest.raises(InvalidInput, match="row_weight must be None"):
        plan_weight_gradient(WeightGradientOperands(ROWS, ROWS, row_weight=weight), LAYOUT, spec, target)
    with pytest.raises(InvalidInput, match="row_mask must be None with a layout"):
        plan_weight_gradient(WeightGradientOperands(ROWS, ROWS, row_mask=mask), LAYOUT, spec, target)
    with pytest.raises(InvalidInput, match="out_dtype must be a dtype"):
        WeightGradientSpec(None)
    with pytest.raises(InvalidInput, match="gather must be one of"):
        WeightGradientSpec("float32", ("row", "expert"))
    with pytest.raises(Unsupported, match="compiled targets"):
        plan_weight_gradient(WeightGradientOperands(ROWS, ROWS), LAYOUT, spec, Target("reference"))
