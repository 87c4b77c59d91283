"""Planning of the ragged grouped matmul with gather, scatter and a fused epilogue."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

from moe_core.activation import row_stride
from moe_core.arrays import ArraySpec
from moe_core.errors import InvalidInput, Unsupported
from moe_core.formats import QuantizedTensor
from moe_core.matmul_hopper import launch_hopper, why_not_hopper, zero_counters
from moe_core.matmul_hopper_fp8 import launch_hopper_fp8
from moe_core.matmul_mixed import FAMILY as MIXED
from moe_core.matmul_mixed import launch_mixed
from moe_core.matmul_operands import MatmulSizes, check_operands, quantized_operands
from moe_core.matmul_quantized import launch_quantized
from moe_core.matmul_stream import FAMILY as STREAM
from moe_core.matmul_stream import launch_stream
from moe_core.operands import MatmulOperands, named_arrays
from moe_core.plan import Constant, LaunchPlan, PlanBuilder, Pointer, Scalar
from moe_core.quantized_tiles import choose_quantized_tile, why_not_quantized
from moe_core.routing import plan_schedule
from moe_core.specs import LayoutSpec, MatmulSpec, MatmulTuning
from moe_core.target import Target
from moe_core.tile_choice import TileChoice, choose_tile, without_tall_blocks
from moe_core.tuning import MatmulProblem, TileConfig, require_legal

#: A weight layout read the other way round: the product with the transposed matrix.
TRANSPOSED = {"in_out": "out_in", "out_in": "in_out"}
#: The layout's arrays a matmul reads, in plan order.
LAYOUT_INPUTS = ("group_sizes", "group_start", "slot_of_row")


def matmul_problem(
    x: ArraySpec,
    n: int,
    layout: LayoutSpec | None,
    spec: MatmulSpec,
    joined: bool = False,
) -> MatmulProblem:
    """The sizes a configuration is chosen by, whatever the product stores; joined as in `plan_matmul_ogs`."""
    rows = x.shape[0] if layout is None else layout.num_slots
    groups = 1 if layout is None else layout.num_experts
    gated = spec.activation is not None and spec.activation.gated
    reason = "its reduction goes over two weights" if joined else why_not_hopper(x, n, layout, spec)
    return MatmulProblem(rows, groups, x.shape[1], n, x.dtype, 2 if gated else 1, spec.weight_layout, reason)


def product_tile(
    operands: MatmulOperands,
    n: int,
    layout: LayoutSpec | None,
    spec: MatmulSpec,
    target: Target,
    *,
    name: str = "tuning.config",
    joined: bool = False,
    outputs: tuple[str, ...] = ("y",),
) -> TileChoice | None:
    """What `plan_matmul_ogs` computes a product with, n output columns wide; None where there are no tiles.

    name: of the override in spec.tuning, for messages. Raises InvalidInput for one that is illegal, and Unsupported
    where quantised operands have no kernel on the target.
    """
    if not quantized_operands(operands):
        problem = matmul_problem(operands.x, n, layout, spec, joined)
        choice = choose_tile(problem, target, spec.tuning, name)
        if "pre" in outputs:
            # That alone is a backward's recomputation, whose forward may have had the configuration given for the call.
            choice = without_tall_blocks(choice, problem, target, given=outputs == ("pre",))
        return choice if target.compiled else None
    if not target.compiled:
        return None
    reason = why_not_quantized(operands, layout, spec, target)
    if reason is not None:
        raise Unsupported(f"quantised operands need a kernel for {target}, and there is none: {reason}")
    return choose_quantized_tile(operands, layout, spec, target, name)


def _tile(
    operands: MatmulOperands,
    n: int,
    layout: LayoutSpec | None,
    spec: MatmulSpec,
    target: Target,
    config: TileConfig | None,
    joined: bool,
    outputs: tuple[str, ...],
) -> TileChoice | None:
    """`product_tile`, or the caller's configuration."""
    if config is None:
        return product_tile(operands, n, layout, spec, target, joined=joined, outputs=outputs)
    if quantized_operands(operands):
        spec = dataclasses.replace(spec, tuning=MatmulTuning(config))
        return product_tile(operands, n, layout, spec, target, name="config")
    config = require_legal(config, matmul_problem(operands.x, n, layout, spec, joined), target)
    return TileChoice(config, "given by the caller") if target.compiled else None


