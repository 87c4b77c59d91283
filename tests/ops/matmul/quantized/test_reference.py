"""The reference's quantised products against float64 products of what the operands stand for."""

from __future__ import annotations

import dataclasses
import re

import ml_dtypes
import numpy as np
import pytest

from moe_core.errors import InvalidInput
from moe_core.formats import (
    FP8_CHANNEL,
    FP8_TENSOR,
    FP8_TOKEN,
    INT8_CHANNEL,
    INT8_TOKEN,
    MXFP4,
    MXFP8,
    Format,
    QuantizedSpec,
    QuantizedTensor,
    scheme_named,
)
from moe_core.ops.matmul.reference.forward import matmul_ogs, matmul_ogs_plan
from moe_core.ops.matmul.reference.quantized import quantized_product
from moe_core.ops.matmul.reference.rows import rows_of
from moe_core.ops.moe.reference.forward import moe_stages
from moe_core.ops.quantize.reference import codes_and_scales, dequantize, quantize, quantize_rows
from moe_core.ops.routing.reference import layout as make_layout
from moe_core.parity.tolerance import UNIT_ROUNDOFF, assert_close, quantized_matmul_tolerance, stage_tolerances
from moe_core.specs import Activation, LayoutSpec, MatmulSpec, MatmulTuning, MoESpec
from moe_core.specs.operands import MatmulOperands, TopK, map_arrays
from tests.support.exact import against_exact, exact_row
from tests.support.quantized.operands import LAYOUTS, SCHEMES, draw_experts, draw_weight, plain, reduction_of
from tests.support.strategies import draw_array, hard_routing

F64 = np.float64


def exact(x: np.ndarray | QuantizedTensor, weight: QuantizedTensor) -> np.ndarray:
    """x . weight in float64; weights that meet plain rows are first rounded to their dtype, unless microscaled."""
    dtype = "float32"
    if isinstance(x, np.ndarray) and not weight.format.has_e8m0_scales:
        dtype = x.dtype.name
    matrix = dequantize(weight, dtype).astype(F64)
    return plain(x).astype(F64) @ (matrix if weight.layout == "in_out" else matrix.T)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_products_of_every_scheme(scheme, dtype):
    rng = np.random.default_rng(0)
    inputs = reduction_of(scheme)
    x = draw_array(rng, (7, inputs), dtype)
    rows = x if scheme.activations is None else quantize(x, scheme.activations)
    for layout in LAYOUTS:
        weight = draw_weight(rng, (515, inputs), scheme.weights, layout)
        spec = MatmulSpec(layout, out_dtype=dtype)
        y = matmul_ogs(MatmulOperands(rows, weight), spec)
        tolerance = quantized_matmul_tolerance(dtype, inputs, scheme.weights, spec, rows=scheme.activations)
        assert_close(y, exact(rows, weight), against_exact(tolerance, dtype), f"{scheme} {layout}")


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_ragged_products_are_products_of_dequantised_operands(scheme, layout):
    """Gather, gate layouts, biases, a layer of a stack, row weights and empty experts: as with plain weights."""
    rng = np.random.default_rng(1)
    case = hard_routing("missing_ids")
    groups, inputs = case.layout(alignment=4), reduction_of(scheme)
    sizes, start, slot_of_row, row_of_slot, _ = make_layout(case.ids, layout=groups)
    rows = rows_of(groups, sizes, start, slot_of_row)
    for gather, gate_layout in (("token", "halves"), ("slot", "interleaved"), ("row", "separate"), ("row", None)):
        activation = None if gate_layout is None else Activation("silu", True, gate_layout)
        spec = MatmulSpec(layout, gather, "slot" if gather == "row" else "row", activation, "float32")
        height = {"token": case.num_tokens, "slot": groups.num_slots, "row": groups.capacity}[gather]
        x = draw_array(rng, (height, inputs), "bfloat16")
        if gather != "token":
            # Of a tensor with one scale for all a NaN would be everywhere; rows of no expert are never read elsewhere.
            per_tensor = scheme.activations is not None and scheme.activations.group_rows is None
            x[(row_of_slot if gather == "slot" else slot_of_row) < 0] = 0 if per_tensor else np.nan
        width = 22 if gate_layout in ("halves", "interleaved") else 11
        lead = (2, case.num_experts)
        operands = {
            "x": x if scheme.activations is None else quantize(x, scheme.activations),
            "weight": draw_weight(rng, (*lead, width, inputs), scheme.weights, layout),
            "up": draw_weight(rng, (*lead, width, inputs), scheme.weights, layout)
            if gate_layout == "separate"
            else None,
            "bias": draw_array(rng, (*lead, width)),
            "up_bias": draw_array(rng, (*lead, width)) if gate_layout == "separate" else None,
            "row_weight": case.weights,
            "layer_index": np.array([1], np.int32),
        }
        y = matmul_ogs(MatmulOperands(**operands), spec, rows)
        # Against bf16 rows weights are rounded to bf16, unless they are microscaled.
        dtype = "bfloat16" if scheme.activations is None and not scheme.weights.has_e8m0_scales else "float32"
        wanted = {name: plain(value, dtype if name != "x" else "float32") for name, value in operands.items()}
        expected = matmul_ogs(MatmulOperands(**wanted), spec, rows)
        tolerance = quantized_matmul_tolerance("bfloat16", inputs, scheme.weights, spec, rows=scheme.activations)
        assert np.isfinite(y).all()
        assert_close(y, expected, tolerance, f"{scheme} {gather} {gate_layout}")


