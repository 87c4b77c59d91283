"""Products of the Hopper kernel for fp8 with fp8: drawn operands, and plans that make codes of their results."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from moe_core.base.arrays import ArraySpec
from moe_core.base.target import Target
from moe_core.formats import FP8_GROUP, FP8_TENSOR, Format, QuantizedSpec, Scheme, quantized_specs, scheme_named
from moe_core.ops.matmul.arguments import zero_counters
from moe_core.ops.matmul.forward import plan_matmul_ogs, plan_product
from moe_core.ops.matmul.problem import MAXIMA, MatmulProblem
from moe_core.ops.matmul.sm90.fp8_plan import MATMUL_FP8, sm90_fp8_config
from moe_core.ops.matmul.tile_choice import choose_tile
from moe_core.ops.quantize.reference import quantize
from moe_core.ops.quantize.rows import plan_quantize_rows
from moe_core.ops.routing.layout import ZERO_COUNTERS, add_schedule
from moe_core.parity.tolerance import EXACT, quantized_matmul_tolerance
from moe_core.plan.builder import PlanBuilder
from moe_core.plan.roles import Held, Role
from moe_core.plan.steps import LaunchPlan, passed
from moe_core.specs import Activation, LayoutSpec, MatmulSpec, MatmulTuning
from moe_core.specs.operands import LAYOUT_INPUTS, MatmulOperands, map_arrays, named_arrays
from tests.support.harness import engine_target, run_plan, spec_of
from tests.support.matmul.composed import filled_rows
from tests.support.quantized.operands import draw_weight
from tests.support.strategies import draw_array, draw_ids, layout_arrays

#: Where the scales of results that are codes come from.
Scales = Literal["groups", "given", "found"]
#: Scales of some rows of x, so that their results are zeros, numbers of every size, infinities and NaN.
SPECIAL = (0.0, np.nan, 1e38, 1e-30, 1e-12, 1e-6, 1e4)


@dataclass(frozen=True)
class Fp8Case:
    """One kernel: what is compiled in; tokens, and where they go, are drawn for every run of it."""

    spec: MatmulSpec
    d: int
    n: int
    scheme: Scheme = dataclasses.field(default_factory=lambda: scheme_named("fp8_block"))
    top_k: int = 2
    num_experts: int = 4
    bias: bool = False
    row_weight: bool = False
    stacked: bool = False

    @property
    def tuned(self) -> MatmulSpec:
        """The spec, on the kernel whatever the number of rows."""
        return replace(self.spec, tuning=MatmulTuning(sm90_fp8_config(self.spec)))

    def layout(self, num_tokens: int) -> LayoutSpec:
        return LayoutSpec(num_tokens, self.top_k, self.num_experts)

    def operands(self, num_tokens: int, seed: int = 0) -> MatmulOperands:
        random, layout, activation = np.random.default_rng(seed), self.layout(num_tokens), self.spec.activation
        gate_layout = activation.gate_layout if activation is not None else None
        width = 2 * self.n if gate_layout in ("halves", "interleaved") else self.n
        lead = (2, self.num_experts) if self.stacked else (self.num_experts,)
        rows = {"row": layout.capacity, "token": num_tokens, "slot": layout.num_slots}[self.spec.gather]
        assert self.scheme.activations is not None
        weights = [draw_weight(random, (*lead, width, self.d), self.scheme.weights, "out_in") for _ in range(2)]
        biases = [draw_array(random, (*lead, width)) if self.bias else None for _ in range(2)]
        separate = gate_layout == "separate"
        return MatmulOperands(
            quantize(draw_array(random, (rows, self.d), "bfloat16"), self.scheme.activations),
            weights[0],
            up=weights[1] if separate else None,
            bias=biases[0],
            up_bias=biases[1] if separate else None,
            row_weight=random.random(layout.num_slots, np.float32) if self.row_weight else None,
            layer_index=np.array([1], np.int32) if self.stacked else None,
        )

    def described(self, num_tokens: int) -> MatmulOperands:
        """ArraySpecs of a plain product: no biases, weights or layers."""
        gated = self.spec.activation is not None and self.spec.activation.gate_layout in ("halves", "interleaved")
        assert self.scheme.activations is not None
        x = quantized_specs(QuantizedSpec(self.scheme.activations), (num_tokens, self.d))
        weights = (self.num_experts, 2 * self.n if gated else self.n, self.d)
        return MatmulOperands(x, quantized_specs(QuantizedSpec(self.scheme.weights), weights))


#: Between them every gate layout, gather and scatter, every kind of scales, reductions that no stage divides.
CASES = {
    "halves": Fp8Case(MatmulSpec("out_in", "token", "row", Activation("silu"), "bfloat16"), 384, 256),
    "slots": Fp8Case(MatmulSpec("out_in", "row", "slot", None, "bfloat16"), 400, 264, bias=True, row_weight=True),
    "interleaved": Fp8Case(MatmulSpec("out_in", "slot", "row", Activation("swiglu_oai", gate_layout="interleaved"),
        "float16"), 656, 200, bias=True, stacked=True),
    "fast": Fp8Case(MatmulSpec("out_in", "token", "slot", Activation("relu2", False), "bfloat16", fast_accumulate=True),
        512, 136, scheme_named("fp8_tensor")),
    "channels": Fp8Case(MatmulSpec("out_in", "token", "row", Activation("silu", gate_layout="separate"), "bfloat16"),
        272, 128, scheme_named("fp8_channel"), bias=True),
}  # fmt: skip
#: The product whose results are codes, of groups cut short too.
CODES = Fp8Case(
    MatmulSpec("out_in", "token", "row", Activation("silu", gate_layout="interleaved"), "bfloat16"), 400, 208, bias=True
)


def with_special_rows(operands: MatmulOperands) -> MatmulOperands:
    """The same, with rows of SPECIAL scales."""
    operands.x.scales[: 7 * len(SPECIAL) : 7] = np.array(SPECIAL, np.float32)[:, None]
    return operands


def plan_quantizing(
    operands: MatmulOperands,
    layout: LayoutSpec,
    spec: MatmulSpec,
    format: Format,
    target: Target,
    scale: ArraySpec | None = None,
) -> LaunchPlan:
    """The first product of a composed plan, which quantises its result. operands: of ArraySpecs."""
    problem = MatmulProblem(operands, layout, spec, target, out_format=format, out_scale=scale)
    return plan_product(problem, choose_tile(problem), 0)


def plan_finding(operands: MatmulOperands, layout: LayoutSpec, spec: MatmulSpec, target: Target) -> LaunchPlan:
    """The first product of a composed plan, which finds its result's largest magnitudes. operands: of ArraySpecs."""
    problem = MatmulProblem(operands, layout, spec, target, finds_maxima=True)
    return plan_product(problem, choose_tile(problem), 0)


