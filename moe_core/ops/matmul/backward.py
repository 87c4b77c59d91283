"""Planning of the grouped matmul's backward, and the two products of composed backwards."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

from moe_core.base import TRANSPOSED, ArraySpec, Target, dtypes, keep_plans, require_spec
from moe_core.base.checks import require_wanted
from moe_core.errors import Unsupported
from moe_core.ops.lora.tail import Tail
from moe_core.ops.matmul.arguments import zero_counters
from moe_core.ops.matmul.forward import plan_matmul_ogs, plan_product
from moe_core.ops.matmul.operands import check_operands, quantized_operands, why_frozen, why_prepacked
from moe_core.ops.matmul.problem import MatmulProblem
from moe_core.ops.matmul.quantized.transposed import choose_transposed_tile, plan_matmul_quantized_transposed
from moe_core.ops.matmul.tile_choice import choose_tile
from moe_core.ops.matmul.weight_gradient import plan_weight_gradient
from moe_core.ops.reduction.reduce import plan_reduce, plan_scale_rows
from moe_core.ops.reduction.rowwise import cast_gradient, plan_weighted_input
from moe_core.ops.routing.layout import add_schedule
from moe_core.plan import LaunchPlan, PlanBuilder, Role
from moe_core.specs import LayoutSpec, MatmulSpec, MatmulTuning, WeightGradientSpec
from moe_core.specs.operands import LAYOUT_INPUTS, MatmulOperands, WeightGradientOperands, named_arrays

DIFFERENTIABLE = ("x", "weight", "bias", "row_weight")


def why_no_gradient(operands: MatmulOperands, layout: object, spec: MatmulSpec, names: set[str]) -> str | None:
    """The reason why these operands have no gradients, or None."""
    quantized = quantized_operands(operands)
    if "x" in quantized:
        return (
            f"matmul_ogs has no gradient with a quantised x, got {quantized['x']}: what rounds x has none; pass x as a "
            "plain array (the weights may stay quantised)"
        )
    if (refused := why_prepacked(quantized) or why_frozen(names, quantized)) is not None:
        return refused
    if spec.activation is not None:
        return (
            "a matmul with a fused activation has no gradient: it does not keep what the activation was applied to; "
            "leave activation out of MatmulSpec and call the op `activation` on the result"
        )
    if layout is None and "row_weight" in names:
        return "row_weight has no gradient without a layout; multiply the rows of the result in your framework"
    if layout is not None and operands.row_weight is not None and spec.scatter != "slot":
        return (
            f"a matmul with row_weight has a gradient for scatter='slot' alone, got {spec.scatter!r}: weights are "
            "those of slots; scatter by slot, or multiply the rows of the result in your framework"
        )
    return None


def _validate(
    d_y: ArraySpec, operands: MatmulOperands, layout: LayoutSpec | None, spec: MatmulSpec, wanted: tuple[str, ...]
) -> None:
    check_operands(operands, layout, spec, joined=False)
    if (reason := why_no_gradient(operands, layout, spec, {name.removeprefix("d_") for name in wanted})) is not None:
        raise Unsupported(reason)
    require_wanted(wanted, tuple(f"d_{name}" for name, _ in named_arrays(operands) if name in DIFFERENTIABLE))
    n = operands.weight.shape[-1 if spec.weight_layout == "in_out" else -2]
    rows = operands.x.shape[0] if layout is None else layout.capacity if spec.scatter == "row" else layout.num_slots
    require_spec("d_y", d_y, (rows, n), dtypes.MATMUL_DTYPES)


@keep_plans
def plan_matmul_ogs_backward(
    d_y: ArraySpec,
    operands: MatmulOperands,
    layout: LayoutSpec | None,
    spec: MatmulSpec,
    target: Target,
    *,
    wanted: tuple[str, ...],
) -> LaunchPlan:
    """The wanted gradients of `plan_matmul_ogs` without an activation: d_x, d_weight, d_bias, d_row_weight.

    d_y: the gradient of y in any matmul dtype. c = cast(d_y) to the dtype of x, g = c, or with row_weight
    cast(row_weight * c). d_x = cast(g . weight^T), and for gather `token` the fp32 sum of a token's rows of it, cast
    again. d_weight = cast(sum over an expert's rows of x^T g). d_bias = cast(sum of g). d_row_weight = <c, x . weight +
    bias> in fp32. Rows, slots and experts without a counterpart get exact zeros. operands, layout, spec: the forward's,
    but of its tuning only expected sizes count. A quantised weight has no gradient. It is dequantised to x's dtype.

    Inputs: d_y, the operands, then a layout's group_sizes, group_start, slot_of_row, row_of_slot. Outputs: wanted, each
    like its operand. Raises InvalidInput, and Unsupported with the reason of `why_no_gradient`.
    """
    _validate(d_y, operands, layout, spec, wanted)
    builder = PlanBuilder("matmul_ogs_backward", target)
    present = builder.inputs({"d_y": d_y, **dict(named_arrays(operands))})
    present |= builder.layout_inputs(layout, (*LAYOUT_INPUTS, "row_of_slot"))
    for name in wanted:
        array = getattr(operands, name.removeprefix("d_"))
        builder.output(name, ArraySpec(array.shape, array.dtype))
    if not target.compiled:
        builder.sums("products and sums: the order of NumPy, fp32")
        constants = {"layout": layout, "spec": spec, "wanted": wanted}
        tensors = tuple((name, tensor.spec) for name, tensor in quantized_operands(operands).items())
        constants |= {"tensors": tensors} if tensors else {}
        from moe_core.ops.matmul.reference import backward as twins

        return builder.reference(twins.matmul_ogs_backward_plan, present, constants, wanted)
    gradient = cast_gradient(builder, "cast", "d_y", operands.x.dtype)
    if "d_row_weight" in wanted:
        assert layout is not None
        plain = dataclasses.replace(operands, row_weight=None)
        unrounded = dataclasses.replace(spec, scatter="row", out_dtype="float32", tuning=_tuning(spec))
        rows = builder.call(plan_matmul_ogs(plain, layout, unrounded, builder.target), "product", {})
        plan = plan_weighted_input(builder.spec(rows), builder.spec(gradient), builder.target, outputs=("d_weight",))
        bindings = {"d_rows": rows, "x": gradient, "d_weight": "d_row_weight"}
        builder.call(plan, "row weight's gradient", bindings, {"d_rows": Role.ROWS, "x": Role.D_ROWS})
    if operands.row_weight is not None and set(wanted) - {"d_row_weight"}:
        rows = builder.spec(gradient)
        plan = plan_scale_rows(rows, ArraySpec((rows.shape[0], 1), "float32"), target)
        gradient = builder.call(plan, "row weight", {"x": gradient}, {"x": Role.D_ROWS, "y": Role.D_ROWS})
    if "d_x" in wanted:
        by_token = spec.gather == "token"
        pulled = MatmulOperands(builder.spec(gradient), operands.weight, layer_index=operands.layer_index)
        scatter = "row" if by_token else spec.gather
        back = MatmulSpec(spec.weight_layout, spec.scatter, scatter, allow_tf32=spec.allow_tf32, tuning=_tuning(spec))
        bindings = {"x": gradient} | ({} if by_token else {"y": "d_x"})
        y = add_input_gradient(builder, "input gradient", pulled, layout, back, bindings)
        if by_token:
            assert layout is not None
            plan = plan_reduce(builder.spec(y), builder.spec("row_of_slot"), layout, builder.target, order="row")
            builder.call(plan, "sum of slots", {"y": y, "out": "d_x"}, {"y": Role.D_ROWS, "out": Role.D_ROWS})
    # g includes the row weight.
    bindings = {name: name for name in ("layer_index", *wanted)}
    left, right = Side("x", spec.gather) if "d_weight" in wanted else None, Side(gradient, spec.scatter)
    add_weight_gradient(builder, "weight gradient", left, right, layout, spec, bindings, trusted=False)
    return builder.build()


def _tuning(spec: MatmulSpec) -> MatmulTuning | None:
    known = spec.tuning
    return known and MatmulTuning(expected_tokens=known.expected_tokens, expected_experts=known.expected_experts)


def stage_inputs(
    builder: PlanBuilder, plan: LaunchPlan, layout: LayoutSpec | None, block_m: int, *, counters: str = "tile_counters"
) -> dict[str, str]:
    """Bindings of a composed plan's product: schedule and zeroed `counters`, each added once."""
    needs, bindings = {buffer.name for buffer in plan.inputs}, {}
    if "schedule" in needs:
        assert layout is not None
        bindings["schedule"] = f"schedule_{block_m}"
        if not builder.has(bindings["schedule"]):
            add_schedule(builder, layout, block_m, name=bindings["schedule"])
    if "tile_counters" in needs:
        bindings["tile_counters"] = counters if builder.has(counters) else zero_counters(builder, counters)
    return bindings


class Composed(NamedTuple):
    """stage, addressed and tail of a product in a composed plan."""

    stage: int
    addressed: bool = False
    tail: Tail | None = None


def add_input_gradient(
    builder: PlanBuilder,
    label: str,
    operands: MatmulOperands,
    layout: LayoutSpec | None,
    spec: MatmulSpec,
    bindings: Mapping[str, str],
    *,
    composed: Composed | None = None,
) -> str:
    """Add d_x `[*, D]` = cast(d_y . weight^T). operands: x is d_y `[*, N]`. Weight `[E, D, N]` (`in_out`) or `[E, N,
    D]`, up and layer_index are the forward's. With `up` d_y is `[*, 2N]`, gate columns first, with one fp32 sum. spec:
    the forward's weight_layout; gather indexes d_y, scatter d_x. bindings: of x, weight, up, and of any buffer of y.
    composed: see `plan_product`. Returns the result's buffer, an addend if spec.out_dtype is set."""
    target, stage = builder.target, None if composed is None else composed.stage
    addressed, tail = (False, None) if composed is None else (composed.addressed, composed.tail)
    if quantized_operands(operands):
        tile = choose_transposed_tile(operands, layout, spec, target)
        plan = plan_matmul_quantized_transposed(
            operands, layout, spec, target, tile=tile, composed=stage is not None, addressed=addressed, tail=tail
        )
    else:
        spec = dataclasses.replace(spec, weight_layout=TRANSPOSED[spec.weight_layout])
        problem = MatmulProblem(
            operands, layout, spec, target, joined=operands.up is not None, addressed=addressed, tail=tail
        )
        tile = choose_tile(problem)
        plan = plan_product(problem, tile, stage)
    assert tile is not None, "backwards of the reference are one call"
    bindings = {**bindings, **stage_inputs(builder, plan, layout, tile.config.block_m)}
    role = Role.ADDEND if spec.out_dtype else Role.D_ROWS
    roles = {"x": Role.D_ROWS} | ({} if addressed else {"y": role})
    roles |= {} if tail is None else {"tail.low": Role.D_LOW}
    return builder.call(plan, label, bindings, roles)


class Side(NamedTuple):
    """A side of a weight gradient: buffer, gather, (first, number) of its columns (None: all), role."""

    buffer: str
    gather: str = "row"
    columns: tuple[int, int] | None = None
    role: Role = Role.D_ROWS


def add_weight_gradient(
    builder: PlanBuilder,
    label: str,
    x: Side | None,
    d_y: Side,
    layout: LayoutSpec | None,
    spec: MatmulSpec,
    bindings: Mapping[str, str],
    *,
    trusted: bool = True,
) -> None:
    """Add d_weight = x^T d_y over every expert's rows, in spec.weight_layout, and d_bias, the column sums of d_y. x
    None: d_bias only. bindings: of d_weight and d_bias, skipped if absent from builder, and of row_weight (for d_bias
    only), row_mask, into and layer_index, if present. A one-layer result takes no layer_index."""
    present = {name: buffer for name, buffer in bindings.items() if builder.has(buffer)}
    results = {name: present[name] for name in ("d_weight", "d_bias") if name in present}
    if not results:
        return
    in_out, other = spec.weight_layout == "in_out", x or Side(d_y.buffer, d_y.gather)
    left, right = (other, d_y) if in_out else (d_y, other)
    first, array = next((name, builder.spec(buffer)) for name, buffer in results.items())
    stacked = array.rank > (2 if first == "d_weight" else 1) + (layout is not None)
    names = ["row_weight"] * ("d_bias" in results) + ["row_mask", "into"] + ["layer_index"] * stacked
    sides = {"left": left.buffer, "right": right.buffer} | {name: present[name] for name in names if name in present}
    operands = WeightGradientOperands(**{name: builder.spec(buffer) for name, buffer in sides.items()})
    dtypes_of = {name: builder.spec(buffer).dtype for name, buffer in results.items()}
    side, num_layers = "right" if in_out else "left", array.shape[0] if stacked else 1
    taken = (left.gather, right.gather), left.columns, right.columns
    bias = side if "d_bias" in results else None, dtypes_of.get("d_bias", "float32")
    tuning = spec.tuning or MatmulTuning()
    expected = None, tuning.expected_tokens, tuning.expected_experts
    options = WeightGradientSpec(dtypes_of.get("d_weight"), *taken, *bias, num_layers, spec.allow_tf32, *expected)
    plan = plan_weight_gradient(operands, layout, options, builder.target, trusted=trusted)
    roles = {name: d_y.role for name in (("left", "right") if x is None else (side,))}
    builder.call(plan, label, sides | results, roles)
