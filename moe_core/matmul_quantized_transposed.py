"""Planning of the grouped matmul with a quantised weight read the other way: gradients through frozen weights."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from moe_core import dtypes
from moe_core.activation import row_stride
from moe_core.arrays import ArraySpec, require_spec
from moe_core.errors import InvalidInput, Unsupported
from moe_core.formats import Format, QuantizedTensor
from moe_core.matmul_ogs import LAYOUT_INPUTS, zero_rows
from moe_core.matmul_operands import quantized_operands, require_like, require_weight, why_prepared
from moe_core.operands import MatmulOperands, named_arrays
from moe_core.plan import Argument, Constant, LaunchPlan, PlanBuilder, Pointer, Scalar
from moe_core.quantized_tiles import FAMILY
from moe_core.routing import plan_schedule
from moe_core.specs import INT32_LIMIT, LayoutSpec, MatmulSpec, MatmulTuning
from moe_core.target import Target
from moe_core.tile_choice import TileChoice
from moe_core.tuning import TileConfig, shared_limit

#: Rows per expert that one configuration for every batch is chosen for.
_INVARIANT_ROWS = 64.0


@functools.lru_cache(maxsize=4096)
def plan_matmul_quantized_transposed(
    operands: MatmulOperands,
    layout: LayoutSpec | None,
    spec: MatmulSpec,
    target: Target,
    *,
    composed: bool = False,
) -> LaunchPlan:
    """`y[scatter(row)] = cast(x[gather(row)] @ dequantised(weight[expert])^T)` for every row of the layout.

    operands: of ArraySpecs, as the forward of `plan_matmul_ogs` has them with these exceptions: x is the gradient of
    its result, `[*, N]` in any matmul dtype, and y `[*, D]`; with `up` x is `[*, 2N]`, the gate's columns first, and
    y = x[:, :N] @ weight^T + x[:, N:] @ up^T, one fp32 sum. Only x, weight, up and layer are there. The weight is
    (code - zero point) * scale in fp32, cast to the dtype of x. spec.weight_layout is the weight's own; spec.tuning:
    batch_invariant, or a config of the family `quantized`; gather and scatter are those of this product.

    Inputs: x, the weights' arrays, [layer], group_sizes `[E]`, group_start `[E + 1]`, slot_of_row `[capacity]`, then
    composed: `schedule` of the config's block_m, and rows that no expert writes are left unwritten; else they become
    exact zeros, and for scatter `slot` row_of_slot `[T * K]` is an input. Output: y. Raises InvalidInput, Unsupported.
    """
    rows, d, n = _validate(operands, layout, spec)
    builder = PlanBuilder("matmul_quantized_transposed", target)
    present = {name: builder.input(name, array) for name, array in named_arrays(operands)}
    if layout is not None:
        sizes = (layout.num_experts, layout.num_experts + 1, layout.capacity)
        for name, size in zip(LAYOUT_INPUTS, sizes, strict=True):
            present[name] = builder.input(name, ArraySpec((size,), "int32"))
    out_rows = layout.num_slots if layout is not None and spec.scatter == "slot" else rows
    y = ArraySpec((out_rows, n), spec.out_dtype or operands.x.dtype)
    choice = choose_transposed_tile(operands, layout, spec, target)
    if choice is None:
        builder.output("y", y)
        tensors = tuple((name, tensor.spec) for name, tensor in quantized_operands(operands).items())
        constants: dict[str, Any] = {"layout": layout, "spec": spec, "tensors": tensors}
        builder.reference("backward_matmul:quantized_input_gradient", present, constants, ("y",))
        builder.sums("reference: float32 BLAS over the whole reduction axis of dequantised weights")
        return builder.build()
    if layout is not None:
        schedule = ArraySpec((layout.max_blocks(choice.config.block_m), 2), "int32")
        if composed:
            builder.input("schedule", schedule)
        else:
            builder.scratch("schedule", schedule)
            bindings = {"group_sizes": "group_sizes", "schedule": "schedule"}
            builder.call(plan_schedule(layout, choice.config.block_m, target), "schedule", bindings)
    builder.output("y", y)
    if layout is not None and not composed:
        markers = "slot_of_row"
        if spec.scatter == "slot":
            markers = builder.input("row_of_slot", ArraySpec((layout.num_slots,), "int32"))
        zero_rows(builder, markers, "y")
    _launch(builder, operands, layout, spec, choice.config, (rows, d, n))
    builder.note(f"{choice.config} for {d} x {n} of {operands.weight.format}; {choice.source}")
    return builder.build()


def _validate(operands: MatmulOperands, layout: LayoutSpec | None, spec: MatmulSpec) -> tuple[int, int, int]:
    """(rows of the layout, length of the sum, columns of the result)."""
    x, weight, layer = operands.x, operands.weight, operands.layer
    if isinstance(x, QuantizedTensor) or not isinstance(weight, QuantizedTensor):
        raise Unsupported(
            f"weight must be quantised and x plain for a product with decoded weights, got {weight} and {x}; plan "
            "matmul_ogs with the other weight_layout"
        )
    for name in ("bias", "up_bias", "row_weight"):
        if getattr(operands, name) is not None:
            raise InvalidInput(f"{name} must be None in a product with transposed weights, got an array; leave it out")
    if spec.activation is not None:
        raise InvalidInput(f"activation must be None with transposed weights, got {spec.activation}; leave it out")
    if spec.fast_accumulate:
        raise InvalidInput("fast_accumulate must be False where weights are decoded, got True; leave it out")
    require_weight("weight", weight, spec.weight_layout)
    prepared = why_prepared({"weight": weight})
    if prepared is not None:
        raise Unsupported(prepared)
    if operands.up is not None:
        require_like("up", operands.up, "weight", weight)
    shape = weight.shape
    lead = ("num_layers",) * (layer is not None) + ((layout.num_experts,) if layout is not None else ())
    decoded = ArraySpec(shape, "float32")
    require_spec("weight", decoded, (*lead, "d", "n"), "float32")
    d, n = shape[-2:] if spec.weight_layout == "out_in" else shape[:-3:-1]
    if 0 in shape:
        raise InvalidInput(f"weight must have no empty axis, got {shape}; pass the full array")
    if d * n >= INT32_LIMIT:
        raise Unsupported(f"one expert's weight must have fewer than 2**31 elements, got {d} x {n}")
    if layer is not None:
        require_spec("layer", layer, (1,), "int32")
    columns = d * (1 if operands.up is None else 2)
    if layout is None:
        if (spec.gather, spec.scatter) != ("row", "row"):
            raise InvalidInput(
                f"gather and scatter must be 'row' without a layout, got {spec.gather!r} and {spec.scatter!r}; pass a "
                "layout"
            )
        expected: int | str = "num_rows"
    else:
        expected = {"row": layout.capacity, "token": layout.num_tokens, "slot": layout.num_slots}[spec.gather]
    x_rows = require_spec("x", x, (expected, columns), dtypes.MATMUL_DTYPES, contiguous=False).shape[0]
    return (x_rows if layout is None else layout.capacity), d, n


def choose_transposed_tile(
    operands: MatmulOperands, layout: LayoutSpec | None, spec: MatmulSpec, target: Target
) -> TileChoice | None:
    """What `plan_matmul_quantized_transposed` runs; None on the reference target. Raises InvalidInput."""
    if not target.compiled:
        return None
    tuning = spec.tuning or MatmulTuning()
    weight: QuantizedTensor = operands.weight
    if tuning.config is not None:
        reason = why_illegal(tuning.config, operands.x.dtype, weight.format, target)
        if reason is not None:
            raise InvalidInput(
                f"tuning.config must be legal on {target}, got {tuning.config}: {reason}; give another, or None for "
                "one that is chosen"
            )
        return TileChoice(tuning.config, "given for this call")
    slots, groups = (operands.x.shape[0], 1) if layout is None else (layout.num_slots, layout.num_experts)
    rows = _INVARIANT_ROWS if tuning.batch_invariant else slots / max(1, min(groups, slots))
    config = _heuristics(rows, operands.x.dtype, weight.format, target)
    d, n = weight.shape[-2:] if weight.layout == "out_in" else weight.shape[:-3:-1]
    block_n, block_k = (
        min(side, max(16, 1 << (max(size, 1) - 1).bit_length()))
        for side, size in ((config.block_n, n), (config.block_k, d))
    )
    config = dataclasses.replace(config, block_n=block_n, block_k=block_k)
    while (reason := why_illegal(config, operands.x.dtype, weight.format, target)) is not None:
        # Only the pipeline's depth can be too much for shared memory.
        assert config.num_stages > 1, reason
        config = dataclasses.replace(config, num_stages=config.num_stages - 1)
    source = "batch invariant: the same for every number of rows" if tuning.batch_invariant else None
    return TileChoice(config, source or f"heuristics: {rows:.1f} rows per expert")


def why_illegal(config: TileConfig, dtype: str, weights: Format, target: Target) -> str | None:
    """The reason a configuration cannot run a product of rows in dtype on the target, or None."""
    if config.family != FAMILY:
        return f"family must be {FAMILY!r} for quantised weights, got {config.family!r}"
    for name in ("block_m", "block_n", "block_k"):
        side = getattr(config, name)
        if side < 16 or side & (side - 1):
            return f"{name} must be a power of two of at least 16 (tensor-core tile), got {side}"
    if config.num_warps not in (4, 8, 16) and target.kind == "cuda":
        return f"num_warps must be 4, 8 or 16 (whole warp groups), got {config.num_warps}"
    if config.num_stages < 1 or config.group_m < 1:
        return f"num_stages and group_m must be at least 1, got {config.num_stages} and {config.group_m}"
    if target.kind != "cuda":
        return None
    width = dtypes.itemsize(dtype)
    stage = config.block_k * (config.block_m * 8 * width + config.block_n * weights.bits_per_element) // 8
    # The decoded tile goes through shared memory too.
    needed = stage * config.num_stages + config.block_k * config.block_n * width
    if needed > shared_limit(target.arch):
        return f"{needed} bytes exceed the {shared_limit(target.arch)} bytes of shared memory of sm_{target.arch}"
    accumulators = config.block_m * config.block_n // (32 * config.num_warps)
    if accumulators > 128:
        return f"{accumulators} accumulator registers per thread leave too few of 255 for decoded weights"
    return None


def _heuristics(rows: float, dtype: str, weights: Format, target: Target) -> TileConfig:
    """By rows per expert: many rows share what is decoded."""
    if target.kind != "cuda":
        return TileConfig(32, 64, 64, 4, 1, family=FAMILY)
    if dtype == "float32":
        return TileConfig(16 if rows <= 16 else 32, 64, 32, 4, 2, family=FAMILY)
    # Zero points and fp32 scales of small groups beside 64 decoded weight rows would not fit into the registers.
    block_k = 32 if weights.own_element.max_code is not None else 64
    if rows <= 32:
        return TileConfig(16 if rows <= 16 else 32, 128, block_k, 4, 4, family=FAMILY)
    if rows <= 64:
        return TileConfig(64, 128, block_k, 4, 3, family=FAMILY)
    return TileConfig(128, 128, block_k, 8, 3, family=FAMILY)


def _launch(
    builder: PlanBuilder,
    operands: MatmulOperands,
    layout: LayoutSpec | None,
    spec: MatmulSpec,
    config: TileConfig,
    sizes: tuple[int, int, int],
) -> None:
    """sizes: as `_validate` gives them."""
    weight: QuantizedTensor = operands.weight
    x, weights, (num_rows, d, n) = operands.x, weight.format, sizes
    num_blocks = layout.max_blocks(config.block_m) if layout is not None else -(-num_rows // config.block_m)

    def optional(name: str) -> Pointer | Constant:
        return Pointer(name) if builder.has(name) else Constant(None)

    def strides(prefix: str, name: str) -> dict[str, Argument]:
        array = getattr(weight, name)
        if array is None:
            return {f"{prefix}_{part}": Constant(0) for part in ("MATRIX", "N", "K")}
        n_axis, k_axis = (-2, -1) if weight.layout == "out_in" else (-1, -2)
        steps = {"MATRIX": array.shape[-2] * array.shape[-1], "N": array.stride[n_axis], "K": array.stride[k_axis]}
        return {f"{prefix}_{part}": Constant(value) for part, value in steps.items()}

    arguments: dict[str, Argument] = {
        "x": Pointer("x"),
        "weight": Pointer("weight.values"),
        "scales": Pointer("weight.scales"),
        "zero_points": optional("weight.zero_points"),
        "up": optional("up.values"),
        "up_scales": optional("up.scales"),
        "up_zero_points": optional("up.zero_points"),
        **{name: optional(name) for name in ("layer", *LAYOUT_INPUTS, "schedule")},
        "y": Pointer("y"),
        "num_blocks": Scalar(num_blocks),
        "num_rows": Scalar(num_rows),
        "num_slots": Scalar(layout.num_slots if layout is not None else num_rows),
        "D": Constant(d),
        "N": Constant(n),
        "NUM_EXPERTS": Constant(layout.num_experts if layout is not None else 1),
        "NUM_LAYERS": Constant(weight.shape[0] if operands.layer is not None else 1),
        "X_STRIDE": Constant(row_stride("x", x)),
        "ELEMENT": Constant(weights.element),
        "GROUP_ROWS": Constant(weights.group_rows or 0),
        "GROUP": Constant(weights.group_columns or 0),
        **strides("VALUE", "values"),
        **strides("SCALE", "scales"),
        **strides("POINT", "zero_points"),
        "TOP_K": Constant(layout.top_k if layout is not None else 1),
        "GATHER": Constant(spec.gather),
        "SCATTER": Constant(spec.scatter),
        "DOT": Constant(x.dtype),
        "INPUT_PRECISION": Constant("tf32" if spec.allow_tf32 and x.dtype == "float32" else "ieee"),
        "BLOCK_M": Constant(config.block_m),
        "BLOCK_N": Constant(config.block_n),
        "BLOCK_K": Constant(config.block_k),
        "GROUP_M": Constant(config.group_m),
    }
    kernel = "matmul_quantized_transposed:matmul_quantized_transposed"
    grid = num_blocks * -(-n // config.block_n)
    builder.launch(kernel, (grid,), arguments, config.num_warps, config.num_stages)
    builder.sums(f"rows of weights in blocks of {config.block_k}, in order, of {x.dtype} products; no split")
