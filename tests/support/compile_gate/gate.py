"""Compiles every kernel of representative plans for one architecture, without a GPU, and reports what came out.

Run as `python -m tests.support.compile_gate.gate GROUP ARCH` in a process without TRITON_INTERPRET (Triton has one mode
per process); prints one JSON list of records. ARCH: `80`, `89`, `90`, `100`, `120`, or `gfx942` (compiles only, nothing
to measure).
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from benchmarks.shapes import SHAPES, TOKENS, Shape
from moe_core.base.arrays import ArraySpec
from moe_core.base.target import Target
from moe_core.ops.activation.forward import plan_activation
from moe_core.ops.matmul import forward as matmul_ogs
from moe_core.ops.matmul import grouped
from moe_core.ops.matmul.problem import MatmulProblem
from moe_core.ops.matmul.sm90.fp8_plan import MATMUL_FP8
from moe_core.ops.matmul.sm90_packed.few_rows_plan import MATMUL_FEW_ROWS
from moe_core.ops.matmul.sm90_packed.plan import MATMUL_MIXED_INPUT
from moe_core.ops.matmul.tile_choice import heuristic_tile
from moe_core.ops.moe import backward as moe_backward
from moe_core.ops.moe import forward as moe
from moe_core.ops.moe.options import BackwardOptions, ForwardOptions
from moe_core.ops.reduction import reduce as reduction
from moe_core.ops.routing.groups import Groups
from moe_core.plan.steps import Constant, KernelLaunch, LaunchPlan, Pointer
from moe_core.runtime.compiler import compile_launch, launch_signature
from moe_core.specs import LayoutSpec, MoESpec, RouterSpec, Tuning
from moe_core.specs.matmul import ACTIVATIONS, ALWAYS_GATED, Activation, MatmulSpec
from moe_core.specs.operands import (
    ExpertWeights,
    MatmulOperands,
    MoEOperands,
    OutputGradients,
    RouterLogits,
    RouterWeights,
    SharedExpert,
)
from moe_core.specs.tile import shared_limit
from tests.support.compile_gate import (
    backward_plans,
    exchange_plans,
    lora_plans,
    pdl_order,
    quantized_plans,
    routing_plans,
    sm90_plans,
)
from tests.support.compile_gate.binaries import overwritten_operand, usage_of

#: Multiprocessors of an A100, an RTX 4090, an H200, a B200 and an RTX 5090.
NUM_SMS, GFX942 = {80: 108, 89: 128, 90: 132, 100: 148, 120: 170}, "gfx942"
#: Spilled bytes per thread that are let pass: addresses of the stores behind a main loop whose sums take 192 registers.
SPILLED = {MATMUL_FP8.name: 64}
#: The same of prepacked integers: what a loop does not change, put away around it or once in a turn of several steps.
SPILLED_OF_INTEGERS = {MATMUL_MIXED_INPUT.name: 16, MATMUL_FEW_ROWS.name: 16}
#: The same of adapters: addresses that a tile reads once.
SPILLED_OF_TAILS = {"matmul.sm90.kernels.matmul:matmul_ogs": 64, MATMUL_MIXED_INPUT.name: 96, MATMUL_FEW_ROWS.name: 16}
#: The same where kernels are not tuned: an integer product of 16 rows on sm_80, and single addresses.
FEW = 72
#: Modules of kernels that use TMA and wgmma.
_SM90 = ("matmul.sm90.", "matmul.sm90_packed.kernels.matmul:")


@dataclass(frozen=True)
class Model:
    """One layer of a released model: its sizes, its routing and how its weights are stored."""

    shape: Shape
    router: RouterSpec
    weight_layout: str
    gate_layout: str
    correction_bias: bool = False
    shared_ff: int = 0


#: Between them every gate layout and both weight layouts.
MODELS = {
    "qwen3": Model(SHAPES["qwen3"], RouterSpec(8, renormalize=True), "in_out", "halves"),
    "gptoss120b": Model(SHAPES["gptoss120b"], RouterSpec(4, order="topk_then_softmax"), "in_out", "interleaved"),
    "mixtral": Model(SHAPES["mixtral"], RouterSpec(2, renormalize=True), "out_in", "separate"),
    "dsv3": Model(SHAPES["dsv3"], RouterSpec(8, "sigmoid", renormalize=True, scale=2.5, num_groups=8, topk_group=4),
        "out_in", "halves", correction_bias=True, shared_ff=2048),
}  # fmt: skip


@dataclass(frozen=True)
class Record:
    """What one compiled launch uses. shared_bytes per block; stack_bytes per thread (spills); many_rows: a 16-bit
    matmul tile of at least 64 rows; has_tma: tensor maps; order: what it breaks of `pdl_order`; narrow: how it moves
    rows between ranks in less than 16 bytes; overwritten: what writes an operand of a wgmma too early."""

    kernel: str
    label: str
    arch: str
    binary_bytes: int
    num_warps: int
    shared_bytes: int
    registers: int
    stack_bytes: int
    many_rows: bool
    has_wgmma: bool
    has_tma: bool
    order: str = ""
    narrow: str = ""
    overwritten: str = ""

    def violations(self) -> list[str]:
        """Every limit the launch breaks."""
        found = [one for one in (self.order, self.narrow, self.overwritten) if one]
        if self.binary_bytes == 0:
            found.append("no binary")
        if self.arch == GFX942:
            return found
        limit = shared_limit(int(self.arch))
        if self.shared_bytes > limit:
            found.append(f"{self.shared_bytes} bytes of shared memory, the limit is {limit}")
        if self.registers * self.num_warps * 32 > 65536:
            found.append(f"{self.registers} registers in {self.num_warps} warps exceed the 65536 of a multiprocessor")
        spilled = SPILLED_OF_INTEGERS if " ELEMENT=uint" in self.label else SPILLED
        spilled = SPILLED_OF_TAILS if "TAIL_RANK=" in self.label and "TAIL_RANK=0" not in self.label else spilled
        if self.stack_bytes > max(spilled.get(self.kernel, 0), 0 if self.arch == "90" else FEW):
            found.append(f"{self.stack_bytes} bytes of registers spilled per thread")
        if self.arch == "90" and self.many_rows and not self.has_wgmma:
            found.append("a many-row 16-bit matmul without wgmma")
        if self.kernel.startswith(_SM90) and not self.has_tma:
            found.append("a kernel of the sm90 family without TMA")
        return found


def _layer(
    model: Model, tokens: int, dtype: str = "bfloat16", tuning: Tuning | None = None
) -> tuple[MoEOperands, MoESpec]:
    """The arrays of a model's layer from x."""
    shape, layout = model.shape, model.weight_layout
    d, f, e = shape.d_model, shape.d_ff, shape.num_experts
    activation = dataclasses.replace(shape.activation, gate_layout=model.gate_layout)

    def matrix(inputs: int, outputs: int, *lead: int) -> ArraySpec:
        return ArraySpec((*lead, *((inputs, outputs) if layout == "in_out" else (outputs, inputs))), dtype)

    separate = model.gate_layout == "separate"
    width = f if separate else 2 * f
    experts = ExpertWeights(
        matrix(d, width, e),
        matrix(f, d, e),
        up=matrix(d, f, e) if separate else None,
        gate_up_bias=ArraySpec((e, width), "float32") if shape.biased else None,
        down_bias=ArraySpec((e, d), "float32") if shape.biased else None,
    )
    bias = ArraySpec((e,), "float32") if model.correction_bias else None
    router = RouterWeights(matrix(d, e), ArraySpec((e,), dtype) if shape.biased else None, bias)
    ff = model.shared_ff
    shared = SharedExpert(matrix(d, 2 * ff), matrix(ff, d)) if ff else None
    spec = MoESpec(activation, model.router, layout, layout, tuning=tuning)
    return MoEOperands(ArraySpec((tokens, d), dtype), experts, router, shared=shared), spec


