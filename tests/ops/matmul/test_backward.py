"""The grouped matmul's backward as an op of its own, on every engine, against a loop over rows in float64."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from moe_core.base.arrays import ArraySpec
from moe_core.base.dtypes import numpy_dtype
from moe_core.base.target import Target, cpu_target
from moe_core.errors import InvalidInput, Unsupported
from moe_core.ops.matmul.backward import plan_matmul_ogs_backward
from moe_core.ops.matmul.weight_gradient import WEIGHT_GRADIENT
from moe_core.plan.steps import KernelLaunch, LaunchPlan
from moe_core.specs import Activation, LayoutSpec, MatmulSpec
from moe_core.specs.operands import MatmulOperands, map_arrays
from tests.support.harness import engine_target, run_plan, spec_of
from tests.support.strategies import layout_arrays

IDS = np.int32([[0, 2], [2, 1], [2, -1], [0, 2], [-1, -1], [2, 0]])
LAYOUT = LayoutSpec(*IDS.shape, 4)  # expert 3 has no rows
D, N, LAYERS = 24, 20, 2
EVERY = ("d_x", "d_weight", "d_bias")
WEIGHTED = (*EVERY, "d_row_weight")
TARGETS = [pytest.param(engine_target(), id="kernels"), pytest.param(Target("reference"), id="reference")]


@dataclasses.dataclass(frozen=True)
class Case:
    name: str
    spec: MatmulSpec
    layout: LayoutSpec | None = LAYOUT
    wanted: tuple[str, ...] = EVERY
    row_weight: bool = False
    stacked: bool = False
    dtype: str = "float32"


CASES = [
    Case("first product", MatmulSpec("in_out", gather="token"), wanted=("d_x", "d_weight")),
    Case("first product, out_in", MatmulSpec("out_in", gather="token")),
    Case("second product", MatmulSpec("in_out", scatter="slot"), wanted=WEIGHTED, row_weight=True),
    Case("slots to slots", MatmulSpec("out_in", "slot", "slot"), wanted=("d_weight", "d_x")),
    Case("aligned rows", MatmulSpec("in_out", "token"), dataclasses.replace(LAYOUT, alignment=4)),
    Case(
        "dropped rows", MatmulSpec("in_out", "token", "slot"), dataclasses.replace(LAYOUT, max_rows=2), row_weight=True
    ),
    Case("one layer of a stack", MatmulSpec("in_out", "token"), stacked=True),
    Case("bfloat16", MatmulSpec("in_out", "token"), dtype="bfloat16"),
    Case("bfloat16 with a float32 result", MatmulSpec("in_out", scatter="slot"), row_weight=True, dtype="bfloat16"),
    Case("dense", MatmulSpec("in_out"), None, row_weight=True),
    Case("bias alone", MatmulSpec("out_in"), wanted=("d_bias",)),
    Case(
        "row weight alone",
        MatmulSpec("out_in", "token", "slot"),
        wanted=("d_row_weight",),
        row_weight=True,
        dtype="bfloat16",
    ),
]


def arrays_of(case: Case) -> dict[str, np.ndarray]:
    """Inputs of the backward by name; rows that nothing may read hold NaN."""
    random, layout = np.random.default_rng(5), case.layout
    upstream = "float32" if "float32 result" in case.name else case.dtype

    def draw(*shape: int, dtype: str = case.dtype) -> np.ndarray:
        return random.standard_normal(shape).astype(np.float32).astype(numpy_dtype(dtype))

    matrix = (D, N) if case.spec.weight_layout == "in_out" else (N, D)
    if layout is None:
        rows = {"row": 7}
        arrays = {"d_y": draw(7, N, dtype=upstream), "x": draw(7, D), "weight": draw(*matrix), "bias": draw(N)}
        return arrays | ({"row_weight": draw(7, dtype="float32")} if case.row_weight else {})
    groups = layout_arrays(IDS, layout)
    slot_of_row, row_of_slot = groups["slot_of_row"], groups["row_of_slot"]
    rows = {"row": layout.capacity, "slot": layout.num_slots, "token": layout.num_tokens}
    x, d_y = draw(rows[case.spec.gather], D), draw(rows[case.spec.scatter], N, dtype=upstream)
    unread = {
        "row": slot_of_row < 0,
        "slot": row_of_slot < 0,
        "token": (row_of_slot.reshape(IDS.shape) < 0).all(axis=1),
    }
    x[unread[case.spec.gather]] = np.nan
    d_y[unread[case.spec.scatter]] = np.nan
    lead = (LAYERS,) * case.stacked + (layout.num_experts,)
    weight, bias = draw(*lead, *matrix), draw(*lead, N)
    (weight[1] if case.stacked else weight)[3] = np.nan
    arrays = {"d_y": d_y, "x": x, "weight": weight, "bias": bias}
    if case.row_weight:
        arrays["row_weight"] = draw(layout.num_slots, dtype="float32")
        arrays["row_weight"][row_of_slot < 0] = np.nan
    if case.stacked:
        arrays["layer_index"] = np.int32([1])
    return arrays | groups


def plan_of(case: Case, arrays: dict[str, np.ndarray], target: Target) -> LaunchPlan:
    names = [field.name for field in dataclasses.fields(MatmulOperands)]
    operands = map_arrays(MatmulOperands(*[arrays.get(name) for name in names]), spec_of)
    return plan_matmul_ogs_backward(
        spec_of(arrays["d_y"]), operands, case.layout, case.spec, target, wanted=case.wanted
    )


def loop(case: Case, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The gradients in float64, one row after the other."""
    given = {name: array.astype(np.float64) if array.dtype.kind != "i" else array for name, array in arrays.items()}
    x, weight, d_y = given["x"], given["weight"], given["d_y"]
    found = {f"d_{name}": np.zeros_like(given[name]) for name in ("x", "weight", "bias", "row_weight") if name in given}
    layer = (1,) * case.stacked
    for row in range(7 if case.layout is None else case.layout.capacity):
        slot, expert = row, ()
        if case.layout is not None:
            slot = int(given["slot_of_row"][row])
            if slot < 0:
                continue
            expert = (int(np.searchsorted(given["group_start"], row, side="right")) - 1,)
        top_k = 1 if case.layout is None else case.layout.top_k
        place = {"row": row, "slot": slot, "token": slot // top_k}
        source, at = place[case.spec.gather], (*layer, *expert)
        g = d_y[place[case.spec.scatter]] * (given["row_weight"][slot] if case.row_weight else 1.0)
        matrix = weight[at] if case.spec.weight_layout == "in_out" else weight[at].T
        product = np.outer(x[source], g)
        if case.row_weight:
            found["d_row_weight"][slot] = d_y[place[case.spec.scatter]] @ (x[source] @ matrix + given["bias"][at])
        found["d_x"][source] += g @ matrix.T
        found["d_weight"][at] += product if case.spec.weight_layout == "in_out" else product.T
        found["d_bias"][at] += g
    return found


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_gradients_are_those_of_a_loop(case: Case, target: Target) -> None:
    arrays = arrays_of(case)
    plan = plan_of(case, arrays, target)
    assert tuple(buffer.name for buffer in plan.outputs) == case.wanted
    found = run_plan(plan, {buffer.name: arrays[buffer.name] for buffer in plan.inputs})
    expected = loop(case, arrays)
    tolerance = 2e-2 if case.dtype == "bfloat16" else 1e-5
    for name in case.wanted:
        value = found[name].astype(np.float64)
        assert found[name].dtype == arrays[name.removeprefix("d_")].dtype
        scale = np.abs(expected[name]).max()
        np.testing.assert_allclose(value, expected[name], rtol=tolerance, atol=tolerance * scale, err_msg=name)
        assert (value[expected[name] == 0] == 0).all(), f"{name} is not exactly zero where nothing flows"


#: Rows of both experts that no slot has lie between those that one has.
PADDED = {
    "group_sizes": np.int32([3, 1]),
    "group_start": np.int32([0, 4, 8]),
    "slot_of_row": np.int32([0, -1, 1, -1, 2, -1, -1, -1]),
    "row_of_slot": np.int32([0, 2, 4, -1]),
}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(("gather", "scatter"), [("row", "row"), ("row", "slot"), ("token", "row")])
def test_padding_inside_a_group_is_not_read(gather: str, scatter: str, target: Target) -> None:
    """As the forward does, this takes layouts from anywhere."""
    layout, spec = LayoutSpec(4, 1, 2, max_rows=4), MatmulSpec("in_out", gather, scatter)
    x, d_y = (np.ones((8 if side == "row" else 4, width), np.float32) for side, width in ((gather, D), (scatter, N)))
    for side, array in ((gather, x), (scatter, d_y)):
        if side == "row":
            array[PADDED["slot_of_row"] < 0] = np.nan
    arrays = {"d_y": d_y, "x": x, "weight": np.ones((2, D, N), np.float32), "bias": np.zeros((2, N), np.float32)}
    arrays |= PADDED
    plan = plan_of(Case("padded", spec, layout, ("d_weight", "d_bias")), arrays, target)
    found = run_plan(plan, {buffer.name: arrays[buffer.name] for buffer in plan.inputs})
    for name, width in (("d_weight", D), ("d_bias", 1)):
        wanted = np.broadcast_to(np.float32([2, 1])[:, None, None], (2, width, N))
        np.testing.assert_array_equal(found[name].reshape(2, width, N), wanted, name)


def test_layouts_from_anywhere_are_not_loaded_in_whole_boxes() -> None:
    """The sm90 family loads rows in layout order without asking whether each has a slot."""
    layout = LayoutSpec(4096, 2, 8)
    x, d_y = ArraySpec((4096, 256), "bfloat16"), ArraySpec((8192, 384), "bfloat16")
    operands = MatmulOperands(x, ArraySpec((8, 256, 384), "bfloat16"))
    h200, spec = Target("cuda", 90, 132), MatmulSpec("in_out", "token", "row")
    plan = plan_matmul_ogs_backward(d_y, operands, layout, spec, h200, wanted=("d_weight",))
    assert [step.kernel for step in plan.steps if isinstance(step, KernelLaunch)] == [WEIGHT_GRADIENT]


@pytest.mark.parametrize("layer", [-1, LAYERS])
def test_a_layer_outside_the_stack_is_refused_by_the_reference(layer: int) -> None:
    case = dataclasses.replace(CASES[6], wanted=("d_weight",))
    arrays = arrays_of(case) | {"layer_index": np.int32([layer])}
    plan = plan_of(case, arrays, Target("reference"))
    with pytest.raises(InvalidInput, match=r"layer_index must be in \[0, 2\)"):
        run_plan(plan, {buffer.name: arrays[buffer.name] for buffer in plan.inputs})


def test_frozen_weights_are_not_planned() -> None:
    case = dataclasses.replace(CASES[0], wanted=("d_x",))
    plan = plan_of(case, arrays_of(case), engine_target())
    assert plan.steps and not any(getattr(step, "kernel", None) == WEIGHT_GRADIENT for step in plan.steps)
    assert [buffer.name for buffer in plan.outputs] == ["d_x"]


def refused(spec: MatmulSpec, wanted: tuple[str, ...] = ("d_x",), rows: int = 12, **changes: Any) -> None:
    case = Case("", spec, row_weight="row_weight" in changes)
    arrays = arrays_of(case) | {"d_y": np.zeros((rows, N), np.float32)}
    plan_of(dataclasses.replace(case, wanted=wanted), arrays, cpu_target())


def test_what_is_refused() -> None:
    with pytest.raises(Unsupported, match=r"fused activation has no gradient.*call the op `activation`"):
        refused(MatmulSpec("in_out", activation=Activation("relu2", gated=False)))
    with pytest.raises(Unsupported, match="scatter='slot' alone, got 'row'"):
        refused(MatmulSpec("in_out"), row_weight=True)
    with pytest.raises(InvalidInput, match="wanted must name at least one of d_x, d_weight, d_bias, each once"):
        refused(MatmulSpec("in_out"), wanted=("d_x", "d_x"))
    dense = CASES[-3]
    assert dense.layout is None
    with pytest.raises(Unsupported, match="row_weight has no gradient without a layout"):
        plan_of(dataclasses.replace(dense, wanted=("d_row_weight",)), arrays_of(dense), cpu_target())
    with pytest.raises(InvalidInput, match="d_y must be"):
        refused(MatmulSpec("in_out"), rows=11)
