"""Plans of quantised products for the compile gate: released models' layers, every scheme, every way to quantise."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

from benchmarks.shapes import SHAPES
from moe_core.base.arrays import ArraySpec
from moe_core.base.target import Target
from moe_core.formats import (
    FP8_GROUP,
    FP8_TENSOR,
    Format,
    QuantizedSpec,
    QuantizedTensor,
    Scheme,
    format_named,
    format_names,
    quantized_specs,
    scheme_named,
    scheme_names,
)
from moe_core.ops.matmul.forward import plan_matmul_ogs
from moe_core.ops.quantize.rows import plan_quantize_rows
from moe_core.plan.steps import LaunchPlan
from moe_core.specs import Activation, LayoutSpec, MatmulSpec
from moe_core.specs.operands import MatmulOperands, map_arrays
from tests.support.compile_gate import prepacked_plans
from tests.support.harness import spec_of
from tests.support.matmul import sm90_fp8_cases

#: Released models and the schemes their checkpoints, or others' of them, come in.
LAYERS = (("gptoss120b", "mxfp4_w4a16"), ("qwen3", "fp8_block"), ("mixtral", "fp8_block"), ("qwen3", "int4_w4a16_zp"))
#: One on each side of every change of tiles.
ROWS_PER_EXPERT = (1, 16, 48, 512)


def _operands(scheme: Scheme, shape: tuple[int, ...], rows: int, layout: str, bias: bool) -> MatmulOperands:
    """shape: `(E, N, D)`."""
    experts, n, d = shape
    x: ArraySpec | QuantizedTensor = ArraySpec((rows, d), "bfloat16")
    if scheme.activations is not None:
        x = quantized_specs(QuantizedSpec(scheme.activations), (rows, d))
    matrix = (n, d) if layout == "out_in" else (d, n)
    weight = quantized_specs(QuantizedSpec(scheme.weights, layout), (experts, *matrix))
    return MatmulOperands(x, weight, bias=ArraySpec((experts, n), "float32") if bias else None)


def _pair(
    scheme: Scheme, sizes: tuple[int, int, int], rows: int, activation: Activation, target: Target, layout: str
) -> Iterator[LaunchPlan]:
    """Both products of a layer of `(E, D, F)` with that many rows per expert."""
    experts, d, f = sizes
    layout_spec, biased = LayoutSpec(rows * experts // 2, 2, experts), activation.name == "swiglu_oai"
    first = MatmulSpec(layout, "token", "row", activation, "bfloat16")
    operands = _operands(scheme, (experts, 2 * f, d), layout_spec.num_tokens, layout, biased)
    yield plan_matmul_ogs(operands, layout_spec, first, target)
    second = MatmulSpec(layout, "row", "slot", out_dtype="bfloat16")
    operands = _operands(scheme, (experts, d, f), layout_spec.capacity, layout, biased)
    yield plan_matmul_ogs(operands, layout_spec, second, target)


def layers(target: Target) -> Iterator[LaunchPlan]:
    """Layers of released models, few tokens to many, and every quantiser of rows."""
    for model, scheme in LAYERS:
        shape = SHAPES[model]
        for rows in ROWS_PER_EXPERT:
            sizes = shape.num_experts, shape.d_model, shape.d_ff
            yield from _pair(scheme_named(scheme), sizes, rows, shape.activation, target, "out_in")
    for format in map(format_named, format_names()):
        if _quantises_rows(format):
            for rows in (64, 4096):
                yield plan_quantize_rows(ArraySpec((rows, 2880), "bfloat16"), format, target)
            yield plan_quantize_rows(ArraySpec((64, 64), "float32", (96, 1)), format, target)
    yield plan_quantize_rows(ArraySpec((64, 37), "float32"), FP8_TENSOR, target, scales=ArraySpec((1,), "float32"))
    for rows, users in ((64, 1), (64, 8), (4096, 8)):
        users_of_rows = ArraySpec((rows * users,), "int32")
        yield plan_quantize_rows(ArraySpec((rows, 2880), "bfloat16"), FP8_TENSOR, target, used_by=users_of_rows)


def _every_scheme(target: Target, layout: str, rows: int) -> Iterator[LaunchPlan]:
    activation = Activation("swiglu_oai", gate_layout="interleaved" if layout == "out_in" else "halves")
    for name in scheme_names():
        yield from _pair(scheme_named(name), (8, 512, 256), rows, activation, target, layout)
    # Where the largest magnitudes of one scale are found too.
    places, scheme = LayoutSpec(rows * 4, 2, 8), scheme_named("fp8_tensor")
    operands = _operands(scheme, (8, 512, 512), places.num_tokens, layout, bias=True)
    spec = MatmulSpec(layout, "token", "row", activation, "bfloat16")
    yield sm90_fp8_cases.plan_finding(operands, places, spec, target)


def few_rows(target: Target) -> Iterator[LaunchPlan]:
    """Every scheme with few rows per expert, and fp16 and fp32 rows."""
    yield from _every_scheme(target, "out_in", 2)
    for name in ("mxfp4", "int4_g32", "fp8_block"):
        for dtype in ("float16", "float32"):
            weight = quantized_specs(QuantizedSpec(format_named(name)), (8, 256, 512))
            for rows in (8, 2048):
                operands = MatmulOperands(ArraySpec((rows, 512), dtype), weight)
                yield plan_matmul_ogs(operands, LayoutSpec(rows, 1, 8), MatmulSpec("out_in", "token"), target)


def many_rows(target: Target) -> Iterator[LaunchPlan]:
    """Every scheme with many rows per expert."""
    yield from _every_scheme(target, "out_in", 200)


def in_out(target: Target) -> Iterator[LaunchPlan]:
    """Every scheme in the layout that is not the fast one."""
    yield from _every_scheme(target, "in_out", 24)


def _quantises_rows(format: Format) -> bool:
    return format.element in ("e4m3", "e2m1", "int8") and format.group_rows in (None, 1)


def sm90(target: Target) -> Iterator[LaunchPlan]:
    """The sm90 family's products of fp8 with fp8, sm_90 only: of layouts that are not ours, with results as codes, or
    with their largest magnitudes."""
    for case in sm90_fp8_cases.CASES.values():
        operands, layout = map_arrays(case.operands(8), spec_of), case.layout(8)
        yield plan_matmul_ogs(operands, layout, case.tuned, target)
    for case in (sm90_fp8_cases.CODES, sm90_fp8_cases.CASES["halves"]):
        operands, layout = map_arrays(case.operands(8), spec_of), case.layout(8)
        yield sm90_fp8_cases.plan_quantizing(operands, layout, case.tuned, FP8_GROUP, target)
    for name, fast in itertools.product(("halves", "interleaved"), (False, True)):
        case = sm90_fp8_cases.CASES[name]
        spec = dataclasses.replace(case.spec, fast_accumulate=fast)
        case = dataclasses.replace(case, spec=spec, scheme=scheme_named("fp8_tensor"))
        operands, layout = map_arrays(case.operands(8), spec_of), case.layout(8)
        scale = ArraySpec((1,), "float32")
        if name == "halves":
            yield sm90_fp8_cases.plan_quantizing(operands, layout, case.tuned, FP8_TENSOR, target, scale)
        yield sm90_fp8_cases.plan_finding(operands, layout, case.tuned, target)


#: Groups of the compile gate.
GROUPS = {
    "quantized_sm90": sm90, "quantized_layers": layers, "quantized_few_rows": few_rows,
    "quantized_many_rows": many_rows, "quantized_in_out": in_out, **prepacked_plans.GROUPS,
}  # fmt: skip
