"""Plans of experts whose last product stores its rows at peers' addresses, for the compile gate."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks.shapes import SHAPES
from moe_core.base.arrays import ArraySpec
from moe_core.base.target import Target
from moe_core.formats import QuantizedSpec, format_named, quantized_specs, scheme_named
from moe_core.ops.exchange.push import plan_result_addresses
from moe_core.ops.moe.backward import plan_moe_backward
from moe_core.ops.moe.forward import plan_moe
from moe_core.ops.moe.options import BackwardOptions, ForwardOptions
from moe_core.plan.steps import Constant, KernelLaunch, LaunchPlan
from moe_core.specs import Activation, MoESpec
from moe_core.specs.operands import ExpertWeights, MoEOperands, OutputGradients, TopK
from tests.support.compile_gate.prepacked_plans import tiled_weight

#: Rows per expert: few, enough for tall blocks, many.
ROWS_PER_EXPERT = (2, 160, 512)
#: A rank's share of the experts.
_RANKS = 4


def _plan(
    experts: ExpertWeights, count: int, spec: MoESpec, target: Target, width: int, dtype: str, **options: Any
) -> LaunchPlan:
    routing = TopK(ArraySpec((count, 1), "int32"), ArraySpec((count, 1), "float32"))
    x, results_at = ArraySpec((count, width), dtype), ArraySpec((count,), "int64")
    return plan_moe(x, experts, routing, spec, target, options=ForwardOptions(results_at=results_at, **options))


def plain(target: Target) -> Iterator[LaunchPlan]:
    """Released models' layers in both weight layouts, fp16 and fp32, with row blocks of every height."""
    cases = [(SHAPES[name], "bfloat16") for name in ("gptoss120b", "qwen3", "mixtral", "dsv3")]
    for shape, dtype in (*cases, (SHAPES["qwen3"], "float16"), (SHAPES["qwen3"], "float32")):
        count, d, f = shape.num_experts // _RANKS, shape.d_model, shape.d_ff
        for layout in ("in_out", "out_in") if dtype == "bfloat16" else ("in_out",):

            def matrix(*sides: int, count: int = count, layout: str = layout, dtype: str = dtype) -> ArraySpec:
                return ArraySpec((count, *(sides if layout == "in_out" else sides[::-1])), dtype)

            bias = ArraySpec((count, d), "float32") if shape.biased else None
            experts = ExpertWeights(matrix(d, 2 * f), matrix(f, d), down_bias=bias)
            for rows in ROWS_PER_EXPERT if dtype == "bfloat16" else ROWS_PER_EXPERT[::2]:
                spec = MoESpec(shape.activation, None, layout)
                yield _plan(experts, rows * count, spec, target, d, dtype)
                if shape.name == "qwen3" and dtype == "bfloat16":
                    # Product 2 on a stream of its own waits for no launch.
                    yield _plan(experts, rows * count, spec, target, d, dtype, multiprocessors=(88, 44))
    for count in (1, 4096):
        arrays = ArraySpec((count, 2), "int32"), ArraySpec((33,), "int32"), ArraySpec((_RANKS,), "int64")
        yield plan_result_addresses(*arrays, target, num_slots=count, width=2880, dtype="bfloat16")


def backward(target: Target) -> Iterator[LaunchPlan]:
    """Backwards that store rows of d_x: of every gate layout, and through quantised experts."""
    d, f, count = 512, 256, 8
    format = QuantizedSpec(format_named("mxfp4"), "out_in")
    for layout, quantised in (("halves", False), ("separate", False), ("halves", True)):
        sides = ((2 * f if layout == "halves" else f, d), (d, f))
        if quantised:
            up, down = (quantized_specs(format, (count, *own)) for own in sides)
        else:
            up, down = (ArraySpec((count, *own), "bfloat16") for own in sides)
        experts = ExpertWeights(up, down, up=up if layout == "separate" else None)
        spec = MoESpec(Activation("silu", gate_layout=layout), None, "out_in")
        for rows in (count * each for each in ROWS_PER_EXPERT):
            x, routing = (
                ArraySpec((rows, d), "bfloat16"),
                TopK(*(ArraySpec((rows, 1), t) for t in ("int32", "float32"))),
            )
            operands, options = MoEOperands(x, experts, routing), {"results_at": ArraySpec((rows,), "int64")}
            wanted = ("d_x", "d_routing.weights")
            yield plan_moe_backward(
                OutputGradients(x), operands, spec, target, options=BackwardOptions(wanted=wanted, **options)
            )


def quantised(target: Target) -> Iterator[LaunchPlan]:
    """Quantised experts of every family."""
    count, d, f, activation = 8, 512, 256, Activation("silu")
    for name in ("mxfp4_w4a16", "fp8_block", "int4_w4a16_zp"):
        scheme = scheme_named(name)
        up, down = (
            quantized_specs(QuantizedSpec(scheme.weights, "out_in"), (count, *sides)) for sides in ((2 * f, d), (d, f))
        )
        spec = MoESpec(activation, None, "out_in", activations=scheme.activations)
        for rows in ROWS_PER_EXPERT:
            yield _plan(ExpertWeights(up, down), rows * count, spec, target, d, "bfloat16")


def prepacked(target: Target) -> Iterator[LaunchPlan]:
    """Prepacked experts, sm_90 only: kernels of few rows, and of every width of a tile."""
    count, d, f, activation = 8, 1024, 512, Activation("silu")
    for name, scales in (("mxfp4", None), ("int4_g32_zp", "bfloat16"), ("int8_g128", "float32")):
        format = format_named(name)
        experts = ExpertWeights(
            tiled_weight((count, 2 * f, d), activation, format, scales),
            tiled_weight((count, d, f), None, format, scales),
            down_bias=ArraySpec((count, d), "float32"),
        )
        for rows in (1, 8, 16, 40, *ROWS_PER_EXPERT):
            yield _plan(experts, rows * count, MoESpec(activation, None, "out_in"), target, d, "bfloat16")


def pushes_rows(launch: KernelLaunch) -> bool:
    """Whether a product stores rows at addresses."""
    scatter = dict(launch.arguments).get("SCATTER", Constant("row"))
    assert isinstance(scatter, Constant)
    return scatter.value not in ("row", "slot")


#: For `gate.GROUPS`.
GROUPS = {"pushed": plain, "pushed_backward": backward, "pushed_quantised": quantised, "pushed_prepacked": prepacked}
