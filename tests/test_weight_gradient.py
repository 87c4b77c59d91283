"""Gradients of weights and biases, ragged and dense, against their NumPy twins."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_core import InvalidInput, Unsupported
from moe_core.arrays import ArraySpec
from moe_core.operands import map_arrays, named_arrays
from moe_core.parity.tolerance import assert_close, matmul_tolerance
from moe_core.plan import KernelLaunch
from moe_core.reference import backward_matmul as reference
from moe_core.reference.routing import layout as make_layout
from moe_core.specs import LayoutSpec
from moe_core.target import Target
from moe_core.weight_gradient import WeightGradientOperands, WeightGradientSpec, plan_weight_gradient
from tests import strategies
from tests.harness import engine_target, run_plan
from tests.strategies import RoutingCase, draw_array, hard_routing

H200 = Target("cuda", 90, 132)


def spec_of(array: np.ndarray) -> ArraySpec:
    return ArraySpec(array.shape, array.dtype.name)


def run_op(
    operands: WeightGradientOperands,
    layout: LayoutSpec | None,
    spec: WeightGradientSpec,
    groups: dict[str, np.ndarray] | None = None,
) -> dict[str, np.ndarray]:
    plan = plan_weight_gradient(map_arrays(operands, spec_of), layout, spec, engine_target())
    return run_plan(plan, dict(named_arrays(operands)) | (groups or {}))


def columns(array: np.ndarray, taken: tuple[int, int] | None) -> np.ndarray:
    return array if taken is None else array[:, taken[0] : taken[0] + taken[1]]


def expected_of(
    operands: WeightGradientOperands,
    layout: LayoutSpec | None,
    spec: WeightGradientSpec,
    groups: dict[str, np.ndarray] | None = None,
) -> dict[str, np.ndarray]:
    """What the twins make of one layer."""
    left, right = columns(operands.left, spec.left_columns), columns(operands.right, spec.right_columns)
    if operands.row_mask is not None:
        left, right = left[operands.row_mask], right[operands.row_mask]
    found, groups = {}, groups or {}
    if spec.out_dtype is not None:
        found["d_weight"] = reference.weight_gradient(
            left, right, into=operands.into, layout=layout, gather=spec.gather, out_dtype=spec.out_dtype, **groups
        )
    if spec.bias_side is not None:
        side, gather = (left, spec.gather[0]) if spec.bias_side == "left" else (right, spec.gather[1])
        if layout is None:
            found["d_bias"] = side.astype(np.float32).sum(axis=0).astype(spec.bias_dtype)
        else:
            found["d_bias"] = reference.bias_gradient(
                side, row_weight=operands.row_weight, layout=layout, gather=gather, out_dtype=spec.bias_dtype, **groups
            )
    return found


def check(
    operands: WeightGradientOperands,
    layout: LayoutSpec | None,
    spec: WeightGradientSpec,
    groups: dict[str, np.ndarray] | None = None,
) -> dict[str, np.ndarray]:
    found, expected = run_op(operands, layout, spec, groups), expected_of(operands, layout, spec, groups)
    assert set(found) == set(expected)
    length = operands.left.shape[0] if layout is None else layout.num_slots
    for name, wanted in expected.items():
        assert found[name].dtype == wanted.dtype, name
        tolerance = matmul_tolerance("bfloat16", wanted.dtype.name, max(length, 1))
        # Columns of experts with few rows are sums of little: an expert's own rms is their scale.
        rms = np.sqrt(np.square(wanted.astype(np.float64)).mean(axis=tuple(range(1, wanted.ndim)), keepdims=True))
        assert_close(found[name], wanted, tolerance, name, scale=np.maximum(rms, np.abs(wanted.astype(np.float64))))
    return found


@dataclasses.dataclass(frozen=True, eq=False)
class Ragged:
    """A layout with two operands indexed as told; whatever no row of an expert reads is NaN."""

    layout: LayoutSpec
    groups: dict[str, np.ndarray]
    operands: WeightGradientOperands

    @classmethod
    def draw(
        cls, case: RoutingCase, gather: tuple[str, str], shape: tuple[int, int], dtype: str, seed: int = 0
    ) -> Ragged:
        rng = np.random.default_rng(seed)
        layout = case.layout()
        sizes, start, slot_of_row, row_of_slot, _ = make_layout(
            case.ids, case.expert_map, case.token_mask, layout=layout
        )
        rows = {"row": layout.capacity, "slot": layout.num_slots, "token": layout.num_tokens}
        slots = np.flatnonzero(row_of_slot >= 0)
        read = {"row": row_of_slot[slots], "slot": slots, "token": slots // layout.top_k}
        sides = []
        for side, width in zip(gather, shape, strict=True):
            array = draw_array(rng, (rows[side], width), dtype)
            array[np.setdiff1d(np.arange(rows[side]), read[side])] = np.nan
            sides.append(array)
        weight = case.weights.copy().reshape(-1)
        weight[row_of_slot < 0] = np.nan
        groups = {"group_sizes": sizes, "group_start": start, "slot_of_row": slot_of_row}
        return cls(layout, groups, WeightGradientOperands(*sides, row_weight=weight.reshape(case.weights.shape)))

    def check(self, spec: WeightGradientSpec, **changes: np.ndarray | None) -> dict[str, np.ndarray]:
        operands = dataclasses.replace(self.operands, **changes)
        return check(operands, self.layout, spec, self.groups)


def many_rows(num_experts: int, num_tokens: int, seed: int = 0) -> RoutingCase:
    """Experts of different size, one of them empty, whose rows fill stages and do not."""
    rng = np.random.default_rng(seed)
    case = hard_routing("missing_ids")
    ids = rng.integers(0, max(num_experts - 1, 1), (num_tokens, 2)).astype(np.int32)
    ids[rng.random(ids.shape) < 0.1] = -1
    weights = rng.random(ids.shape).astype(np.float32)
    return dataclasses.replace(
        case, ids=ids, weights=weights, num_experts=num_experts, expert_map=None, token_mask=None
    )


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
    operands = dataclasses.replace(drawn.operands, layer=np.array([layer], np.int32))
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
    left, right = draw_array(rng, (1500, 8)), draw_array(rng, (1500, 20))
    into, layer = draw_array(rng, (2, 8, 20)), np.array([1], np.int32)
    operands = WeightGradientOperands(left, right, layer=layer, into=into)
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


def test_parts_fill_the_device() -> None:
    """A router's gradient has few tiles and many rows; an expert's has tiles enough."""
    x, d_logits = ArraySpec((16384, 2048), "bfloat16"), ArraySpec((16384, 128), "float32")
    spec = WeightGradientSpec("bfloat16", bias_side="right")
    plan = plan_weight_gradient(WeightGradientOperands(x, d_logits), None, spec, H200)
    (product, *sums) = [step for step in plan.steps if isinstance(step, KernelLaunch)]
    assert product.grid[1] > 1 and product.grid[0] * product.grid[1] <= 4 * H200.num_sms
    assert [step.kernel for step in sums] == ["weight_gradient:sum_parts"] * 2
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
