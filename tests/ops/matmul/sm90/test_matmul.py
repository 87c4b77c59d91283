"""The warp-specialised kernel of the `sm90` family: what it refuses everywhere, what it computes on an sm_90 GPU."""

from __future__ import annotations

import dataclasses
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
from moe_core.ops.matmul.sm90.plan import SM90_MATMUL_OGS, sm90_config
from moe_core.ops.moe.backward import plan_moe_backward
from moe_core.ops.moe.forward import plan_moe
from moe_core.ops.moe.options import BackwardOptions, ForwardOptions
from moe_core.ops.routing.layout import PLACE_BLOCKS, ZERO_COUNTERS
from moe_core.parity.tolerance import assert_close, matmul_tolerance
from moe_core.plan.steps import Constant, KernelLaunch, LaunchPlan, Pointer, TensorMap
from moe_core.specs import Activation, LayoutSpec, MatmulSpec, MoESpec, RouterSpec, Tuning
from moe_core.specs.operands import ExpertWeights, MatmulOperands, MoEOperands, OutputGradients, RouterLogits
from tests.support.matmul.cases import Case, build, expected_matmul, run_matmul
from tests.support.matmul.composed import expected_composed, filled_rows, run_composed
from tests.support.matmul.sm90 import FIRST, KEEPING, SECOND, SM_90, cases, config_of, needs_sm_90, swapped, tall


@pytest.mark.gpu
@given(cases())
def test_matches_the_reference(case: Case) -> None:
    needs_sm_90()
    operands, layout, arrays = build(case)
    actual = run_matmul(operands, layout, arrays, case.spec, config=config_of(case))
    expected = expected_matmul(operands, layout, arrays, case.spec)
    tolerance = matmul_tolerance(case.dtype, case.dtype, case.d, activation=case.spec.activation)
    assert_close(actual, expected, tolerance, label="y")


@pytest.mark.gpu
@pytest.mark.parametrize("name", KEEPING)
def test_the_pre_activation_is_kept(name: str) -> None:
    """As the reference has it, beside the result and alone, which changes no bit of either; no other row is written."""
    needs_sm_90()
    case = KEEPING[name]
    operands, layout, arrays = build(case)
    filled, found = filled_rows(layout, arrays), {}
    expected = expected_composed(operands, layout, arrays, case.spec, ("y", "pre"))
    for outputs in (("y", "pre"), ("pre",), ("y",)):
        found[outputs] = run_composed(operands, layout, arrays, case.spec, config_of(case), outputs)
        for label, array in found[outputs].items():
            activation = case.spec.activation if label == "y" else None
            tolerance = matmul_tolerance(case.dtype, case.dtype, case.d, activation=activation)
            assert_close(array[filled], expected[label][filled], tolerance, label=f"{label} of {outputs}")
            assert (array[~filled].view(np.uint16) == 0xFFFF).all(), f"{label} of {outputs} outside of the groups"
    for label in ("y", "pre"):
        assert found["y", "pre"][label].tobytes() == found[(label,)][label].tobytes(), label


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [127, 128, 129, 1500])
def test_two_runs_and_any_number_of_tiles_are_bitwise_equal(rows: int) -> None:
    """Which block computes a tile changes from run to run; a row's result also does not depend on the others."""
    needs_sm_90()
    spec = MatmulSpec("in_out", "row", "row")
    operands, layout, arrays = build(Case(rows, 1, 4, 512, 640, "bfloat16", spec, "uniform"))
    runs = [run_matmul(operands, layout, arrays, spec, config=SECOND) for _ in range(3)]
    assert np.array_equal(runs[0].view(np.uint16), runs[1].view(np.uint16))
    assert np.array_equal(runs[0].view(np.uint16), runs[2].view(np.uint16))


@pytest.mark.gpu
@pytest.mark.parametrize("blocks", ["plain", "tall", "swapped"])
def test_a_layer_outside_the_stack_gives_nan(blocks: str) -> None:
    needs_sm_90()
    case = Case(400, 1, 2, 64, 128, "bfloat16", MatmulSpec("in_out", "row", "row"), "uniform", stacked=True)
    operands, layout, arrays = build(case)
    operands = dataclasses.replace(operands, layer_index=np.array([7], np.int32))
    config = {"plain": SECOND, "tall": tall(SECOND), "swapped": swapped(case)}[blocks]
    assert np.isnan(run_matmul(operands, layout, arrays, case.spec, config=config).astype(np.float32)).all()


