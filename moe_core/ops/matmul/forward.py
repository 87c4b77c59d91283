"""Planning of the ragged grouped matmul."""

from __future__ import annotations

from typing import Any

from moe_core.base import ArraySpec, Target, keep_plans
from moe_core.errors import InvalidInput, Unsupported
from moe_core.formats import QuantizedSpec, quantized_specs
from moe_core.ops.matmul.arguments import fill_absent, zero_counters
from moe_core.ops.matmul.families import families_for, why_not
from moe_core.ops.matmul.problem import MAXIMA, MatmulProblem
from moe_core.ops.matmul.tile_choice import TileChoice, choose_tile, given_tile
from moe_core.ops.routing.layout import add_schedule
from moe_core.plan import LaunchPlan, PlanBuilder
from moe_core.specs import LayoutSpec, MatmulOperands, MatmulSpec, TileConfig, named_arrays


@keep_plans
def plan_matmul_ogs(
    operands: MatmulOperands,
    layout: LayoutSpec | None,
    spec: MatmulSpec,
    target: Target,
    *,
    config: TileConfig | None = None,
    stage: int | None = None,
    outputs: tuple[str, ...] = ("y",),
    joined: bool = False,
) -> LaunchPlan:
    """`y[scatter(row)] = cast(act(x[gather(row)] @ w[expert] + bias) * row_weight)` for every row of the layout.

    operands: ArraySpecs, weights and x possibly `QuantizedTensor`s (docs/user/quantization.md). layout None: dense, x
    `[T, D]`, weight `[D, N]` or `[N, D]`. config None: `choose_tile`. Rows that no expert writes become exact zeros.
    joined: x is twice as wide, and y = x[:, :D] @ weight + x[:, D:] @ up in one fp32 sum, on compiled targets with
    plain weights. outputs: `y`, `pre` or both. pre is the input of the activation, cast to the dtype of x: `[rows of y,
    2N]` (ungated N), gate_layout `separate` as gate columns, then up, in layout order in composed and dense plans. A
    quantised x has no pre.

    stage: 0 or 1 for that product of a composed plan. It trusts its layout, neither reads nor writes rows without an
    expert, and has two more inputs: the schedule of the config's block_m and, for families that count tiles,
    tile_counters int32 `[2]`, zeros. The reference engine needs neither and fills all rows.

    Inputs: the operands, group_sizes `[E]`, group_start `[E + 1]`, slot_of_row `[capacity]`, [schedule],
    [tile_counters]. y: `[capacity, N]` (scatter `row`) or `[T * K, N]` (`slot`). Raises InvalidInput, Unsupported.
    """
    problem = MatmulProblem(operands, layout, spec, target, outputs, joined)
    if joined and not target.compiled:
        raise Unsupported(f"joined products are planned for compiled targets, got {target}; plan two products")
    if outputs != ("y",) and layout is not None and stage is None:
        raise InvalidInput(f"outputs must be ('y',) outside of a composed plan, got {outputs}; pass stage")
    tile = choose_tile(problem) if config is None else given_tile(problem, config)
    return plan_product(problem, tile, stage)