@functools.lru_cache(maxsize=4096)
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

    operands: a bundle of ArraySpecs (shapes in MatmulOperands), weights and x possibly `QuantizedTensor`s of them
    (what is computed then: docs/quantization.md). layout None = dense: x `[T, D]`, weight `[D, N]` or `[N, D]`.
    config: None = chosen by `product_tile`, which follows spec.tuning. Rows no expert writes become exact zeros.
    stage: 0 or 1 as that product of a composed plan, which trusts its own layout, never reads rows that no expert
    writes (they are left unwritten) and brings two more inputs: the schedule of the config's block_m, and for the
    hopper family tile_counters int32 `[2]`, zeros. The reference engine has no tiles: it needs neither, and fills all.
    outputs: `y`, `pre` or both. pre is what the fused activation is applied to, cast to the dtype of x: `[rows of y,
    2N]` (ungated N), gate_layout `separate` as gate columns, then up; for composed and dense plans, in layout order.
    joined: x is twice as wide, and y = x[:, :D] @ weight + x[:, D:] @ up, one fp32 sum: of compiled targets only.
    A quantised x has no pre and quantised weights are not joined: `moe_core.matmul_quantized_transposed` is for these.
    Inputs: the operands given, then group_sizes `[E]`, group_start `[E + 1]`, slot_of_row `[capacity]`, [schedule],
    [tile_counters]. y: `[capacity, N]` (scatter `row`) or `[T * K, N]` (`slot`). Raises InvalidInput, Unsupported.
    """
    sizes = check_operands(operands, layout, spec, joined)
    quantized = quantized_operands(operands)
    if quantized and (joined or ("x" in quantized and outputs != ("y",))):
        raise Unsupported(
            f"outputs must be ('y',) with a quantised x, and joined False with any quantised operand, got {outputs} "
            f"and {joined} with {', '.join(quantized)} quantised; dequantise it"
        )
    if joined and not target.compiled:
        raise Unsupported(f"joined products are planned for compiled targets, got {target}; plan two products")
    if outputs != ("y",) and any(tensor.spec.tiling is not None for tensor in quantized.values()):
        raise Unsupported(f"outputs must be ('y',) with tiled weights, got {outputs}; restore the weights to train")
    _validate_outputs(outputs, operands, layout, spec, stage)
    builder = PlanBuilder("matmul_ogs", target)
    present = {name: builder.input(name, array) for name, array in named_arrays(operands)}
    if layout is not None:
        experts = layout.num_experts
        shapes = ((experts,), (experts + 1,), (layout.capacity,))
        for name, shape in zip(LAYOUT_INPUTS, shapes, strict=True):
            builder.input(name, ArraySpec(shape, "int32"))
    found = {"y": ArraySpec((sizes.out_rows, sizes.n), spec.out_dtype or operands.x.dtype)}
    if "pre" in outputs and spec.activation is not None:
        found["pre"] = ArraySpec((sizes.out_rows, spec.activation.input_width(sizes.n)), operands.x.dtype)
    choice = _tile(operands, sizes.n, layout, spec, target, config, joined, outputs)
    if choice is None:
        inputs = present | ({name: name for name in LAYOUT_INPUTS} if layout is not None else {})
        for name in outputs:
            builder.output(name, found[name])
        _add_reference(builder, inputs, quantized, layout, spec, outputs)
        return builder.build()

    config = choice.config
    num_blocks = -(-sizes.rows // config.block_m)
    if layout is not None:
        num_blocks = layout.max_blocks(config.block_m)
        schedule = ArraySpec((num_blocks, 2), "int32")
        if stage is not None:
            builder.input("schedule", schedule)
        else:
            builder.scratch("schedule", schedule)
            bindings = {"group_sizes": "group_sizes", "schedule": "schedule"}
            builder.call(plan_schedule(layout, config.block_m, target), "schedule", bindings)
        if config.counts_tiles:
            if stage is not None:
                builder.input("tile_counters", ArraySpec((2,), "int32"))
            else:
                zero_counters(builder)
    for name in outputs:
        builder.output(name, found[name])
    if stage is None and layout is not None:
        _fill_absent(builder, layout, spec)
    if config.family == STREAM and layout is not None:
        launch_stream(builder, operands, sizes.n, layout, spec, config)
    elif config.family == MIXED and layout is not None:
        launch_mixed(builder, operands, sizes.n, layout, spec, config, counter=stage or 0)
    elif config.family == "hopper" and layout is not None:
        counted = {"trusted": stage is not None, "counter": stage or 0}
        if quantized:
            launch_hopper_fp8(builder, operands, layout, spec, config, **counted)
        else:
            launch_hopper(builder, operands, layout, spec, config, **counted)
    elif quantized:
        launch_quantized(builder, operands, layout, spec, config)
    else:
        tiles = -(-sizes.n // config.block_n)
        arguments = _arguments(operands, layout, spec, sizes, config, num_blocks, outputs)
        builder.launch("matmul_ogs:matmul_ogs", (num_blocks * tiles,), arguments, config.num_warps, config.num_stages)
        builder.sums(f"k in blocks of {config.block_k}, in order, fp32 accumulator, one dot per block; no split")
    rows, groups = (operands.x.shape[0], 1) if layout is None else (layout.num_slots, layout.num_experts)
    builder.note(f"{config} for {rows} rows, {groups} experts, {operands.x.shape[1]} x {sizes.n}; {choice.source}")
    return builder.build()


def _add_reference(
    builder: PlanBuilder,
    inputs: dict[str, str],
    quantized: dict[str, QuantizedTensor],
    layout: LayoutSpec | None,
    spec: MatmulSpec,
    outputs: tuple[str, ...],
) -> None:
    """The NumPy twin in the place of launches."""
    constants: dict[str, Any] = {"layout": layout, "spec": spec}
    by_row = ", one row at a time" if spec.tuning is not None and spec.tuning.batch_invariant else ""
    if quantized:
        constants["tensors"] = tuple((name, tensor.spec) for name, tensor in quantized.items())
        constants |= {} if outputs == ("y",) else {"outputs": outputs}
        builder.reference("matmul:matmul_ogs_quantized", inputs, constants, outputs)
        builder.note(", ".join(f"{name} {tensor}" for name, tensor in quantized.items()))
        builder.sums(f"reference: float32 BLAS over every group of the reduction axis, in order{by_row}")
        return
    if outputs == ("y",):
        builder.reference("matmul:matmul_ogs", inputs, constants, outputs)
    else:
        builder.reference("matmul:matmul_ogs_keeping", inputs, constants | {"outputs": outputs}, outputs)
    builder.sums(f"reference: float32 BLAS over the whole reduction axis{by_row}")


def _validate_outputs(
    outputs: tuple[str, ...],
    operands: MatmulOperands,
    layout: LayoutSpec | None,
    spec: MatmulSpec,
    stage: int | None,
) -> None:
    if outputs not in (("y",), ("pre",), ("y", "pre")):
        raise InvalidInput(f"outputs must be ('y',), ('pre',) or ('y', 'pre'), got {outputs}; choose one of them")
    if outputs == ("y",):
        return
    if spec.activation is None or operands.row_weight is not None or spec.scatter != "row":
        raise InvalidInput(
            "outputs must be ('y',) without a fused activation, with row_weight and with scatter='slot', got "
            f"{outputs}; leave them out"
        )
    if layout is not None and stage is None:
        raise InvalidInput(f"outputs must be ('y',) outside of a composed plan, got {outputs}; pass stage")


def _fill_absent(builder: PlanBuilder, layout: LayoutSpec, spec: MatmulSpec) -> None:
    """Zero the output rows no expert writes: marked by slot_of_row, or by a slot's missing row."""
    markers = "slot_of_row"
    if spec.scatter == "slot":
        markers = builder.input("row_of_slot", ArraySpec((layout.num_slots,), "int32"))
    zero_rows(builder, markers, "y")