def plan(tokens: int = 512, dtype: str = "bfloat16", d: int = 256, f: int = 128, layers: int | None = None):
    experts = ExpertWeights(ArraySpec((8, d, 2 * f), dtype), ArraySpec((8, f, d), dtype))
    spec = MoESpec(Activation("silu"), RouterSpec(2), tuning=Tuning(FIRST, SECOND))
    return plan_moe(
        ArraySpec((tokens, d), dtype), experts, RouterLogits(ArraySpec((tokens, 8), "float32")), spec, SM_90
    )


def test_a_forward_counts_tiles_and_reduces_by_row() -> None:
    steps = [step for step in plan().steps if isinstance(step, KernelLaunch)]
    kernels = [step.kernel for step in steps]
    assert kernels.count(SM90_MATMUL_OGS) == 2
    assert kernels[1] == PLACE_BLOCKS and dict(steps[1].arguments)["tile_counters"] == Pointer("tile_counters")
    assert len(steps) == 5, "clearing the counters takes no launch of its own"
    counters = [dict(step.arguments)["COUNTER"].value for step in steps if step.kernel == SM90_MATMUL_OGS]
    assert counters == [0, 1]
    assert dict(steps[-1].arguments)["BY_ROW"].value is True


def sm90_launches(plan: LaunchPlan) -> list[dict[str, Any]]:
    """The arguments of every product of the family."""
    steps = [step for step in plan.steps if isinstance(step, KernelLaunch) and step.kernel == SM90_MATMUL_OGS]
    return [dict(step.arguments) for step in steps]


def keep_operands(gate_layout: str) -> tuple[MoEOperands, MoESpec]:
    width, up = (192, ArraySpec((8, 256, 192), "bfloat16")) if gate_layout == "separate" else (384, None)
    experts = ExpertWeights(ArraySpec((8, 256, width), "bfloat16"), ArraySpec((8, 192, 256), "bfloat16"), up)
    spec = MoESpec(Activation("silu", gate_layout=gate_layout), RouterSpec(2))
    logits = RouterLogits(ArraySpec((320, 8), "float32"))
    return MoEOperands(ArraySpec((320, 256), "bfloat16"), experts, logits), spec


@pytest.mark.parametrize("gate_layout", ["halves", "separate", "interleaved"])
def test_a_forward_that_keeps_runs_the_same_products(gate_layout: str) -> None:
    operands, spec = keep_operands(gate_layout)
    arrays = (operands.x, operands.experts, operands.routing)
    plain, kept = (
        sm90_launches(plan_moe(*arrays, spec, SM_90, options=ForwardOptions(save=save))) for save in (False, True)
    )
    names = ("pre", "pre_map", "gate_map")
    pre: dict[str, Any] = {
        name: TensorMap("saved.pre_activation", (640, 384), 384, (64, 128)) for name in ("pre_map", "gate_map")
    }
    if gate_layout == "interleaved":
        pre["gate_map"] = Constant(None)
    else:
        pre["gate_map"] = dataclasses.replace(pre["gate_map"], shape=(640, 192))
    assert {name: kept[0][name] for name in names} == pre | {"pre": Pointer("saved.pre_activation")}
    for with_pre, without in zip(kept, plain, strict=True):
        assert all(without[name] == Constant(None) for name in names)
        same = [name for name, value in without.items() if isinstance(value, Constant) and name not in names]
        assert all(with_pre[name] == without[name] for name in same), "the same tiles, and so the same bits"


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("gate_layout", ["halves", "separate"])
def test_no_counter_of_a_backward_serves_twice(gate_layout: str, recompute: bool) -> None:
    operands, spec = keep_operands(gate_layout)
    spec = dataclasses.replace(spec, recompute=recompute)
    wanted = ("d_x", "d_experts.gate_up", "d_experts.down")
    backward = plan_moe_backward(
        OutputGradients(operands.x), operands, spec, SM_90, options=BackwardOptions(wanted=wanted)
    )
    launches = sm90_launches(backward)
    # The pull-back through gate and up as two buffers is one product that this family does not have.
    assert len(launches) == 1 + (gate_layout == "halves") + recompute
    counters = [(launch["counters"], launch["COUNTER"]) for launch in launches]
    assert len(set(counters)) == len(counters)
    cleared: set[Any] = set()
    for step in backward.steps:
        if isinstance(step, KernelLaunch) and "counters" in dict(step.arguments):
            counter = dict(step.arguments)["counters"]
            # First the launch that clears it, once, then the products.
            assert (step.kernel == ZERO_COUNTERS) == (counter not in cleared)
            cleared.add(counter)
    if recompute:
        assert launches[0]["y"] == launches[0]["y_map"] == Constant(None) and isinstance(launches[0]["pre"], Pointer)


