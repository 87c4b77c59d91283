"""Planning of the backward's row-wise kernels; compiled targets only, as parts of `moe_core.moe_backward`."""

from __future__ import annotations

import functools

from moe_core.activation import elementwise_tile, row_stride
from moe_core.arrays import ArraySpec
from moe_core.layout import optional, padded
from moe_core.plan import Constant, LaunchPlan, PlanBuilder, Pointer, Scalar
from moe_core.specs import LayoutSpec
from moe_core.target import Target

#: Elements of one program of an elementwise kernel.
_ELEMENTS = {"cuda": 1024, "interpreter": 65536}
#: Rows, and columns at a time, of a program that walks along rows; experts it compares with at once.
_ROWS = {"cuda": (4, 512), "interpreter": (64, 1024)}
_EXPERTS_AT_ONCE = 128


def _row_tile(width: int, target: Target) -> tuple[int, int]:
    rows, columns = _ROWS[target.kind]
    return rows, min(columns, padded(width))


@functools.lru_cache(maxsize=4096)
def plan_bias_product(
    d_y: ArraySpec, bias: ArraySpec, layout: LayoutSpec, target: Target, *, layer: ArraySpec | None = None
) -> LaunchPlan:
    """products fp32 `[T * K]` by slot = <d_y[token] `[T, D]`, bias[expert] `[E, D]`>; slots of no row stay unwritten.

    layer int32 `[1]`: bias has a leading layer axis. Inputs: d_y, bias, [layer], group_start, slot_of_row of a layout
    without alignment.
    """
    builder = PlanBuilder("bias_product", target)
    for name, array in (("d_y", d_y), ("bias", bias), ("layer", layer)):
        if array is not None:
            builder.input(name, array)
    builder.input("group_start", ArraySpec((layout.num_experts + 1,), "int32"))
    builder.input("slot_of_row", ArraySpec((layout.capacity,), "int32"))
    builder.output("products", ArraySpec((layout.num_slots,), "float32"))
    block_m, block_n = _row_tile(d_y.shape[1], target)
    builder.sums(f"d_model in {block_n} partial sums in order, then a tree over them, fp32")
    builder.launch(
        "backward_rows:bias_product",
        (-(-layout.capacity // block_m),),
        {
            "d_y": Pointer("d_y"),
            "bias": Pointer("bias"),
            "layer": optional("layer", layer),
            "group_start": Pointer("group_start"),
            "slot_of_row": Pointer("slot_of_row"),
            "products": Pointer("products"),
            "num_rows": Scalar(layout.capacity),
            "num_slots": Scalar(layout.num_slots),
            "WIDTH": Constant(d_y.shape[1]),
            "NUM_EXPERTS": Constant(layout.num_experts),
            "NUM_LAYERS": Constant(1 if layer is None else bias.shape[0]),
            "D_Y_STRIDE": Constant(row_stride("d_y", d_y)),
            "TOP_K": Constant(layout.top_k),
            "EXPERTS": Constant(min(_EXPERTS_AT_ONCE, padded(layout.num_experts, 1))),
            "BLOCK_M": Constant(block_m),
            "BLOCK_N": Constant(block_n),
        },
    )
    return builder.build()


@functools.lru_cache(maxsize=4096)
def _plan_elementwise(kernel: str, inputs: tuple[str, ...], output: str, shape: tuple[int, ...], target: Target):
    """output fp32 = a kernel of fp32 arrays of one size."""
    builder = PlanBuilder(kernel, target)
    array = ArraySpec(shape, "float32")
    names = [builder.input(name, array) for name in inputs] + [builder.output(output, array)]
    block = _ELEMENTS[target.kind]
    arguments: dict[str, Pointer | Scalar | Constant] = {name: Pointer(name) for name in names}
    arguments |= {"size": Scalar(array.size, "int64"), "BLOCK": Constant(block)}
    builder.launch(f"backward_rows:{kernel}", (-(-array.size // block),), arguments)
    return builder.build()


def plan_gate_weight(gate: ArraySpec, target: Target) -> LaunchPlan:
    """weight = sigmoid(gate), fp32. Input: gate; output: weight."""
    return _plan_elementwise("gate_weight", ("gate",), "weight", gate.shape, target)


def plan_gate_gradient(gate: ArraySpec, target: Target) -> LaunchPlan:
    """d_gate = d_weight s(gate) s(-gate), s the sigmoid, fp32. Inputs: d_weight, gate; output: d_gate."""
    return _plan_elementwise("gate_gradient", ("d_weight", "gate"), "d_gate", gate.shape, target)


def plan_add(array: ArraySpec, target: Target) -> LaunchPlan:
    """total = first + second, fp32. Inputs: first, second; output: total."""
    return _plan_elementwise("add", ("first", "second"), "total", array.shape, target)


@functools.lru_cache(maxsize=4096)
def plan_cast_rows(x: ArraySpec, dtype: str, target: Target) -> LaunchPlan:
    """y `[R, D]` = x `[R, D]` in another dtype, one cast. Input: x; output: y."""
    rows, width = x.shape
    builder = PlanBuilder("cast_rows", target)
    builder.input("x", x)
    builder.output("y", ArraySpec((rows, width), dtype))
    block_m, block_n = elementwise_tile(width, target)
    builder.launch(
        "backward_rows:cast_rows",
        (-(-rows // block_m), -(-width // block_n)),
        {
            "x": Pointer("x"),
            "y": Pointer("y"),
            "num_rows": Scalar(rows),
            "WIDTH": Constant(width),
            "BLOCK_M": Constant(block_m),
            "BLOCK_N": Constant(block_n),
        },
    )
    return builder.build()


@functools.lru_cache(maxsize=4096)
def plan_weighted_input(
    d_rows: ArraySpec, x: ArraySpec, target: Target, *, outputs: tuple[str, ...], with_extra: bool = False
) -> LaunchPlan:
    """The backward of x[t] * w[t] where every token has one slot: d_x `[T, D]` = cast(w d_row + extra) in the dtype of
    x and d_weight fp32 `[T, 1]` = <d_row, x>, those that outputs names.

    d_rows `[capacity, D]` by layout row; a token without one gives no product. Inputs: d_rows, x, row_of_slot `[T]`,
    weights fp32 `[T, 1]`, [extra fp32 `[T, D]`].
    """
    tokens, width = x.shape
    builder = PlanBuilder("weighted_input", target)
    builder.input("d_rows", d_rows)
    builder.input("x", x)
    builder.input("row_of_slot", ArraySpec((tokens,), "int32"))
    builder.input("weights", ArraySpec((tokens, 1), "float32"))
    extra = ArraySpec((tokens, width), "float32") if with_extra else None
    if extra is not None:
        builder.input("extra", extra)
    found = {"d_x": ArraySpec((tokens, width), x.dtype), "d_weight": ArraySpec((tokens, 1), "float32")}
    for name in outputs:
        builder.output(name, found[name])
    block_m, block_n = _row_tile(width, target)
    builder.sums(f"d_weight: d_model in {block_n} partial sums in order, then a tree over them, fp32")
    builder.launch(
        "backward_rows:weighted_input",
        (-(-tokens // block_m),),
        {
            "d_rows": Pointer("d_rows"),
            "x": Pointer("x"),
            "row_of_slot": Pointer("row_of_slot"),
            "weights": Pointer("weights"),
            "extra": optional("extra", extra),
            **{name: Pointer(name) if name in outputs else Constant(None) for name in found},
            "num_tokens": Scalar(tokens),
            "num_rows": Scalar(d_rows.shape[0]),
            "WIDTH": Constant(width),
            "X_STRIDE": Constant(row_stride("x", x)),
            "BLOCK_M": Constant(block_m),
            "BLOCK_N": Constant(block_n),
        },
    )
    return builder.build()