def plan_codes(
    operands: MatmulOperands, case: Fp8Case, num_tokens: int, target: Target, *, scales: Scales, fused: bool
) -> LaunchPlan:
    """values and scales of a composed product's result, fused or by a product, then its quantisation.

    operands: arrays. scales: of groups; one, the input `static_scale`; or one that is found, which is fused where the
    product finds the largest magnitudes."""
    layout, spec, arrays = case.layout(num_tokens), case.tuned, map_arrays(operands, spec_of)
    format, scale = FP8_GROUP if scales == "groups" else FP8_TENSOR, None
    if scales == "given":
        scale = ArraySpec((1,), "float32")
    finds, fused = fused and scales == "found", fused and scales != "found"
    if finds:
        plan = plan_finding(arrays, layout, spec, target)
    elif fused:
        plan = plan_quantizing(arrays, layout, spec, format, target, scale)
    else:
        plan = plan_matmul_ogs(arrays, layout, spec, target, stage=0)
    builder = PlanBuilder("composed codes", target)
    names = [name for name, _ in named_arrays(arrays)] + list(LAYOUT_INPUTS)
    bindings = {name: builder.input(name, plan.spec(name)) for name in names}
    given = {"static_scale": builder.input("static_scale", scale)} if scale is not None else {}
    codes = quantized_specs(QuantizedSpec(format), (layout.capacity, case.n))
    made = {part: builder.output(part, array, Held(Role.ROWS, part)) for part, array in named_arrays(codes)}
    add_schedule(builder, layout, sm90_fp8_config(spec).block_m)
    bindings["tile_counters"] = zero_counters(builder)
    options = {}
    if finds:
        options["maxima"] = builder.scratch("maxima", plan.spec("maxima"), Role.MAXIMA)
        builder.launch(ZERO_COUNTERS, (1,), passed(counters="maxima", COUNT=MAXIMA), 1, 1)
    if scales == "found":
        options["used_by"] = "slot_of_row"
    if fused:
        builder.call(plan, "matmul", bindings | given | {f"y.{part}": name for part, name in made.items()})
        return builder.build()
    hidden = builder.scratch("hidden", ArraySpec((layout.capacity, case.n), "bfloat16"), Role.ROWS)
    found = {"maxima": "maxima"} if finds else {}
    builder.call(plan, "matmul", bindings | {"y": hidden} | found)
    specs = {name: builder.spec(buffer) for name, buffer in options.items()}
    plan = plan_quantize_rows(builder.spec(hidden), format, target, scales=scale, **specs)
    roles = {"used_by": Role.SLOT_OF_ROW} if "used_by" in options else None
    builder.call(plan, "quantize", {"x": hidden} | given | options | made, roles)
    return builder.build()


