"""Planning of the grouped matmul's backward, as an op of its own."""

from __future__ import annotations

import dataclasses
import functools

from moe_core import dtypes
from moe_core.arrays import ArraySpec, require_spec
from moe_core.backward_rows import plan_cast_rows, plan_weighted_input
from moe_core.errors import InvalidInput, Unsupported
from moe_core.matmul_ogs import LAYOUT_INPUTS, TRANSPOSED, plan_matmul_ogs
from moe_core.matmul_operands import quantized_operands, why_frozen, why_prepared
from moe_core.matmul_quantized_transposed import plan_matmul_quantized_transposed
from moe_core.operands import MatmulOperands, named_arrays
from moe_core.plan import LaunchPlan, PlanBuilder
from moe_core.reduction import plan_reduce, plan_scale_rows
from moe_core.specs import LayoutSpec, MatmulSpec
from moe_core.target import Target
from moe_core.weight_gradient import WeightGradientOperands, WeightGradientSpec, plan_weight_gradient

#: The operands that have a gradient.
DIFFERENTIABLE = ("x", "weight", "bias", "row_weight")


def why_no_gradient(operands: MatmulOperands, layout: object, spec: MatmulSpec, names: set[str]) -> str | None:
    """Why a product has no gradients of the operands of these names; None where it has. layout: None for a dense one.

    Of operands it only counts which are there, which are quantised, and which are tiled.
    """
    quantized = quantized_operands(operands)
    if "x" in quantized:
        return (
            f"matmul_ogs has no gradient with a quantised x, got {quantized['x']}: what rounds x has none; pass x as a "
            "plain array (the weights may stay quantised)"
        )
    refused = why_prepared(quantized) or why_frozen(names, quantized)
    if refused is not None:
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
    reason = why_no_gradient(operands, layout, spec, {name.removeprefix("d_") for name in wanted})
    if reason is not None:
        raise Unsupported(reason)
    present = [name for name, _ in named_arrays(operands) if name in DIFFERENTIABLE]
    names = tuple(f"d_{name}" for name in present)
    if not wanted or not set(wanted) <= set(names) or len(set(wanted)) != len(wanted):
        raise InvalidInput(f"wanted must name at least one of {', '.join(names)}, each once, got {wanted}; correct it")
    n = operands.weight.shape[-1 if spec.weight_layout == "in_out" else -2]
    rows = operands.x.shape[0] if layout is None else layout.capacity if spec.scatter == "row" else layout.num_slots
    require_spec("d_y", d_y, (rows, n), dtypes.MATMUL_DTYPES)


@functools.lru_cache(maxsize=4096)
def plan_matmul_ogs_backward(
    d_y: ArraySpec,
    operands: MatmulOperands,
    layout: LayoutSpec | None,
    spec: MatmulSpec,
    target: Target,
    *,
    wanted: tuple[str, ...],
) -> LaunchPlan:
    """The gradients of `plan_matmul_ogs` without an activation, those wanted of d_x, d_weight, d_bias, d_row_weight.

    d_y: the gradient of y, of y's shape, in any matmul dtype; c = cast(d_y) to the dtype of x, and g = c, or with
    row_weight g = cast(row_weight * c). d_x = cast(g . weight^T), and for gather `token` the fp32 sum of a token's such
    rows, cast once more; d_weight = cast(sum over an expert's rows of x^T g); d_bias = cast(sum of g); d_row_weight =
    <c, x . weight + bias> in fp32, for which the product runs again. Rows, slots and experts without each other get
    exact zeros. operands, layout and spec are the forward's; its tuning is not used. A quantised weight is dequantised
    to the dtype of x for d_x, and has no gradient.

    Inputs: d_y, the operands given, then group_sizes, group_start, slot_of_row, row_of_slot of a layout. Outputs:
    wanted, in that order, each as what it is the gradient of. Raises InvalidInput, and Unsupported where
    `why_no_gradient` says so.
    """
    _validate(d_y, operands, layout, spec, wanted)
    builder = PlanBuilder("matmul_ogs_backward", target)
    inputs = {"d_y": d_y, **dict(named_arrays(operands))}
    if layout is not None:
        sizes = (layout.num_experts, layout.num_experts + 1, layout.capacity, layout.num_slots)
        names = (*LAYOUT_INPUTS, "row_of_slot")
        inputs |= {name: ArraySpec((size,), "int32") for name, size in zip(names, sizes, strict=True)}
    for name, array in inputs.items():
        builder.input(name, array)
    for name in wanted:
        array = getattr(operands, name.removeprefix("d_"))
        builder.output(name, ArraySpec(array.shape, array.dtype))
    if not target.compiled:
        # The forward's planner has checked operands against layout and spec; a backward may come without it.
        plan_matmul_ogs(operands, layout, spec, target)
        builder.sums("products and sums: the order of NumPy, fp32")
        constants = {"layout": layout, "spec": spec, "wanted": wanted}
        tensors = tuple((name, tensor.spec) for name, tensor in quantized_operands(operands).items())
        constants |= {"tensors": tensors} if tensors else {}
        builder.reference("matmul_backward:matmul_ogs_backward", {name: name for name in inputs}, constants, wanted)
        return builder.build()
    gradient = _cast_gradient(builder, operands)
    if "d_row_weight" in wanted:
        assert layout is not None
        _plan_d_row_weight(builder, operands, layout, spec, gradient)
    if operands.row_weight is not None and set(wanted) - {"d_row_weight"}:
        gradient = _weighted_gradient(builder, gradient)
    if "d_x" in wanted:
        _plan_d_x(builder, operands, layout, spec, gradient)
    if set(wanted) & {"d_weight", "d_bias"}:
        _plan_d_weight(builder, operands, layout, spec, gradient)
    return builder.build()


