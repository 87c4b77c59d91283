"""Plans the backward's row-wise kernels on compiled targets."""

from __future__ import annotations

from moe_core.base import ArraySpec, Target, dtypes, keep_plans, require_spec, row_stride
from moe_core.base.sizes import elementwise_tile, padded
from moe_core.ops.reduction.kernels import rowwise as kernels
from moe_core.plan import LaunchPlan, PlanBuilder, Role, declare_kernel, passed
from moe_core.plan.steps import Kernel, Scalar
from moe_core.specs import LayoutSpec
from moe_core.specs.exchange import packed_row

BIAS_PRODUCT = declare_kernel(kernels.bias_product)
GATE_WEIGHT = declare_kernel(kernels.gate_weight)
GATE_GRADIENT = declare_kernel(kernels.gate_gradient)
ADD = declare_kernel(kernels.add)
CAST_ROWS = declare_kernel(kernels.cast_rows)
WEIGHTED_INPUT = declare_kernel(kernels.weighted_input)

_ELEMENTS = {"gpu": 1024, "interpreter": 65536}
_ROWS = {"gpu": (4, 512), "interpreter": (64, 1024)}
_EXPERTS_AT_ONCE = 128


def _row_tile(width: int, target: Target) -> tuple[int, int]:
    rows, columns = _ROWS[target.engine]
    return rows, min(columns, padded(width))


