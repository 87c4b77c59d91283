"""The backward's row-wise kernels against NumPy, and that a composed plan gives them the rows they take."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_core.base.arrays import ArraySpec
from moe_core.base.target import Target
from moe_core.ops.activation.reference import sigmoid
from moe_core.ops.common.rounding import round_to, to_float32
from moe_core.ops.matmul.reference.backward import bias_product
from moe_core.ops.matmul.reference.rows import rows_of
from moe_core.ops.moe.backward import plan_moe_backward
from moe_core.ops.moe.options import BackwardOptions
from moe_core.ops.reduction.rowwise import (
    plan_add,
    plan_bias_product,
    plan_cast_rows,
    plan_gate_gradient,
    plan_gate_weight,
    plan_weighted_input,
)
from moe_core.ops.routing.reference import layout as make_layout
from moe_core.parity.tolerance import assert_close, matmul_tolerance
from moe_core.specs import Activation, MoESpec
from moe_core.specs.operands import ExpertWeights, MoEOperands, OutputGradients, TopK
from tests.support import strategies
from tests.support.harness import engine_target, run_plan, spec_of
from tests.support.strategies import draw_array, hard_routing


def close(actual: np.ndarray, expected: np.ndarray, length: int, label: str) -> None:
    scale = np.full(expected.shape, max(1.0, np.sqrt(length)))
    assert_close(actual, expected, matmul_tolerance("float32", expected.dtype.name, length), label, scale=scale)


@given(case=strategies.routings(max_tokens=40), width=st.sampled_from((1, 33, 1030)), seed=strategies.seeds())
def test_bias_product(case: strategies.RoutingCase, width: int, seed: int) -> None:
    rng, layout = np.random.default_rng(seed), case.layout()
    sizes, start, slot_of_row, row_of_slot, _ = make_layout(case.ids, case.expert_map, case.token_mask, layout=layout)
    d_y, bias = draw_array(rng, (case.num_tokens, width)), draw_array(rng, (layout.num_experts, width))
    bias[sizes == 0] = np.nan
    groups = {"group_start": start, "slot_of_row": slot_of_row}
    plan = plan_bias_product(spec_of(d_y), spec_of(bias), layout, engine_target())
    found = run_plan(plan, {"d_y": d_y, "bias": bias} | groups)["products"]
    expected = bias_product(d_y, bias, rows_of(layout, sizes, **groups), gather="token")
    present = row_of_slot >= 0
    close(found[present], expected[present], width, "products")


@pytest.mark.parametrize("layer", [0, 1])
def test_bias_product_of_many_experts_in_a_stack(layer: int) -> None:
    case, rng = hard_routing("many_experts"), np.random.default_rng(0)
    layout = case.layout()
    sizes, start, slot_of_row, _, _ = make_layout(case.ids, case.expert_map, case.token_mask, layout=layout)
    d_y, bias = draw_array(rng, (case.num_tokens, 24)), draw_array(rng, (2, layout.num_experts, 24))
    groups, index = {"group_start": start, "slot_of_row": slot_of_row}, np.array([layer], np.int32)
    plan = plan_bias_product(spec_of(d_y), spec_of(bias), layout, engine_target(), layer_index=spec_of(index))
    found = run_plan(plan, {"d_y": d_y, "bias": bias, "layer_index": index} | groups)["products"]
    expected = bias_product(d_y, bias[layer], rows_of(layout, sizes, **groups), gather="token")
    close(found, expected, 24, "products")


@pytest.mark.parametrize("rows", [0, 1, 1500])
def test_gates_and_sums(rows: int) -> None:
    rng, target = np.random.default_rng(0), engine_target()
    gate, upstream = draw_array(rng, (rows, 1), rms=4.0), draw_array(rng, (rows, 1))
    array = spec_of(gate)
    found = run_plan(plan_gate_weight(array, target), {"gate": gate})["weight"]
    close(found, sigmoid(gate), 1, "weight")
    found = run_plan(plan_gate_gradient(array, target), {"d_weight": upstream, "gate": gate})["d_gate"]
    close(found, upstream * sigmoid(gate) * sigmoid(-gate), 1, "d_gate")
    found = run_plan(plan_add(array, target), {"first": gate, "second": upstream})["total"]
    np.testing.assert_array_equal(found, gate + upstream)


@pytest.mark.parametrize(("dtype", "to"), [("float32", "bfloat16"), ("bfloat16", "float16"), ("float16", "float32")])
def test_cast_rows(dtype: str, to: str) -> None:
    x = draw_array(np.random.default_rng(0), (37, 70), dtype)
    found = run_plan(plan_cast_rows(spec_of(x), to, engine_target()), {"x": x})["y"]
    np.testing.assert_array_equal(found, round_to(x, to))


@pytest.mark.parametrize("outputs", [("d_x",), ("d_weight",), ("d_x", "d_weight")])
@pytest.mark.parametrize("with_extra", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weighted_input(outputs: tuple[str, ...], with_extra: bool, dtype: str) -> None:
    rng, tokens, width = np.random.default_rng(0), 70, 1040
    rows = rng.permutation(tokens).astype(np.int32)
    absent = rng.random(tokens) < 0.3
    d_rows, x, weights = (
        draw_array(rng, (tokens, width), dtype),
        draw_array(rng, (tokens, width), dtype),
        rng.random((tokens, 1), np.float32),
    )
    extra = draw_array(rng, (tokens, width))
    d_rows[rows[absent]], x[absent], weights[absent] = np.nan, np.nan, np.nan
    # No row, and one behind the last.
    rows[absent] = np.where(np.arange(absent.sum()) % 2, -1, tokens)
    plan = plan_weighted_input(spec_of(d_rows), spec_of(x), engine_target(), outputs=outputs, with_extra=with_extra)
    arrays = {"d_rows": d_rows, "x": x, "row_of_slot": rows, "weights": weights}
    found = run_plan(plan, arrays | ({"extra": extra} if with_extra else {}))
    d_source = np.where(absent[:, None], np.float32(0), to_float32(d_rows)[np.where(absent, 0, rows)])
    d_x = d_source * np.where(absent[:, None], np.float32(0), weights) + (extra if with_extra else 0)
    products = d_source * np.where(absent[:, None], np.float32(0), to_float32(x))
    expected = {"d_x": round_to(d_x, x.dtype), "d_weight": products.sum(axis=1, keepdims=True)}
    assert set(found) == set(outputs)
    for name in outputs:
        close(found[name], expected[name], width if name == "d_weight" else 1, name)


def test_recompute_reads_weighted_rows_of_a_strided_x() -> None:
    """Weighted rows are contiguous, whatever the strides of x."""
    x = ArraySpec((8, 32), "float32", (64, 1))
    experts = ExpertWeights(ArraySpec((4, 32, 32), "float32"), ArraySpec((4, 16, 32), "float32"))
    routing = TopK(ArraySpec((8, 1), "int32"), ArraySpec((8, 1), "float32"))
    spec = MoESpec(Activation("silu"), apply_router_weight_on_input=True)
    gradients = OutputGradients(ArraySpec((8, 32), "float32"))
    for recompute in (False, True):
        plan = plan_moe_backward(
            gradients,
            MoEOperands(x, experts, routing),
            dataclasses.replace(spec, recompute=recompute),
            Target("interpreter"),
            options=BackwardOptions(wanted=("d_x",)),
        )
        assert plan.spec("d_x").shape == (8, 32)
