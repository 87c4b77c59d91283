"""Plans whose launches overlap, and whether a compiled kernel waits for the launch ahead before it touches what that
launch may write."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from moe_core.base.arrays import ArraySpec
from moe_core.base.target import Target
from moe_core.formats import QuantizedSpec, quantized_specs, scheme_named
from moe_core.ops.matmul.sm90_packed.few_rows_plan import MATMUL_FEW_ROWS
from moe_core.ops.moe.forward import plan_moe
from moe_core.ops.moe.options import ForwardOptions
from moe_core.ops.reduction.reduce import REDUCE
from moe_core.plan.steps import Constant, KernelLaunch, LaunchPlan, Pointer
from moe_core.specs import Activation, MoESpec, RouterSpec, Tuning
from moe_core.specs.operands import ExpertWeights, LoRAFactors, RouterLogits, SharedExpert, TopK

WAIT, ALLOW = "griddepcontrol.wait", "griddepcontrol.launch_dependents"
#: Loads, stores, atomics and copies of global memory, and the two instructions of dependent launches, as PTX has them.
_STEPS = re.compile(rf"{WAIT}|{ALLOW}|\b(?:ld|st|red|atom)\.global[\w.:]*|\bcp\.(?:async|reduce)\.[\w.:]*")
#: Kernels that load their first weights before they wait, past no cache; other early loads of theirs are `.cg`.
_WEIGHTS_FIRST = (MATMUL_FEW_ROWS,)
#: Kernels that allow no further launch: the last of a plan.
_LAST = (REDUCE,)


def order_violation(launch: KernelLaunch, ptx: str) -> str:
    """The rule of `moe_core.ops.moe.pdl` that a launch's PTX breaks; empty if none."""
    arguments = dict(launch.arguments)
    overlap = arguments.get("PDL", Constant(None))
    assert isinstance(overlap, Constant)
    steps = _STEPS.findall(ptx)
    if overlap.value is None:
        if launch.dependent:
            return "a dependent launch of a kernel that never waits"
        return "an ordinary launch of a kernel that waits" if {WAIT, ALLOW} & set(steps) else ""
    if WAIT not in steps:
        return "a kernel that never waits"
    early = steps[: steps.index(WAIT)]
    if ALLOW in early:
        return "the next launch is allowed before this one has waited"
    if (ALLOW in steps) != (launch.kernel not in _LAST):
        return "the next launch is allowed behind the plan's last kernel, or behind another one never"
    looks_first = overlap.value in ("layout", "tail")
    if looks_first and isinstance(arguments.get("schedule"), Pointer) and steps.count(WAIT) != 2:
        return "a block without an expert that never waits"
    # The layout is read past the L1 cache; the layer is an input of the plan.
    stacked = isinstance(arguments.get("layer_index"), Pointer)
    touched = early
    if looks_first:
        allowed = ("ld.global.cg", "ld.global.ca") if launch.kernel in _WEIGHTS_FIRST else ("ld.global.cg",)
        touched = [step for step in touched if not step.startswith(allowed)]
        touched = touched[1:] if stacked and touched and touched[0].startswith("ld.global") else touched
    if overlap.value == "tail":  # its sums come first; only the rows of low rank are the launch ahead's
        touched = [step for step in touched if not step.startswith(("ld.", "cp.async"))]
    return f"{', '.join(touched)} before the wait" if touched else ""