@keep_plans
def plan_bias_product(
    d_y: ArraySpec, bias: ArraySpec, layout: LayoutSpec, target: Target, *, layer_index: ArraySpec | None = None
) -> LaunchPlan:
    """products fp32 `[T * K]` by slot = <d_y[token] `[T, D]`, bias[expert] `[E, D]`>, unwritten for slots without a
    row.

    layer_index int32 `[1]`: bias has a leading layer axis. Inputs: d_y, bias, [layer_index], group_start, slot_of_row
    of a layout without alignment.
    """
    builder = PlanBuilder("bias_product", target)
    builder.inputs({"d_y": d_y, "bias": bias, "layer_index": layer_index})
    builder.layout_inputs(layout, ("group_start", "slot_of_row"))
    builder.output("products", ArraySpec((layout.num_slots,), "float32"))
    block_m, block_n = _row_tile(d_y.shape[1], target)
    builder.sums(f"d_model in {block_n} partial sums in order, then a tree over them, fp32")
    layers, experts = 1 if layer_index is None else bias.shape[0], min(_EXPERTS_AT_ONCE, padded(layout.num_experts, 1))
    arguments = {
        **builder.pointers("d_y", "bias", "layer_index", "group_start", "slot_of_row", "products"),
        **passed(num_rows=layout.capacity, num_slots=layout.num_slots, WIDTH=d_y.shape[1]),
        **passed(NUM_EXPERTS=layout.num_experts, NUM_LAYERS=layers, D_Y_STRIDE=row_stride("d_y", d_y)),
        **passed(TOP_K=layout.top_k, EXPERTS=experts, BLOCK_M=block_m, BLOCK_N=block_n),
    }
    builder.launch(BIAS_PRODUCT, (-(-layout.capacity // block_m),), arguments)
    return builder.build()


@keep_plans
def _plan_elementwise(kernel: Kernel, inputs: tuple[str, ...], output: str, shape: tuple[int, ...], target: Target):
    builder = PlanBuilder(kernel.function, target)
    array = ArraySpec(shape, "float32")
    names = [builder.input(name, array) for name in inputs] + [builder.output(output, array)]
    block = _ELEMENTS[target.engine]
    arguments = builder.pointers(*names) | {"size": Scalar(array.size, "int64")} | passed(BLOCK=block)
    builder.launch(kernel, (-(-array.size // block),), arguments)
    return builder.build()


def plan_gate_weight(gate: ArraySpec, target: Target) -> LaunchPlan:
    return _plan_elementwise(GATE_WEIGHT, ("gate",), "weight", gate.shape, target)


def plan_gate_gradient(gate: ArraySpec, target: Target) -> LaunchPlan:
    """d_gate = d_weight s(gate) s(-gate), s the sigmoid, fp32. Inputs: d_weight, gate."""
    return _plan_elementwise(GATE_GRADIENT, ("d_weight", "gate"), "d_gate", gate.shape, target)


def plan_add(array: ArraySpec, target: Target) -> LaunchPlan:
    return _plan_elementwise(ADD, ("first", "second"), "total", array.shape, target)


@keep_plans
def plan_cast_rows(x: ArraySpec, dtype: str, target: Target) -> LaunchPlan:
    rows, width = x.shape
    builder = PlanBuilder("cast_rows", target)
    builder.input("x", x)
    builder.output("y", ArraySpec((rows, width), dtype))
    block_m, block_n = elementwise_tile(width, target)
    arguments = passed(x="x", y="y", num_rows=rows, WIDTH=width, BLOCK_M=block_m, BLOCK_N=block_n)
    builder.launch(CAST_ROWS, (-(-rows // block_m), -(-width // block_n)), arguments)
    return builder.build()


def cast_gradient(builder: PlanBuilder, label: str, rows: str, dtype: str) -> str:
    """A buffer with gradients in this dtype."""
    if builder.spec(rows).dtype == dtype:
        return rows
    plan = plan_cast_rows(builder.spec(rows), dtype, builder.target)
    return builder.call(plan, label, {"x": rows}, {"x": Role.D_ROWS, "y": Role.D_ROWS})


@keep_plans
def plan_weighted_input(
    d_rows: ArraySpec, x: ArraySpec, target: Target, *, outputs: tuple[str, ...], with_extra: bool = False
) -> LaunchPlan:
    """The backward of x[t] * w[t] with one slot per token: d_x `[T, D]` = cast(w d_row + extra) in the dtype of x and
    d_weight fp32 `[T, 1]` = <d_row, x>, if in outputs.

    d_rows `[capacity, D]` by layout row; a token without one gives no product. Inputs: d_rows, x, row_of_slot `[T]`,
    weights fp32 `[T, 1]`, [extra fp32 `[T, D]`].
    """
    tokens, width = x.shape
    builder = PlanBuilder("weighted_input", target)
    arrays = {"row_of_slot": ArraySpec((tokens,), "int32"), "weights": ArraySpec((tokens, 1), "float32")}
    extra = ArraySpec((tokens, width), "float32") if with_extra else None
    builder.inputs({"d_rows": d_rows, "x": x, **arrays, "extra": extra})
    specs = {"d_x": ArraySpec((tokens, width), x.dtype), "d_weight": ArraySpec((tokens, 1), "float32")}
    for name in outputs:
        builder.output(name, specs[name], Role.D_ROW_WEIGHT if name == "d_weight" else None)
    block_m, block_n = _row_tile(width, target)
    builder.sums(f"d_weight: d_model in {block_n} partial sums in order, then a tree over them, fp32")
    arguments = builder.pointers("d_rows", "x", "row_of_slot", "weights", "extra", "d_x", "d_weight")
    arguments |= passed(num_tokens=tokens, num_rows=d_rows.shape[0], WIDTH=width, X_STRIDE=row_stride("x", x))
    builder.launch(WEIGHTED_INPUT, (-(-tokens // block_m),), arguments | passed(BLOCK_M=block_m, BLOCK_N=block_n))
    return builder.build()


GATHER_ROWS = declare_kernel(kernels.gather_rows)


@keep_plans
def plan_gather_rows(
    x: ArraySpec,
    slot_of_row: ArraySpec,
    row_of_slot: ArraySpec,
    layout: LayoutSpec,
    target: Target,
    *,
    wide: ArraySpec | None = None,
    table: ArraySpec | None = None,
) -> LaunchPlan:
    """y `[capacity, D]`: each layout row's token of x `[T, D]`, zeros for rows without a slot.

    row_of_slot int32 `[T * K]` and wide fp32 `[T, D]` are for the backward, `plan_reduce` of order `row`, and only
    checked. Inputs: x, slot_of_row int32 `[capacity]`, [table int32 `[capacity, N]`: each row's numbers, behind it in y
    as `packed_row` says, padding undefined].
    """
    row_stride("x", require_spec("x", x, (layout.num_tokens, "d_model"), dtypes.MATMUL_DTYPES, contiguous=False))
    require_spec("layout.slot_of_row", slot_of_row, (layout.capacity,), "int32")
    require_spec("layout.row_of_slot", row_of_slot, (layout.num_slots,), "int32")
    require_wide(wide, x)
    rows, width, numbers, (stride, first) = layout.capacity, x.shape[1], 0, (x.shape[1], 0)
    if table is not None:
        numbers = require_spec("table", table, (rows, "numbers"), "int32").shape[1]
        stride, first = packed_row(width, x.dtype, numbers)
    builder = PlanBuilder("gather_rows", target)
    present = builder.inputs({"x": x, "slot_of_row": slot_of_row, "table": table})
    builder.output("y", ArraySpec((rows, stride), x.dtype))
    if not target.compiled:
        from moe_core.ops.reduction import reference as twins

        constants = {"top_k": layout.top_k, "stride": stride, "first": first}
        return builder.reference(twins.gather_rows, present, constants, ("y",))
    launch_gather(builder, x, rows, layout.top_k, stride, (first, numbers))
    return builder.build()


def launch_gather(
    builder: PlanBuilder, x: ArraySpec, rows: int, top_k: int, stride: int, behind: tuple[int, int] = (0, 0)
) -> None:
    """Launch `gather_rows` on buffers of its names. stride: of y. behind: first word and numbers of table."""
    width, (first, numbers), words = x.shape[1], behind, stride * dtypes.itemsize(x.dtype) // 4
    block_m, block_n = elementwise_tile(width, builder.target)
    arguments = builder.pointers("x", "slot_of_row", "table", "y") | passed(num_rows=rows, num_tokens=x.shape[0])
    arguments |= passed(TOP_K=top_k, WIDTH=width, X_STRIDE=row_stride("x", x), Y_STRIDE=stride)
    arguments |= passed(NUMBERS=numbers, Y_WORDS=words, FIRST=first, COLUMNS=padded(numbers, 1))
    arguments |= passed(BLOCK_M=block_m, BLOCK_N=block_n)
    builder.launch(GATHER_ROWS, (-(-rows // block_m), -(-width // block_n)), arguments)


ORDER_ROWS = declare_kernel(kernels.order_rows, pdl="start")
_ORDERED_COLUMNS = 4096


@keep_plans
def plan_order_rows(x: ArraySpec, layout: LayoutSpec, target: Target) -> LaunchPlan:
    """As `plan_gather_rows` in composed plans, without rows of no slot. Inputs: x, row_of_slot int32 `[T * K]`."""
    assert target.compiled
    rows, width = layout.capacity, x.shape[1]
    builder = PlanBuilder("order_rows", target)
    builder.inputs({"x": x, "row_of_slot": ArraySpec((layout.num_slots,), "int32")})
    builder.output("y", ArraySpec((rows, width), x.dtype))
    columns = min(padded(width), _ORDERED_COLUMNS)
    arguments = builder.pointers("x", "row_of_slot", "y") | passed(num_rows=rows, TOP_K=layout.top_k, WIDTH=width)
    arguments |= passed(X_STRIDE=row_stride("x", x), BLOCK_N=columns, PDL=None)
    builder.launch(ORDER_ROWS, (layout.num_tokens, -(-width // columns)), arguments)
    return builder.build()


def require_wide(wide: ArraySpec | None, x: ArraySpec) -> None:
    if wide is not None:
        require_spec("wide", wide, x.shape, "float32", contiguous=False)
