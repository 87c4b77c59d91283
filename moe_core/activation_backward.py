"""Planning of the activation's backward, as an op of its own and between the two matmuls of the experts."""

from __future__ import annotations

import dataclasses
import functools

from moe_core import dtypes
from moe_core.activation import elementwise_tile, row_stride
from moe_core.arrays import ArraySpec, require_spec
from moe_core.checks import require_choice
from moe_core.errors import InvalidInput
from moe_core.layout import optional
from moe_core.operands import ExpertActivationOperands, named_arrays
from moe_core.plan import Constant, LaunchPlan, PlanBuilder, Pointer, Scalar
from moe_core.specs import Activation
from moe_core.target import Target

#: What the backward between the matmuls can compute; a plan leaves out what nobody needs.
EXPERT_GRADIENTS = ("d_pre", "weighted_hidden", "d_weight")
#: Elements of a tile of whole rows (8 per thread; more registers would leave fewer loads in flight), and the columns it
#: may have, wide first.
_ELEMENTS = {"cuda": 1024, "interpreter": 65536}
_COLUMNS = {"cuda": (512, 256, 128), "interpreter": (1024, 32)}


def _function(activation: Activation) -> dict[str, Constant]:
    return {
        "NAME": Constant(activation.name),
        "ALPHA": Constant(activation.alpha),
        "LIMIT": Constant(activation.limit),
    }


