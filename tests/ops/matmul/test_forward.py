"""The ragged grouped matmul against its NumPy twin: every layout, epilogue, gather and scatter."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_core import InvalidInput, Unsupported
from moe_core.base import dtypes
from moe_core.base.arrays import ArraySpec
from moe_core.base.target import Target
from moe_core.ops.matmul.forward import plan_matmul_ogs
from moe_core.parity.tolerance import assert_close, matmul_tolerance
from moe_core.specs import Activation, LayoutSpec, MatmulSpec, TileConfig
from moe_core.specs.operands import MatmulOperands, named_arrays
from tests.support.harness import engine_target, run_plan, spec_of
from tests.support.matmul.cases import Case, build, expected_matmul, random_array, run_matmul
from tests.support.strategies import ID_KINDS

ACTIVATIONS = (
    None,
    Activation("silu"),
    Activation("gelu", gate_layout="interleaved"),
    Activation("gelu_tanh", gate_layout="separate"),
    Activation("relu2", gated=False),
    Activation("silu", gated=False),
    Activation("swiglu_oai", gate_layout="interleaved"),
    Activation("swiglu_oai", gate_layout="halves", limit=None),
    Activation("silu", gate_layout="separate", limit=0.75),
    Activation("clamped_silu", limit=0.75),
    Activation("softcapped_silu", gate_layout="interleaved", alpha=1.5, limit=2.0),
)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    spec = MatmulSpec(
        draw(st.sampled_from(["in_out", "out_in"])),
        draw(st.sampled_from(["row", "token", "slot"])),
        draw(st.sampled_from(["row", "slot"])),
        draw(st.sampled_from(ACTIVATIONS)),
        draw(st.sampled_from([None, "float32"])),
    )
    return Case(
        num_tokens=draw(st.sampled_from([0, 1, 3, 9, 40])),
        top_k=draw(st.sampled_from([1, 2, 3])),
        num_experts=draw(st.sampled_from([1, 3, 8])),
        d=draw(st.sampled_from([16, 40, 72])),
        n=draw(st.sampled_from([16, 24, 72])),
        dtype=draw(st.sampled_from(dtypes.MATMUL_DTYPES)),
        spec=spec,
        ids=draw(st.sampled_from(ID_KINDS)),
        alignment=draw(st.sampled_from([1, 1, 8])),
        bias=draw(st.sampled_from([None, "float32", "same"])),
        row_weight=draw(st.booleans()),
        stacked=draw(st.booleans()),
        seed=draw(st.integers(0, 9)),
    )


@given(cases())
def test_matches_the_reference(case: Case) -> None:
    operands, layout, arrays = build(case)
    actual = run_matmul(operands, layout, arrays, case.spec)
    expected = expected_matmul(operands, layout, arrays, case.spec)
    out_dtype = case.spec.out_dtype or case.dtype
    tolerance = matmul_tolerance(case.dtype, out_dtype, case.d, activation=case.spec.activation)
    assert actual.dtype == expected.dtype
    assert_close(actual, expected, tolerance, label="y")


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
@pytest.mark.parametrize("weight_layout", ["in_out", "out_in"])
def test_every_activation_and_layout(activation: Activation | None, weight_layout: str) -> None:
    spec = MatmulSpec(weight_layout, "token", "slot", activation)
    case = Case(13, 2, 4, 40, 24, "bfloat16", spec, "some_absent", bias="float32", row_weight=True, stacked=True)
    operands, layout, arrays = build(case)
    actual = run_matmul(operands, layout, arrays, spec)
    tolerance = matmul_tolerance("bfloat16", "bfloat16", case.d, activation=activation)
    assert_close(actual, expected_matmul(operands, layout, arrays, spec), tolerance, label="y")


@pytest.mark.parametrize("weight_layout", ["in_out", "out_in"])
@pytest.mark.parametrize("dtype", dtypes.MATMUL_DTYPES)
def test_dense(weight_layout: str, dtype: str) -> None:
    random = np.random.default_rng(0)
    spec = MatmulSpec(weight_layout, activation=Activation("silu"), out_dtype="float32")
    weight = random_array(random, (24, 40) if weight_layout == "in_out" else (40, 24), dtype)
    operands = MatmulOperands(random_array(random, (9, 24), dtype), weight)
    actual = run_matmul(operands, None, {}, spec)
    tolerance = matmul_tolerance(dtype, "float32", 24, activation=spec.activation)
    assert_close(actual, expected_matmul(operands, None, {}, spec), tolerance, label="y")


def test_row_strided_x() -> None:
    case = Case(9, 2, 3, 24, 16, "float32", MatmulSpec("in_out", "token"), "uniform")
    operands, layout, arrays = build(case)
    wide = np.zeros((9, 40), np.float32)
    wide[:, :24] = operands.x
    plan = plan_matmul_ogs(
        dataclasses.replace(spec_of(operands), x=ArraySpec((9, 24), "float32", (40, 1))),
        layout,
        case.spec,
        engine_target(),
    )
    given_arrays = dict(named_arrays(operands)) | arrays | {"x": wide[:, :24]}
    actual = run_plan(plan, {buffer.name: given_arrays[buffer.name] for buffer in plan.inputs})["y"]
    expected = expected_matmul(operands, layout, arrays, case.spec)
    assert_close(actual, expected, matmul_tolerance("float32", "float32", 24), label="y")


def test_rows_without_an_expert_are_zero_and_never_read() -> None:
    spec = MatmulSpec("in_out", "slot", "slot")
    case = Case(20, 2, 4, 16, 16, "bfloat16", spec, "some_absent", row_weight=True)
    operands, layout, arrays = build(case)
    absent = arrays["row_of_slot"] < 0
    assert absent.any() and not absent.all()
    operands.x[absent] = np.nan
    operands.row_weight[absent] = np.nan
    actual = run_matmul(operands, layout, arrays, spec).astype(np.float32)
    assert np.array_equal(actual[absent], np.zeros_like(actual[absent]))
    assert np.isfinite(actual).all()


def test_nan_and_infinity_stay_in_their_rows_and_columns() -> None:
    spec = MatmulSpec("in_out", "token", "slot", Activation("swiglu_oai", gate_layout="interleaved"))
    case = Case(9, 2, 3, 40, 24, "float32", spec, "uniform")
    operands, layout, arrays = build(case)
    operands.x[4, 7] = np.nan
    operands.x[5, 3] = np.inf
    actual = run_matmul(operands, layout, arrays, spec)
    expected = expected_matmul(operands, layout, arrays, spec)
    assert np.isnan(expected[8:10]).all()
    assert_close(actual, expected, matmul_tolerance("float32", "float32", 40, activation=spec.activation), label="y")


def test_layer_outside_the_stack_gives_nan() -> None:
    case = Case(5, 1, 2, 16, 16, "float32", MatmulSpec("in_out", "token"), "uniform", stacked=True)
    operands, layout, arrays = build(case)
    for layer in (-1, 2, 2**31 - 1):
        outside = dataclasses.replace(operands, layer_index=np.array([layer], np.int32))
        assert np.isnan(run_matmul(outside, layout, arrays, case.spec)).all()


@pytest.mark.parametrize("block_m", [16, 32])
def test_same_bits_twice_and_close_across_configs(block_m: int) -> None:
    case = Case(40, 2, 4, 72, 24, "bfloat16", MatmulSpec("in_out", "token", "slot"), "uniform")
    operands, layout, arrays = build(case)
    config = TileConfig(block_m, 32, 32, 4, 2)
    first = run_matmul(operands, layout, arrays, case.spec, config=config)
    second = run_matmul(operands, layout, arrays, case.spec, config=config)
    assert first.tobytes() == second.tobytes()
    assert_close(
        first, expected_matmul(operands, layout, arrays, case.spec), matmul_tolerance("bfloat16", "bfloat16", 72), "y"
    )


_LAYOUT = LayoutSpec(4, 2, 3)
_GOOD = MatmulOperands(ArraySpec((4, 16), "bfloat16"), ArraySpec((3, 16, 8), "bfloat16"))
_TOKEN = MatmulSpec("in_out", "token")
_STACK = {"weight": ArraySpec((2, 3, 16, 8), "bfloat16")}


@pytest.mark.parametrize(
    ("change", "spec", "layout", "words"),
    [
        ({"x": ArraySpec((2, 4, 16), "bfloat16")}, _TOKEN, _LAYOUT, ("x must be", "(2, 4, 16)", "flatten")),
        ({"x": ArraySpec((4, 0), "bfloat16")}, _TOKEN, _LAYOUT, ("x must have at least one column", "(4, 0)", "wider")),
        ({"x": ArraySpec((4, 16), "int32")}, _TOKEN, _LAYOUT, ("x must be bfloat16", "int32", "cast")),
        ({"x": ArraySpec((5, 16), "bfloat16")}, _TOKEN, _LAYOUT, ("x must be [4, 16]", "(5, 16)")),
        ({"x": ArraySpec((4, 16), "bfloat16", (1, 4))}, _TOKEN, _LAYOUT, ("x must have dense rows", "contiguous")),
        ({"x": ArraySpec((4, 16), "bfloat16", (0, 1))}, _TOKEN, _LAYOUT, ("overlapping", "contiguous")),
        ({"weight": ArraySpec((3, 16, 8), "float32")}, _TOKEN, _LAYOUT, ("weight must be bfloat16", "float32", "cast")),
        ({"weight": ArraySpec((2, 16, 8), "bfloat16")}, _TOKEN, _LAYOUT, ("weight must be [3, 16, n]", "(2, 16, 8)")),
        ({"weight": ArraySpec((3, 16, 8), "bfloat16", (128, 1, 16))}, _TOKEN, _LAYOUT, ("contiguous", "strides")),
        ({}, MatmulSpec("out_in", "token"), _LAYOUT, ("weight must be [3, n, 16]", "(3, 16, 8)")),
        ({}, MatmulSpec("in_out", "slot"), _LAYOUT, ("x must be [8, 16]", "(4, 16)")),
        ({"bias": ArraySpec((3, 7), "float32")}, _TOKEN, _LAYOUT, ("bias must be [3, 8]", "(3, 7)")),
        ({"bias": ArraySpec((3, 8), "float16")}, _TOKEN, _LAYOUT, ("bias must be float32 or bfloat16", "float16")),
        ({"up": ArraySpec((3, 16, 8), "bfloat16")}, _TOKEN, _LAYOUT, ("up must be None", "leave it out")),
        ({"up_bias": ArraySpec((3, 8), "float32")}, _TOKEN, _LAYOUT, ("up_bias must be None",)),
        ({"row_weight": ArraySpec((4,), "float32")}, _TOKEN, _LAYOUT, ("row_weight must be [8]", "(4,)")),
        ({"row_weight": ArraySpec((8,), "float16")}, _TOKEN, _LAYOUT, ("row_weight must be float32", "float16")),
        ({"layer_index": ArraySpec((1,), "int32")}, _TOKEN, _LAYOUT, ("weight must be [num_layers, 3, 16, n]",)),
        (_STACK | {"layer_index": ArraySpec((2,), "int32")}, _TOKEN, _LAYOUT, ("layer_index must be [1]", "(2,)")),
        (_STACK | {"layer_index": ArraySpec((1,), "int64")}, _TOKEN, _LAYOUT, ("layer_index must be int32", "int64")),
        ({"weight": ArraySpec((16, 8), "bfloat16")}, _TOKEN, None, ("gather and scatter must be 'row'", "layout")),
    ],
)
def test_bad_input(change: dict, spec: MatmulSpec, layout: LayoutSpec | None, words: tuple[str, ...]) -> None:
    with pytest.raises(InvalidInput) as caught:
        plan_matmul_ogs(dataclasses.replace(_GOOD, **change), layout, spec, Target("interpreter"))
    for word in words:
        assert word in str(caught.value)


def test_odd_width_for_a_gated_activation() -> None:
    odd = dataclasses.replace(_GOOD, weight=ArraySpec((3, 16, 7), "bfloat16"))
    with pytest.raises(InvalidInput, match="even width"):
        plan_matmul_ogs(
            odd, _LAYOUT, MatmulSpec("in_out", "token", activation=Activation("silu")), Target("interpreter")
        )


def test_expert_matrix_beyond_int32() -> None:
    huge = MatmulOperands(ArraySpec((4, 65536), "bfloat16"), ArraySpec((3, 65536, 32768), "bfloat16"))
    with pytest.raises(Unsupported, match=r"2\*\*31"):
        plan_matmul_ogs(huge, _LAYOUT, _TOKEN, Target("interpreter"))


def test_illegal_config_says_why() -> None:
    with pytest.raises(InvalidInput, match=r"stages of .* bytes exceed"):
        config = TileConfig(128, 256, 128, 8, 4)
        plan_matmul_ogs(_GOOD, _LAYOUT, _TOKEN, Target("cuda", 90, 132), config=config)


@pytest.mark.parametrize(("gather", "scatter"), [("row", "row"), ("token", "slot"), ("token", "row")])
def test_a_layout_that_lies_stays_inside_the_buffers(gather: str, scatter: str) -> None:
    """Values of a layout's arrays may come from anywhere; guard zones around every buffer see a stray write."""
    layout = LayoutSpec(4, 1, 2, max_rows=4)
    rows = {"row": layout.capacity, "token": 4}[gather]
    operands = MatmulOperands(np.ones((rows, 16), np.float32), np.ones((2, 16, 16), np.float32))
    spec = MatmulSpec("in_out", gather, scatter)
    honest = {
        "group_sizes": np.array([3, 1], np.int32),
        "group_start": np.array([0, 4, 8], np.int32),
        "slot_of_row": np.array([0, -1, 1, -1, 2, -1, -1, -1], np.int32),
        "row_of_slot": np.array([0, 2, 4, -1], np.int32),
    }
    assert_close(
        run_matmul(operands, layout, honest, spec),
        expected_matmul(operands, layout, honest, spec),
        matmul_tolerance("float32", "float32", 16),
        label="padding inside a group",
    )
    for name, values in (
        ("slot_of_row", [0, 2**30, -7, 99, 2, -1, -1, -1]),
        ("group_start", [-5, 2**30, 8]),
        ("group_sizes", [2**30, -3]),
    ):
        run_matmul(operands, layout, honest | {name: np.array(values, np.int32)}, spec)


