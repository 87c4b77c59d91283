"""The backward through frozen quantised weights: kernels against NumPy, NumPy against dequantised weights."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from moe_core import InvalidInput, Unsupported
from moe_core.base.arrays import ArraySpec
from moe_core.formats import Format, QuantizedSpec, QuantizedTensor, format_named, quantized_specs
from moe_core.ops.matmul.backward import plan_matmul_ogs_backward, why_no_gradient
from moe_core.ops.matmul.forward import plan_matmul_ogs
from moe_core.ops.matmul.quantized.transposed import choose_transposed_tile, plan_matmul_quantized_transposed
from moe_core.ops.matmul.reference.backward import input_gradient
from moe_core.ops.matmul.reference.rows import planned_rows
from moe_core.ops.moe.backward import plan_moe_backward
from moe_core.ops.moe.checks import why_no_moe_gradient
from moe_core.ops.moe.options import BackwardOptions
from moe_core.ops.moe.reference.backward import moe_backward_stages
from moe_core.ops.moe.reference.forward import moe_stages
from moe_core.ops.quantize.reference import dequantize, quantize
from moe_core.ops.routing.reference import layout as make_layout
from moe_core.parity.tolerance import assert_close
from moe_core.specs import Activation, LayoutSpec, MatmulSpec, MatmulTuning, MoESpec, RouterSpec, TileConfig
from moe_core.specs.operands import MatmulOperands, map_arrays, named_arrays
from tests.support.harness import H200, engine_target, run_plan, spec_of
from tests.support.quantized.operands import LAYOUTS, draw_weight, plain
from tests.support.strategies import RoutingCase, draw_array, hard_routing
from tests.support.training.moe_backward import REFERENCE, Problem, draw, routed
from tests.support.training.tolerances import BF16, FP32

#: Every element, kind of scale and extent of a group, with lengths of the axis that groups run along.
FORMATS = {
    "mxfp4": 96, "mxfp8": 96, "int4_g32_zp": 96, "int4_g128": 128, "int8_g64_zp": 192, "int8_row": 37,
    "int8_channel": 37, "fp8_block": 150, "fp8_channel": 37, "fp8_tensor": 37,
}  # fmt: skip
#: Rows of a weight: no multiple of a block, of 128 or of 2.
OUTPUTS = 151


def grouped(case: RoutingCase) -> dict[str, np.ndarray]:
    names = ("group_sizes", "group_start", "slot_of_row", "row_of_slot")
    made = make_layout(case.ids, case.expert_map, case.token_mask, layout=case.layout())
    return dict(zip(names, made[:4], strict=True))


def without_tokens(weight: QuantizedTensor, sizes: np.ndarray) -> QuantizedTensor:
    """NaN, where the format has one, in all that belongs to experts without tokens."""
    scales = weight.scales.copy()
    scales[..., sizes == 0, :, :] = 255 if scales.dtype == np.uint8 else np.nan
    return dataclasses.replace(weight, scales=scales)


def run_both(
    operands: MatmulOperands, layout: LayoutSpec | None, spec: MatmulSpec, groups: dict[str, np.ndarray]
) -> tuple[np.ndarray, np.ndarray]:
    """The product by kernels, and by the reference's plan."""
    found = []
    for target in (engine_target(), REFERENCE):
        plan = plan_matmul_quantized_transposed(map_arrays(operands, spec_of), layout, spec, target)
        given = dict(named_arrays(operands)) | groups
        found.append(run_plan(plan, {buffer.name: given[buffer.name] for buffer in plan.inputs})["y"])
    return found[0], found[1]


def assert_both(kernels: np.ndarray, reference: np.ndarray, expected: np.ndarray) -> None:
    """Sums of fp32 in three orders."""
    rms = np.full(expected.shape, np.sqrt(np.square(expected).mean()))
    for label, found in (("kernels", kernels), ("reference", reference)):
        assert np.isfinite(found).all(), label
        assert_close(found, expected, FP32, label, scale=rms)


@pytest.mark.parametrize("weight_layout", LAYOUTS)
@pytest.mark.parametrize("name", FORMATS)
def test_products_of_every_format(name: str, weight_layout: str) -> None:
    case, rng = hard_routing("missing_ids"), np.random.default_rng(0)
    groups, layout = grouped(case), case.layout()
    weight = draw_weight(rng, (case.num_experts, OUTPUTS, FORMATS[name]), format_named(name), weight_layout)
    weight = without_tokens(weight, groups["group_sizes"])
    x = draw_array(rng, (layout.num_tokens, OUTPUTS))
    x[(case.ids < 0).all(axis=1)] = np.nan
    spec = MatmulSpec(weight_layout, "token", "slot")
    kernels, reference = run_both(MatmulOperands(x, weight), layout, spec, groups)
    rows = planned_rows(layout, groups, len(x))
    expected = input_gradient(MatmulOperands(x, dequantize(weight, "float32")), spec, rows)
    assert_both(kernels, reference, expected)