@functools.lru_cache(maxsize=4096)
def plan_activation_backward(
    d_y: ArraySpec, x: ArraySpec, activation: Activation, target: Target, *, up: ArraySpec | None = None
) -> LaunchPlan:
    """d_x (and d_up) of y `[R, F]` = activation(x, up): fp32 arithmetic, one cast to the dtype of x.

    d_y `[R, F]`, x `[R, 2F]` (gated, one buffer) or `[R, F]` (ungated, or the gate beside `up` `[R, F]`): bf16, fp16 or
    fp32, d_y of any of them; rows may be strided. Inputs: d_y, x, [up]; outputs, dense: d_x, [d_up]. Formulas:
    `moe_core.reference.backward_activation`. Raises InvalidInput.
    """
    require_spec("x", x, ("num_rows", "width"), dtypes.MATMUL_DTYPES, contiguous=False)
    rows, columns = x.shape
    one_buffer = activation.gate_layout in ("halves", "interleaved")
    if one_buffer and columns % 2:
        raise InvalidInput(f"x must have an even width (gate and up), got {columns}; pass both halves")
    width = columns // 2 if one_buffer else columns
    require_spec("d_y", d_y, (rows, width), dtypes.MATMUL_DTYPES, contiguous=False)
    strides = {"D_Y_STRIDE": row_stride("d_y", d_y), "X_STRIDE": row_stride("x", x), "UP_STRIDE": 0}
    if activation.gate_layout == "separate":
        require_spec("up", up, (rows, width), x.dtype, contiguous=False)
    elif up is not None:
        raise InvalidInput(f"up must be None for gate_layout={activation.gate_layout!r}, got {up}; leave it out")

    builder = PlanBuilder("activation_backward", target)
    inputs = {"d_y": builder.input("d_y", d_y), "x": builder.input("x", x)}
    outputs = [builder.output("d_x", ArraySpec((rows, columns), x.dtype))]
    if up is not None:
        strides["UP_STRIDE"] = row_stride("up", up)
        inputs["up"] = builder.input("up", up)
        outputs.append(builder.output("d_up", ArraySpec((rows, width), x.dtype)))
    if not target.compiled:
        builder.reference("backward_activation:activation_backward", inputs, {"activation": activation}, outputs)
        return builder.build()
    block_m, block_n = elementwise_tile(width, target)
    builder.launch(
        "activation_backward:activation_backward",
        (-(-rows // block_m), -(-width // block_n)),
        {
            "d_y": Pointer("d_y"),
            "x": Pointer("x"),
            "up": optional("up", up),
            "d_x": Pointer("d_x"),
            "d_up": optional("d_up", up),
            "num_rows": Scalar(rows),
            "WIDTH": Constant(width),
            **{name: Constant(stride) for name, stride in strides.items()},
            "GATE_LAYOUT": Constant(activation.gate_layout),
            **_function(activation),
            "BLOCK_M": Constant(block_m),
            "BLOCK_N": Constant(block_n),
        },
    )
    return builder.build()


def _row_tile(width: int, target: Target) -> tuple[int, int]:
    """(rows, columns) of a tile that walks along whole rows of `width`: the widest that adds at most an eighth,
    or else the one that pads it least."""
    padding = {columns: -(-width // columns) * columns - width for columns in _COLUMNS[target.kind]}
    columns = next((one for one in padding if 8 * padding[one] <= width), min(padding, key=lambda one: padding[one]))
    return _ELEMENTS[target.kind] // columns, columns


def _validate(operands: ExpertActivationOperands, activation: Activation, order: str) -> tuple[int, int]:
    """(F, slots)."""
    pre, row_of_slot = operands.pre, operands.row_of_slot
    require_choice("order", order, ("row", "slot"))
    require_spec("d_hidden", operands.d_hidden, ("num_rows", "d_ff"), dtypes.MATMUL_DTYPES)
    rows, width = operands.d_hidden.shape
    require_spec("pre", pre, (rows, activation.input_width(width)), dtypes.MATMUL_DTYPES)
    slots = rows
    if row_of_slot is not None:
        require_spec("row_of_slot", row_of_slot, ("num_tokens * top_k",), "int32")
        slots = row_of_slot.shape[0]
        if order == "slot" and slots != rows:
            raise InvalidInput(f"d_hidden must have a row per slot for order='slot', got {rows} for {slots} slots")
    elif order == "slot":
        raise InvalidInput("row_of_slot must be given for order='slot', got None; pass it or use order='row'")
    if operands.row_weight is not None:
        weight: ArraySpec = operands.row_weight
        require_spec("row_weight", weight, ("num_slots",) if weight.rank == 1 else ("num_tokens", "top_k"), "float32")
        if weight.size != slots:
            raise InvalidInput(f"row_weight must hold {slots} slots, got {weight.shape}; pass a weight for every slot")
    if operands.bias_product is not None:
        require_spec("bias_product", operands.bias_product, (slots,), "float32")
    return width, slots


@functools.lru_cache(maxsize=4096)
def plan_expert_activation_backward(
    operands: ExpertActivationOperands,
    activation: Activation,
    target: Target,
    *,
    order: str = "row",
    outputs: tuple[str, ...] = EXPERT_GRADIENTS,
    slot_of_row: ArraySpec | None = None,
) -> LaunchPlan:
    """d_pre = act'(pre) (w z), weighted_hidden = w act(pre), d_weight = <z, act(pre)> + bias_product; z = d_hidden.

    operands: a bundle of ArraySpecs, all dense. Gate layout `separate` is stored as `halves` is: gate columns, then up.
    order: a slot's row is row_of_slot[slot] (`row`) or the slot itself (`slot`); without row_of_slot every row is the
    slot of its number. outputs: those wanted of d_pre `[R, 2F]` and weighted_hidden `[R, F]` in the dtype of pre and
    d_weight fp32 `[T * K]`; d_pre is always one. A slot without a row (-1): d_weight 0, nothing read. slot_of_row int32
    `[R]` (order `row`): rows of no slot become exact zeros; without it they are left unwritten, for composed plans that
    never read them (the reference engine writes zeros always). Inputs: the operands given, [slot_of_row]. Formulas:
    `moe_core.reference.backward_activation`. Raises InvalidInput.
    """
    width, slots = _validate(operands, activation, order)
    if "d_pre" not in outputs or not set(outputs) <= set(EXPERT_GRADIENTS) or len(set(outputs)) != len(outputs):
        raise InvalidInput(f"outputs must be d_pre and any of {EXPERT_GRADIENTS}, got {outputs}; name each once")
    if operands.bias_product is not None and "d_weight" not in outputs:
        raise InvalidInput("bias_product must be None where d_weight is no output, got an array; leave it out")
    pre: ArraySpec = operands.pre
    if slot_of_row is not None:
        require_spec("slot_of_row", slot_of_row, (pre.shape[0],), "int32")
        if order == "slot" or operands.row_of_slot is None:
            raise InvalidInput(
                "slot_of_row must be None unless order='row' with row_of_slot, got an array; leave it out"
            )

    builder = PlanBuilder("expert_activation_backward", target)
    present = {name: builder.input(name, array) for name, array in named_arrays(operands)}
    if slot_of_row is not None:
        builder.input("slot_of_row", slot_of_row)
    shapes = {
        "d_pre": pre,
        "weighted_hidden": ArraySpec(operands.d_hidden.shape, pre.dtype),
        "d_weight": ArraySpec((slots,), "float32"),
    }
    for name in outputs:
        builder.output(name, shapes[name])
    if not target.compiled:
        builder.sums("d_weight: NumPy's pairwise sum over d_ff, fp32")
        constants = {"activation": activation, "order": order, "outputs": outputs}
        builder.reference("backward_activation:expert_activation_backward", present, constants, outputs)
        return builder.build()
    block_m, block_n = _row_tile(width, target)
    builder.sums(
        f"d_weight: d_ff in {block_n} partial sums in order, then a tree over them, fp32; then the bias product"
    )
    if slot_of_row is not None:
        for name in outputs:
            if name != "d_weight":
                _zero_rows(builder, name, shapes[name])
    layout = "halves" if activation.gate_layout == "separate" else activation.gate_layout
    wanted = {name: Pointer(name) if name in outputs else Constant(None) for name in EXPERT_GRADIENTS}
    builder.launch(
        "activation_backward:expert_activation_backward",
        (-(-slots // block_m),),
        {
            **{
                field.name: optional(field.name, getattr(operands, field.name))
                for field in dataclasses.fields(operands)
            },
            **wanted,
            "num_slots": Scalar(slots),
            "num_rows": Scalar(pre.shape[0]),
            "WIDTH": Constant(width),
            "BY_ROW": Constant(order == "row"),
            "GATE_LAYOUT": Constant(layout),
            **_function(activation),
            "BLOCK_M": Constant(block_m),
            "BLOCK_N": Constant(block_n),
        },
    )
    return builder.build()


def _zero_rows(builder: PlanBuilder, name: str, spec: ArraySpec) -> None:
    """Zero the rows that slot_of_row marks as padding."""
    rows, width = spec.shape
    block_m, block_n = elementwise_tile(width, builder.target)
    builder.launch(
        "reduction:zero_rows",
        (-(-rows // block_m),),
        {
            "markers": Pointer("slot_of_row"),
            "y": Pointer(name),
            "num_rows": Scalar(rows),
            "WIDTH": Constant(width),
            "BLOCK_M": Constant(block_m),
            "BLOCK_N": Constant(block_n),
        },
    )
