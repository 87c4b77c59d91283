"""Plans of the backward's small ops that stand for what training uses: for the compile gate."""

from __future__ import annotations

from collections.abc import Iterator

from moe_core.base.arrays import ArraySpec
from moe_core.base.target import Target
from moe_core.formats import QuantizedSpec, format_named, quantized_specs
from moe_core.ops.activation.backward import plan_activation_backward, plan_expert_activation_backward
from moe_core.ops.matmul.backward import plan_matmul_ogs_backward
from moe_core.ops.matmul.quantized.transposed import plan_matmul_quantized_transposed
from moe_core.ops.norm.backward import NORM_GRADIENTS, plan_rms_norm_backward
from moe_core.ops.norm.forward import plan_rms_norm
from moe_core.ops.reduction import rowwise as backward_rows
from moe_core.ops.router.backward import plan_router_backward
from moe_core.ops.routing.backward import plan_routing_backward
from moe_core.ops.routing.rounding import plan_route_rounded_backward
from moe_core.plan.steps import LaunchPlan
from moe_core.specs import LayoutSpec, LogitsSpec, NormSpec, RouterSpec, TokenRounding
from moe_core.specs.matmul import ACTIVATIONS, ALWAYS_GATED, Activation, MatmulSpec
from moe_core.specs.operands import ExpertActivationOperands, MatmulOperands, RoutingGradients

TOKENS = 4096
#: d_ff, K and activation of layers between which every gate layout and tile width appears.
EXPERTS = (
    (768, 8, Activation("silu")),
    (2880, 4, Activation("swiglu_oai", True, "interleaved")),
    (14336, 2, Activation("silu", True, "separate")),
    (768, 2, Activation("gelu", True, "interleaved")),
    (2048, 2, Activation("gelu_tanh", False)),
)
#: E and K.
ROUTERS = ((128, 8), (384, 6), (4096, 8))


def activation_plans(target: Target) -> Iterator[LaunchPlan]:
    for name in ACTIVATIONS:
        for layout in ("halves", "interleaved", "separate"):
            separate = layout == "separate"
            x, d_y = ArraySpec((256, 768 if separate else 1536), "bfloat16"), ArraySpec((256, 768), "bfloat16")
            yield plan_activation_backward(d_y, x, Activation(name, True, layout), target, up=x if separate else None)
        if name not in ALWAYS_GATED:
            wide = ArraySpec((256, 768), "float32")
            yield plan_activation_backward(wide, wide, Activation(name, False), target)
    for width, top_k, activation in EXPERTS:
        slots = ArraySpec((TOKENS * top_k,), "int32")
        weight, product = ArraySpec((TOKENS, top_k), "float32"), ArraySpec(slots.shape, "float32")
        pre = ArraySpec((*slots.shape, activation.input_width(width)), "bfloat16")
        for dtype in ("float32", "bfloat16"):
            d_hidden = ArraySpec((*slots.shape, width), dtype)
            operands = ExpertActivationOperands(d_hidden, pre, slots, weight, product)
            yield plan_expert_activation_backward(operands, activation, target, slot_of_row=slots)
        dense = ExpertActivationOperands(d_hidden, pre)
        yield plan_expert_activation_backward(dense, activation, target, outputs=("d_pre", "weighted_hidden"))


def routing_plans(target: Target) -> Iterator[LaunchPlan]:
    for num_experts, top_k in ROUTERS:
        logits, weights = ArraySpec((TOKENS, num_experts), "float32"), ArraySpec((TOKENS, top_k), "float32")
        ids, mask = ArraySpec((TOKENS, top_k), "int32"), ArraySpec((TOKENS,), "bool")
        one, counts = ArraySpec((1,), "float32"), ArraySpec((num_experts,), "int32")
        everything = RoutingGradients(weights, logits, one, one, counts)
        for router in (
            RouterSpec(top_k),
            RouterSpec(top_k, renormalize=True),
            RouterSpec(top_k, order="topk_then_softmax"),
            RouterSpec(top_k, "sigmoid", renormalize=True, scale=2.5),
            RouterSpec(top_k, "sqrt_softplus"),
            RouterSpec(top_k, "sigmoid", renormalize=True, epsilon=1e-6, softcap=30.0, logit_scale=0.5),
        ):
            yield plan_routing_backward(everything, logits, ids, router, target, token_mask=mask)
            yield plan_routing_backward(RoutingGradients(weights), logits, ids, router, target)
        for rounding in (TokenRounding(), TokenRounding(mode="down")) if num_experts == 128 else ():
            table = (TOKENS, rounding.width(top_k, num_experts))
            rows, places = ArraySpec(table, "float32"), ArraySpec(table, "int32")
            yield plan_route_rounded_backward(rows, logits, places, places, RouterSpec(top_k), rounding, target)
        losses = RoutingGradients(load_balance=one, z=one, tokens_per_expert=counts)
        yield plan_routing_backward(losses, logits, None, RouterSpec(top_k, "sigmoid"), target)