def _cast_gradient(builder: PlanBuilder, operands: MatmulOperands) -> str:
    """d_y in the dtype of x."""
    if builder.spec("d_y").dtype == operands.x.dtype:
        return "d_y"
    plan = plan_cast_rows(builder.spec("d_y"), operands.x.dtype, builder.target)
    builder.call(plan, "cast", {"x": "d_y", "y": builder.scratch("cast_d_y", plan.spec("y"))})
    return "cast_d_y"


def _weighted_gradient(builder: PlanBuilder, gradient: str) -> str:
    """Its rows times the row weight."""
    rows = builder.spec(gradient)
    plan = plan_scale_rows(rows, ArraySpec((rows.shape[0], 1), "float32"), builder.target)
    bindings = {"x": gradient, "weights": "row_weight", "y": builder.scratch("weighted_d_y", plan.spec("y"))}
    builder.call(plan, "row weight", bindings)
    return "weighted_d_y"


def _plan_d_row_weight(
    builder: PlanBuilder, operands: MatmulOperands, layout: LayoutSpec, spec: MatmulSpec, gradient: str
) -> None:
    """The product again, by layout row, without the row weight and unrounded; its rows times those of the gradient."""
    plain = dataclasses.replace(operands, row_weight=None)
    unrounded = dataclasses.replace(spec, scatter="row", out_dtype="float32", tuning=None)
    plan = plan_matmul_ogs(plain, layout, unrounded, builder.target)
    rows = builder.scratch("unweighted", plan.spec("y"))
    builder.call(plan, "product", {"y": rows} | {buffer.name: buffer.name for buffer in plan.inputs})
    plan = plan_weighted_input(builder.spec(rows), builder.spec(gradient), builder.target, outputs=("d_weight",))
    bindings = {"d_rows": rows, "x": gradient, "row_of_slot": "row_of_slot", "weights": "row_weight"}
    builder.call(plan, "row weight's gradient", bindings | {"d_weight": "d_row_weight"})


def _layer(operands: MatmulOperands) -> dict[str, str]:
    return {} if operands.layer is None else {"layer": "layer"}


def _plan_d_x(
    builder: PlanBuilder, operands: MatmulOperands, layout: LayoutSpec | None, spec: MatmulSpec, gradient: str
) -> None:
    """The product with the transposed weight, from where y is scattered to where x is gathered."""
    target, by_token = builder.target, spec.gather == "token"
    scatter = "row" if by_token else spec.gather
    pulled = MatmulOperands(builder.spec(gradient), operands.weight, layer=operands.layer)
    back = MatmulSpec(spec.weight_layout, spec.scatter, scatter, allow_tf32=spec.allow_tf32)
    if quantized_operands(operands):
        plan = plan_matmul_quantized_transposed(pulled, layout, back, target)
    else:
        transposed = dataclasses.replace(back, weight_layout=TRANSPOSED[spec.weight_layout])
        plan = plan_matmul_ogs(pulled, layout, transposed, target)
    y = builder.scratch("d_rows", plan.spec("y")) if by_token else "d_x"
    bindings = {name: name for name, _ in named_arrays(pulled)} | {"x": gradient, "y": y}
    known = (*LAYOUT_INPUTS, "row_of_slot")
    bindings |= {buffer.name: buffer.name for buffer in plan.inputs if buffer.name in known}
    builder.call(plan, "input gradient", bindings)
    if by_token:
        assert layout is not None
        plan = plan_reduce(plan.spec("y"), builder.spec("row_of_slot"), layout.top_k, target, order="row")
        builder.call(plan, "sum of slots", {"y": y, "row_of_slot": "row_of_slot", "out": "d_x"})


def _plan_d_weight(
    builder: PlanBuilder, operands: MatmulOperands, layout: LayoutSpec | None, spec: MatmulSpec, gradient: str
) -> None:
    """d_weight, d_bias or both, ragged along the reduction."""
    with_weight, with_bias = builder.has("d_weight"), builder.has("d_bias")
    # For the bias alone the other side is not read, whatever stands there.
    sides = [("x", spec.gather) if with_weight else (gradient, spec.scatter), (gradient, spec.scatter)]
    bias_side = "right"
    if spec.weight_layout == "out_in":
        sides, bias_side = sides[::-1], "left"
    (left, left_gather), (right, right_gather) = sides
    bindings = {"left": left, "right": right} | _layer(operands)
    options = WeightGradientSpec(
        operands.weight.dtype if with_weight else None,
        (left_gather, right_gather),
        bias_side=bias_side if with_bias else None,
        bias_dtype=operands.bias.dtype if with_bias else "float32",
        num_layers=1 if operands.layer is None else operands.weight.shape[0],
        allow_tf32=spec.allow_tf32,
    )
    arrays = WeightGradientOperands(**{name: builder.spec(buffer) for name, buffer in bindings.items()})
    plan = plan_weight_gradient(arrays, layout, options, builder.target, trusted=False)
    if layout is not None:
        bindings |= {name: name for name in LAYOUT_INPUTS}
    bindings |= {output.name: output.name for output in plan.outputs}
    builder.call(plan, "weight gradient", bindings)
