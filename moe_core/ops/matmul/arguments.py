"""Plan parts and launch arguments that all products share."""

from __future__ import annotations

from moe_core.base import ArraySpec, padded
from moe_core.formats import QuantizedTensor
from moe_core.ops.common.zero_rows import launch_zero_rows
from moe_core.ops.matmul.problem import MatmulProblem
from moe_core.ops.routing.layout import ZERO_COUNTERS
from moe_core.plan import Argument, Constant, PlanBuilder, Pointer, passed
from moe_core.specs import LAYOUT_INPUTS, LayoutSpec, MatmulOperands, MatmulSpec, TileConfig

SCHEDULED_INPUTS = (*LAYOUT_INPUTS, "schedule")


def zero_counters(builder: PlanBuilder, name: str = "tile_counters") -> str:
    """Add tile counters (int32 `[2]`, one per product) and the launch that clears them."""
    builder.scratch(name, ArraySpec((2,), "int32"))
    builder.launch(ZERO_COUNTERS, (1,), passed(counters=name, COUNT=2), 1, 1)
    return name


def fill_absent(builder: PlanBuilder, layout: LayoutSpec, spec: MatmulSpec) -> None:
    markers = "slot_of_row"
    if spec.scatter == "slot":
        markers = builder.input("row_of_slot", ArraySpec((layout.num_slots,), "int32"))
    columns = min(1024, padded(builder.spec("y").shape[1]))
    launch_zero_rows(builder, markers, "y", (64 if builder.target.interpreted else 8, columns))


def row_counts(problem: MatmulProblem, config: TileConfig) -> dict[str, Argument]:
    rows, layout = problem.sizes.rows, problem.layout
    num_slots = layout.num_slots if layout is not None else rows
    return passed(num_blocks=problem.num_blocks(config), num_rows=rows, num_slots=num_slots)


def result(builder: PlanBuilder, name: str = "y") -> Pointer | Constant:
    """The buffer y, or the addresses of rows."""
    return builder.optional("results_at" if builder.has("results_at") else name)


def size_constants(problem: MatmulProblem) -> dict[str, Argument]:
    sizes = problem.sizes
    counts = passed(NUM_EXPERTS=problem.groups, NUM_LAYERS=sizes.num_layers)
    return passed(D=sizes.d, N=sizes.n, WEIGHT_N=sizes.weight_n) | counts


def bias_strides(operands: MatmulOperands) -> dict[str, Argument]:
    """Elements between layers, 0 if not stacked."""
    stacked, biases = operands.layer_index is not None, (operands.bias, operands.up_bias)
    weight_stride, up_stride = (bias.stride[0] if bias is not None and stacked else 0 for bias in biases)
    return passed(BIAS_LAYER_STRIDE=weight_stride, UP_BIAS_LAYER_STRIDE=up_stride)


def fused_constants(problem: MatmulProblem) -> dict[str, Argument]:
    """TOP_K, gather, scatter (or the dtype of addressed rows) and the activation, in the kernels' order."""
    spec, layout, activation = problem.spec, problem.layout, problem.spec.activation
    scatter = spec.scatter if not problem.addressed else spec.out_dtype or problem.dtype
    places = passed(TOP_K=layout.top_k if layout is not None else 1, GATHER=spec.gather, SCATTER=scatter)
    name, alpha, limit = (activation.name, activation.alpha, activation.limit) if activation else (None,) * 3
    return places | passed(GATE_LAYOUT=problem.gate_layout, ACTIVATION=name, ALPHA=alpha, LIMIT=limit)


def block_constants(config: TileConfig) -> dict[str, Argument]:
    sides = passed(BLOCK_M=config.block_m, BLOCK_N=config.block_n, BLOCK_K=config.block_k)
    return sides | passed(GROUP_M=config.group_m)


def quantized_pointers(builder: PlanBuilder) -> dict[str, Argument]:
    names = ("weight", "scales", "zero_points", "up", "up_scales", "up_zero_points")
    buffers = (f"{side}.{part}" for side in ("weight", "up") for part in ("values", "scales", "zero_points"))
    return {name: builder.optional(buffer) for name, buffer in zip(names, buffers, strict=True)}


def format_constants(weight: QuantizedTensor) -> dict[str, Argument]:
    """A weight's element, and the rows and columns of a group (0: the whole axis)."""
    format = weight.format
    return passed(ELEMENT=format.element, GROUP_ROWS=format.group_rows or 0, GROUP=format.group_columns or 0)


def quantized_strides(weight: QuantizedTensor) -> dict[str, Argument]:
    """Strides of codes, scales and zero points, in elements: matrices, outputs, reduction columns."""
    n_axis, k_axis = (-2, -1) if weight.layout == "out_in" else (-1, -2)
    strides: dict[str, Argument] = {}
    for prefix, array in (("VALUE", weight.values), ("SCALE", weight.scales), ("POINT", weight.zero_points)):
        steps = (0, 0, 0)
        if array is not None:
            steps = (array.shape[-2] * array.shape[-1], array.stride[n_axis], array.stride[k_axis])
        strides |= {f"{prefix}_{part}": Constant(step) for part, step in zip(("MATRIX", "N", "K"), steps, strict=True)}
    return strides
