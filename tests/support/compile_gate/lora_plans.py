"""Plans of layers with adapters, for the compile gate: few and many rows, plain and quantised experts, dropout."""

from __future__ import annotations

from collections.abc import Iterator

from moe_core.base.arrays import ArraySpec
from moe_core.base.target import Target
from moe_core.formats import QuantizedSpec, quantized_specs, scheme_named
from moe_core.ops.moe.backward import gradient_names, plan_moe_backward
from moe_core.ops.moe.forward import plan_moe
from moe_core.ops.moe.options import BackwardOptions, ForwardOptions
from moe_core.plan.steps import LaunchPlan
from moe_core.specs import Activation, MoESpec
from moe_core.specs.operands import ExpertWeights, LoRAFactors, MoEOperands, OutputGradients, TopK
from tests.support.compile_gate.prepacked_plans import tiled_weight

_OAI, _SILU = Activation("swiglu_oai", gate_layout="interleaved"), Activation("silu")
#: Tokens, experts, D, F, K, R, activation, dtype, scheme, dropout.
_LAYERS = (
    (64, 32, 2880, 2880, 4, 16, _OAI, "bfloat16", None, 0.0),
    (4096, 128, 2048, 768, 8, 64, _SILU, "bfloat16", None, 0.1),
    (4096, 32, 2880, 2880, 4, 16, _OAI, "bfloat16", "mxfp4_w4a16", 0.0),
    (1, 32, 2880, 2880, 4, 16, _OAI, "bfloat16", "prepacked", 0.0),
    (64, 32, 2880, 2880, 4, 16, _OAI, "bfloat16", "prepacked", 0.0),
    (17, 8, 64, 48, 2, 16, Activation("silu", gate_layout="separate"), "float32", None, 0.0),
)


def plans(target: Target) -> Iterator[LaunchPlan]:
    for tokens, e, d, f, top_k, rank, activation, dtype, scheme, dropout in _LAYERS:
        separate, slots = activation.gate_layout == "separate", 8

        def matrix(
            inside: int, outside: int, order: Activation | None = None, e: int = e, dtype: str = dtype,
            scheme: str | None = scheme,
        ):  # fmt: skip
            if scheme == "prepacked":
                return tiled_weight((e, outside, inside), order)
            if scheme is None:
                return ArraySpec((e, inside, outside), dtype)
            return quantized_specs(QuantizedSpec(scheme_named(scheme).weights), (e, outside, inside))

        def factor(*shape: int, lead: tuple[int, int] = (slots, e), alike: str | None = dtype if dropout else None):
            return ArraySpec((*lead, *shape), alike if alike is not None and shape else "float32")

        experts = ExpertWeights(
            matrix(d, f if separate else 2 * f, activation), matrix(f, d), matrix(d, f) if separate else None
        )
        pairs = factor(d, rank), factor(rank, 2 * f), factor(f, rank), factor(rank, d)
        seed = ArraySpec((1,), "int32") if dropout else None
        lora = LoRAFactors(*pairs, factor(), ArraySpec((slots, e), "int32"), seed)
        spec = MoESpec(activation, weight_layout="in_out" if scheme is None else "out_in", lora_dropout=dropout)
        x, routing = (
            ArraySpec((tokens, d), dtype),
            TopK(*(ArraySpec((tokens, top_k), kind) for kind in ("int32", "float32"))),
        )
        adapters = {"lora": lora, "adapter_ids": ArraySpec((tokens,), "int32")}
        if scheme == "prepacked" and target.arch != 90:
            continue
        yield plan_moe(x, experts, routing, spec, target, options=ForwardOptions(**adapters))
        if scheme == "prepacked":
            continue
        operands = MoEOperands(x, experts, routing, **adapters)
        wanted = tuple(name for name in gradient_names(operands) if not name.startswith("d_experts"))
        yield plan_moe_backward(OutputGradients(x), operands, spec, target, options=BackwardOptions(wanted))