def test_every_row_of_a_batched_layout_is_written() -> None:
    """Counts from elsewhere may fill all of `[E, max_rows]`, whatever T * K says."""
    layout = LayoutSpec(64, 1, 2, max_rows=64)
    operands = MatmulOperands(np.ones((128, 16), np.float32), np.ones((2, 16, 16), np.float32))
    arrays = {
        "group_sizes": np.array([64, 64], np.int32),
        "group_start": np.array([0, 64, 128], np.int32),
        "slot_of_row": np.arange(128, dtype=np.int32) % 64,
    }
    assert (run_matmul(operands, layout, arrays, MatmulSpec("in_out")) == 16).all()


def test_one_sum_over_two_weights_that_are_longer_than_a_step() -> None:
    random = np.random.default_rng(1)
    x = random_array(random, (9, 160), "float32")
    weight, up = (random_array(random, (80, 24), "float32") for _ in range(2))
    operands = MatmulOperands(x, weight, up)
    plan = plan_matmul_ogs(spec_of(operands), None, MatmulSpec("in_out"), engine_target(), joined=True)
    actual = run_plan(plan, dict(named_arrays(operands)))["y"]
    expected = x @ np.concatenate([weight, up])
    assert_close(actual, expected, matmul_tolerance("float32", "float32", 160), label="y")
