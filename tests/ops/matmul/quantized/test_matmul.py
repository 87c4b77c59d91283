"""Grouped matmuls of quantised operands on real kernels against their NumPy twin."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest

from moe_core import InvalidInput, Unsupported
from moe_core.base.arrays import ArraySpec
from moe_core.base.target import Target
from moe_core.formats import (
    ELEMENTS,
    Format,
    QuantizedSpec,
    QuantizedTensor,
    Scheme,
    format_named,
    format_names,
    int8_grouped,
    quantized_specs,
    scheme_named,
    scheme_names,
)
from moe_core.ops.matmul.families import why_illegal
from moe_core.ops.matmul.forward import plan_matmul_ogs
from moe_core.ops.matmul.problem import MatmulProblem
from moe_core.ops.matmul.tile_choice import heuristic_tile
from moe_core.ops.quantize.reference import dequantize, quantize
from moe_core.parity.tolerance import assert_close, quantized_matmul_tolerance
from moe_core.plan.steps import Constant, KernelLaunch
from moe_core.specs import Activation, LayoutSpec, MatmulSpec, MatmulTuning, TileConfig
from moe_core.specs.operands import MatmulOperands, map_arrays, named_arrays
from tests.support.harness import H200, engine_target, run_plan
from tests.support.strategies import draw_array, draw_ids, layout_arrays

EPILOGUES = (
    (None, "token", "slot"),
    (Activation("silu"), "slot", "row"),
    (Activation("swiglu_oai", gate_layout="interleaved"), "token", "slot"),
    (Activation("gelu_tanh", gate_layout="separate"), "row", "slot"),
    (Activation("relu2", gated=False), "token", "row"),
)
LAYOUT = LayoutSpec(13, 2, 4)
ARRAYS = layout_arrays(draw_ids("some_absent", 13, 2, 4, 0), LAYOUT)
WIDTH = 40


def reduction_of(weights: Format) -> int:
    """No multiple of a block where the format allows it."""
    return 160 if weights.allows_partial_groups or weights.group_columns in (None, 32) else 3 * weights.group_columns


def problem(scheme: Scheme, spec: MatmulSpec, dtype: str = "bfloat16", d: int | None = None, stacked: bool = True):
    """Operands of a product in LAYOUT: biases, row weights and, where asked, the second layer of a stack."""
    random = np.random.default_rng(0)
    d, activation = d or reduction_of(scheme.weights), spec.activation
    separate = activation is not None and activation.gate_layout == "separate"
    one_buffer = activation is not None and activation.gated and not separate
    lead = (2, LAYOUT.num_experts) if stacked else (LAYOUT.num_experts,)
    width = 2 * WIDTH if one_buffer else WIDTH

    def weight() -> QuantizedTensor:
        matrix = (width, d) if spec.weight_layout == "out_in" else (d, width)
        return quantize(draw_array(random, (*lead, *matrix)), scheme.weights, layout=spec.weight_layout)

    rows = {"row": LAYOUT.capacity, "token": LAYOUT.num_tokens, "slot": LAYOUT.num_slots}[spec.gather]
    x = draw_array(random, (rows, d), dtype)
    return MatmulOperands(
        x if scheme.activations is None else quantize(x, scheme.activations),
        weight(),
        up=weight() if separate else None,
        bias=draw_array(random, (*lead, width)),
        up_bias=draw_array(random, (*lead, width)) if separate else None,
        row_weight=random.random(LAYOUT.num_slots, np.float32),
        layer_index=np.array([1], np.int32) if stacked else None,
    )


def run(operands: MatmulOperands, spec: MatmulSpec, target: Target, config: TileConfig | None = None, layout=LAYOUT):
    described = map_arrays(operands, lambda array: ArraySpec(array.shape, array.dtype.name))
    plan = plan_matmul_ogs(described, layout, spec, target, config=config)
    arrays = dict(named_arrays(operands)) | (ARRAYS if layout is not None else {})
    return run_plan(plan, {buffer.name: arrays[buffer.name] for buffer in plan.inputs})["y"]


def check(scheme: Scheme, spec: MatmulSpec, operands: MatmulOperands, config: TileConfig | None = None, layout=LAYOUT):
    expected = run(operands, spec, Target("reference"), layout=layout)
    actual = run(operands, spec, engine_target(), config, layout)
    dtype = "bfloat16" if isinstance(operands.x, QuantizedTensor) else operands.x.dtype.name
    weight: QuantizedTensor = operands.weight
    d = weight.shape[-1 if spec.weight_layout == "out_in" else -2]
    tolerance = quantized_matmul_tolerance(dtype, d, scheme.weights, spec, rows=scheme.activations)
    assert actual.dtype == expected.dtype
    assert_close(actual, expected, tolerance, label=f"{scheme} {spec.weight_layout}")


@pytest.mark.parametrize(
    "name", ["mxfp4", "mxfp8", "fp8_channel", "int8_row", "int4_row", "int4_row_zp", "int8_row_zp", "int8_channel"]
)
def test_every_code_is_decoded_exactly(name: str) -> None:
    """The product with a unit matrix is the dequantised matrix; codes and e8m0 bytes of every kind, NaN among them.

    On a GPU these are tiles of many tokens and of 128 weight rows, which eight warps share."""
    format = format_named(name)
    described = quantized_specs(QuantizedSpec(format), (160, 256))
    random = np.random.default_rng(0)
    codes = np.arange(np.prod(described.values.shape), dtype=np.int64).astype(np.uint8).reshape(described.values.shape)
    if format.element == "e4m3":
        # A NaN makes its whole row NaN: in one row they stay.
        codes = np.where((codes & 127 != 127) | (np.arange(160) == 5)[:, None], codes, np.uint8(0))
    values = codes.view(described.values.dtype if format.element != "e4m3" else "uint8")
    values = values.view(quantize(np.zeros((24, 256), np.float32), format).values.dtype)
    scales = np.ones(described.scales.shape, np.float32)
    if format.has_e8m0_scales:
        # Sums with infinities are NaN: bytes whose products stay finite and within bfloat16, and one NaN.
        least = 3 if format.element == "e4m3" else 0
        scales = random.integers(least, 240, described.scales.shape).astype(np.uint8)
        scales[3, 1] = 255
    else:
        scales[3, 0] = np.nan
    points = described.zero_points
    points = None if points is None else random.integers(0, 256, points.shape, np.uint8)
    weight = QuantizedTensor(QuantizedSpec(format), values, scales, points)
    spec = MatmulSpec("out_in", out_dtype="float32")
    rows = np.flatnonzero(~np.isnan(dequantize(weight)).any(axis=1))
    assert len(rows) >= 158 and 3 not in rows
    for dtype in ("bfloat16", "float32"):
        operands = MatmulOperands(np.eye(256).astype(draw_array(random, (1,), dtype).dtype), weight)
        y = run(operands, spec, engine_target(), layout=None).T
        assert np.isnan(y[np.isnan(dequantize(weight)).any(axis=1)]).all()
        np.testing.assert_array_equal(y[rows], dequantize(weight)[rows])


@pytest.mark.parametrize("layout", ["out_in", "in_out"])
@pytest.mark.parametrize("name", scheme_names())
def test_every_scheme(name: str, layout: str) -> None:
    """Each with other epilogues, gathers and scatters; a stack of layers, absent slots, an odd end of every axis."""
    scheme, number = scheme_named(name), 2 * scheme_names().index(name) + (layout == "in_out")
    activation, gather, scatter = EPILOGUES[number % len(EPILOGUES)]
    spec = MatmulSpec(layout, gather, scatter, activation, "float32")
    check(scheme, spec, problem(scheme, spec))


@pytest.mark.parametrize("name", format_names())
def test_plain_rows_times_every_format(name: str) -> None:
    """Dtypes of x by turns; fp16 takes another way where scales leave its range."""
    scheme = Scheme("weights_only", format_named(name))
    dtypes = ("float16",) if scheme.weights.has_e8m0_scales else ("bfloat16", "float16", "float32")
    spec = MatmulSpec("out_in", "token", "slot", Activation("silu", gate_layout="interleaved"))
    check(scheme, spec, problem(scheme, spec, dtypes[format_names().index(name) % len(dtypes)], stacked=False))


@pytest.mark.parametrize("name", ["mxfp4_w4a16", "mxfp4_w4a8", "int8_w8a16_zp", "fp8_block", "int8_w8a8"])
def test_many_tokens_take_other_ways(name: str) -> None:
    """x put into order by a launch of its own, or tokens as the left operand."""
    scheme = scheme_named(name)
    for activation in (None, Activation("silu", gate_layout="halves")):
        spec = MatmulSpec("out_in", "token", "slot", activation, "float32")
        config = TileConfig(64, 32, 128, 4, 1, family="quantized")
        check(scheme, spec, problem(scheme, spec, d=256), config)


@pytest.mark.parametrize(("name", "layout"), [("mxfp4_w4a16", "in_out"), ("mxfp8", "out_in")])
def test_blocks_wider_than_the_matrix_read_none_of_what_lies_behind(name: str, layout: str) -> None:
    scheme, spec = scheme_named(name), MatmulSpec(layout, "token", "slot", out_dtype="float32")
    operands = problem(scheme, spec, d=32, stacked=False)
    check(scheme, spec, operands, TileConfig(16, 16, 128, 4, 1, family="quantized"))


def test_groups_that_no_block_divides() -> None:
    scheme = Scheme("odd_groups", int8_grouped(24, zero_points=True))
    spec = MatmulSpec("out_in", "token", "row")
    check(scheme, spec, problem(scheme, spec, d=168))


def test_rows_without_an_expert_are_zero_and_nan_stays_where_it_is() -> None:
    scheme = scheme_named("fp8_block")
    spec = MatmulSpec("out_in", "slot", "slot", out_dtype="float32")
    operands = problem(scheme, spec)
    absent = ARRAYS["row_of_slot"] < 0
    operands.x.scales[absent] = np.nan
    operands.row_weight[absent] = np.nan
    present = int(np.flatnonzero(~absent)[0])
    operands.x.scales[present, 1] = np.nan
    y = run(operands, spec, engine_target())
    assert absent.any() and not y[absent].any() and np.isnan(y[present]).all()
    assert np.isfinite(np.delete(y, present, axis=0)).all()


def test_layer_outside_the_stack_gives_nan() -> None:
    spec = MatmulSpec("out_in", "token")
    operands = problem(scheme_named("mxfp4_w4a16"), spec)
    for layer in (-1, 2, 2**31 - 1):
        outside = dataclasses.replace(operands, layer_index=np.array([layer], np.int32))
        assert np.isnan(run(outside, spec, engine_target())[: ARRAYS["group_start"][-1]].astype(np.float32)).all()


def described(scheme: Scheme, rows: int, experts: int, n: int, d: int, layout: str = "out_in") -> MatmulOperands:
    shape = (experts, n, d) if layout == "out_in" else (experts, d, n)
    x = ArraySpec((rows, d), "bfloat16")
    if scheme.activations is not None:
        x = quantized_specs(QuantizedSpec(scheme.activations), (rows, d))
    return MatmulOperands(x, quantized_specs(QuantizedSpec(scheme.weights, layout), shape))


@pytest.mark.parametrize("name", scheme_names())
def test_chosen_tiles_are_legal_everywhere(name: str) -> None:
    scheme = scheme_named(name)
    for tokens, arch, gated in itertools.product((1, 16, 300, 5000), (80, 86, 90, 100), (False, True)):
        target, layout = Target("cuda", arch, 100), LayoutSpec(tokens, 4, 32)
        activation = Activation("silu") if gated else None
        spec = MatmulSpec("out_in", "token", activation=activation, out_dtype="bfloat16")
        n = 1024 if gated else 512
        problem = MatmulProblem(described(scheme, tokens, 32, n, 1024), layout, spec, target)
        assert why_illegal(heuristic_tile(problem).config, problem) is None
        invariant = dataclasses.replace(spec, tuning=MatmulTuning(batch_invariant=True))
        few = MatmulProblem(described(scheme, 7, 32, n, 1024), LayoutSpec(7, 4, 32), invariant, target)
        assert heuristic_tile(dataclasses.replace(problem, spec=invariant)) == heuristic_tile(few)


def test_fp8_is_decoded_where_tensor_cores_do_not_take_it() -> None:
    spec = MatmulSpec("out_in", "token", out_dtype="bfloat16")
    operands = described(scheme_named("fp8_block"), 64, 8, 256, 256)
    for arch, dot in ((80, "bfloat16"), (90, "e4m3")):
        plan = plan_matmul_ogs(operands, LayoutSpec(64, 2, 8), spec, Target("cuda", arch, 100))
        launch = next(step for step in plan.steps if isinstance(step, KernelLaunch) and "matmul" in step.kernel.name)
        assert dict(launch.arguments)["DOT"] == Constant(dot)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"family": "portable"}, "family must be 'quantized'"),
        ({"block_n": 24}, "block_n must be a power of two"),
        ({"block_k": 16}, "block_k must be a power of two of at least 32"),
        ({"block_k": 256}, "block_k must divide 128 columns"),
        ({"num_warps": 2}, "num_warps must be"),
        ({"num_stages": 0}, "num_stages and group_m"),
        ({"num_stages": 20}, "exceed the"),
        ({"block_m": 256, "block_n": 256}, "accumulator registers"),
    ],
)
def test_illegal_configs_say_why(change: dict[str, object], words: str) -> None:
    config = dataclasses.replace(TileConfig(64, 64, 128, 4, 2, family="quantized"), **change)
    spec = MatmulSpec("out_in", "token", out_dtype="bfloat16", tuning=MatmulTuning(config))
    with pytest.raises(InvalidInput, match=words):
        plan_matmul_ogs(described(scheme_named("fp8_block"), 64, 8, 256, 256), LayoutSpec(64, 2, 8), spec, H200)


def test_what_no_kernel_computes_says_why() -> None:
    group = Format("fp8_g24", "e4m3", 1, 24)
    operands = described(Scheme("narrow", group, group), 64, 8, 256, 240)
    spec = MatmulSpec("out_in", "token", out_dtype="bfloat16")
    with pytest.raises(Unsupported, match=r"multiplies 32 columns.*groups of 24 is 8"):
        plan_matmul_ogs(operands, LayoutSpec(64, 2, 8), spec, H200)


def test_every_element_is_a_weight_somewhere() -> None:
    assert {format_named(name).element for name in format_names()} == set(ELEMENTS)