def test_integer_weights_are_rounded_to_the_dtype_of_x():
    """One rounding of (q - z) s: bit by bit the plain product with the dequantised matrix, in each dtype."""
    rng = np.random.default_rng(2)
    weight = draw_weight(rng, (33, 256), scheme_named("int4_w4a16_zp").weights, "out_in")
    for dtype in ("bfloat16", "float16", "float32"):
        x = draw_array(rng, (5, 256), dtype)
        found = matmul_ogs(MatmulOperands(x, weight), MatmulSpec("out_in"))
        again = matmul_ogs(MatmulOperands(x, dequantize(weight, dtype)), MatmulSpec("out_in"))
        assert found.tobytes() == again.tobytes()


@pytest.mark.parametrize("format", [MXFP4, MXFP8], ids=str)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_scales_that_leave_the_range_of_float16(format, dtype):
    rng = np.random.default_rng(3)
    weight = draw_weight(rng, (9, 96), format, "out_in")
    scales = np.broadcast_to(np.array([60, 127, 190], np.uint8), weight.scales.shape).copy()
    weight = dataclasses.replace(weight, scales=scales)
    x = draw_array(rng, (4, 96), dtype)
    spec = MatmulSpec("out_in", out_dtype="float32")
    found = matmul_ogs(MatmulOperands(x, weight), spec)
    assert_close(found, exact(x, weight), quantized_matmul_tolerance(dtype, 96, format, spec), "large scales")