def router_plans(target: Target) -> Iterator[LaunchPlan]:
    """The router product's backward where it runs apart."""
    d_logits, bias = ArraySpec((TOKENS, 128), "float32"), ArraySpec((128,), "bfloat16")
    x, weight = ArraySpec((TOKENS, 2048), "bfloat16"), ArraySpec((128, 2048), "bfloat16")
    yield plan_router_backward(
        d_logits, x, weight, bias, LogitsSpec("out_in"), target, wanted=("d_x", "d_weight", "d_bias")
    )


def norm_plans(target: Target) -> Iterator[LaunchPlan]:
    """The normalisation of rows, and its backward."""
    for dtype, width in (("bfloat16", 2816), ("float32", 512)):
        x, weight = ArraySpec((TOKENS, width), dtype), ArraySpec((width,), "float32")
        yield plan_rms_norm(x, weight, NormSpec(1e-6, width**-0.5), target)
        for spec in (NormSpec(), NormSpec(centred=True, weight_first=True)):
            yield plan_rms_norm_backward(x, x, weight, spec, target, wanted=NORM_GRADIENTS)


def product_plans(target: Target) -> Iterator[LaunchPlan]:
    """The gradients of a grouped product of its own: adapters of small rank, and everything that may be beside one."""
    layout, e = LayoutSpec(TOKENS, 4, 32), 32
    x, rows, y = (
        ArraySpec(shape, "bfloat16") for shape in ((TOKENS, 2048), (layout.num_slots, 16), (TOKENS * 4, 1536))
    )
    first = MatmulOperands(x, ArraySpec((e, 2048, 16), "bfloat16"))
    spec = MatmulSpec("in_out", "token", "row")
    yield plan_matmul_ogs_backward(rows, first, layout, spec, target, wanted=("d_x", "d_weight"))
    weight, bias = ArraySpec((e, 1536, 16), "bfloat16"), ArraySpec((e, 1536), "float32")
    second = MatmulOperands(rows, weight, bias=bias, row_weight=ArraySpec((layout.num_slots,), "float32"))
    wanted = ("d_x", "d_weight", "d_bias", "d_row_weight")
    yield plan_matmul_ogs_backward(y, second, layout, MatmulSpec("out_in", "row", "slot"), target, wanted=wanted)


def quantized_plans(target: Target) -> Iterator[LaunchPlan]:
    """Products with quantised weights read the other way: every element, both layouts, few rows and many."""
    for name, layout, dtype, tokens in (
        ("mxfp4", "out_in", "bfloat16", TOKENS),
        ("int4_g32_zp", "in_out", "float16", 512),
        ("int8_g64_zp", "in_out", "bfloat16", TOKENS),
        ("fp8_block", "out_in", "float32", 512),
    ):
        rows = LayoutSpec(tokens, 4, 32)
        shape = (32, 5760, 2880) if name == "mxfp4" else (32, 2048, 1408)
        weight = quantized_specs(QuantizedSpec(format_named(name), layout), shape)
        outputs = shape[1] if layout == "out_in" else shape[2]
        up = weight if name == "int4_g32_zp" else None
        operands = MatmulOperands(ArraySpec((rows.capacity, outputs * (1 if up is None else 2)), dtype), weight, up)
        yield plan_matmul_quantized_transposed(operands, rows, MatmulSpec(layout), target, composed=True)


def row_plans(target: Target) -> Iterator[LaunchPlan]:
    """What a gate, a weighted input, another dtype of the output's gradient and a second part of d_x need."""
    for dtype in ("bfloat16", "float32"):
        x, gate = ArraySpec((TOKENS, 5120), dtype), ArraySpec((TOKENS, 1), "float32")
        yield backward_rows.plan_weighted_input(x, x, target, outputs=("d_x",), with_extra=True)
        yield backward_rows.plan_weighted_input(x, x, target, outputs=("d_weight",))
        yield backward_rows.plan_cast_rows(x, "float32" if dtype == "bfloat16" else "bfloat16", target)
    yield backward_rows.plan_gate_weight(gate, target)
    yield backward_rows.plan_gate_gradient(gate, target)
    yield backward_rows.plan_add(gate, target)


def plans(target: Target) -> Iterator[LaunchPlan]:
    yield from row_plans(target)
    yield from activation_plans(target)
    yield from routing_plans(target)
    yield from router_plans(target)
    yield from norm_plans(target)
    yield from product_plans(target)
    yield from quantized_plans(target)
