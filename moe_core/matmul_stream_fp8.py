"""Planning of the grouped matmul of e4m3 with e4m3 for few rows per expert (`kernels.stream_fp8`).

The kernel quantises rows of x itself: it takes the place of a quantisation and a product in a composed plan.
"""

from __future__ import annotations

import functools

from moe_core.activation import row_stride
from moe_core.arrays import ArraySpec
from moe_core.errors import InvalidInput
from moe_core.formats import Format, QuantizedTensor
from moe_core.matmul_mixed import block_width
from moe_core.matmul_operands import check_operands, fused_constants
from moe_core.operands import MatmulOperands, named_arrays
from moe_core.plan import Argument, Constant, LaunchPlan, PlanBuilder, Pointer, Scalar
from moe_core.specs import INT32_LIMIT, LayoutSpec, MatmulSpec, MatmulTuning
from moe_core.target import Target
from moe_core.tile_choice import TileChoice
from moe_core.tuning import TileConfig

FAMILY = "stream"
#: Columns, and weight rows, that share a scale, and columns of a step.
_GROUP = 128
#: Rows of a block of the grid, as many as one instruction takes, and weight rows.
_HEIGHT, _WEIGHT_ROWS = 8, 64
#: Codes in the 16 bytes that a thread loads at a time, and numbers of a row.
_CODES, _NUMBERS = 16, 8
#: Steps that are under way, as many as there are registers for.
_CHUNKS = (2, 1)
#: Registers of a thread, so that four blocks share a multiprocessor.
_REGISTERS = 128
#: Mean rows per expert up to which the kernel is taken: with more, experts with more than 8 rows stream twice.
_MOST_ROWS = 4


def why_not_stream_fp8(
    operands: MatmulOperands, rows: Format, n: int, layout: LayoutSpec, spec: MatmulSpec, target: Target
) -> str:
    """The reason the kernel cannot run a product of (valid) operands, empty if it can.

    rows: the format that it quantises the plain rows to; n: output columns.
    """
    x, weight, activation = operands.x, operands.weight, spec.activation
    if target.kind != "cuda" or target.arch != 90:
        return f"it is for sm_90, got {target}"
    if not isinstance(weight, QuantizedTensor) or isinstance(x, QuantizedTensor):
        return f"it multiplies plain rows with codes, got {x} and {weight}"
    groups = (weight.format.group_rows, weight.format.group_columns)
    if weight.format.element != "e4m3" or weight.format.has_e8m0_scales or groups != (_GROUP, _GROUP):
        return f"its weights are e4m3 with fp32 scales of {_GROUP} x {_GROUP} blocks, got {weight.format}"
    if rows.element != "e4m3" or rows.has_e8m0_scales or (rows.group_rows, rows.group_columns) != (1, _GROUP):
        return f"its rows are e4m3 with fp32 scales of {_GROUP} columns, got {rows}"
    if weight.layout != "out_in" or operands.up is not None:
        return "its weights are one buffer, out_in"
    if x.dtype != "bfloat16" or spec.out_dtype != "bfloat16":
        return f"its rows are bfloat16, and so is y, got {x.dtype} and {spec.out_dtype}"
    if x.shape[1] % _CODES or row_stride("x", x) % _NUMBERS or n % _NUMBERS:
        return (
            f"rows of weights, x and y must start at multiples of 16 bytes, got {x.shape[1]} columns of x, "
            f"{row_stride('x', x)} elements from row to row, and {n} columns of y"
        )
    if activation is not None and activation.name == "gelu":
        return "gelu's erf does not fit into its registers"
    if weight.values.size // x.shape[1] >= INT32_LIMIT:
        return "rows of all weights must be fewer than 2**31"
    if layout.max_rows is not None:
        return "the batched form has blocks for rows that nothing fills"
    return ""


def why_illegal_stream_fp8(config: TileConfig, spec: MatmulSpec) -> str | None:
    """The reason a configuration of the family cannot run, or None."""
    wanted = [stream_fp8_config(spec, chunk) for chunk in _CHUNKS]
    if config not in wanted:
        return f"tiles of the stream family for fp8 are {' or '.join(map(str, wanted))}, got {config}"
    return None


def stream_fp8_config(spec: MatmulSpec, chunk: int = _CHUNKS[0]) -> TileConfig:
    """The configuration with so many steps under way."""
    return TileConfig(_HEIGHT, block_width(spec), chunk * _GROUP, 4, 2, 1, FAMILY)


