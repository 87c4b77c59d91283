"""Cases of the weight gradient: ragged groups, the run on an engine, and the reference's answer."""

from __future__ import annotations

import dataclasses

import numpy as np

from moe_core.ops.matmul.reference import backward as reference
from moe_core.ops.matmul.reference.rows import planned_rows
from moe_core.ops.matmul.weight_gradient import plan_weight_gradient
from moe_core.ops.routing.reference import layout as make_layout
from moe_core.parity.tolerance import assert_close, matmul_tolerance
from moe_core.specs import LayoutSpec, WeightGradientSpec
from moe_core.specs.operands import WeightGradientOperands, map_arrays, named_arrays
from tests.support.harness import engine_target, run_plan, spec_of
from tests.support.strategies import RoutingCase, draw_array, hard_routing


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
    found, rows = {}, planned_rows(layout, groups or {}, len(left))
    if spec.out_dtype is not None:
        found["d_weight"] = reference.weight_gradient(
            left, right, rows, gather=spec.gather, out_dtype=spec.out_dtype, into=operands.into
        )
    if spec.bias_side is not None:
        side, gather = (left, spec.gather[0]) if spec.bias_side == "left" else (right, spec.gather[1])
        if layout is None:
            found["d_bias"] = side.astype(np.float32).sum(axis=0).astype(spec.bias_dtype)
        else:
            found["d_bias"] = reference.bias_gradient(
                side, rows, gather=gather, out_dtype=spec.bias_dtype, row_weight=operands.row_weight
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