def test_a_changing_number_of_tokens_compiles_nothing() -> None:
    def compiled(tokens: int):
        return [
            (step.kernel, [(name, value) for name, value in step.arguments if type(value).__name__ == "Constant"])
            for step in plan(tokens).steps
            if isinstance(step, KernelLaunch) and step.kernel == SM90_MATMUL_OGS
        ]

    assert compiled(300) == compiled(5000)


def test_no_tokens_launch_no_product() -> None:
    assert not [step for step in plan(0).steps if getattr(step, "kernel", "") == SM90_MATMUL_OGS]


def test_weights_are_one_matrix_for_tma() -> None:
    maps = [
        value
        for step in plan().steps
        if isinstance(step, KernelLaunch)
        for _, value in step.arguments
        if isinstance(value, TensorMap)
    ]
    assert TensorMap("experts.gate_up", (8 * 256, 256), 256, (64, 128)) in maps
    assert TensorMap("experts.down", (8 * 128, 256), 256, (64, 256)) in maps


REFUSALS = {
    "another chip": (Target("cuda", 100, 148), {}, "sm_90"),
    "dtype": (SM_90, {"dtype": "float32"}, "float32"),
    "d": (SM_90, {"d": 72}, "must divide d, got 72"),
    "n": (SM_90, {"n": 12}, "12 columns"),
    "out_dtype": (SM_90, {"out_dtype": "float32"}, "out_dtype float32"),
    "stride": (SM_90, {"stride": 132}, "132 elements"),
    "gelu": (SM_90, {"activation": Activation("gelu", gated=False)}, "erf"),
    "dense": (SM_90, {"dense": True}, "dense"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refusals_say_why(name: str) -> None:
    target, change, reason = REFUSALS[name]
    d, n, dtype = change.get("d", 128), change.get("n", 64), change.get("dtype", "bfloat16")
    layout = None if "dense" in change else LayoutSpec(40, 1, 4)
    spec = MatmulSpec("in_out", activation=change.get("activation"), out_dtype=change.get("out_dtype"))
    x = ArraySpec((40, d), dtype, (change.get("stride", d), 1))
    weight = ArraySpec((d, n) if layout is None else (4, d, n), dtype)
    problem = MatmulProblem(MatmulOperands(x, weight), layout, spec, target)
    assert reason in str(why_illegal(sm90_config(problem), problem))
    with pytest.raises(InvalidInput, match=r"config must be legal"):
        plan_matmul_ogs(problem.operands, layout, spec, target, config=sm90_config(problem))


@pytest.mark.parametrize(
    ("change", "reason"),
    [({"block_m": 64}, "tiles are"), ({"num_stages": 5}, "num_stages"), ({"group_m": 0}, "group_m")],
)
def test_other_tiles_are_refused(change: dict[str, int], reason: str) -> None:
    layout, spec = LayoutSpec(40, 1, 4), MatmulSpec("in_out")
    operands = MatmulOperands(ArraySpec((40, 128), "bfloat16"), ArraySpec((4, 128, 256), "bfloat16"))
    problem = MatmulProblem(operands, layout, spec, SM_90)
    assert reason in str(why_illegal(dataclasses.replace(SECOND, **change), problem))
    assert why_illegal(SECOND, problem) is None


def test_weighted_input_is_planned_as_it_is_read() -> None:
    """Rows of x at odd strides are weighted into a contiguous buffer: matmul 1 is chosen for that, not for x."""
    experts = ExpertWeights(ArraySpec((8, 512, 512), "bfloat16"), ArraySpec((8, 256, 512), "bfloat16"))
    spec = MoESpec(Activation("silu"), RouterSpec(1), apply_router_weight_on_input=True)
    for stride in (512, 516):
        x = ArraySpec((4096, 512), "bfloat16", (stride, 1))
        steps = plan_moe(x, experts, RouterLogits(ArraySpec((4096, 8), "float32")), spec, SM_90).steps
        assert [step.kernel for step in steps if isinstance(step, KernelLaunch)].count(SM90_MATMUL_OGS) == 2


def test_an_up_bias_alone_is_added() -> None:
    """The kernel loads biases where either is given."""
    layout, activation = LayoutSpec(400, 1, 4), Activation("silu", gate_layout="separate")
    weight = ArraySpec((4, 128, 128), "bfloat16")
    operands = MatmulOperands(
        ArraySpec((400, 128), "bfloat16"), weight, up=weight, up_bias=ArraySpec((4, 128), "float32")
    )
    spec = MatmulSpec("in_out", "token", "row", activation)
    (launch,) = [
        step
        for step in plan_matmul_ogs(operands, layout, spec, SM_90).steps
        if isinstance(step, KernelLaunch) and step.kernel == SM90_MATMUL_OGS
    ]
    arguments = dict(launch.arguments)
    assert arguments["bias"] == Constant(None) and arguments["up_bias"] == Pointer("up_bias")