def test_int8_sums_are_exact():
    """131 thousand products add up to more than fp32 holds: only the two scales are rounded."""
    rng = np.random.default_rng(4)
    codes_x, codes_w = (rng.integers(101, 128, shape, np.int8) for shape in ((3, 131_000), (5, 131_000)))
    x = QuantizedTensor(QuantizedSpec(INT8_TOKEN), codes_x, rng.random((3, 1), np.float32))
    weight = QuantizedTensor(QuantizedSpec(INT8_CHANNEL), codes_w, rng.random((5, 1), np.float32))
    total = (codes_x.astype(np.int64) @ codes_w.astype(np.int64).T).astype(np.float32)
    np.testing.assert_array_equal(quantized_product(x, weight, False), total * (x.scales * weight.scales.T))


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_a_nan_scale_reaches_what_it_touches_and_nothing_else(scheme):
    rng = np.random.default_rng(5)
    inputs = reduction_of(scheme)
    x, weight = draw_array(rng, (6, inputs)), draw_weight(rng, (130, inputs), scheme.weights, "out_in")
    scales = weight.scales.copy()
    scales[-1, -1] = 255 if scheme.weights.has_e8m0_scales else np.nan
    rows = x if scheme.activations is None else quantize(x, scheme.activations)
    broken = np.isnan(quantized_product(rows, dataclasses.replace(weight, scales=scales), False))
    height = scheme.weights.group_rows or 130
    first = (129 // height) * height
    assert broken[:, first:].all() and not broken[:, :first].any()
    if isinstance(rows, QuantizedTensor):
        scales = rows.scales.copy()
        scales[-1, 0] = 255 if rows.format.has_e8m0_scales else np.nan
        broken = np.isnan(quantized_product(dataclasses.replace(rows, scales=scales), weight, False)).all(axis=1)
        np.testing.assert_array_equal(broken, np.arange(6) == 5 if rows.format.group_rows == 1 else np.ones(6, bool))


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_batch_invariance(scheme):
    if scheme.activations is not None and scheme.activations.group_rows is None:
        scheme = dataclasses.replace(scheme, activations=None)
    rng = np.random.default_rng(6)
    inputs = reduction_of(scheme)
    inputs *= 8
    weight, x = draw_weight(rng, (40, inputs), scheme.weights, "in_out"), draw_array(rng, (9, inputs), "bfloat16")
    spec = MatmulSpec("in_out", out_dtype="float32", tuning=MatmulTuning(batch_invariant=True))

    def product(rows: np.ndarray) -> np.ndarray:
        operand = rows if scheme.activations is None else quantize(rows, scheme.activations)
        return matmul_ogs(MatmulOperands(operand, weight), spec)

    assert product(x)[4:5].tobytes() == product(x[4:5]).tobytes()


@pytest.mark.parametrize("format", [FP8_CHANNEL, MXFP4, INT8_CHANNEL, scheme_named("fp8_block").weights], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_codes_and_scales(format, layout):
    inputs = 200 if format.allows_partial_groups else 96
    weight = draw_weight(np.random.default_rng(7), (150, inputs), format, layout)
    codes, scales = codes_and_scales(weight)
    columns = format.group_columns or inputs
    restored = codes * np.repeat(scales, columns, axis=1)[:, :inputs]
    np.testing.assert_array_equal(restored if layout == "out_in" else restored.T, dequantize(weight))


def test_rows_with_their_own_scales_are_quantised_as_ever():
    x = draw_array(np.random.default_rng(8), (5, 128), "bfloat16")
    for format in (FP8_TENSOR, FP8_TOKEN, INT8_TOKEN, MXFP8, MXFP4):
        tensor = quantize(x, format)
        values, scales = quantize_rows(x, format=format)
        assert (values.tobytes(), scales.tobytes()) == (tensor.values.tobytes(), tensor.scales.tobytes())


def test_rows_with_a_static_scale():
    """Elements stand alone: what is not a number in one row changes no other."""
    x = np.array([[1, np.nan, 3], [np.inf, -np.inf, 900], [0.25, -7, 0]], np.float32)
    given = np.array([2], np.float32)
    values, scales = quantize_rows(x, given, format=FP8_TENSOR)
    assert scales.shape == (1, 1) and scales[0, 0] == 2 and scales is not given
    wanted = np.array([[0.5, np.nan, 1.5], [448, -448, 448], [0.125, -3.5, 0]], np.float32)
    np.testing.assert_array_equal(values.astype(np.float32), wanted)
    int8_tensor = Format("int8_tensor", "int8", None, None)
    values, _ = quantize_rows(x, given, format=int8_tensor)
    np.testing.assert_array_equal(values, [[0, 0, 2], [127, -127, 127], [0, -4, 0]])
    for scale in (0, np.nan):
        values, scales = quantize_rows(x, np.array([scale], np.float32), format=FP8_TENSOR)
        assert not values.view(np.uint8).any() and np.isnan(scales[0, 0]) == np.isnan(scale)


class SlotLoop:
    """One forward of quantised experts, slot by slot, products in float64."""

    def __init__(self, scheme, experts, spec: MoESpec, dtype: str) -> None:
        self.scheme, self.spec, self.dtype = scheme, spec, dtype
        rounded = scheme.activations is None and not scheme.weights.has_e8m0_scales
        self.experts = plain(experts, dtype if rounded else "float32")
        if spec.weight_layout == "out_in":
            turned = {name: getattr(self.experts, name) for name in ("gate_up", "up", "down")}
            turned = {name: array.swapaxes(-1, -2) for name, array in turned.items() if array is not None}
            self.experts = dataclasses.replace(self.experts, **turned)

    def rows(self, x: np.ndarray) -> np.ndarray:
        return x if self.scheme.activations is None else dequantize(quantize(x, self.scheme.activations))

    def run(self, x: np.ndarray, ids: np.ndarray, weights: np.ndarray) -> dict[str, np.ndarray]:
        experts, kind = self.experts, ml_dtypes.bfloat16 if self.dtype == "bfloat16" else np.dtype(self.dtype)
        first = {"weight": experts.gate_up, "up": experts.up, "bias": experts.gate_up_bias, "up_bias": experts.up_bias}
        first = {name: array for name, array in first.items() if array is not None}
        hidden = np.zeros((ids.size, experts.down.shape[1]), kind)
        # One scale is found from tokens that an expert gets; with other formats rows are quantised by themselves.
        source = self.rows(np.where((ids >= 0).any(axis=1)[:, None], x, np.zeros((), x.dtype)))
        options = MatmulSpec("in_out", activation=self.spec.activation)
        for slot, expert in enumerate(ids.ravel()):
            if expert >= 0:
                own = {name: array[expert] for name, array in first.items()}
                hidden[slot] = exact_row(source[slot // ids.shape[1]], own, options).astype(np.float32)
        slots = np.zeros((ids.size, x.shape[1]), kind)
        source = self.rows(hidden)
        for slot, expert in enumerate(ids.ravel()):
            if expert >= 0:
                own = {"weight": experts.down[expert], "bias": experts.down_bias[expert]}
                value = exact_row(source[slot], own, MatmulSpec("in_out")) * float(weights.ravel()[slot])
                slots[slot] = value.astype(np.float32)
        output = slots.reshape(*ids.shape, -1).astype(F64).sum(axis=1).astype(np.float32).astype(kind)
        return {"activation": hidden, "matmul2": slots, "output": output}


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_stages_of_a_forward(scheme):
    """Activations are quantised once per token, hidden rows after the activation; other stages as of plain experts."""
    rng = np.random.default_rng(9)
    number = SCHEMES.index(scheme)
    gate_layout, layout = ("halves", "interleaved", "separate")[number % 3], LAYOUTS[number % 2]
    spec = MoESpec(Activation("silu", True, gate_layout), weight_layout=layout, activations=scheme.activations)
    d_model = d_ff = reduction_of(scheme)
    experts = draw_experts(rng, (3,), d_model, d_ff, scheme, spec)
    case = hard_routing("missing_ids")
    ids, weights = np.where(case.ids[:9, :2] < 3, case.ids[:9, :2], -1), case.weights[:9, :2].copy()
    x = draw_array(rng, (9, d_model), "bfloat16")
    found = moe_stages(x, experts, TopK(ids, weights), spec)
    wanted = SlotLoop(scheme, experts, spec, "bfloat16").run(x, ids, weights)
    tolerances = stage_tolerances(
        spec, "bfloat16", d_model=d_model, d_ff=d_ff, top_k=2, num_experts=3, routed_from="ids",
        weights_format=scheme.weights,
    )  # fmt: skip
    for stage, expected in wanted.items():
        assert_close(found[stage], expected, tolerances[stage], f"{scheme} {stage}")
    rows = found["activation"]
    rows = rows if scheme.activations is None else quantize(rows, scheme.activations)
    assert found["matmul2"].tobytes() == second_product(rows, experts, ids, weights, layout).tobytes()


def second_product(rows, experts, ids: np.ndarray, weights: np.ndarray, weight_layout: str) -> np.ndarray:
    """bf16 slots of rows by slot, bit by bit what the forward makes of the same rows."""
    groups = LayoutSpec(*ids.shape, experts.down.shape[-3])
    operands = MatmulOperands(rows, experts.down, bias=experts.down_bias, row_weight=weights)
    spec = MatmulSpec(weight_layout, "slot", "slot", None, "bfloat16")
    return matmul_ogs(operands, spec, rows_of(groups, *make_layout(ids, layout=groups)[:3]))


def test_a_layer_of_a_stack_is_that_layer_alone():
    rng = np.random.default_rng(10)
    scheme = scheme_named("int4_w4a16_zp")
    spec = MoESpec(Activation("silu"), weight_layout="out_in")
    stack = draw_experts(rng, (3, 4), 128, 128, scheme, spec)
    routing = TopK(np.array([[0, 3], [2, -1]], np.int32), np.array([[0.5, 0.25], [1, 1]], np.float32))
    x = draw_array(rng, (2, 128), "bfloat16")
    one = map_arrays(stack, lambda array: np.ascontiguousarray(array[2]))
    stack = dataclasses.replace(stack, layer_index=np.array([2], np.int32))
    found, wanted = moe_stages(x, stack, routing, spec), moe_stages(x, one, routing, spec)
    assert found["output"].tobytes() == wanted["output"].tobytes() and found["output"].any()
    with pytest.raises(InvalidInput, match=re.escape("layer_index must be in [0, 3), got 3")):
        moe_stages(x, dataclasses.replace(stack, layer_index=np.array([3], np.int32)), routing, spec)


def test_a_static_scale_is_used():
    rng = np.random.default_rng(11)
    scheme = scheme_named("fp8_tensor")
    spec = MoESpec(Activation("silu"), activations=scheme.activations)
    experts = draw_experts(rng, (2,), 90, 90, scheme, spec)
    routing = TopK(np.array([[0], [1], [-1]], np.int32), np.ones((3, 1), np.float32))
    x = draw_array(rng, (3, 90), "bfloat16")
    x[2] = np.nan
    given = {"gate_up_input_scale": np.array([0.05], np.float32), "down_input_scale": np.array([0.02], np.float32)}
    found = moe_stages(x, dataclasses.replace(experts, **given), routing, spec)
    assert np.isfinite(found["output"].astype(np.float32)).all()
    rows = quantize(found["activation"], scheme.activations, scales=given["down_input_scale"].reshape(1, 1))
    wanted = second_product(rows, experts, routing.ids, routing.weights, "in_out")
    assert found["matmul2"].tobytes() == wanted.tobytes()
    rows = quantize(x[:2], scheme.activations, scales=given["gate_up_input_scale"].reshape(1, 1))
    again = moe_stages(
        dequantize(rows), plain(experts), TopK(routing.ids[:2], routing.weights[:2]), MoESpec(Activation("silu"))
    )
    np.testing.assert_allclose(found["matmul1"][:2].astype(np.float32), again["matmul1"], rtol=2.0**-8, atol=1e-3)
    # One scale for all rows is found from rows that an expert gets: a NaN in one of those reaches every other.
    dynamic = moe_stages(x, experts, routing, spec)["output"]
    alone = moe_stages(x[:2], experts, TopK(routing.ids[:2], routing.weights[:2]), spec)["output"]
    assert dynamic[:2].tobytes() == alone.tobytes() and not dynamic[2].any()
    x[1, 0] = np.nan
    assert np.isnan(moe_stages(x, experts, routing, spec)["output"][:2].astype(np.float32)).all()


def test_the_entrance_of_plans():
    rng = np.random.default_rng(12)
    x, weight = quantize(draw_array(rng, (3, 128)), FP8_TOKEN), draw_weight(rng, (5, 128), FP8_CHANNEL, "out_in")
    arrays = {
        "x.values": x.values, "x.scales": x.scales, "weight.values": weight.values, "weight.scales": weight.scales,
    }  # fmt: skip
    spec = MatmulSpec("out_in", out_dtype="float32")
    found = np.empty((3, 5), np.float32)
    tensors = ("x", x.spec), ("weight", weight.spec)
    matmul_ogs_plan(arrays, layout=None, spec=spec, outputs=("y",), tensors=tensors, places=(found,))
    assert found.tobytes() == matmul_ogs(MatmulOperands(x, weight), spec).tobytes()
    with pytest.raises(InvalidInput, match=re.escape("spec.out_dtype must be given where x is quantised, got None")):
        matmul_ogs(MatmulOperands(x, weight), MatmulSpec("out_in"))


@pytest.mark.parametrize("element", ["int8", "fp8", "mxfp8", "plain"])
def test_tolerances_follow_what_is_added_up(element):
    spec = MatmulSpec("out_in", out_dtype="float32")
    weights, rows = {
        "int8": (INT8_CHANNEL, INT8_TOKEN),
        "fp8": (FP8_CHANNEL, FP8_TOKEN),
        "mxfp8": (MXFP8, MXFP8),
        "plain": (MXFP8, None),
    }[element]
    found = quantized_matmul_tolerance("bfloat16", 2048, weights, spec, rows=rows)
    fast = dataclasses.replace(spec, fast_accumulate=True)
    faster = quantized_matmul_tolerance("bfloat16", 2048, weights, fast, rows=rows)
    if element == "int8":
        # Exact sums: the roundings of the two scales and the epilogue.
        assert found.relative_frobenius < 8 * UNIT_ROUNDOFF["float32"]
    if element == "fp8":
        assert found.relative_frobenius < 2.0**-10 < 2.0**-8 < faster.relative_frobenius
    else:
        assert found == faster and found.relative_frobenius < 2.0**-15
