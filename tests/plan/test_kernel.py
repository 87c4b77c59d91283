"""Kernels declare themselves: what a launch refuses."""

from __future__ import annotations

import dataclasses
import importlib
from typing import Any

import pytest

from moe_core.base import codec
from moe_core.base.target import Target
from moe_core.errors import InvalidInput, Unsupported
from moe_core.ops.matmul.sm90_packed.few_rows_plan import MATMUL_FEW_ROWS
from moe_core.ops.reduction.reduce import REDUCE
from moe_core.ops.reduction.rowwise import CAST_ROWS
from moe_core.plan.builder import PlanBuilder
from moe_core.plan.check import check_plan
from moe_core.plan.steps import Argument, Constant, Kernel, KernelLaunch
from tests.support.runtime.isolation import run_blocked


def launch(kernel: Any, grid: tuple[int, ...] = (1,), **arguments: Argument) -> None:
    PlanBuilder("test", Target("cuda", 90, 132)).launch(kernel, grid, arguments)


@pytest.mark.parametrize("grid", [(1,), (0,)])
def test_undeclared_kernels_are_refused(grid: tuple[int, ...]) -> None:
    with pytest.raises(InvalidInput, match=r"must be a Kernel, got 'reduction.kernels.rowwise:cast_rows'; declare one"):
        launch(CAST_ROWS.name, grid)
    launch(CAST_ROWS, grid)


@pytest.mark.parametrize(("axis", "most"), [(0, 2**31 - 1), (1, 65535), (2, 65535)])
def test_grids_end_where_those_of_cuda_do(axis: int, most: int) -> None:
    ones = (1,) * axis
    launch(CAST_ROWS, (*ones, most))
    with pytest.raises(Unsupported, match=r"cast_rows would need a grid of .*; split the arrays"):
        launch(CAST_ROWS, (*ones, most + 1))


@pytest.mark.parametrize(
    "name", ["reduction.kernels.rowwise:cast_row", "reduction.kernels.row:cast_rows", "reduction:cast_rows"]
)
def test_kernels_that_do_not_exist_are_refused(name: str) -> None:
    builder = PlanBuilder("test", Target("cuda", 90, 132))
    builder.launch(Kernel(name), (1,), {})
    with pytest.raises(InvalidInput, match=f"kernel must exist, got {name}, which moe_core.ops does not define"):
        check_plan(builder.build())


def test_kernels_with_other_facts_are_refused() -> None:
    builder = PlanBuilder("test", Target("cuda", 90, 132))
    builder.launch(dataclasses.replace(CAST_ROWS, writes_layout=True), (1,), {})
    with pytest.raises(InvalidInput, match=r"cast_rows of a plan must have the kernel .*writes_layout=False.*, got"):
        check_plan(builder.build())


def test_kernels_are_named_as_they_are_loaded() -> None:
    """Names of unloaded functions equal those of loaded ones; packages give modules that are loaded."""
    run_blocked(
        (),
        "from moe_core.plan.steps import declared_kernels, function_name\n"
        "from moe_core.runtime.compiler import load_kernel\n"
        "names = list(declared_kernels())\n"
        "assert len(names) > 60 and 'triton' not in sys.modules\n"
        "assert [function_name(load_kernel(name)) for name in names] == names\n"
        "from moe_core.ops.reduction.kernels import rowwise\n"
        "assert rowwise is sys.modules['moe_core.ops.reduction.kernels.rowwise']\n",
    )


def test_modules_that_do_not_exist_cannot_be_imported_unloaded() -> None:
    for name in ("moe_core.ops.reduction.kernels", "moe_core.ops.matmul.portable"):
        package = importlib.import_module(name)
        for missing in ("row_wise", "plans", "__all__"):
            assert not hasattr(package, missing), (name, missing)


def test_launches_have_four_warps_and_three_stages_unless_they_say_so() -> None:
    builder = PlanBuilder("test", Target("cuda", 90, 132))
    builder.launch(CAST_ROWS, (1,), {})
    assert (
        builder.build().steps[0]
        == KernelLaunch(CAST_ROWS, (1, 1, 1), (), 4, 3)
        == KernelLaunch(CAST_ROWS, (1, 1, 1), ())
    )


def test_launches_and_kernels_agree_on_pdl() -> None:
    launch(REDUCE, PDL=Constant(None))
    with pytest.raises(InvalidInput, match=r"rowwise:cast_rows must have PDL exactly if .* got pdl=None and .* PDL;"):
        launch(CAST_ROWS, PDL=Constant(None))
    with pytest.raises(InvalidInput, match=r"reduce:reduce must have PDL exactly if .* got pdl='layout' and .* TOP_K;"):
        launch(REDUCE, TOP_K=Constant(2))


def test_launches_have_the_prepacked_weight_of_their_kernel() -> None:
    with pytest.raises(InvalidInput, match="must have its prepacked weight 'weight', got PDL; correct its Kernel"):
        launch(MATMUL_FEW_ROWS, PDL=Constant(None))


def test_declarations_are_checked() -> None:
    with pytest.raises(InvalidInput, match=r"must be 'module:function' under moe_core\.ops, got 'reduce'; correct it"):
        Kernel("reduce")
    never: Any = "never"
    with pytest.raises(InvalidInput, match="pdl of a:b must be None, start, layout or tail, got 'never'; choose one"):
        Kernel("a:b", pdl=never)


def test_exported_plans_keep_every_fact() -> None:
    assert codec.loads(codec.dumps(MATMUL_FEW_ROWS)) == MATMUL_FEW_ROWS
    assert MATMUL_FEW_ROWS.function == "matmul_few_rows"