def choose_stream_fp8(
    operands: MatmulOperands, rows: Format, n: int, layout: LayoutSpec, spec: MatmulSpec, target: Target, name: str
) -> TileChoice | None:
    """The configuration of a product that quantises its rows; None where other kernels compute it, after a launch that
    quantises them. name: of the override in spec.tuning. Raises InvalidInput where that is illegal."""
    tuning = spec.tuning or MatmulTuning()
    reason = why_not_stream_fp8(operands, rows, n, layout, spec, target)
    if tuning.config is not None:
        if tuning.config.family != FAMILY:
            return None
        reason = reason or why_illegal_stream_fp8(tuning.config, spec)
        if reason:
            raise InvalidInput(
                f"{name} must be legal on {target}, got {tuning.config}: {reason}; give another, or None for one that "
                "is chosen"
            )
        return TileChoice(tuning.config, "given for this call")
    mean = layout.num_slots / max(1, min(layout.num_experts, layout.num_slots))
    if reason or mean > _MOST_ROWS or tuning.batch_invariant:
        return None
    return TileChoice(stream_fp8_config(spec), f"heuristics: {mean:.1f} rows per expert, quantised on their way")


@functools.lru_cache(maxsize=4096)
def plan_stream_fp8(
    operands: MatmulOperands, checked: MatmulOperands, rows: Format, layout: LayoutSpec, spec: MatmulSpec,
    target: Target, choice: TileChoice,
) -> LaunchPlan:  # fmt: skip
    """`plan_quantize_rows`, then `matmul_ogs.plan_matmul_ogs` as a product of a composed plan, in one launch.

    Codes and scales are those of the two; sums are in another order. operands: with plain rows x, bf16; checked: the
    same with x in the format `rows`. Inputs: the operands, then group_sizes, group_start, slot_of_row and the schedule
    of 8 rows; output: y. For products that `choose_stream_fp8` has a choice for.
    """
    sizes = check_operands(checked, layout, spec, False)
    config = choice.config
    builder = PlanBuilder("stream_fp8", target)
    for name, array in named_arrays(operands):
        builder.input(name, array)
    experts = layout.num_experts
    shapes: dict[str, tuple[int, ...]] = {
        "group_sizes": (experts,),
        "group_start": (experts + 1,),
        "slot_of_row": (layout.capacity,),
    }
    shapes["schedule"] = (layout.max_blocks(config.block_m), 2)
    for name, shape in shapes.items():
        builder.input(name, ArraySpec(shape, "int32"))
    builder.output("y", ArraySpec((sizes.out_rows, sizes.n), spec.out_dtype or "bfloat16"))
    weight, bias = operands.weight, operands.bias
    stacked = operands.layer is not None
    blocks = -(-sizes.n // config.block_n)

    def optional(name: str) -> Pointer | Constant:
        return Pointer(name) if builder.has(name) else Constant(None)

    arguments: dict[str, Argument] = {
        "x": Pointer("x"),
        "weight": Pointer("weight.values"),
        "scales": Pointer("weight.scales"),
        **{name: optional(name) for name in ("bias", "row_weight", "layer")},
        **{name: Pointer(name) for name in (*shapes, "y")},
        "num_rows": Scalar(layout.capacity),
        "num_slots": Scalar(layout.num_slots),
        "D": Constant(sizes.d),
        "N": Constant(sizes.n),
        "WEIGHT_N": Constant(sizes.weight_n),
        "BLOCKS": Constant(blocks),
        "NUM_EXPERTS": Constant(experts),
        "NUM_LAYERS": Constant(weight.shape[0] if stacked else 1),
        "X_STRIDE": Constant(row_stride("x", operands.x)),
        "BIAS_LAYER_STRIDE": Constant(bias.stride[0] if bias is not None and stacked else 0),
        "TOP_K": Constant(layout.top_k),
        **fused_constants(spec),
        "RULE": Constant(rows.scale_rule),
        "LARGEST": Constant(float(rows.own_element.largest)),
        "BLOCK_M": Constant(config.block_m),
        "CHUNK": Constant(config.block_k // _GROUP),
        "REGISTERS": Constant(_REGISTERS),
        "OVERLAP": Constant(None),
    }
    grid = layout.max_blocks(config.block_m) * blocks
    builder.launch("stream_fp8:matmul_stream_fp8", (grid,), arguments, config.num_warps, 1)
    builder.sums(
        f"k in blocks of {_GROUP}, in order, each the sum of its halves times both scales, fp32; a half in blocks of "
        "32 columns, mma.sync of 16 weight rows and 8 tokens"
    )
    builder.note(f"{config} for {layout.num_slots} rows, {experts} experts, {sizes.d} x {sizes.n}; {choice.source}")
    builder.note(f"rows quantised to {rows} by the product's kernel")
    return builder.build()
