"""Grouped matmuls of rows in the order of their groups, in float64 one group at a time."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_core import InvalidInput
from moe_core.base.arrays import ArraySpec
from moe_core.base.target import Target
from moe_core.ops.matmul.grouped import plan_grouped_contraction, plan_grouped_mm
from moe_core.ops.routing.groups import Groups
from moe_core.parity.tolerance import assert_close, matmul_tolerance
from moe_core.plan.steps import Constant, KernelLaunch
from moe_core.specs.matmul import MatmulSpec
from moe_core.specs.operands import MatmulOperands, map_arrays, named_arrays
from tests.support import strategies
from tests.support.harness import H200, engine_target, run_plan, spec_of
from tests.support.strategies import draw_array

on_engines = pytest.mark.parametrize("target", (engine_target(), Target("reference")), ids=lambda target: target.kind)
#: Sizes, rows, first group and matrices (None: all of them): empty, whole, one group, tails, no rows, sizes that lie.
HARD = {
    "no_rows": ([0, 0, 0], 0, None),
    "all_empty": ([0, 0], 5, None),
    "one_group": ([7], 7, None),
    "one_group_and_a_tail": ([5], 9, None),
    "last_and_first_empty": ([0, 3, 0, 40, 0], 43, None),
    "tail": ([4, 0, 9, 2], 24, None),
    "too_many": ([4, 30, 2], 20, None),
    "below_zero": ([4, -3, 5], 12, None),
    "far_too_many": ([2**31 - 1, 2**31 - 1, 3], 12, None),
    "middle_groups": ([3, 4, 0, 5, 2], 16, (1, 3)),
    "past_the_last_group": ([3, 4, 5], 14, (2, 3)),
    "before_the_first_group": ([3, 4], 9, (-4, 1)),
    "no_group_left": ([3, 4], 9, (9, 2)),
}  # fmt: skip


def bounds_of(values: Sequence[int], ends: bool, num_rows: int) -> list[int]:
    bounds = [0]
    for value in values:
        end = max(bounds[-1], value) if ends else bounds[-1] + max(value, 0)
        bounds.append(min(end, num_rows))
    return bounds


class Case:
    """x `[R, D]`, right `[R, N]`, weight and bias of `count` matrices, and the rows of each."""

    def __init__(
        self, values: Sequence[int], num_rows: int, window: tuple[int, int] | None, ends: bool, dtype: str = "float32",
        sizes: tuple[int, int] = (17, 40), layout: str = "in_out", seed: int = 0, biased: bool = True,
    ) -> None:  # fmt: skip
        rng, (d, n), self.ends, self.dtype = np.random.default_rng(seed), sizes, ends, dtype
        first, count = window or (0, len(values))
        shape = (count, d, n) if layout == "in_out" else (count, n, d)
        self.x, self.right = (draw_array(rng, (num_rows, size), dtype) for size in sizes)
        self.weight, bias = draw_array(rng, shape, dtype), draw_array(rng, (count, n), "float32")
        self.operands = MatmulOperands(self.x, self.weight, bias=bias if biased else None)
        self.groups, self.layout = np.array(values, np.int32), layout
        self.first = None if window is None else np.array([first], np.int32)
        bounds, first = bounds_of(values, ends, num_rows), min(max(first, 0), len(values))
        bounds = [*bounds[first : first + count + 1]]
        self.rows = [slice(*ends) for ends in itertools.pairwise([*bounds, *[bounds[-1]] * (count + 1 - len(bounds))])]

    @property
    def arrays(self) -> dict[str, np.ndarray]:
        return {"offs" if self.ends else "sizes": self.groups} | (
            {} if self.first is None else {"first_group": self.first}
        )

    def check(self, target: Target, out_dtype: str | None = None) -> None:
        for poisoned in (self.x, self.right):  # rows outside of groups are not read
            inside = np.zeros(len(poisoned), bool)
            for rows in self.rows:
                inside[rows] = True
            poisoned[~inside] = np.nan
        self.check_rows(target, out_dtype)
        self.check_contraction(target, out_dtype)

    def check_rows(self, target: Target, out_dtype: str | None) -> None:
        spec = MatmulSpec(self.layout, out_dtype=out_dtype)
        groups = Groups(spec_of(self.groups), self.ends, spec_of(self.first))
        plan = plan_grouped_mm(map_arrays(self.operands, spec_of), groups, spec, target)
        y = run_plan(plan, dict(named_arrays(self.operands)) | self.arrays)["y"]
        wide = self.weight.astype(np.float64)
        wide, expected = wide if self.layout == "in_out" else wide.swapaxes(1, 2), np.zeros(y.shape)
        for group, rows in enumerate(self.rows):
            expected[rows] = self.x[rows].astype(np.float64) @ wide[group]
            if self.operands.bias is not None:
                expected[rows] += self.operands.bias[group]
        assert_close(
            y, expected.astype(y.dtype), matmul_tolerance(self.dtype, y.dtype.name, self.x.shape[1]), label="y"
        )
        outside = np.ones(len(y), bool)
        for rows in self.rows:
            outside[rows] = False
        assert not y[outside].astype(np.float32).any(), "rows outside of groups"

    def check_contraction(self, target: Target, out_dtype: str | None) -> None:
        groups = Groups(spec_of(self.groups), self.ends, spec_of(self.first), len(self.rows))
        plan = plan_grouped_contraction(spec_of(self.x), spec_of(self.right), groups, target, out_dtype=out_dtype)
        y = run_plan(plan, {"left": self.x, "right": self.right} | self.arrays)["d_weight"]
        sides = self.x.astype(np.float64), self.right.astype(np.float64)
        expected = np.stack([sides[0][rows].T @ sides[1][rows] for rows in self.rows])
        assert_close(
            y,
            expected.astype(y.dtype),
            matmul_tolerance(self.dtype, y.dtype.name, max(1, len(self.x))),
            label="d_weight",
        )
        assert not any(y[group].any() for group, rows in enumerate(self.rows) if rows.start == rows.stop)


@on_engines
@pytest.mark.parametrize("name", HARD)
def test_hard_groups(target: Target, name: str) -> None:
    values, num_rows, window = HARD[name]
    Case(values, num_rows, window, ends=False).check(target)
    ends = np.clip(np.cumsum(np.maximum(values, 0)), 0, 2**31 - 1).tolist()
    Case(ends, num_rows, window, ends=True, layout="out_in").check(target)


@on_engines
@pytest.mark.parametrize("values", [[4, 2, 9, 9, 3, 20], [-5, 6, 40, 2, 50, 50], [2**31 - 1, 0, 0, 0, 0, -(2**31)]])
def test_ends_that_fall_make_empty_groups(target: Target, values: list[int]) -> None:
    Case(values, 20, None, ends=True).check(target)
    Case(values, 20, (1, 3), ends=True).check(target)


@on_engines
@given(st.data())
def test_any_groups(target: Target, data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 6))
    sizes = data.draw(st.lists(st.sampled_from((0, 0, 1, 2, 7, 33)), min_size=count, max_size=count))
    num_rows = max(0, sum(sizes) + data.draw(st.sampled_from((-3, 0, 0, 1, 40))))
    window = (data.draw(st.integers(0, count)), data.draw(st.integers(1, count))) if data.draw(st.booleans()) else None
    ends, dtype = data.draw(st.booleans()), data.draw(strategies.matmul_dtypes())
    widths = data.draw(strategies.widths()), data.draw(strategies.widths())
    values, layout = np.cumsum(sizes).tolist() if ends else sizes, data.draw(strategies.weight_layouts())
    case = Case(
        values, num_rows, window, ends, dtype, widths, layout, data.draw(strategies.seeds()), len(sizes) % 2 > 0
    )
    case.groups = case.groups.astype(data.draw(st.sampled_from(("int32", "int64", "uint8"))))
    case.check(target, data.draw(st.sampled_from((None, "float32"))))


def test_rows_compile_nothing_and_launch_few_kernels() -> None:
    weight, groups, found = ArraySpec((8, 512, 512), "bfloat16"), ArraySpec((8,), "int32"), set()
    for num_rows in (4096, 8192):
        operands = MatmulOperands(ArraySpec((num_rows, 512), "bfloat16"), weight)
        steps = plan_grouped_mm(operands, Groups(groups, True), MatmulSpec("in_out"), H200).steps
        assert len(steps) == 2, "the layout, then the product"
        launches = [step for step in steps if isinstance(step, KernelLaunch)]
        found.add(tuple(value for step in launches for _, value in step.arguments if isinstance(value, Constant)))
    assert len(found) == 1
    many = MatmulOperands(ArraySpec((64, 16), "bfloat16"), ArraySpec((2048, 16, 16), "bfloat16"))
    steps = plan_grouped_mm(many, Groups(ArraySpec((2048,), "int32"), True), MatmulSpec("in_out"), H200).steps
    assert isinstance(steps[0], KernelLaunch) and steps[0].num_warps == 16


def test_wrong_arguments() -> None:
    x, weight, groups = (ArraySpec(shape, dtype) for shape, dtype in (
        ((24, 16), "float32"), ((5, 16, 12), "float32"), ((5,), "int32")))  # fmt: skip
    spec, one = MatmulSpec("in_out"), ArraySpec((1,), "int32")
    for operands, given_groups, first, message in (
        (MatmulOperands(weight, weight), groups, None, "x must be .rows, d. and weight .groups, d, n., got"),
        (MatmulOperands(x, weight), ArraySpec((4,), "int32"), None, "as many groups as matrices, 5, got 4; pass"),
        (MatmulOperands(x, weight), ArraySpec((4,), "int32"), one, "at least 5 groups, got 4; pass"),
        (MatmulOperands(x, weight), ArraySpec((5,), "float32"), None, "offs must be int32 .*, got float32; c"),
        (MatmulOperands(x, weight), groups, ArraySpec((2,), "int32"), r"first_group must be \[1\], got \(2,\); pass"),
        (MatmulOperands(x, ArraySpec((5, 9, 12), "float32")), groups, None, r"weight must be \[5, 16, n\], got \(5"),
    ):  # fmt: skip
        with pytest.raises(InvalidInput, match=message):
            plan_grouped_mm(operands, Groups(given_groups, True, first), spec, H200)
    with pytest.raises(InvalidInput, match=r"right must be \[24, n\], got \(23, 16\); pass"):
        plan_grouped_contraction(x, ArraySpec((23, 16), "float32"), Groups(groups, True), H200)
