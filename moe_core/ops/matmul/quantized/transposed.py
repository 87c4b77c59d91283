"""Gradients through frozen weights: the grouped matmul with a transposed quantised weight."""

from __future__ import annotations

import dataclasses
from typing import Any

from moe_core.base import TRANSPOSED, ArraySpec, Target, dtypes, keep_plans, padded, require_spec, row_stride
from moe_core.errors import InvalidInput, Unsupported
from moe_core.formats import Format, QuantizedTensor
from moe_core.ops.lora.tail import Tail, tail_arguments
from moe_core.ops.matmul import arguments as common
from moe_core.ops.matmul import tile_rules as rules
from moe_core.ops.matmul.operands import quantized_operands, require_like, require_weight, why_prepacked
from moe_core.ops.matmul.problem import MatmulProblem
from moe_core.ops.matmul.quantized import transposed_kernel as kernels
from moe_core.ops.matmul.quantized.plan import QUANTIZED
from moe_core.ops.matmul.tile_choice import TileChoice, TileSource
from moe_core.ops.routing.layout import add_schedule
from moe_core.plan import LaunchPlan, PlanBuilder, declare_kernel, passed
from moe_core.specs import LayoutSpec, MatmulOperands, MatmulSpec, named_arrays
from moe_core.specs.tile import TileConfig, shared_limit

MATMUL_QUANTIZED_TRANSPOSED = declare_kernel(kernels.matmul_quantized_transposed)


@keep_plans
def plan_matmul_quantized_transposed(
    operands: MatmulOperands,
    layout: LayoutSpec | None,
    spec: MatmulSpec,
    target: Target,
    *,
    tile: TileChoice | None = None,
    composed: bool = False,
    addressed: bool = False,
    tail: Tail | None = None,
) -> LaunchPlan:
    """`y[scatter(row)] = cast(x[gather(row)] @ dequantised(weight[expert])^T)` for every row of the layout.

    operands: the forward's weight, up and layer_index as ArraySpecs. x is the gradient of its result, `[*, N]` in any
    matmul dtype, and y is `[*, D]`. With `up` x is `[*, 2N]`, gate columns first, with one fp32 sum. The weight is
    (code - zero point) * scale in fp32, cast to the dtype of x. spec: the weight's weight_layout, this product's gather
    and scatter, tuning with batch_invariant or a config of the family `quantized`. tile None: `choose_transposed_tile`.

    Inputs: x, the weights' arrays, [layer_index], group_sizes `[E]`, group_start `[E + 1]`, slot_of_row `[capacity]`.
    composed: also `schedule` for the tile's block_m, and rows without an expert are unwritten. Otherwise they become
    exact zeros, and scatter `slot` has the input row_of_slot `[T * K]`. Output: y, or none if addressed (composed
    only), as in `plan_product`. tail (composed only): see `plan_product`. Raises InvalidInput, Unsupported.
    """
    problem = dataclasses.replace(_decoded(operands, layout, spec, target), addressed=addressed, tail=tail)
    builder = PlanBuilder("matmul_quantized_transposed", target)
    inputs = builder.inputs(dict(named_arrays(operands))) | builder.layout_inputs(layout)
    builder.inputs({} if tail is None else tail.inputs())
    y = ArraySpec((problem.sizes.out_rows, problem.n), spec.out_dtype or problem.dtype)
    if (tile := tile or _choose(problem, operands.weight.format)) is None:
        builder.output("y", y)
        tensors = tuple((name, tensor.spec) for name, tensor in quantized_operands(operands).items())
        constants: dict[str, Any] = {"layout": layout, "spec": spec, "tensors": tensors}
        builder.sums("reference: float32 BLAS over the whole reduction axis of dequantised weights")
        from moe_core.ops.matmul.reference import backward as twins

        return builder.reference(twins.input_gradient_plan, inputs, constants, ("y",))
    if layout is not None:
        add_schedule(builder, layout, tile.config.block_m, given=composed)
    if addressed:
        assert layout is not None and composed, "rows go to addresses in composed plans"
        builder.input("results_at", ArraySpec((layout.num_slots,), "int64"))
    else:
        builder.output("y", y)
    if layout is not None and not composed:
        common.fill_absent(builder, layout, spec)
    _launch(builder, problem, operands.weight, tile.config)
    if tail is not None:
        tail.describe(builder)
    builder.note(f"{tile.config} for {problem.sizes.d} x {problem.n} of {operands.weight.format}; {tile}")
    return builder.build()


def _decoded(operands: MatmulOperands, layout: LayoutSpec | None, spec: MatmulSpec, target: Target) -> MatmulProblem:
    """The product with decoded weights in the other layout."""
    x, weight = operands.x, operands.weight
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
    if (prepared := why_prepacked({"weight": weight})) is not None:
        raise Unsupported(prepared)
    if operands.up is not None:
        require_like("up", operands.up, "weight", weight)
    if 0 in weight.shape:
        raise InvalidInput(f"weight must have no empty axis, got {weight.shape}; pass the full array")
    columns = weight.shape[-2 if spec.weight_layout == "out_in" else -1] * (1 if operands.up is None else 2)
    require_spec("x", x, ("num_rows", columns), dtypes.MATMUL_DTYPES, contiguous=False)
    decoded = ArraySpec(weight.shape, x.dtype)
    plain = MatmulOperands(x, decoded, None if operands.up is None else decoded, layer_index=operands.layer_index)
    other = dataclasses.replace(spec, weight_layout=TRANSPOSED[spec.weight_layout])
    return MatmulProblem(plain, layout, other, target, joined=operands.up is not None)