def _layer_plan(
    model: Model, tokens: int, target: Target, dtype: str = "bfloat16", tuning: Tuning | None = None, save: bool = False
) -> LaunchPlan:
    """The composed forward."""
    layer, spec = _layer(model, tokens, dtype, tuning)
    return moe.plan_moe(
        layer.x, layer.experts, layer.routing, spec, target, options=ForwardOptions(shared=layer.shared, save=save)
    )


def _without_tables(model: Model, tokens: int, target: Target, dtype: str) -> Tuning:
    """What the heuristics choose for product 1, whatever the shipped table holds."""
    layer, spec = _layer(model, tokens, dtype)
    matmul = MatmulSpec(spec.weight_layout, "token", "row", spec.activation)
    layout = LayoutSpec(tokens, model.shape.top_k, model.shape.num_experts)
    operands = MatmulOperands(layer.x, layer.experts.gate_up, layer.experts.up, layer.experts.gate_up_bias)
    return Tuning(matmul_1=heuristic_tile(MatmulProblem(operands, layout, matmul, target)).config)


def _layers(name: str) -> Callable[[Target], Iterator[LaunchPlan]]:
    def plans(target: Target) -> Iterator[LaunchPlan]:
        for tokens in TOKENS:
            yield _layer_plan(MODELS[name], tokens, target)

    return plans