def test_an_infinite_last_row_stays_one() -> None:
    """151 rows are no multiple of a tile, and 256 columns are one of it: what fills tiles is neither read nor NaN."""
    case, rng = hard_routing("missing_ids"), np.random.default_rng(0)
    groups, layout = grouped(case), case.layout()
    weight = draw_weight(rng, (case.num_experts, OUTPUTS, 256), format_named("fp8_channel"), "out_in")
    weight.values[:, -1] = 1
    weight.scales[:, -1] = np.inf
    x = draw_array(rng, (layout.num_tokens, OUTPUTS))
    for y in run_both(MatmulOperands(x, weight), layout, MatmulSpec("out_in", "token", "slot"), groups):
        wanted = np.where(groups["row_of_slot"] < 0, 0, np.repeat(np.copysign(np.inf, x[:, -1]), case.top_k))
        np.testing.assert_array_equal(y, np.repeat(wanted[:, None], 256, 1))


@pytest.mark.parametrize("case_name", ["one_expert", "top_1"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_two_matrices_of_one_layer_in_16_bits(case_name: str, dtype: str) -> None:
    """Gate and up beside each other, a stack of layers, rows in layout order."""
    case, rng = hard_routing(case_name), np.random.default_rng(1)
    groups, layout = grouped(case), case.layout()
    shape = (2, case.num_experts, OUTPUTS, 64)
    gate, up = (draw_weight(rng, shape, format_named("int4_g32_zp"), "out_in") for _ in range(2))
    x = draw_array(rng, (layout.capacity, 2 * OUTPUTS), dtype)
    operands = MatmulOperands(x, gate, up, layer_index=np.array([1], np.int32))
    spec = MatmulSpec("out_in", out_dtype="float32")
    kernels, reference = run_both(operands, layout, spec, groups)
    matrices = [dequantize(map_arrays(weight, lambda array: array[1]), dtype) for weight in (gate, up)]
    expected = input_gradient(MatmulOperands(x, *matrices), spec, planned_rows(layout, groups, len(x)))
    assert_both(kernels, reference, expected)


def test_a_layer_outside_the_stack_and_a_dense_product() -> None:
    rng = np.random.default_rng(2)
    weight = draw_weight(rng, (2, 40, 64), format_named("mxfp4"), "in_out")
    # More blocks of rows than a group of tiles has.
    x = draw_array(rng, (300, 40))
    operands = MatmulOperands(x, weight, layer_index=np.array([1], np.int32))
    kernels, reference = run_both(operands, None, MatmulSpec("in_out"), {})
    assert_both(kernels, reference, x @ dequantize(weight)[1].T)
    plan = plan_matmul_quantized_transposed(map_arrays(operands, spec_of), None, MatmulSpec("in_out"), engine_target())
    outside = dict(named_arrays(operands)) | {"layer_index": np.array([2], np.int32)}
    assert np.isnan(run_plan(plan, outside)["y"]).all()


def quantized(problem: Problem, gate_up: Format, down: Format | None) -> Problem:
    """The problem with its experts quantised; down None: that matrix stays plain, and is trained."""
    experts, formats = problem.operands.experts, {"gate_up": gate_up, "up": gate_up, "down": down}
    made = {
        name: quantize(np.asarray(array, np.float32), format, layout=problem.spec.weight_layout)
        for name, array in named_arrays(experts)
        if (format := formats.get(name)) is not None
    }
    operands = dataclasses.replace(problem.operands, experts=dataclasses.replace(experts, **made))
    return dataclasses.replace(problem, operands=operands)


MXFP4, INT4, BLOCK = (format_named(name) for name in ("mxfp4", "int4_g32_zp", "fp8_block"))
#: (activation, formats of the experts, other options, d_model and d_ff)
LAYERS = {
    "mxfp4": (
        Activation("swiglu_oai", gate_layout="interleaved"),
        (MXFP4, MXFP4),
        {"weight_layout": "out_in"},
        (64, 96),
    ),
    "int4": (Activation("silu", gate_layout="separate"), (INT4, INT4), {"weight_layout": "in_out"}, (32, 64)),
    "fp8": (Activation("gelu"), (BLOCK, BLOCK), {"weight_layout": "out_in"}, (20, 17)),
    "plain down": (Activation("relu2", gated=False), (MXFP4, None), {"weight_layout": "out_in"}, (32, 17)),
}


def layer(
    name: str, case: str = "missing_ids", dtype: str = "float32", router: RouterSpec | None = None, **changes: Any
) -> Problem:
    activation, formats, options, widths = LAYERS[name]
    spec = MoESpec(activation, **(options | changes))
    problem = draw(hard_routing(case), spec, widths=(*widths, 9), dtype=dtype, with_shared=True)
    return quantized(problem if router is None else routed(problem, router), *formats)


@pytest.mark.parametrize("name", LAYERS)
def test_layers(name: str) -> None:
    problem = layer(name)
    names = problem.names()
    assert "d_x" in names and "d_experts.down_bias" in names and "d_shared.down" in names
    assert "d_experts.gate_up" not in names and ("d_experts.down" in names) == (name == "plain down")
    problem.check()
    kept = problem.backward()
    for key, gradient in problem.recomputing().backward().items():
        np.testing.assert_array_equal(gradient, kept[key], key)


def test_the_reference_is_that_of_dequantised_weights() -> None:
    problem = layer("int4")
    operands = problem.operands
    stages = moe_stages(operands.x, operands.experts, operands.routing, problem.spec, shared=operands.shared)
    found, expected = (
        moe_backward_stages(problem.gradients, dataclasses.replace(operands, experts=experts), problem.spec, stages)
        for experts in (operands.experts, plain(operands.experts))
    )
    absent = {f"d_experts.{name}" for name in ("gate_up", "up", "down")}
    assert expected.keys() - found.keys() == absent
    for name, gradient in found.items():
        np.testing.assert_array_equal(gradient, expected[name], name)
    planned = problem.backward(REFERENCE)
    for name, gradient in planned.items():
        assert_close(gradient, found[name], FP32, name, scale=np.full(gradient.shape, np.abs(found[name]).max()))


@pytest.mark.parametrize("case", ["one_expert", "expert_map"])
def test_16_bit(case: str) -> None:
    """All rows with one expert, weighted before it; and a router of more experts than are local."""
    if case == "one_expert":
        layer("int4", case, "bfloat16", apply_router_weight_on_input=True).check(BF16)
    else:
        layer("mxfp4", case, "bfloat16", RouterSpec(3, renormalize=True), router_weight_layout="out_in").check(BF16)


def test_keeping_does_not_change_the_forward() -> None:
    for name in ("mxfp4", "int4"):
        problem = layer(name, dtype="bfloat16")
        for target in (engine_target(), REFERENCE):
            kept, given = problem.forward(target)[1], problem.forward(target, save=False)[1]
            for key, array in given.items():
                np.testing.assert_array_equal(kept[key], array, key)


def test_one_layer_of_a_stack() -> None:
    single = layer("int4", "empty_experts")
    stacked = map_arrays(single.operands.experts, lambda array: np.stack([np.ones_like(array), array]))
    stacked = dataclasses.replace(stacked, layer_index=np.array([1], np.int32))
    problem = dataclasses.replace(single, operands=dataclasses.replace(single.operands, experts=stacked))
    found, alone = problem.backward(), single.backward()
    for name, gradient in found.items():
        if gradient.shape != alone[name].shape:
            assert not gradient[0].any(), name
            gradient = gradient[1]
        np.testing.assert_array_equal(gradient, alone[name], name)


@pytest.mark.parametrize("wanted", ["d_x", "d_bias", "d_row_weight"])
def test_the_op_of_its_own(wanted: str) -> None:
    """A quantised weight's product by kernels and by NumPy, every gradient that there is."""
    case, rng = hard_routing("missing_ids"), np.random.default_rng(4)
    groups, layout = grouped(case), case.layout()
    weight = draw_weight(rng, (case.num_experts, 30, 64), format_named("mxfp4"), "out_in")
    x, d_y = draw_array(rng, (layout.num_tokens, 64)), draw_array(rng, (layout.num_slots, 30))
    operands = MatmulOperands(x, weight, bias=draw_array(rng, (case.num_experts, 30)), row_weight=case.weights)
    spec = MatmulSpec("out_in", "token", "slot")
    found = []
    for target in (engine_target(), REFERENCE):
        specs = map_arrays(operands, spec_of)
        plan = plan_matmul_ogs_backward(spec_of(d_y), specs, layout, spec, target, wanted=(wanted,))
        given = dict(named_arrays(operands)) | groups | {"d_y": d_y}
        found.append(run_plan(plan, {buffer.name: given[buffer.name] for buffer in plan.inputs})[wanted])
    plain_plan = plan_matmul_ogs_backward(
        spec_of(d_y), map_arrays(plain(operands), spec_of), layout, spec, REFERENCE, wanted=(wanted,)
    )
    given = dict(named_arrays(plain(operands))) | groups | {"d_y": d_y}
    assert_both(
        found[0],
        found[1],
        run_plan(plain_plan, {buffer.name: given[buffer.name] for buffer in plain_plan.inputs})[wanted],
    )


def test_what_has_no_gradient() -> None:
    weight = spec_of(draw_weight(np.random.default_rng(0), (4, 64, 128), format_named("fp8_block"), "out_in"))
    rows = spec_of(draw_weight(np.random.default_rng(0), (6, 128), format_named("fp8_group"), "out_in"))
    layout, spec = LayoutSpec(6, 2, 4), MatmulSpec("out_in", "token", "row", out_dtype="bfloat16")
    operands = MatmulOperands(rows, weight)
    assert "quantised x" in str(why_no_gradient(operands, layout, spec, {"x"}))
    with pytest.raises(Unsupported, match=r"outputs must be \('y',\) with a quantised x"):
        fused = dataclasses.replace(spec, activation=Activation("silu"))
        plan_matmul_ogs(operands, layout, fused, REFERENCE, stage=0, outputs=("y", "pre"))
    frozen = MatmulOperands(ArraySpec((6, 128), "bfloat16"), weight)
    for name in ("weight", "weight.scales"):
        assert f"{name} has no gradient: quantised weights are frozen" in str(
            why_no_gradient(frozen, layout, spec, {"x", name})
        )
    assert why_no_gradient(frozen, layout, spec, {"x"}) is None
    problem = layer("fp8", weight_layout="out_in")
    specs, gradients = problem.specs(), map_arrays(problem.gradients, spec_of)
    with pytest.raises(InvalidInput, match=r"wanted must name at least one of d_x, d_experts\.gate_up_bias"):
        plan_moe_backward(
            gradients, specs, problem.spec, REFERENCE, options=BackwardOptions(wanted=("d_experts.down",))
        )
    both = dataclasses.replace(problem.spec, activations=format_named("fp8_group"))
    with pytest.raises(Unsupported, match="no gradient with activations fp8_group: what rounds x"):
        plan_moe_backward(gradients, specs, both, REFERENCE, options=BackwardOptions(wanted=("d_x",)))
    assert "experts.down.scales has no gradient" in str(
        why_no_moe_gradient(specs.experts, problem.spec, ["x", "experts.down.scales"])
    )


def test_wrong_products() -> None:
    weight = spec_of(draw_weight(np.random.default_rng(0), (4, 64, 128), format_named("mxfp4"), "out_in"))
    x, layout = ArraySpec((12, 64), "bfloat16"), LayoutSpec(6, 2, 4)
    good, spec = MatmulOperands(x, weight), MatmulSpec("out_in")

    def refused(match: str, operands: MatmulOperands = good, kind: type = InvalidInput, **changes: Any) -> None:
        with pytest.raises(kind, match=match):
            plan_matmul_quantized_transposed(operands, layout, dataclasses.replace(spec, **changes), H200)

    refused("x must be", MatmulOperands(ArraySpec((12, 128), "bfloat16"), weight))
    refused("weight must be in_out like weight_layout", weight_layout="in_out")
    refused("up must be mxfp4", MatmulOperands(x, weight, ArraySpec((4, 64, 128), "bfloat16")))
    refused("weight must be quantised", MatmulOperands(x, ArraySpec((4, 64, 128), "bfloat16")), Unsupported)
    refused("bias must be None", MatmulOperands(x, weight, bias=ArraySpec((4, 128), "float32")))
    refused("activation must be None", activation=Activation("silu"))
    refused("fast_accumulate must be False", fast_accumulate=True)
    fp8 = QuantizedSpec(format_named("fp8_tensor"))
    no_rows = MatmulOperands(ArraySpec((12, 0), "bfloat16"), quantized_specs(fp8, (4, 0, 128)))
    refused("weight must have no empty axis", no_rows)
    wide = MatmulOperands(ArraySpec((12, 2**16), "bfloat16"), quantized_specs(fp8, (4, 2**16, 2**15)))
    refused(r"fewer than 2\*\*31 elements, got 65536 x 32768", wide, Unsupported)
    for config, reason in (
        (TileConfig(64, 64, 64), "family must be 'quantized'"),
        (TileConfig(64, 64, 24, family="quantized"), "block_k must be a power of two"),
        (TileConfig(128, 256, 128, 8, 4, family="quantized"), "262144 bytes exceed the 232448 bytes of shared memory"),
        (TileConfig(256, 256, 16, 4, 1, family="quantized"), "accumulator registers"),
    ):
        refused(reason, tuning=MatmulTuning(config))
    given = TileConfig(16, 32, 32, family="quantized")
    choice = choose_transposed_tile(good, layout, dataclasses.replace(spec, tuning=MatmulTuning(given)), H200)
    assert choice is not None and choice.config == given and str(choice) == "given for this call"
    chosen = plan_matmul_quantized_transposed(good, layout, spec, H200)
    invariant = dataclasses.replace(spec, tuning=MatmulTuning(batch_invariant=True))
    assert "batch invariant" in plan_matmul_quantized_transposed(good, layout, invariant, H200).explain()
    assert "mxfp4" in chosen.explain()
