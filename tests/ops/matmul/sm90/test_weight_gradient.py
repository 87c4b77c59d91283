"""The warp-specialised weight gradient of the `sm90` family: what it refuses, what it computes on an sm_90 GPU."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from moe_core import Unsupported
from moe_core.base.arrays import ArraySpec
from moe_core.base.target import Target
from moe_core.ops.matmul.sm90.weight_gradient_plan import SM90_WEIGHT_GRADIENT
from moe_core.ops.matmul.weight_gradient import WEIGHT_GRADIENT, plan_weight_gradient
from moe_core.ops.routing.layout import ZERO_COUNTERS
from moe_core.plan.steps import Kernel, KernelLaunch, LaunchPlan
from moe_core.specs import LayoutSpec, WeightGradientSpec
from moe_core.specs.operands import WeightGradientOperands
from tests.support import strategies
from tests.support.matmul.sm90 import SM_90, needs_sm_90
from tests.support.matmul.weight_gradient import Ragged, many_rows, run_op
from tests.support.strategies import hard_routing

GATHERS = [("token", "row"), ("row", "token"), ("row", "row"), ("slot", "row")]
SHAPES = [(64, 8), (64, 256), (192, 72), (320, 520)]


def spec_of(gather: tuple[str, str], dtype: str = "bfloat16", **options: object) -> WeightGradientSpec:
    return WeightGradientSpec(dtype, gather, family="sm90", **options)  # pyright: ignore[reportArgumentType]


@pytest.mark.gpu
@pytest.mark.parametrize("name", strategies.HARD_ROUTINGS)
@pytest.mark.parametrize("gather", GATHERS[:2], ids=str)
@pytest.mark.parametrize("rows", [128, 192])
def test_hard_routings(name: str, gather: tuple[str, str], rows: int) -> None:
    """With biases in a launch of their own and, gathered, with 192 rows, in the tiles."""
    needs_sm_90()
    drawn = Ragged.draw(hard_routing(name), gather, (rows, 264), "bfloat16")
    spec, weighted = spec_of(gather, bias_side="right"), {} if rows == 128 else {"row_weight": None}
    found = drawn.check(spec if drawn.layout.num_slots else dataclasses.replace(spec, family=None), **weighted)
    for gradient in found.values():
        assert np.isfinite(gradient.astype(np.float32)).all()
        assert not gradient[drawn.groups["group_sizes"] == 0].any(), "an expert without rows"


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("num_experts", "num_tokens", "gather", "shape", "dtype", "side"),
    [
        (1, 1, ("token", "row"), (192, 8), "bfloat16", "right, in the tiles"),
        (8, 130, ("slot", "row"), (320, 520), "float16", "right, in the tiles"),
        (8, 3000, ("token", "row"), (192, 264), "bfloat16", "right, in the tiles"),
        (1, 1, ("token", "row"), (64, 8), "bfloat16", None),
        (3, 31, ("row", "token"), (64, 256), "float16", "left"),
        (8, 64, ("row", "row"), (192, 72), "bfloat16", "right"),
        (8, 130, ("slot", "row"), (320, 520), "float16", "right"),
        (3, 700, ("token", "row"), (320, 520), "bfloat16", "left"),
        (8, 3000, ("row", "token"), (192, 264), "bfloat16", "right"),
    ],
)
def test_matches_the_reference(
    num_experts: int, num_tokens: int, gather: tuple[str, str], shape: tuple[int, int], dtype: str, side: str | None
) -> None:
    needs_sm_90()
    drawn = Ragged.draw(many_rows(num_experts, num_tokens), gather, shape, dtype)
    bias_side, _, in_tiles = (side or "").partition(", ")
    weighted = {"row_weight": None} if in_tiles or side is None else {}
    drawn.check(spec_of(gather, dtype, bias_side=bias_side or None), **weighted)


@pytest.mark.gpu
def test_columns_of_one_side() -> None:
    needs_sm_90()
    drawn = Ragged.draw(many_rows(4, 200), ("token", "row"), (192, 400), "bfloat16")
    for taken in ((0, 200), (200, 200), (8, 136)):
        drawn.check(spec_of(("token", "row"), right_columns=taken, left_columns=(64, 128)), row_weight=None)


@pytest.mark.gpu
def test_two_runs_are_bitwise_equal_with_and_without_a_bias() -> None:
    needs_sm_90()
    drawn = Ragged.draw(many_rows(8, 3000), ("token", "row"), (320, 520), "bfloat16")
    with_bias = spec_of(("token", "row"), bias_side="right")
    runs = [run_op(drawn.operands, drawn.layout, with_bias, drawn.groups) for _ in range(3)]
    for name in runs[0]:
        for other in runs[1:]:
            assert runs[0][name].tobytes() == other[name].tobytes(), name
    alone = dataclasses.replace(drawn.operands, row_weight=None)
    bare = run_op(alone, drawn.layout, spec_of(("token", "row")), drawn.groups)
    assert bare["d_weight"].tobytes() == runs[0]["d_weight"].tobytes()
    in_tiles = [run_op(alone, drawn.layout, with_bias, drawn.groups) for _ in range(3)]
    assert len({one["d_bias"].tobytes() for one in in_tiles}) == 1
    assert all(one["d_weight"].tobytes() == bare["d_weight"].tobytes() for one in in_tiles)


@pytest.mark.gpu
def test_layouts_that_lie_stay_inside_their_buffers() -> None:
    """Sizes, starts and slots outside the arrays: the harness's guard zones must stay untouched."""
    needs_sm_90()
    drawn = Ragged.draw(many_rows(4, 300), ("token", "row"), (128, 264), "bfloat16")
    operands = dataclasses.replace(drawn.operands, row_weight=None)
    for name, value in (("group_sizes", 10**6), ("group_start", -(10**6)), ("slot_of_row", 10**7)):
        wrong = drawn.groups | {name: np.full_like(drawn.groups[name], value)}
        run_op(operands, drawn.layout, spec_of(("token", "row")), wrong)