def _training(name: str) -> Callable[[Target], Iterator[LaunchPlan]]:
    """What a training step runs: the forward that keeps, and every gradient, with losses and without."""

    def plans(target: Target) -> Iterator[LaunchPlan]:
        for tokens, dtype in ((64, "bfloat16"), (4096, "bfloat16"), (16384, "bfloat16"), (4096, "float32")):
            layer, spec = _layer(MODELS[name], tokens, dtype)
            one = ArraySpec((1,), "float32")
            yield _layer_plan(MODELS[name], tokens, target, dtype, save=True)
            for gradients in (OutputGradients(layer.x), OutputGradients(layer.x, load_balance=one, z=one)):
                wanted = moe_backward.gradient_names(layer)
                yield moe_backward.plan_moe_backward(
                    gradients, layer, spec, target, options=BackwardOptions(wanted=wanted)
                )
            accumulated = tuple(name for name in wanted if name.startswith(("d_experts", "d_routing.weight")))
            accumulated = tuple(name for name in accumulated if not name.endswith("bias"))
            again = dataclasses.replace(spec, recompute=True)
            options = {"wanted": accumulated, "accumulate": accumulated}
            yield moe_backward.plan_moe_backward(
                OutputGradients(layer.x), layer, again, target, options=BackwardOptions(**options)
            )

    return plans


def _other_dtypes(target: Target) -> Iterator[LaunchPlan]:
    for name, dtype in (("qwen3", "float16"), ("gptoss120b", "float32")):
        for tokens in (16, 4096):
            yield _layer_plan(MODELS[name], tokens, target, dtype)


def _batch_invariant(target: Target) -> Iterator[LaunchPlan]:
    """One number of tokens: the kernels that add floats are the same for all."""
    for model, dtype in itertools.product(MODELS.values(), ("bfloat16", "float32")):
        yield _layer_plan(model, 64, target, dtype, Tuning(batch_invariant=True))


def _small_ops(target: Target) -> Iterator[LaunchPlan]:
    for name in ACTIVATIONS:
        for layout in ("halves", "interleaved", "separate"):
            separate = layout == "separate"
            x = ArraySpec((256, 768 if separate else 1536), "bfloat16")
            yield plan_activation(x, Activation(name, True, layout), target, up=x if separate else None)
        if name not in ALWAYS_GATED:
            yield plan_activation(ArraySpec((256, 768), "float32"), Activation(name, False), target)
    for dtype in ("bfloat16", "float32"):
        y, slots, layout = ArraySpec((256 * 8, 2048), dtype), ArraySpec((256 * 8,), "int32"), LayoutSpec(256, 8, 64)
        shared, gate = ArraySpec((256, 2048), "float32"), ArraySpec((256, 1), "float32")
        yield reduction.plan_reduce(y, slots, layout, target)
        yield reduction.plan_reduce(y, slots, layout, target, order="row", shared=shared, shared_gate=gate)
        yield reduction.plan_scale_rows(ArraySpec((256, 2048), dtype), gate, target)