def layer_plan(
    target: Target,
    tokens: int,
    top_k: int = 2,
    num_experts: int = 8,
    *,
    routed: str = "logits",
    shared: bool = False,
    stacked: bool = False,
    on_input: bool = False,
    weight_layout: str = "in_out",
    dtype: str = "bfloat16",
    width: int = 128,
    tuning: Tuning | None = None,
    **options: Any,
) -> LaunchPlan:
    """A forward of D = 192 and F = width. routed: from `logits` or by given `ids`. options: of `plan_moe`."""
    lead = (3, num_experts) if stacked else (num_experts,)

    def matrix(inside: int, outside: int, *axes: int) -> ArraySpec:
        return ArraySpec((*axes, *((inside, outside) if weight_layout == "in_out" else (outside, inside))), dtype)

    layer = ArraySpec((1,), "int32") if stacked else None
    experts = ExpertWeights(matrix(192, 2 * width, *lead), matrix(width, 192, *lead), layer_index=layer)
    chosen = (tokens, top_k)
    routing = RouterLogits(ArraySpec((tokens, num_experts), "float32"))
    if routed == "ids":
        routing = TopK(ArraySpec(chosen, "int32"), ArraySpec(chosen, "float32"))
    router = RouterSpec(top_k) if routed == "logits" else None
    spec = MoESpec(Activation("silu"), router, weight_layout, apply_router_weight_on_input=on_input, tuning=tuning)
    beside = SharedExpert(matrix(192, 2 * width), matrix(width, 192)) if shared else None
    return plan_moe(
        ArraySpec((tokens, 192), dtype), experts, routing, spec, target,
        options=ForwardOptions(shared=beside, **options),
    )  # fmt: skip


def adapted_plan(target: Target, tokens: int, *, slots: int = 2, num_experts: int = 8, **options: Any) -> LaunchPlan:
    """`layer_plan` with adapters of rank 16."""
    width = options.get("width", 128)
    sizes = {"a1": (192, 16), "b1": (16, 2 * width), "a2": (width, 16), "b2": (16, 192)}
    factors = {name: ArraySpec((slots, num_experts, *size), "bfloat16") for name, size in sizes.items()}
    scale, ranks = (ArraySpec((slots, num_experts), dtype) for dtype in ("float32", "int32"))
    lora, ids = LoRAFactors(**factors, scale=scale, ranks=ranks), ArraySpec((tokens,), "int32")
    return layer_plan(target, tokens, num_experts=num_experts, lora=lora, adapter_ids=ids, **options)


def quantized_plan(
    target: Target,
    tokens: int,
    scheme: str = "fp8_block",
    num_experts: int = 8,
    *,
    stacked: bool = False,
    static: bool = False,
) -> LaunchPlan:
    """A forward from logits of D = 256 and F = 128, its weights as published, two experts per token. static: the scales
    of both products' rows are given."""
    quantized = scheme_named(scheme)
    weights, lead = QuantizedSpec(quantized.weights), (3, num_experts) if stacked else (num_experts,)
    matrices = (quantized_specs(weights, (*lead, *sizes)) for sizes in ((256, 256), (256, 128)))
    scale = ArraySpec((1,), "float32") if static else None
    layer = ArraySpec((1,), "int32") if stacked else None
    experts = ExpertWeights(*matrices, layer_index=layer, gate_up_input_scale=scale, down_input_scale=scale)
    spec = MoESpec(Activation("silu"), RouterSpec(2), "out_in", activations=quantized.activations)
    routing = RouterLogits(ArraySpec((tokens, num_experts), "float32"))
    return plan_moe(ArraySpec((tokens, 256), "bfloat16"), experts, routing, spec, target)


def plans(target: Target) -> Iterator[LaunchPlan]:
    """What the models' layers do not have: given ids, stacked layers, many slots per token, weighted inputs; and what
    quantises rows, or reads weights as they are published."""
    yield layer_plan(target, 4, 20, 32, routed="ids", stacked=True, weight_layout="out_in")
    yield layer_plan(target, 4, 1, on_input=True, shared=True)
    for scheme in ("fp8_tensor", "int8_w8a8", "int4_w4a16_zp"):
        yield quantized_plan(target, 4, scheme)
    yield quantized_plan(target, 4, stacked=True)
    yield adapted_plan(target, 4)
    # Many rows per expert: a kernel lies between that launches ordinarily.
    yield quantized_plan(target, 64, "int4_w4a16_zp", 2)