def plan(
    tokens: int = 4096, dtype: str = "bfloat16", shape: tuple[int, int] = (256, 384), target: Target = SM_90, **options
) -> LaunchPlan:
    layout = LayoutSpec(tokens, 2, 8)
    into = ArraySpec((8, *shape), "float32") if options.pop("adds", False) else None
    operands = WeightGradientOperands(
        ArraySpec((tokens, shape[0]), dtype), ArraySpec((2 * tokens, shape[1]), dtype), into=into
    )
    spec = WeightGradientSpec(options.pop("out_dtype", dtype), ("token", "row"), **options)
    return plan_weight_gradient(operands, layout, spec, target)


def kernels_of(plan: LaunchPlan) -> list[Kernel]:
    return [step.kernel for step in plan.steps if isinstance(step, KernelLaunch)]


def test_many_rows_take_it_and_biases_a_launch_of_their_own_or_none() -> None:
    zero, product, bias = kernels_of(plan(bias_side="right"))
    assert (zero, product) == (ZERO_COUNTERS, SM90_WEIGHT_GRADIENT)
    assert bias == WEIGHT_GRADIENT
    in_tiles = plan(shape=(192, 384), bias_side="right")
    assert kernels_of(in_tiles) == [ZERO_COUNTERS, SM90_WEIGHT_GRADIENT], "a consumer without rows has the sums"
    assert in_tiles.summation[-1] == "d_bias: as d_weight, with ones for left"
    assert kernels_of(plan(shape=(192, 384), bias_side="left"))[2:] == [WEIGHT_GRADIENT]
    assert kernels_of(plan(shape=(64, 8), bias_side="right", family="sm90"))[2:] == [WEIGHT_GRADIENT], "one tile"
    assert kernels_of(plan(tokens=64)) == [WEIGHT_GRADIENT], "few rows"
    assert kernels_of(plan(family="portable")) == [WEIGHT_GRADIENT]
    assert len(kernels_of(plan(tokens=64, family="sm90"))) == 2


def test_narrow_gradients_do_not_fill_its_tiles() -> None:
    """As those of adapters of small rank."""
    for shape, taken in (((256, 16), False), ((64, 384), False), ((256, 136), True), ((192, 384), True)):
        assert (SM90_WEIGHT_GRADIENT in kernels_of(plan(shape=shape))) == taken, shape


def test_a_changing_number_of_tokens_compiles_nothing() -> None:
    def constants(tokens: int) -> list[object]:
        steps = [step for step in plan(tokens).steps if isinstance(step, KernelLaunch)]
        return [[one for one in step.arguments if type(one[1]).__name__ == "Constant"] for step in steps]

    assert constants(4096) == constants(8192)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"target": Target("cuda", 80, 108)}, "needs sm_90"),
        ({"target": Target("interpreter")}, "needs sm_90"),
        ({"dtype": "float32"}, "one dtype of 16 bits"),
        ({"out_dtype": "float32"}, "one dtype of 16 bits"),
        ({"shape": (100, 384)}, "multiple of 64 rows and of 8 columns, got 100 x 384"),
        ({"shape": (128, 386)}, "multiple of 64 rows and of 8 columns, got 128 x 386"),
        ({"right_columns": (4, 64)}, "right must start at multiples of 16 bytes, got stride 384 and first column 4"),
        ({"adds": True}, "nor adds to an array"),
    ],
)
def test_what_it_refuses(options: dict, reason: str) -> None:
    with pytest.raises(Unsupported, match=f"the sm90 family cannot run this gradient: .*{reason}"):
        plan(**options, family="sm90")
    assert kernels_of(plan(**options)) == [WEIGHT_GRADIENT]
