"""Products of the Hopper matmul that store the pre-activation, for the compile gate."""

from __future__ import annotations

from collections.abc import Iterator

from moe_core.arrays import ArraySpec
from moe_core.matmul_ogs import plan_matmul_ogs
from moe_core.operands import MatmulOperands
from moe_core.plan import LaunchPlan
from moe_core.specs import Activation, LayoutSpec, MatmulSpec
from moe_core.target import Target


def keeping(target: Target) -> Iterator[LaunchPlan]:
    """Pre-activations stored: everything optional, where registers are fewest."""
    layout, d, n, e = LayoutSpec(2048, 4, 16), 1024, 360, 16
    x, layer = ArraySpec((layout.num_tokens, d), "bfloat16"), ArraySpec((1,), "int32")
    for weight_layout, activation in (
        ("out_in", Activation("gelu_tanh")),
        ("in_out", Activation("gelu_tanh", gate_layout="separate")),
        ("out_in", Activation("swiglu_oai", gate_layout="interleaved")),
        ("in_out", Activation("gelu_tanh", gated=False)),
    ):
        width = 2 * n if activation.gate_layout in ("halves", "interleaved") else n
        weight = ArraySpec((3, e, *((d, width) if weight_layout == "in_out" else (width, d))), "bfloat16")
        bias, second = ArraySpec((3, e, width), "float32"), activation.gate_layout == "separate"
        up, up_bias = (weight, bias) if second else (None, None)
        operands = MatmulOperands(x, weight, up=up, bias=bias, up_bias=up_bias, layer=layer)
        spec = MatmulSpec(weight_layout, "token", "row", activation)
        for outputs in (("y", "pre"),) if activation.gated else (("y", "pre"), ("pre",)):
            yield plan_matmul_ogs(operands, layout, spec, target, stage=0, outputs=outputs)
