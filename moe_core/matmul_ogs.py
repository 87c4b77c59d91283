"""Planning of the ragged grouped matmul with gather, scatter and a fused epilogue."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass

from moe_core import dtypes
from moe_core.activation import row_stride
from moe_core.arrays import ArraySpec, require_spec
from moe_core.errors import InvalidInput, Unsupported
from moe_core.operands import MatmulOperands, named_arrays
from moe_core.plan import Constant, LaunchPlan, PlanBuilder, Pointer, Scalar
from moe_core.routing import plan_schedule
from moe_core.specs import INT32_LIMIT, LayoutSpec, MatmulSpec
from moe_core.target import Target
from moe_core.tuning import MatmulProblem, TileConfig, choose_config, require_legal

#: The layout's arrays a matmul reads, in plan order.
LAYOUT_INPUTS = ("group_sizes", "group_start", "slot_of_row")


@dataclass(frozen=True)
class _Sizes:
    """What validation finds. d: reduction length; n: output columns; weight_n: columns of one weight buffer."""

    d: int
    n: int
    weight_n: int
    num_layers: int
    expert_axes: int
    rows: int
    out_rows: int


def matmul_problem(x: ArraySpec, n: int, layout: LayoutSpec | None, spec: MatmulSpec) -> MatmulProblem:
    """The sizes a configuration is chosen by."""
    rows = x.shape[0] if layout is None else layout.num_slots
    groups = 1 if layout is None else layout.num_experts
    gated = spec.activation is not None and spec.activation.gated
    return MatmulProblem(rows, groups, x.shape[1], n, x.dtype, 2 if gated else 1)


def _validate(operands: MatmulOperands, layout: LayoutSpec | None, spec: MatmulSpec) -> _Sizes:
    x: ArraySpec = operands.x
    require_spec("x", x, ("num_rows", "d"), dtypes.MATMUL_DTYPES, contiguous=False)
    row_stride("x", x)
    d = x.shape[1]
    if d < 1:
        raise InvalidInput(f"x must have at least one column, got {x.shape}; pass a wider array")
    weight: ArraySpec = operands.weight
    axes = (0 if layout is None else 1) + (1 if operands.layer is not None else 0)
    names = ("num_layers",) * (operands.layer is not None) + ((layout.num_experts,) if layout is not None else ())
    matrix = (d, "n") if spec.weight_layout == "in_out" else ("n", d)
    require_spec("weight", weight, (*names, *matrix), x.dtype)
    weight_n = weight.shape[-1] if spec.weight_layout == "in_out" else weight.shape[-2]
    num_layers = weight.shape[0] if operands.layer is not None else 1
    if weight_n < 1 or num_layers < 1:
        raise InvalidInput(f"weight must have no empty axis, got {weight.shape}; pass the full array")
    if d * weight_n >= INT32_LIMIT:
        raise Unsupported(f"one expert's weight must have fewer than 2**31 elements, got {d} x {weight_n}")

    activation = spec.activation
    separate = activation is not None and activation.gate_layout == "separate"
    one_buffer = activation is not None and activation.gated and not separate
    if one_buffer and weight_n % 2:
        raise InvalidInput(f"weight must have an even width (gate and up), got {weight_n}; pass both halves")
    n = weight_n // 2 if one_buffer else weight_n
    if separate:
        require_spec("up", operands.up, weight.shape, weight.dtype)
    elif operands.up is not None:
        raise InvalidInput("up must be None unless a gate_layout='separate' activation is fused; leave it out")
    lead = weight.shape[:axes]
    for name in ("bias", "up_bias"):
        bias: ArraySpec | None = getattr(operands, name)
        if bias is not None:
            require_spec(name, bias, (*lead, weight_n), ("float32", x.dtype))
    if operands.up_bias is not None and not separate:
        raise InvalidInput("up_bias must be None unless up is given; put both halves into bias")
    if operands.layer is not None:
        require_spec("layer", operands.layer, (1,), "int32")

    if layout is None:
        if (spec.gather, spec.scatter) != ("row", "row"):
            raise InvalidInput(
                f"gather and scatter must be 'row' without a layout, got {spec.gather!r} and {spec.scatter!r}; "
                "pass a layout"
            )
        rows = out_rows = x.shape[0]
        slots = rows
    else:
        expected = {"row": layout.capacity, "token": layout.num_tokens, "slot": layout.num_slots}[spec.gather]
        require_spec("x", x, (expected, d), x.dtype, contiguous=False)
        rows, slots = layout.capacity, layout.num_slots
        out_rows = slots if spec.scatter == "slot" else rows
    if operands.row_weight is not None:
        by_token = layout is not None and operands.row_weight.rank == 2
        shape = (layout.num_tokens, layout.top_k) if layout is not None and by_token else (slots,)
        require_spec("row_weight", operands.row_weight, shape, "float32")
    return _Sizes(d, n, weight_n, num_layers, axes, rows, out_rows)


@functools.lru_cache(maxsize=4096)
def plan_matmul_ogs(
    operands: MatmulOperands,
    layout: LayoutSpec | None,
    spec: MatmulSpec,
    target: Target,
    *,
    config: TileConfig | None = None,
    with_schedule: bool = False,
    fill_absent: bool = True,
) -> LaunchPlan:
    """`y[scatter(row)] = cast(act(x[gather(row)] @ w[expert] + bias) * row_weight)` for every row of the layout.

    operands: a bundle of ArraySpecs (shapes in MatmulOperands). layout None = dense: x `[T, D]`, weight `[D, N]`
    (`in_out`) or `[N, D]`. config: None = chosen by `tuning.choose_config`. with_schedule: the schedule of the config's
    block_m is an input, else the plan makes it. fill_absent: rows no expert writes become exact zeros (False: left
    unwritten, for composed plans that never read them). The reference engine has no tiles: it needs no schedule and
    fills always.
    Inputs: the operands given, then group_sizes `[E]`, group_start `[E + 1]`, slot_of_row `[capacity]`, [schedule].
    Output: y `[capacity, N]` (scatter `row`) or `[T * K, N]` (`slot`). Raises InvalidInput, Unsupported.
    """
    sizes = _validate(operands, layout, spec)
    out_dtype = spec.out_dtype or operands.x.dtype
    builder = PlanBuilder("matmul_ogs", target)
    present = {name: builder.input(name, array) for name, array in named_arrays(operands)}
    if layout is not None:
        experts = layout.num_experts
        shapes = ((experts,), (experts + 1,), (layout.capacity,))
        for name, shape in zip(LAYOUT_INPUTS, shapes, strict=True):
            builder.input(name, ArraySpec(shape, "int32"))
    y = ArraySpec((sizes.out_rows, sizes.n), out_dtype)
    problem = matmul_problem(operands.x, sizes.n, layout, spec)
    config = require_legal(config or choose_config(problem, target), problem, target)
    if not target.compiled:
        inputs = present | ({name: name for name in LAYOUT_INPUTS} if layout is not None else {})
        builder.output("y", y)
        builder.reference("matmul:matmul_ogs", inputs, {"layout": layout, "spec": spec}, ("y",))
        builder.sums("reference: float32 BLAS over the whole reduction axis")
        return builder.build()

    num_blocks = -(-sizes.rows // config.block_m)
    if layout is not None:
        num_blocks = layout.max_blocks(config.block_m)
        schedule = ArraySpec((num_blocks, 2), "int32")
        if with_schedule:
            builder.input("schedule", schedule)
        else:
            builder.scratch("schedule", schedule)
            bindings = {"group_sizes": "group_sizes", "schedule": "schedule"}
            builder.call(plan_schedule(layout, config.block_m, target), "schedule", bindings)
    builder.output("y", y)
    if fill_absent and layout is not None:
        _fill_absent(builder, layout, spec, sizes)
    tiles = -(-sizes.n // config.block_n)
    arguments = _arguments(operands, layout, spec, sizes, config, num_blocks)
    builder.launch("matmul_ogs:matmul_ogs", (num_blocks * tiles,), arguments, config.num_warps, config.num_stages)
    builder.sums(f"k in blocks of {config.block_k}, in order, fp32 accumulator, one dot per block; no split")
    builder.note(f"{config} for {problem.rows} rows, {problem.groups} experts, {problem.d} x {problem.n}")
    return builder.build()


def _fill_absent(builder: PlanBuilder, layout: LayoutSpec, spec: MatmulSpec, sizes: _Sizes) -> None:
    """Zero the output rows no expert writes: marked by slot_of_row, or by a slot's missing row."""
    markers = "slot_of_row"
    if spec.scatter == "slot":
        markers = builder.input("row_of_slot", ArraySpec((layout.num_slots,), "int32"))
    columns = min(1024, 1 << (max(sizes.n, 16) - 1).bit_length())
    block_m = 64 if builder.target.kind == "interpreter" else 8
    builder.launch(
        "reduction:zero_rows",
        (-(-sizes.out_rows // block_m),),
        {
            "markers": Pointer(markers),
            "y": Pointer("y"),
            "num_rows": Scalar(sizes.out_rows),
            "WIDTH": Constant(sizes.n),
            "BLOCK_M": Constant(block_m),
            "BLOCK_N": Constant(columns),
        },
    )


def _input_precision(operands: MatmulOperands, spec: MatmulSpec) -> str:
    return "tf32" if spec.allow_tf32 and operands.x.dtype == "float32" else "ieee"


def _arguments(
    operands: MatmulOperands,
    layout: LayoutSpec | None,
    spec: MatmulSpec,
    sizes: _Sizes,
    config: TileConfig,
    num_blocks: int,
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
        "y": Pointer("y"),
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
        "GATE_LAYOUT": Constant(activation.gate_layout if activation is not None else None),
        "ACTIVATION": Constant(activation.name if activation is not None else None),
        "ALPHA": Constant(activation.alpha if activation is not None else None),
        "LIMIT": Constant(activation.limit if activation is not None else None),
        "INPUT_PRECISION": Constant(_input_precision(operands, spec)),
        "BLOCK_M": Constant(config.block_m),
        "BLOCK_N": Constant(config.block_n),
        "BLOCK_K": Constant(config.block_k),
        "GROUP_M": Constant(config.group_m),
    }