class Fp8Product:
    """A product of fp8 with fp8, or with codes for its result one against that of launches apart."""

    kernel = MATMUL_FP8

    def __init__(self, codes: Scales | None) -> None:
        self.case = case = CODES if codes else CASES["halves"]
        self.codes: Scales | None = codes
        self.outputs = ("values", "scales") if codes else ("y",)
        self.operands, self.layout = case.operands(300), case.layout(300)
        if codes == "found":
            # Results are small, but not behind the last column, which has no bias.
            self.operands.bias[:, ::2] = -20
        self.arrays = layout_arrays(draw_ids("uniform", 300, 2, 4, 0), self.layout)
        weights, rows = case.scheme.weights, case.scheme.activations
        self.tolerance = (
            EXACT if codes else quantized_matmul_tolerance("bfloat16", case.d, weights, case.spec, rows=rows)
        )

    def plan(self, target: Target) -> LaunchPlan:
        if self.codes is not None:
            return plan_codes(self.operands, self.case, 300, target, scales=self.codes, fused=True)
        return plan_matmul_ogs(map_arrays(self.operands, spec_of), self.layout, self.case.tuned, target)

    def results(self) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        given = dict(named_arrays(self.operands)) | self.arrays

        def run(plan: LaunchPlan) -> dict[str, np.ndarray]:
            found = run_plan(plan, {buffer.name: given[buffer.name] for buffer in plan.inputs})
            return {name: array.astype(np.float32) for name, array in found.items()}

        found, filled = run(self.plan(engine_target())), filled_rows(self.layout, self.arrays)
        if self.codes is None:
            operands = map_arrays(self.operands, spec_of)
            return found, run(plan_matmul_ogs(operands, self.layout, self.case.spec, Target("reference")))
        expected = run(plan_codes(self.operands, self.case, 300, engine_target(), scales=self.codes, fused=False))
        rows = {"values": filled, "scales": filled if self.codes == "groups" else slice(None)}
        return {name: found[name][rows[name]] for name in rows}, {name: expected[name][rows[name]] for name in rows}