def _matmul_variants(target: Target) -> Iterator[LaunchPlan]:
    """Gathers, scatters, stacked layers, odd sizes, TF32: what the models' layers do not use."""
    for tokens in (16, 2048):
        layout, d, n, e = LayoutSpec(tokens, 4, 16), 1000, 360, 16
        x, weight = ArraySpec((tokens, d), "bfloat16"), ArraySpec((3, e, d, 2 * n), "bfloat16")
        bias, layer = ArraySpec((3, e, 2 * n), "bfloat16"), ArraySpec((1,), "int32")
        spec = MatmulSpec("in_out", "token", "slot", Activation("gelu_tanh"))
        yield matmul_ogs.plan_matmul_ogs(MatmulOperands(x, weight, bias=bias, layer_index=layer), layout, spec, target)
        rows = ArraySpec((layout.num_slots, d), "float32")
        tf32 = MatmulSpec("in_out", "slot", "row", out_dtype="bfloat16", allow_tf32=True)
        operands = MatmulOperands(rows, ArraySpec((e, d, n), "float32"), row_weight=ArraySpec((tokens * 4,), "float32"))
        yield matmul_ogs.plan_matmul_ogs(operands, layout, tf32, target)
    for tokens, number, dtype, first in ((64, 8, "bfloat16", None), (4096, 300, "float32", layer)):
        x, sizes = ArraySpec((tokens, 360), dtype), ArraySpec((number,), "int32" if first else "int64")
        operands, groups = MatmulOperands(x, ArraySpec((8, 360, 256), dtype)), Groups(sizes, first is None, first, 8)
        yield grouped.plan_grouped_mm(operands, groups, MatmulSpec("in_out"), target)
        yield grouped.plan_grouped_contraction(x, x, groups, target)


def _sm90(target: Target) -> Iterator[LaunchPlan]:
    """The sm90 family, sm_90 only: both products of layers, then single ops, whose layouts are not trusted."""
    for name, dtype in (*((name, "bfloat16") for name in ("qwen3", "gptoss120b", "mixtral")), ("qwen3", "float16")):
        for weight_layout in ("in_out", "out_in"):
            model = dataclasses.replace(MODELS[name], weight_layout=weight_layout)
            # Few rows per expert and many, none with tall blocks: Mixtral's long reductions take fewer stages for few.
            for tokens in (1024, 4096) if name == "mixtral" else (8192,):
                yield _layer_plan(model, tokens, target, dtype, _without_tables(model, tokens, target, dtype))
    layout, d, n, e = LayoutSpec(2048, 4, 16), 1024, 360, 16
    layer, row_weight = ArraySpec((1,), "int32"), ArraySpec((layout.num_slots,), "float32")
    for weight_layout, dtype in itertools.product(("in_out", "out_in"), ("bfloat16", "float16")):

        def stack(width: int, dtype: str = dtype, in_out: bool = weight_layout == "in_out") -> ArraySpec:
            return ArraySpec((3, e, *((d, width) if in_out else (width, d))), dtype)

        x = ArraySpec((layout.num_tokens, d), dtype)
        bias = ArraySpec((3, e, 2 * n), dtype)
        operands = MatmulOperands(x, stack(2 * n), bias=bias, layer_index=layer)
        spec = MatmulSpec(weight_layout, "token", "slot", Activation("gelu_tanh"))
        yield matmul_ogs.plan_matmul_ogs(operands, layout, spec, target)
        rows, one = ArraySpec((layout.num_slots, d), dtype), ArraySpec((3, e, n), dtype)
        operands = MatmulOperands(
            rows, stack(n), up=stack(n), bias=one, up_bias=one, row_weight=row_weight, layer_index=layer
        )
        spec = MatmulSpec(weight_layout, "slot", "row", Activation("silu", gate_layout="separate"))
        yield matmul_ogs.plan_matmul_ogs(operands, layout, spec, target)
        rows = ArraySpec((layout.capacity, d), dtype)
        operands = MatmulOperands(rows, stack(n), row_weight=row_weight, layer_index=layer)
        yield matmul_ogs.plan_matmul_ogs(operands, layout, MatmulSpec(weight_layout, "row", "slot"), target)
    yield from sm90_plans.keeping(target)


def _from_logits(target: Target) -> Iterator[LaunchPlan]:
    """For compile-only architectures: one small and one large forward."""
    experts = ExpertWeights(ArraySpec((8, 256, 512), "bfloat16"), ArraySpec((8, 256, 256), "bfloat16"))
    for tokens in (16, 1024):
        spec = MoESpec(Activation("silu"), RouterSpec(2))
        logits = RouterLogits(ArraySpec((tokens, 8), "float32"))
        yield moe.plan_moe(ArraySpec((tokens, 256), "bfloat16"), experts, logits, spec, target)


