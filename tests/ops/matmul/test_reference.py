"""The grouped matmul reference against a float64 loop over slots: gather, scatter, epilogue, layouts, layers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_core.errors import InvalidInput
from moe_core.ops.matmul.reference.forward import matmul_ogs
from moe_core.ops.matmul.reference.rows import rows_of
from moe_core.ops.routing.reference import layout as make_layout
from moe_core.parity.tolerance import assert_close, matmul_tolerance
from moe_core.specs import Activation, LayoutSpec, MatmulSpec
from moe_core.specs.operands import MatmulOperands, named_arrays
from tests.support import strategies
from tests.support.exact import against_exact, exact_row
from tests.support.strategies import HARD_ROUTINGS, RoutingCase, draw_array, hard_routing, numpy_dtype


class Problem:
    """Operands, layout arrays and the float64 answer of one grouped matmul."""

    def __init__(self, case: RoutingCase, layout: LayoutSpec, spec: MatmulSpec, dtype: str, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.case, self.layout, self.spec, self.dtype = case, layout, spec, dtype
        self.inner, self.width = (int(rng.choice(strategies.WIDE_WIDTHS)) for _ in range(2))
        *arrays, _ = make_layout(case.ids, case.expert_map, case.token_mask, layout=layout)
        self.sizes, self.start, self.slot_of_row, self.row_of_slot = arrays
        self.operands = self._draw(rng)

    def _draw(self, rng: np.random.Generator) -> MatmulOperands:
        case, spec = self.case, self.spec
        experts, separate = case.num_experts, spec.activation is not None and spec.activation.gate_layout == "separate"
        columns = self.width
        if spec.activation is not None and not separate:
            columns = spec.activation.input_width(self.width)
        rows = {"token": case.num_tokens, "slot": self.layout.num_slots, "row": self.layout.capacity}[spec.gather]
        x = draw_array(rng, (rows, self.inner), self.dtype)
        if spec.gather != "token":
            order = self.slot_of_row if spec.gather == "row" else self.row_of_slot
            x[order < 0] = np.nan  # padding, never read
        shape = (experts, self.inner, columns) if spec.weight_layout == "in_out" else (experts, columns, self.inner)
        with_bias, with_row_weight, fp32_bias = rng.random(3) < 0.5
        bias_dtype = "float32" if fp32_bias else self.dtype

        def weight() -> np.ndarray:
            return draw_array(rng, shape, self.dtype, rms=1.5 / np.sqrt(self.inner))

        def bias() -> np.ndarray | None:
            return draw_array(rng, (experts, columns), bias_dtype) if with_bias else None

        up, up_bias = (weight(), bias()) if separate else (None, None)
        row_weight = case.weights.reshape(-1) if with_row_weight else None
        return MatmulOperands(x, weight(), up, bias(), up_bias, row_weight)

    def run(self, **changes: Any) -> np.ndarray:
        arrays = dict(named_arrays(self.operands)) | changes
        groups = self.sizes, self.start, self.slot_of_row
        for array in (*arrays.values(), *groups):
            array.flags.writeable = False
        return matmul_ogs(MatmulOperands(**arrays), self.spec, rows_of(self.layout, *groups))

    def exact(self) -> np.ndarray:
        rows = self.layout.capacity if self.spec.scatter == "row" else self.layout.num_slots
        y = np.zeros((rows, self.width))
        operands = dict(named_arrays(self.operands))
        for expert in range(self.case.num_experts):
            own = {name: operands[name][expert] for name in ("weight", "up", "bias", "up_bias") if name in operands}
            if self.spec.weight_layout == "out_in":
                own |= {name: own[name].T for name in ("weight", "up") if name in own}
            for row in range(self.start[expert], self.start[expert] + self.sizes[expert]):
                slot = int(self.slot_of_row[row])
                source = {"row": row, "slot": slot, "token": slot // self.case.top_k}[self.spec.gather]
                value = exact_row(operands["x"][source], own, self.spec)
                if "row_weight" in operands:
                    value = value * float(operands["row_weight"][slot])
                y[row if self.spec.scatter == "row" else slot] = value
        return y

    def check(self) -> None:
        y, wanted = self.run(), self.exact()
        out_dtype = self.spec.out_dtype or self.dtype
        assert y.dtype == numpy_dtype(out_dtype)
        tolerance = matmul_tolerance(self.dtype, out_dtype, self.inner, activation=self.spec.activation)
        assert_close(y, wanted, against_exact(tolerance, out_dtype), f"{self.spec}")
        assert not y[~wanted.any(axis=1)].any()


@st.composite
def matmul_specs(draw: st.DrawFn) -> MatmulSpec:
    return MatmulSpec(
        weight_layout=draw(strategies.weight_layouts()),
        gather=draw(st.sampled_from(("row", "token", "slot"))),
        scatter=draw(st.sampled_from(("row", "slot"))),
        activation=draw(st.one_of(st.none(), strategies.activations())),
        out_dtype=draw(st.one_of(st.none(), strategies.matmul_dtypes())),
        allow_tf32=draw(st.booleans()),
    )


@given(st.data())
def test_matmul_follows_the_contract(data: st.DataObject):
    case = data.draw(strategies.routings(max_tokens=24, max_experts=8))
    layout = data.draw(strategies.layouts(case))
    Problem(
        case, layout, data.draw(matmul_specs()), data.draw(strategies.matmul_dtypes()), data.draw(strategies.seeds())
    ).check()


@pytest.mark.parametrize("name", HARD_ROUTINGS)
def test_hard_routings(name: str):
    case = hard_routing(name)
    spec = MatmulSpec("in_out", "token", "slot", Activation("swiglu_oai", True, "interleaved"))
    Problem(case, case.layout(), spec, "bfloat16", 1).check()


@pytest.mark.parametrize("layout", ["in_out", "out_in"])
def test_dense_product_is_one_group(layout: str):
    rng = np.random.default_rng(4)
    spec = MatmulSpec(layout, activation=Activation("gelu", True, "separate"), out_dtype="float32")
    x, row_weight = draw_array(rng, (23, 40), "bfloat16"), draw_array(rng, (23,))
    weight, up = (draw_array(rng, (40, 32), "bfloat16", rms=0.2) for _ in range(2))
    bias, up_bias = (draw_array(rng, (32,)) for _ in range(2))
    given = [np.ascontiguousarray(w.T) if layout == "out_in" else w for w in (weight, up)]
    dense = matmul_ogs(MatmulOperands(x, *given, bias, up_bias, row_weight), spec)
    own = {"weight": weight, "up": up, "bias": bias, "up_bias": up_bias}
    wanted = np.stack([exact_row(row, own, spec) for row in x]) * row_weight[:, None]
    assert_close(dense, wanted, matmul_tolerance("bfloat16", "float32", 40, activation=spec.activation), "dense")


def test_layer_picks_from_the_stack_and_must_exist():
    case = hard_routing("missing_ids")
    problem = Problem(case, case.layout(), MatmulSpec("in_out", "token"), "float32", 2)
    plain = problem.run()
    names = ("weight", "bias", "up", "up_bias")
    stacked = {
        name: np.stack([np.full_like(array, np.nan), array])
        for name, array in named_arrays(problem.operands)
        if name in names
    }
    assert np.array_equal(problem.run(layer_index=np.array([1], np.int32), **stacked), plain)
    for index in (-1, 2):
        with pytest.raises(InvalidInput, match=rf"layer_index must be in \[0, 2\), got {index}; "):
            problem.run(layer_index=np.array([index], np.int32), **stacked)


def test_router_weight_comes_after_the_activation_and_before_the_only_rounding():
    x, weight = np.array([[2.0]], np.float32), np.array([[[1.0, 3.0]]], np.float32)
    spec = MatmulSpec("in_out", "token", "slot", Activation("relu2"), "bfloat16")
    row_weight = np.array([1 + 2.0**-7], np.float32)
    one = np.array([1], np.int32)
    rows = rows_of(LayoutSpec(1, 1, 1), one, np.array([0, 1]), np.array([0]))
    y = matmul_ogs(MatmulOperands(x, weight, row_weight=row_weight), spec, rows)
    # relu(2)^2 * 6 = 24, * 1.0078125 = 24.1875: halfway between 24.125 and 24.25, to even.
    assert float(y[0, 0]) == 24.25


def test_padding_rows_inside_a_group_are_skipped():
    x = np.array([[1.0], [np.nan], [3.0]], np.float32)
    groups = np.array([3], np.int32), np.array([0, 3], np.int32), np.array([0, -1, 2], np.int32)
    operands = MatmulOperands(x, np.ones((1, 1, 1), np.float32))
    y = matmul_ogs(operands, MatmulSpec("in_out"), rows_of(LayoutSpec(3, 1, 1), *groups))
    assert y.tolist() == [[1.0], [0.0], [3.0]]


def test_a_negative_size_is_that_of_a_group_without_rows():
    """As the kernels have it: sizes may come from anywhere."""
    groups = np.array([1, -2, 2], np.int32), np.array([0, 1, 1, 3], np.int32), np.array([0, 1, 2], np.int32)
    x, weight = np.array([[1.0], [2.0], [3.0]], np.float32), np.array([[[1.0]], [[10.0]], [[100.0]]], np.float32)
    y = matmul_ogs(MatmulOperands(x, weight), MatmulSpec("in_out"), rows_of(LayoutSpec(3, 1, 3), *groups))
    assert y.tolist() == [[1.0], [200.0], [300.0]]