def zero_rows(builder: PlanBuilder, markers: str, y: str) -> None:
    """Zero the rows of the buffer y `[rows, columns]` whose entry in the buffer markers int32 `[rows]` is -1."""
    rows, width = builder.spec(y).shape
    columns = min(1024, 1 << (max(width, 16) - 1).bit_length())
    block_m = 64 if builder.target.kind == "interpreter" else 8
    builder.launch(
        "reduction:zero_rows",
        (-(-rows // block_m),),
        {
            "markers": Pointer(markers),
            "y": Pointer(y),
            "num_rows": Scalar(rows),
            "WIDTH": Constant(width),
            "BLOCK_M": Constant(block_m),
            "BLOCK_N": Constant(columns),
        },
    )


def _gate_layout(operands: MatmulOperands, spec: MatmulSpec) -> str | None:
    """How the kernel takes its weights: as the activation says; `joined` for a second one without an activation."""
    if spec.activation is not None:
        return spec.activation.gate_layout
    return "joined" if operands.up is not None else None


def _input_precision(operands: MatmulOperands, spec: MatmulSpec) -> str:
    return "tf32" if spec.allow_tf32 and operands.x.dtype == "float32" else "ieee"


def _arguments(
    operands: MatmulOperands,
    layout: LayoutSpec | None,
    spec: MatmulSpec,
    sizes: MatmulSizes,
    config: TileConfig,
    num_blocks: int,
    outputs: tuple[str, ...],
) -> Mapping[str, Pointer | Scalar | Constant]:
    """Every kernel parameter in order."""

    def pointer(name: str, given: bool) -> Pointer | Constant:
        return Pointer(name) if given else Constant(None)

    def stride(array: ArraySpec | None, axis: int, given: bool) -> Constant:
        return Constant(array.stride[axis] if array is not None and given else 0)

    ragged, stacked, activation = layout is not None, operands.layer is not None, spec.activation
    weight: ArraySpec = operands.weight
    k_axis, n_axis = (-2, -1) if spec.weight_layout == "in_out" else (-1, -2)
    optional = ("up", "bias", "up_bias", "row_weight", "layer")
    return {
        "x": Pointer("x"),
        "weight": Pointer("weight"),
        **{name: pointer(name, getattr(operands, name) is not None) for name in optional},
        **{name: pointer(name, ragged) for name in LAYOUT_INPUTS},
        "schedule": pointer("schedule", ragged),
        "y": pointer("y", "y" in outputs),
        "pre": pointer("pre", "pre" in outputs),
        "num_blocks": Scalar(num_blocks),
        "num_rows": Scalar(sizes.rows),
        "num_slots": Scalar(layout.num_slots if layout is not None else sizes.rows),
        "D": Constant(sizes.d),
        "N": Constant(sizes.n),
        "WEIGHT_N": Constant(sizes.weight_n),
        "NUM_LAYERS": Constant(sizes.num_layers),
        "X_STRIDE": Constant(row_stride("x", operands.x)),
        "LAYER_STRIDE": stride(weight, 0, stacked),
        "EXPERT_STRIDE": stride(weight, -3, ragged),
        "K_STRIDE": Constant(weight.stride[k_axis]),
        "N_STRIDE": Constant(weight.stride[n_axis]),
        "BIAS_LAYER_STRIDE": stride(operands.bias, 0, stacked),
        "UP_BIAS_LAYER_STRIDE": stride(operands.up_bias, 0, stacked),
        "TOP_K": Constant(layout.top_k if layout is not None else 1),
        "GATHER": Constant(spec.gather),
        "SCATTER": Constant(spec.scatter),
        "GATE_LAYOUT": Constant(_gate_layout(operands, spec)),
        "ACTIVATION": Constant(activation.name if activation is not None else None),
        "ALPHA": Constant(activation.alpha if activation is not None else None),
        "LIMIT": Constant(activation.limit if activation is not None else None),
        "INPUT_PRECISION": Constant(_input_precision(operands, spec)),
        "BLOCK_M": Constant(config.block_m),
        "BLOCK_N": Constant(config.block_n),
        "BLOCK_K": Constant(config.block_k),
        "GROUP_M": Constant(config.group_m),
        "OVERLAP": Constant(None),
    }