def choose_transposed_tile(
    operands: MatmulOperands, layout: LayoutSpec | None, spec: MatmulSpec, target: Target
) -> TileChoice | None:
    """The tile, None on the reference target."""
    return _choose(_decoded(operands, layout, spec, target), operands.weight.format)


def _choose(problem: MatmulProblem, weights: Format) -> TileChoice | None:
    tuning, target = problem.tuning, problem.target
    if not target.compiled:
        return None
    if tuning.config is not None:
        if (reason := why_illegal(tuning.config, problem.dtype, weights, target)) is not None:
            raise InvalidInput(
                f"tuning.config must be legal on {target}, got {tuning.config}: {reason}; give another, or None for "
                "one that is chosen"
            )
        return TileChoice(QUANTIZED, tuning.config, TileSource.GIVEN)
    rows = rules.INVARIANT_ROWS if tuning.batch_invariant else problem.rows_per_group
    config = _heuristics(rows, problem.dtype, weights, target)
    block_n, block_k = min(config.block_n, padded(problem.n)), min(config.block_k, padded(problem.sizes.d))
    config = dataclasses.replace(config, block_n=block_n, block_k=block_k)
    config = rules.shrunk(config, lambda config: why_illegal(config, problem.dtype, weights, target), block_k)
    if tuning.batch_invariant:
        return TileChoice(QUANTIZED, config, TileSource.BATCH_INVARIANT)
    return TileChoice(QUANTIZED, config, TileSource.HEURISTICS, f"{rows:.1f} rows per expert")


def why_illegal(config: TileConfig, dtype: str, weights: Format, target: Target) -> str | None:
    if config.family != QUANTIZED.name:
        return f"family must be {QUANTIZED.name!r} for quantised weights, got {config.family!r}"
    reason = rules.why_not_sides(config) or rules.why_not_warps(config, target) or rules.why_not_counts(config)
    if reason is not None:
        return reason
    if not target.on_gpu:
        return None
    width = dtypes.itemsize(dtype)
    stage = config.block_k * (config.block_m * 8 * width + config.block_n * weights.bits_per_element) // 8
    # The decoded tile also goes through shared memory.
    needed = stage * config.num_stages + config.block_k * config.block_n * width
    if needed > shared_limit(target.arch):
        return f"{needed} bytes exceed the {shared_limit(target.arch)} bytes of shared memory of {target.architecture}"
    if (held := rules.accumulators(config, target)) > 128:
        return f"{held} accumulator registers per thread leave too few of 255 for decoded weights"
    return None


def _heuristics(rows: float, dtype: str, weights: Format, target: Target) -> TileConfig:
    # Zero points and fp32 scales of small groups would not fit into registers with 64 weight rows.
    block_k = 32 if weights.own_element.max_code is not None else 64
    low = 16 if rows <= 16 else 32
    if not target.on_gpu:
        sizes = (32, 64, 64, 4, 1)
    elif dtype == "float32":
        sizes = (low, 64, 32, 4, 2)
    elif rows <= 32:
        sizes = (low, 128, block_k, 4, 4)
    else:
        sizes = (64, 128, block_k, 4, 3) if rows <= 64 else (128, 128, block_k, 8, 3)
    return TileConfig(*sizes, family=QUANTIZED.name)


def _launch(builder: PlanBuilder, problem: MatmulProblem, weight: QuantizedTensor, config: TileConfig) -> None:
    x, spec, sizes, fused = problem.operands.x, problem.spec, problem.sizes, common.fused_constants(problem)
    arguments = {
        **(builder.pointers("x") | common.quantized_pointers(builder)),
        **(builder.pointers("layer_index", *common.SCHEDULED_INPUTS) | passed(y=common.result(builder))),
        **common.row_counts(problem, config),
        **passed(D=sizes.d, N=sizes.n, NUM_EXPERTS=problem.groups, NUM_LAYERS=sizes.num_layers),
        **(passed(X_STRIDE=row_stride("x", x)) | common.format_constants(weight) | common.quantized_strides(weight)),
        **{name: fused[name] for name in ("TOP_K", "GATHER", "SCATTER")},
        **passed(DOT=x.dtype, INPUT_PRECISION="tf32" if spec.allow_tf32 and x.dtype == "float32" else "ieee"),
        **(common.block_constants(config) | tail_arguments(builder, problem.tail)),
    }
    grid = (problem.tiles(config),)
    builder.launch(MATMUL_QUANTIZED_TRANSPOSED, grid, arguments, config.num_warps, config.num_stages)
    builder.sums(f"rows of weights in blocks of {config.block_k}, in order, of {x.dtype} products; no split")
