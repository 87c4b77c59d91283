"""Plans the activation's backward, as an op and between the experts' two matmuls."""

from __future__ import annotations

import dataclasses

from moe_core.base import ArraySpec, Target, dtypes, keep_plans, require_spec, row_stride
from moe_core.base.sizes import elementwise_tile
from moe_core.errors import InvalidInput
from moe_core.ops.activation.forward import check_input, function_constants, input_constants
from moe_core.ops.activation.kernels import backward as kernels
from moe_core.plan import LaunchPlan, PlanBuilder, Role, declare_kernel, passed
from moe_core.specs import Activation
from moe_core.specs.operands import ExpertActivationOperands, named_arrays

ACTIVATION_BACKWARD = declare_kernel(kernels.activation_backward)
EXPERT_ACTIVATION_BACKWARD = declare_kernel(kernels.expert_activation_backward)

EXPERT_GRADIENTS = ("d_pre", "weighted_hidden", "d_weight")
#: Elements of a tile of whole rows (8 per thread; more registers leave fewer loads in flight), and its columns, wide
#: first.
_ELEMENTS = {"gpu": 1024, "interpreter": 65536}
_COLUMNS = {"gpu": (512, 256, 128), "interpreter": (1024, 32)}


@keep_plans
def plan_activation_backward(
    d_y: ArraySpec, x: ArraySpec, activation: Activation, target: Target, *, up: ArraySpec | None = None
) -> LaunchPlan:
    """d_x (and d_up) of y = activation(x, up) from d_y: fp32, one cast to the dtype of x. Arrays: as in
    `plan_activation`. Outputs, dense: d_x, [d_up]."""
    width = check_input(x, up, activation)
    rows = x.shape[0]
    require_spec("d_y", d_y, (rows, width), dtypes.MATMUL_DTYPES, contiguous=False)
    d_y_stride = row_stride("d_y", d_y)
    builder = PlanBuilder("activation_backward", target)
    inputs = builder.inputs({"d_y": d_y, "x": x, "up": up})
    outputs = [builder.output("d_x", ArraySpec(x.shape, x.dtype))]
    if up is not None:
        outputs.append(builder.output("d_up", ArraySpec((rows, width), x.dtype)))
    if not target.compiled:
        constants = {"activation": activation}
        from moe_core.ops.activation import reference as twins

        return builder.reference(twins.activation_backward, inputs, constants, outputs)
    block_m, block_n = elementwise_tile(width, target)
    arguments = builder.pointers("d_y", "x", "up", "d_x", "d_up")
    arguments |= passed(num_rows=rows, WIDTH=width, D_Y_STRIDE=d_y_stride)
    arguments |= input_constants(x, up, activation) | passed(BLOCK_M=block_m, BLOCK_N=block_n)
    builder.launch(ACTIVATION_BACKWARD, (-(-rows // block_m), -(-width // block_n)), arguments)
    return builder.build()


def _row_tile(width: int, target: Target) -> tuple[int, int]:
    padding = {columns: -(-width // columns) * columns - width for columns in _COLUMNS[target.engine]}
    columns = next((one for one in padding if 8 * padding[one] <= width), min(padding, key=lambda one: padding[one]))
    return _ELEMENTS[target.engine] // columns, columns


def _validate(
    operands: ExpertActivationOperands, activation: Activation, slot_of_row: ArraySpec | None
) -> tuple[int, int]:
    pre, row_of_slot = operands.pre, operands.row_of_slot
    require_spec("d_hidden", operands.d_hidden, ("num_rows", "d_ff"), dtypes.MATMUL_DTYPES)
    rows, width = operands.d_hidden.shape
    require_spec("pre", pre, (rows, activation.input_width(width)), dtypes.MATMUL_DTYPES)
    slots = rows
    if row_of_slot is not None:
        require_spec("row_of_slot", row_of_slot, ("num_tokens * top_k",), "int32")
        slots = row_of_slot.shape[0]
    if slot_of_row is not None:
        require_spec("slot_of_row", slot_of_row, (rows,), "int32")
    if (slot_of_row is None) != (row_of_slot is None):
        raise InvalidInput(
            f"slot_of_row must be given if row_of_slot is, and else None, got {slot_of_row}; pass both or neither"
        )
    if operands.row_weight is not None:
        weight: ArraySpec = operands.row_weight
        require_spec("row_weight", weight, ("num_slots",) if weight.rank == 1 else ("num_tokens", "top_k"), "float32")
        if weight.size != slots:
            raise InvalidInput(f"row_weight must hold {slots} slots, got {weight.shape}; pass a weight for every slot")
    if operands.bias_product is not None:
        require_spec("bias_product", operands.bias_product, (slots,), "float32")
    return width, slots


@keep_plans
def plan_expert_activation_backward(
    operands: ExpertActivationOperands,
    activation: Activation,
    target: Target,
    *,
    outputs: tuple[str, ...] = EXPERT_GRADIENTS,
    slot_of_row: ArraySpec | None = None,
) -> LaunchPlan:
    """Plan `expert_activation_backward` of the reference. operands: dense ArraySpecs. Gate layout `separate` is stored
    like `halves`. The row of a slot is row_of_slot[slot], or the slot without row_of_slot.

    outputs: of d_pre `[R, 2F]` and weighted_hidden `[R, F]` in the dtype of pre and d_weight fp32 `[T * K]`; d_pre
    always. A slot without a row (-1) has d_weight 0 and is not read.

    slot_of_row int32 `[R]`, with row_of_slot: programs walk along rows, since an owner among ranks has few. Rows of no
    slot stay unwritten (the reference engine writes zeros).

    Inputs: operands, [slot_of_row].
    """
    width, slots = _validate(operands, activation, slot_of_row)
    if "d_pre" not in outputs or not set(outputs) <= set(EXPERT_GRADIENTS) or len(set(outputs)) != len(outputs):
        raise InvalidInput(f"outputs must be d_pre and any of {EXPERT_GRADIENTS}, got {outputs}; name each once")
    if operands.bias_product is not None and "d_weight" not in outputs:
        raise InvalidInput("bias_product must be None where d_weight is no output, got an array; leave it out")
    pre: ArraySpec = operands.pre
    builder = PlanBuilder("expert_activation_backward", target)
    present = builder.inputs(dict(named_arrays(operands)))
    builder.inputs({"slot_of_row": slot_of_row})
    shapes = {
        "d_pre": pre,
        "weighted_hidden": ArraySpec(operands.d_hidden.shape, pre.dtype),
        "d_weight": ArraySpec((slots,), "float32"),
    }
    roles = {"weighted_hidden": Role.ROWS, "d_weight": Role.D_ROW_WEIGHT}
    for name in outputs:
        builder.output(name, shapes[name], roles.get(name))
    if not target.compiled:
        builder.sums("d_weight: NumPy's pairwise sum over d_ff, fp32")
        options = {"activation": activation, "outputs": outputs}
        from moe_core.ops.activation import reference as twins

        return builder.reference(twins.expert_activation_backward_plan, present, options, outputs)
    block_m, block_n = _row_tile(width, target)
    builder.sums(
        f"d_weight: d_ff in {block_n} partial sums in order, then a tree over them, fp32; then the bias product"
    )
    layout = "halves" if activation.gate_layout == "separate" else activation.gate_layout
    names = *(field.name for field in dataclasses.fields(operands)), "slot_of_row", *EXPERT_GRADIENTS
    arguments = builder.pointers(*names)
    arguments |= passed(num_slots=slots, num_rows=pre.shape[0], WIDTH=width, GATE_LAYOUT=layout)
    arguments |= function_constants(activation) | passed(BLOCK_M=block_m, BLOCK_N=block_n)
    numbers = slots if slot_of_row is None else max(slots, pre.shape[0])
    builder.launch(EXPERT_ACTIVATION_BACKWARD, (-(-numbers // block_m),), arguments)
    return builder.build()
