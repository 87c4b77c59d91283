"""What quantised operands, experts and options are told where they do not fit together."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest

from moe_core.base.arrays import ArraySpec
from moe_core.base.target import Target
from moe_core.errors import InvalidInput, Unsupported
from moe_core.formats import (
    FP8_BLOCK,
    FP8_CHANNEL,
    FP8_GROUP,
    FP8_TENSOR,
    FP8_TOKEN,
    INT8_CHANNEL,
    INT8_TOKEN,
    MXFP4,
    MXFP8,
    Format,
    QuantizedSpec,
    QuantizedTensor,
    int4_grouped,
    quantized_specs,
)
from moe_core.ops.matmul.forward import plan_matmul_ogs
from moe_core.ops.moe.forward import plan_moe
from moe_core.ops.moe.options import ForwardOptions
from moe_core.specs import Activation, MatmulSpec, MoESpec, Tuning
from moe_core.specs.operands import ExpertWeights, MatmulOperands, SharedExpert, TopK

REFERENCE = Target("reference")


def tensor(format: Format, *shape: int, layout: str = "out_in") -> QuantizedTensor:
    return quantized_specs(QuantizedSpec(format, layout), shape)


def strided(weight: QuantizedTensor) -> QuantizedTensor:
    """The same tensor whose scales are every other element of a larger array."""
    scales = weight.scales
    steps = tuple(2 * step for step in scales.stride)
    return dataclasses.replace(weight, scales=ArraySpec(scales.shape, scales.dtype, steps))


X, BF16 = ArraySpec((6, 128), "bfloat16"), {"out_dtype": "bfloat16"}
OUT_IN, SEPARATE = MatmulSpec("out_in", **BF16), Activation("silu", True, "separate")
REFUSED: dict[str, tuple[MatmulOperands, MatmulSpec, type[Exception], str]] = {
    "layout of the weight": (MatmulOperands(X, tensor(FP8_CHANNEL, 8, 128)), MatmulSpec("in_out"), InvalidInput,
        "weight must be in_out like weight_layout, got fp8_channel[8, 128] out_in; quantise it in that layout, or "
        "change weight_layout"),
    "layout of x": (
        MatmulOperands(tensor(FP8_TOKEN, 6, 128, layout="in_out"), tensor(FP8_CHANNEL, 8, 128)),
        OUT_IN,
        InvalidInput,
        "x must be out_in, its rows along the reduction, got fp8_token[6, 128] in_out; quantise it in that layout",
    ),
    "shape of the weight": (MatmulOperands(X, tensor(MXFP4, 8, 96)), OUT_IN, InvalidInput,
        "weight must be [n, 128], got (8, 96); pass an array of that shape"),
    "memory of the weight": (MatmulOperands(X, strided(tensor(MXFP4, 8, 128))), OUT_IN, InvalidInput,
        "weight.scales must be row-major contiguous, got strides (8, 2); make it contiguous first"),
    "memory of x": (MatmulOperands(strided(tensor(FP8_GROUP, 6, 256)), tensor(FP8_BLOCK, 8, 256)), OUT_IN, InvalidInput,
        "x.scales must be row-major contiguous, got strides (4, 2); make it contiguous first"),
    "stack of rows": (MatmulOperands(tensor(FP8_TOKEN, 2, 6, 128), tensor(FP8_CHANNEL, 8, 128)), OUT_IN, InvalidInput,
        "x must be [num_rows, d], got (2, 6, 128); flatten the leading axes first"),
    "plain weight": (
        MatmulOperands(tensor(FP8_TOKEN, 6, 128), ArraySpec((8, 128), "bfloat16")),
        OUT_IN,
        InvalidInput,
        "weight must be quantised where x is, got bfloat16[8, 128] beside fp8_token[6, 128] out_in; dequantise x, or "
            "quantise weight",
    ),
    "no out_dtype": (MatmulOperands(tensor(FP8_TOKEN, 6, 128), tensor(FP8_CHANNEL, 8, 128)), MatmulSpec("out_in"),
        InvalidInput, "out_dtype must be given where x is quantised, got None for fp8_token[6, 128] out_in; pass "
        "MatmulSpec(out_dtype=...)"),
    "codes of weights": (
        MatmulOperands(tensor(int4_grouped(32), 6, 128), tensor(int4_grouped(32), 8, 128)),
        OUT_IN,
        InvalidInput,
        "x must be in a format that goes with int4_g32, got int4_g32: uint4 codes are of weights; activations are "
            "e4m3, e2m1 or int8; quantise x to another",
    ),
    "blocks of rows": (MatmulOperands(tensor(FP8_BLOCK, 6, 128), tensor(FP8_BLOCK, 8, 128)), OUT_IN, InvalidInput,
        "its scales must be of one row or of all, not of 128"),
    "rows with codes": (MatmulOperands(tensor(INT8_TOKEN, 6, 128), tensor(int4_grouped(32), 8, 128)), OUT_IN,
        InvalidInput, "weights of uint4 are multiplied with plain rows"),
    "int8 with fp8": (MatmulOperands(tensor(INT8_TOKEN, 6, 128), tensor(FP8_CHANNEL, 8, 128)), OUT_IN, InvalidInput,
        "int8 is multiplied with int8"),
    "groups": (MatmulOperands(tensor(MXFP8, 6, 128), tensor(FP8_BLOCK, 8, 128)), OUT_IN, InvalidInput,
        "its groups must have 128 columns, like the weight's, or all"),
    "fast_accumulate": (
        MatmulOperands(X, tensor(FP8_CHANNEL, 8, 128)),
        MatmulSpec("out_in", fast_accumulate=True),
        InvalidInput,
        "fast_accumulate must be False unless x and weight are both fp8, got True for bfloat16[6, 128] and "
            "fp8_channel[8, 128] out_in; leave it out",
    ),
    "no up": (MatmulOperands(X, tensor(FP8_CHANNEL, 8, 128)), MatmulSpec("out_in", activation=SEPARATE), InvalidInput,
        "up must be fp8_channel[8, 128] out_in like weight, with scales of float32, got None; quantise both alike"),
    "another up": (MatmulOperands(X, tensor(FP8_CHANNEL, 8, 128), tensor(FP8_TENSOR, 8, 128)),
        MatmulSpec("out_in", activation=SEPARATE), InvalidInput,
        "up must be fp8_channel[8, 128] out_in like weight, with scales of float32, got fp8_tensor[8, 128] out_in"),
    "up alone": (MatmulOperands(X, ArraySpec((8, 128), "bfloat16"), tensor(FP8_TENSOR, 8, 128)),
        MatmulSpec("out_in", activation=SEPARATE), InvalidInput,
        "up must be [8, 128] of bfloat16, got fp8_tensor[8, 128] out_in; pass a plain array"),
    "sums of int8": (MatmulOperands(tensor(INT8_TOKEN, 6, 2**17), tensor(INT8_CHANNEL, 8, 2**17)), OUT_IN, Unsupported,
        "d must be below 131072 for products of int8 with int8, whose sums fill 32 bits, got 131072; quantise to fp8, "
        "or split the reduction"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_operands_that_are_refused(name):
    operands, spec, kind, message = REFUSED[name]
    with pytest.raises(kind, match=re.escape(message)):
        plan_matmul_ogs(operands, None, spec, REFERENCE)


def test_what_is_refused_around_a_product():
    rows = MatmulOperands(tensor(FP8_TOKEN, 6, 128), tensor(FP8_CHANNEL, 8, 128))
    spec = MatmulSpec("out_in", activation=Activation("silu"), **BF16)
    message = "outputs must be ('y',) with a quantised x, and joined False with any quantised operand, got ('pre',)"
    with pytest.raises(Unsupported, match=re.escape(message)):
        plan_matmul_ogs(rows, None, spec, REFERENCE, outputs=("pre",))
    wide = MatmulOperands(X, tensor(FP8_CHANNEL, 8, 64), tensor(FP8_CHANNEL, 8, 64))
    with pytest.raises(Unsupported, match=re.escape("got ('y',) and True with weight, up quantised; dequantise it")):
        plan_matmul_ogs(wide, None, OUT_IN, Target("cuda", 90, 132), joined=True)


def specs_of_experts(format: Format, **fields: Any) -> ExpertWeights:
    return ExpertWeights(tensor(format, 2, 256, 128), tensor(format, 2, 128, 128), **fields)


SCALE = ArraySpec((1,), "float32")
PLAIN = ArraySpec((2, 128, 128), "bfloat16")
EXPERTS_REFUSED: dict[str, tuple[ExpertWeights, dict[str, Any], str]] = {
    "layout": (ExpertWeights(tensor(MXFP4, 2, 128, 256, layout="in_out"), tensor(MXFP4, 2, 128, 128)), {},
        "experts.gate_up must be out_in like weight_layout, got mxfp4[2, 128, 256] in_out"),
    "shape of down": (ExpertWeights(tensor(MXFP4, 2, 256, 128), tensor(MXFP4, 2, 128, 64)), {},
        "experts.down must be [2, 128, 128], got (2, 128, 64); pass an array of that shape"),
    "plain experts": (ExpertWeights(tensor(FP8_CHANNEL, 2, 256, 128), PLAIN), {"activations": FP8_TOKEN},
        "experts.down must be quantised where activations are, got bfloat16[2, 128, 128] with activations fp8_token; "
        "quantise it, or leave activations out"),
    "formats": (specs_of_experts(int4_grouped(32)), {"activations": INT8_TOKEN},
        "activations must be a format that goes with int4_g32 of experts.gate_up, got int8_token: weights of uint4 are "
        "multiplied with plain rows; choose another"),
    "static scale of tokens": (specs_of_experts(FP8_CHANNEL, gate_up_input_scale=SCALE), {"activations": FP8_TOKEN},
        "experts.gate_up_input_scale must be None unless activations have one fp32 scale per tensor, got an array with "
        "activations fp8_token; leave it out"),
    "static scale without activations": (specs_of_experts(FP8_CHANNEL, down_input_scale=SCALE), {},
        "experts.down_input_scale must be None unless activations have one fp32 scale per tensor"),
    "shape of a static scale": (specs_of_experts(FP8_TENSOR, down_input_scale=ArraySpec((2,), "float32")),
        {"activations": FP8_TENSOR}, "experts.down_input_scale must be [1], got (2,); pass an array of that shape"),
    "batch_invariant": (
        specs_of_experts(FP8_TENSOR),
        {"activations": FP8_TENSOR, "tuning": Tuning(batch_invariant=True)},
        "experts.gate_up_input_scale must be given with batch_invariant and activations fp8_tensor, got None: one "
            "scale found from all rows makes each depend on the others; pass it, or quantise by token",
    ),
    "fast_accumulate": (specs_of_experts(MXFP4), {"activations": MXFP8, "fast_accumulate": True},
        "fast_accumulate must be False unless experts.gate_up is fp8, got True with mxfp4; leave it out"),
}  # fmt: skip


@pytest.mark.parametrize("name", EXPERTS_REFUSED)
def test_experts_that_are_refused(name):
    experts, options, message = EXPERTS_REFUSED[name]
    spec = MoESpec(Activation("silu"), weight_layout="out_in", **options)
    routing = TopK(ArraySpec((6, 2), "int32"), ArraySpec((6, 2), "float32"))
    with pytest.raises(InvalidInput, match=re.escape(message)):
        plan_moe(X, experts, routing, spec, REFERENCE)


def test_other_operands_stay_plain():
    spec, routing = (
        MoESpec(Activation("silu"), weight_layout="out_in"),
        TopK(ArraySpec((6, 2), "int32"), ArraySpec((6, 2), "float32")),
    )
    experts = specs_of_experts(MXFP4)
    shared = SharedExpert(ArraySpec((256, 128), "bfloat16"), tensor(MXFP4, 128, 128))
    with pytest.raises(
        InvalidInput, match=re.escape("shared.down must be [128, 128] of bfloat16, got mxfp4[128, 128]")
    ):
        plan_moe(X, experts, routing, spec, REFERENCE, options=ForwardOptions(shared=shared))
    biased = dataclasses.replace(experts, down_bias=tensor(MXFP4, 2, 128))
    with pytest.raises(InvalidInput, match=re.escape("experts.down_bias must be [2, 128] of float32 or bfloat16, got")):
        plan_moe(X, biased, routing, spec, REFERENCE)
    with pytest.raises(InvalidInput, match=re.escape("x must be [num_tokens, d_model] of bfloat16 or float16")):
        plan_moe(tensor(MXFP8, 6, 128), experts, routing, spec, REFERENCE)


def test_options_that_are_refused():
    for options in ({}, {"activations": INT8_TOKEN}):
        with pytest.raises(
            InvalidInput, match="fast_accumulate must be False unless activations are fp8, got True with"
        ):
            MoESpec(Activation("silu"), fast_accumulate=True, **options)
    with pytest.raises(InvalidInput, match="activations must be a Format or None, got str"):
        MoESpec(Activation("silu"), activations="fp8_token")
