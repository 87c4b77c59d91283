"""The activation's backward, alone and between the matmuls, against its NumPy twins."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_core import InvalidInput
from moe_core.base import dtypes
from moe_core.base.arrays import ArraySpec
from moe_core.base.target import Target
from moe_core.ops.activation import reference
from moe_core.ops.activation.backward import EXPERT_GRADIENTS, plan_activation_backward, plan_expert_activation_backward
from moe_core.ops.routing.reference import layout as make_layout
from moe_core.parity.tolerance import Tolerance, assert_close
from moe_core.specs.matmul import Activation
from moe_core.specs.operands import ExpertActivationOperands, map_arrays, named_arrays
from tests.support import strategies
from tests.support.harness import engine_target, run_plan, spec_of
from tests.support.strategies import draw_array, hard_routing

F32 = np.float32
EVERY = strategies.all_activations()
UNIT = {"float32": 2.0**-24, "bfloat16": 2.0**-8, "float16": 2.0**-11}


def close(dtype: str) -> Tolerance:
    """fp32 formulas of a few exponentials and roundings, whose terms may cancel; one cast."""
    return Tolerance(2e-6 + UNIT[dtype] / 4, 4e-5 + 2 * UNIT[dtype])


def run_op(d_y: np.ndarray, x: np.ndarray, up: np.ndarray | None, activation: Activation):
    """(actual, expected), each a list of d_x and, with up, d_up."""
    up_spec = None if up is None else spec_of(up)
    plan = plan_activation_backward(spec_of(d_y), spec_of(x), activation, engine_target(), up=up_spec)
    found = run_plan(plan, {"d_y": d_y, "x": x} | ({} if up is None else {"up": up}))
    expected = reference.activation_backward(d_y, x, up, activation=activation)
    return [found[buffer.name] for buffer in plan.outputs], [expected] if up is None else list(expected)


def draw_input(rng: np.random.Generator, activation: Activation, rows: int, width: int, dtype: str, rms: float = 2.0):
    """(x, up)."""
    separate = activation.gate_layout == "separate"
    x = draw_array(rng, (rows, width if separate else activation.input_width(width)), dtype, rms)
    return x, draw_array(rng, (rows, width), dtype, rms) if separate else None


@pytest.mark.parametrize("activation", EVERY, ids=str)
def test_every_activation(activation: Activation) -> None:
    rng = np.random.default_rng(0)
    x, up = draw_input(rng, activation, 7, 33, "float32", rms=4)
    x[0, :6] = [0.0, -0.0, 1e4, -1e4, 1e-30, 30.0]
    x[1, :3] = [np.nan, np.inf, -np.inf]
    actual, expected = run_op(draw_array(rng, (7, 33)), x, up, activation)
    for found, wanted in zip(actual, expected, strict=True):
        # The row of 1e4 has a scale of its own, which would hide the others.
        for rows in (slice(0, 1), slice(1, None)):
            assert_close(found[rows], wanted[rows], close("float32"), str(activation))


@given(
    rows=st.sampled_from([0, 1, 5, 70]),
    width=st.sampled_from([1, 16, 33]),
    dtype=strategies.matmul_dtypes(),
    upstream=strategies.matmul_dtypes(),
    activation=strategies.activations(),
    seed=strategies.seeds(),
)
def test_shapes_and_dtypes(rows, width, dtype, upstream, activation, seed) -> None:
    rng = np.random.default_rng(seed)
    x, up = draw_input(rng, activation, rows, width, dtype)
    actual, expected = run_op(draw_array(rng, (rows, width), upstream), x, up, activation)
    for found, wanted in zip(actual, expected, strict=True):
        assert found.dtype == x.dtype
        assert_close(found, wanted, close(dtype), str(activation))


def run_expert(
    operands: ExpertActivationOperands,
    activation: Activation,
    *,
    outputs: tuple[str, ...] = EXPERT_GRADIENTS,
    slot_of_row: np.ndarray | None = None,
    target: Target | None = None,
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """(actual, expected) by name."""
    plan = plan_expert_activation_backward(
        map_arrays(operands, spec_of),
        activation,
        target or engine_target(),
        outputs=outputs,
        slot_of_row=None if slot_of_row is None else spec_of(slot_of_row),
    )
    arrays = dict(named_arrays(operands)) | ({} if slot_of_row is None else {"slot_of_row": slot_of_row})
    expected = reference.expert_activation_backward(operands, activation=activation, outputs=outputs)
    return run_plan(plan, arrays), dict(zip(outputs, expected, strict=True))


def check_expert(actual: dict[str, np.ndarray], expected: dict[str, np.ndarray], operands, width: int) -> None:
    dtype, places = operands.pre.dtype.name, operands.row_of_slot
    used = np.isin(np.arange(len(operands.pre)), np.arange(len(operands.pre)) if places is None else places)
    for name, wanted in expected.items():
        assert actual[name].dtype == wanted.dtype and actual[name].shape == wanted.shape, name
        if name == "d_weight":
            assert places is None or not actual[name][places < 0].any()
            sums = Tolerance(4e-6 + np.sqrt(width) * UNIT["float32"], 8e-5)
            assert_close(actual[name], wanted, sums, name, scale=np.float64(3 * np.sqrt(width)))
        else:
            assert np.isnan(actual[name][~used].astype(F32)).all(), f"{name}: poison of the harness"
            assert_close(actual[name][used], wanted[used], close(dtype), name)


def draw_expert_operands(
    rng: np.random.Generator, rows: int, slots: np.ndarray, activation: Activation, width: int, dtype: str
) -> ExpertActivationOperands:
    """Operands whose row_of_slot is `slots`; all that nothing may read is NaN."""
    kept = slots >= 0
    used = np.zeros(rows, bool)
    used[slots[kept]] = True
    d_hidden = draw_array(rng, (rows, width), "float32" if dtype == "float16" else dtype)
    pre = draw_array(rng, (rows, activation.input_width(width)), dtype, rms=2)
    d_hidden[~used], pre[~used] = np.nan, np.inf
    weight = np.where(kept, rng.uniform(0.1, 1, slots.shape), np.nan).astype(F32)
    product = np.where(kept, rng.standard_normal(slots.shape), np.nan).astype(F32)
    return ExpertActivationOperands(d_hidden, pre, slots, weight, product)


@given(st.data())
def test_layouts(data: st.DataObject) -> None:
    case = data.draw(strategies.routings(max_tokens=24))
    layout = data.draw(strategies.layouts(case))
    activation, dtype = data.draw(strategies.activations()), data.draw(strategies.matmul_dtypes())
    width = data.draw(st.sampled_from([1, 17, 40, 1030]))
    rng = np.random.default_rng(data.draw(strategies.seeds()))
    _, _, slot_of_row, row_of_slot, _ = make_layout(case.ids, case.expert_map, case.token_mask, layout=layout)
    operands = draw_expert_operands(rng, layout.capacity, row_of_slot, activation, width, dtype)
    actual, expected = run_expert(operands, activation, slot_of_row=slot_of_row)
    check_expert(actual, expected, operands, width)


@pytest.mark.parametrize("activation", EVERY, ids=str)
def test_every_activation_between_products(activation: Activation) -> None:
    case = hard_routing("missing_ids")
    layout = case.layout(alignment=16)
    _, _, slot_of_row, row_of_slot, _ = make_layout(case.ids, layout=layout)
    rng = np.random.default_rng(4)
    operands = draw_expert_operands(rng, layout.capacity, row_of_slot, activation, 24, "bfloat16")
    check_expert(*run_expert(operands, activation, slot_of_row=slot_of_row), operands, 24)


def test_dense_rows_and_fewer_outputs() -> None:
    activation, rng = Activation("silu"), np.random.default_rng(5)
    operands = draw_expert_operands(rng, 11, np.arange(11, dtype=np.int32), activation, 20, "float32")
    operands = dataclasses.replace(operands, row_of_slot=None, row_weight=operands.row_weight[:, None])
    for outputs in (EXPERT_GRADIENTS, ("d_pre", "d_weight"), ("d_weight", "weighted_hidden", "d_pre")):
        check_expert(*run_expert(operands, activation, outputs=outputs), operands, 20)
    bare = dataclasses.replace(operands, row_weight=None, bias_product=None)
    for outputs in (EXPERT_GRADIENTS, ("d_pre",), ("d_pre", "weighted_hidden")):
        check_expert(*run_expert(bare, activation, outputs=outputs), bare, 20)


def test_reference_plan() -> None:
    case = hard_routing("missing_ids")
    layout = case.layout(alignment=4)
    _, _, slot_of_row, row_of_slot, _ = make_layout(case.ids, layout=layout)
    activation, rng = Activation("gelu", gate_layout="interleaved"), np.random.default_rng(7)
    operands = draw_expert_operands(rng, layout.capacity, row_of_slot, activation, 16, "bfloat16")
    actual, expected = run_expert(operands, activation, slot_of_row=slot_of_row, target=Target("reference"))
    for name, wanted in expected.items():
        np.testing.assert_array_equal(actual[name], wanted)
    d_y, x = draw_array(rng, (5, 8)), draw_array(rng, (5, 16))
    plan = plan_activation_backward(spec_of(d_y), spec_of(x), activation, Target("reference"))
    wanted = reference.activation_backward(d_y, x, activation=activation)
    np.testing.assert_array_equal(run_plan(plan, {"d_y": d_y, "x": x})["d_x"], wanted)


Z, PRE, SLOTS = ArraySpec((8, 4), "float32"), ArraySpec((8, 8), "bfloat16"), ArraySpec((6,), "int32")


@pytest.mark.parametrize(
    ("operands", "options", "message"),
    [
        (ExpertActivationOperands(Z, Z), {}, r"pre must be \[8, 8\], got \(8, 4\)"),
        (ExpertActivationOperands(Z, PRE, PRE), {}, r"row_of_slot must be \[num_tokens \* top_k\], got \(8, 8\)"),
        (ExpertActivationOperands(Z, PRE, SLOTS), {}, "slot_of_row must be given if row_of_slot is.*got None"),
        (ExpertActivationOperands(Z, PRE, SLOTS), {"slot_of_row": SLOTS}, r"slot_of_row must be \[8\], got \(6,\)"),
        (ExpertActivationOperands(Z, PRE, row_weight=ArraySpec((4,), "float32")), {}, r"row_weight must hold 8 slots"),
        (ExpertActivationOperands(Z, PRE), {"outputs": ("d_weight",)}, "outputs must be d_pre and any of"),
        (ExpertActivationOperands(Z, PRE, bias_product=ArraySpec((8,), "float32")), {"outputs": ("d_pre",)},
            "bias_product must be None where d_weight is no output"),
        (ExpertActivationOperands(Z, PRE), {"slot_of_row": ArraySpec((8,), "int32")},
            "slot_of_row must be given if row_of_slot is.*got int32"),
    ],
)  # fmt: skip
def test_bad_expert_input(operands: ExpertActivationOperands, options: dict, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        plan_expert_activation_backward(operands, Activation("silu"), Target("interpreter"), **options)


@pytest.mark.parametrize(
    ("d_y", "x", "up", "activation", "message"),
    [
        (Z, ArraySpec((8, 7), "float32"), None, Activation("silu"), "x must have an even width.*got 7"),
        (PRE, PRE, None, Activation("silu"), r"d_y must be \[8, 4\], got \(8, 8\)"),
        (Z, ArraySpec((8, 8), "int32"), None, Activation("silu"), "x must be bfloat16 .*got int32"),
        (Z, PRE, Z, Activation("silu"), "up must be None for gate_layout='halves'"),
        (Z, Z, None, Activation("silu", gate_layout="separate"), "up must be .*got None"),
    ],
)
def test_bad_input(d_y, x, up, activation, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        plan_activation_backward(d_y, x, activation, Target("interpreter"), up=up)


def test_every_matmul_dtype_is_drawn() -> None:
    assert set(UNIT) == set(dtypes.MATMUL_DTYPES)