def plan_product(problem: MatmulProblem, tile: TileChoice | None, stage: int | None = None) -> LaunchPlan:
    """`plan_matmul_ogs` of a problem with its chosen tile (None: no tiles), in a composed plan also with:

    - tail: inputs `tail.low`, `tail.factor`, `tail.virtual_start`, `tail.ranks`, [`tail.seed`] of `Tail`.
    - out_format (first product): y is quantised bitwise like `plan_quantize_rows`. Input [static_scale]. Outputs
      y.values e4m3 `[capacity, N]`, y.scales fp32 `[capacity, ceil(N / 128)]` (static: `[1]`), unwritten without an
      expert.
    - finds_maxima (first, compiled): input maxima int32 `[64]`, zeros, is raised to the fp32 bits of the largest
      magnitudes of written rows of y.
    - addressed (last, compiled): no output. Input results_at int64 `[T * K]` holds the address of each slot's row, a
      multiple of 16 (0: not stored).
    """
    operands, layout, spec = problem.operands, problem.layout, problem.spec
    builder = PlanBuilder("matmul_ogs", problem.target)
    inputs = builder.inputs(dict(named_arrays(operands))) | builder.layout_inputs(layout)
    inputs |= {} if problem.tail is None else builder.inputs(problem.tail.inputs())
    if tile is None:
        declare_outputs(builder, problem)
        return _reference(builder, inputs, problem)
    if layout is not None:
        add_schedule(builder, layout, tile.config.block_m, given=stage is not None)
        if tile.family.counts_tiles:
            if stage is not None:
                builder.input("tile_counters", ArraySpec((2,), "int32"))
            else:
                zero_counters(builder)
    maxima = ArraySpec((MAXIMA,), "int32") if problem.finds_maxima else None
    builder.inputs({"static_scale": problem.out_scale, "maxima": maxima})
    declare_outputs(builder, problem)
    if stage is None and layout is not None:
        fill_absent(builder, layout, spec)
    tile.family.launch(builder, problem, tile.config, stage)
    if problem.tail is not None:
        problem.tail.describe(builder)
    add_notes(builder, problem, tile)
    if problem.out_format is not None:
        builder.note(f"rounded to {spec.out_dtype} and quantised to {problem.out_format} before it is stored")
    if problem.finds_maxima:
        builder.note("the largest magnitudes of what it stores are found too")
    return builder.build()


def add_notes(builder: PlanBuilder, problem: MatmulProblem, tile: TileChoice) -> None:
    shape = f", {problem.d} x {problem.n}" if problem.out_format is None else ""
    if problem.tail is not None and problem.target.on_gpu:
        for family in families_for(problem):
            reason = None if family is tile.family else why_not(family, problem) or family.why_not_chosen(problem)
            if reason is not None:
                builder.note(f"its tail of adapters is not the {family.name} family's: {reason}")
    builder.note(f"{tile.config} for {problem.rows} rows, {problem.expected_groups} experts{shape}; {tile}")


def declare_outputs(builder: PlanBuilder, problem: MatmulProblem) -> None:
    rows, n, spec = problem.sizes.out_rows, problem.n, problem.spec
    if problem.addressed:
        assert problem.target.compiled, "the twin of a push is a call of its own"
        assert problem.layout is not None
        builder.input("results_at", ArraySpec((problem.layout.num_slots,), "int64"))
        return
    if problem.out_format is not None:
        assert problem.target.compiled, "rows are quantised by a plan of their own"
        codes = quantized_specs(QuantizedSpec(problem.out_format), (rows, n))
        for part, array in named_arrays(codes, "y."):
            builder.output(part, array)
        return
    for name in problem.outputs:
        if name == "y":
            builder.output("y", ArraySpec((rows, n), spec.out_dtype or problem.dtype))
        else:
            assert spec.activation is not None
            builder.output("pre", ArraySpec((rows, spec.activation.input_width(n)), problem.dtype))


def _reference(builder: PlanBuilder, inputs: dict[str, str], problem: MatmulProblem) -> LaunchPlan:
    outputs, axis = problem.outputs, "the whole reduction axis"
    constants: dict[str, Any] = {"layout": problem.layout, "spec": problem.spec, "outputs": outputs}
    if problem.quantized:
        constants |= {"tensors": tuple((name, tensor.spec) for name, tensor in problem.quantized.items())}
        axis = "every group of the reduction axis, in order"
        builder.note(", ".join(f"{name} {tensor}" for name, tensor in problem.quantized.items()))
    if problem.tail is not None:
        constants["adapters"] = problem.tail.adapters
        problem.tail.describe(builder)
    by_row = ", one row at a time" if problem.batch_invariant else ""
    builder.sums(f"reference: float32 BLAS over {axis}{by_row}")
    from moe_core.ops.matmul.reference import forward as twins

    return builder.reference(twins.matmul_ogs_plan, inputs, constants, outputs)