GROUPS: dict[str, Callable[[Target], Iterator[LaunchPlan]]] = {
    **{name: _layers(name) for name in MODELS},
    **{f"{name}_training": _training(name) for name in MODELS},
    "other_dtypes": _other_dtypes,
    "batch_invariant": _batch_invariant,
    "routing": routing_plans.plans,
    **exchange_plans.GROUPS,
    "small_ops": _small_ops,
    "matmul_variants": _matmul_variants,
    "sm90": _sm90,
    "sm90_tall": sm90_plans.tall,
    "sm90_swapped": sm90_plans.swapped,
    "shipped_table": sm90_plans.shipped,
    "overlap": pdl_order.plans,
    "backward_ops": backward_plans.plans,
    "lora": lora_plans.plans,
    **quantized_plans.GROUPS,
    "from_logits": _from_logits,
}


def distinct_launches(plans: Iterator[LaunchPlan]) -> list[tuple[LaunchPlan, KernelLaunch]]:
    """One launch for every kernel that would be compiled: grids and run-time scalars do not count."""
    found: dict[Any, tuple[LaunchPlan, KernelLaunch]] = {}
    for plan in plans:
        for launch in plan.steps:
            assert isinstance(launch, KernelLaunch), launch
            constants = tuple(name_value for name_value in launch.arguments if isinstance(name_value[1], Constant))
            key = (launch.kernel.name, launch_signature(plan, launch), constants, launch.num_warps, launch.num_stages)
            found.setdefault(key, (plan, launch))
    return list(found.values())


def _is_many_rows(plan: LaunchPlan, launch: KernelLaunch) -> bool:
    if launch.kernel.name.startswith(_SM90):
        return True
    arguments = dict(launch.arguments)
    block_m, x = arguments.get("BLOCK_M"), arguments.get("x")
    forward = launch.kernel.name.startswith(("matmul.portable.kernel:", "matmul.quantized."))
    if not forward or not isinstance(block_m, Constant) or not isinstance(x, Pointer):
        return False
    return int(block_m.value or 0) >= 64 and plan.spec(x.buffer).dtype in ("bfloat16", "float16")


def _label(plan: LaunchPlan, launch: KernelLaunch) -> str:
    constants = " ".join(f"{name}={value.value}" for name, value in launch.arguments if isinstance(value, Constant))
    types = " ".join(kind for _, kind in launch_signature(plan, launch) if kind != "constexpr")
    return f"{launch.kernel.name} ({types}) {constants} warps={launch.num_warps} stages={launch.num_stages}"


def measure(plan: LaunchPlan, launch: KernelLaunch, target: Target) -> Record:
    """Compile one launch for a CUDA target and read what the binary uses."""
    compiled = compile_launch(plan, launch, target)
    cubin = compiled.asm["cubin"]
    registers, stack = usage_of(cubin)
    return Record(
        kernel=launch.kernel.name,
        label=_label(plan, launch),
        arch=str(target.arch),
        binary_bytes=len(cubin),
        num_warps=compiled.metadata.num_warps,
        shared_bytes=compiled.metadata.shared,
        registers=registers,
        stack_bytes=stack,
        many_rows=_is_many_rows(plan, launch),
        has_wgmma="wgmma.mma_async" in compiled.asm["ptx"],
        has_tma="cp.async.bulk.tensor" in compiled.asm["ptx"],
        order=pdl_order.order_violation(launch, compiled.asm["ptx"]),
        narrow=exchange_plans.narrow_moves(launch, compiled.asm["ptx"]),
        overwritten=overwritten_operand(compiled.asm["ptx"], cubin),
    )


def compile_for_amd(plan: LaunchPlan, launch: KernelLaunch) -> Record:
    """Compile one launch for gfx942; only that it compiles is looked at."""
    size = len(compile_launch(plan, launch, plan.target).asm["hsaco"])
    metrics = size, launch.num_warps, 0, 0, 0, False, False, False
    return Record(launch.kernel.name, _label(plan, launch), GFX942, *metrics)


def main(group: str, arch: str) -> list[Record]:
    """The records of one group of plans on one architecture."""
    target = Target("hip", 942, 304) if arch == GFX942 else Target("cuda", int(arch), NUM_SMS[int(arch)])
    compiled = compile_for_amd if arch == GFX942 else functools.partial(measure, target=target)
    return [compiled(plan, launch) for plan, launch in distinct_launches(GROUPS[group](target))]


if __name__ == "__main__":
    print(json.dumps([dataclasses.asdict(record) for record in main(*sys.argv[1:])]))
