"""Planning of the ragged grouped matmul with gather, scatter and a fused epilogue."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass

from moe_core import dtypes
from moe_core.activation import row_stride
from moe_core.arrays import ArraySpec, require_spec
from moe_core.errors import InvalidInput, Unsupported
from moe_core.matmul_hopper import launch_hopper, why_not_hopper, zero_counters
from moe_core.operands import MatmulOperands, named_arrays
from moe_core.plan import Constant, LaunchPlan, PlanBuilder, Pointer, Scalar
from moe_core.routing import plan_schedule
from moe_core.specs import INT32_LIMIT, LayoutSpec, MatmulSpec
from moe_core.target import Target
from moe_core.tile_choice import TileChoice, choose_tile
from moe_core.tuning import MatmulProblem, TileConfig, require_legal

#: A weight layout read the other way round: the product with the transposed matrix.
TRANSPOSED = {"in_out": "out_in", "out_in": "in_out"}
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


def _validate(operands: MatmulOperands, layout: LayoutSpec | None, spec: MatmulSpec, joined: bool) -> _Sizes:
    x: ArraySpec = operands.x
    require_spec("x", x, ("num_rows", "d"), dtypes.MATMUL_DTYPES, contiguous=False)
    row_stride("x", x)
    columns = x.shape[1]
    if columns < (2 if joined else 1) or (joined and columns % 2):
        need = "an even number of columns" if joined else "at least one column"
        raise InvalidInput(f"x must have {need}, got {x.shape}; pass a wider array")
    d = columns // 2 if joined else columns
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
    if joined and (activation is not None or operands.bias is not None):
        raise InvalidInput("joined must be False with an activation or a bias, got True; leave them out")
    if separate or joined:
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
        require_spec("x", x, (expected, columns), x.dtype, contiguous=False)
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
    stage: int | None = None,
    outputs: tuple[str, ...] = ("y",),
    joined: bool = False,
) -> LaunchPlan:
    """`y[scatter(row)] = cast(act(x[gather(row)] @ w[expert] + bias) * row_weight)` for every row of the layout.

    operands: a bundle of ArraySpecs (shapes in MatmulOperands). layout None = dense: x `[T, D]`, weight `[D, N]`
    (`in_out`) or `[N, D]`. config: None = chosen by `tile_choice.choose_tile`, which follows spec.tuning.
    Rows no expert writes become exact zeros.
    stage: 0 or 1 as that product of a composed plan, which trusts its own layout, never reads rows that no expert
    writes (they are left unwritten) and brings two more inputs: the schedule of the config's block_m, and for the
    hopper family tile_counters int32 `[2]`, zeros. The reference engine has no tiles: it needs neither, and fills all.
    outputs: `y`, `pre` or both. pre is what the fused activation is applied to, cast to the dtype of x: `[rows of y,
    2N]` (ungated N), gate_layout `separate` as gate columns, then up; for composed and dense plans, in layout order.
    joined: x is twice as wide, and y = x[:, :D] @ weight + x[:, D:] @ up, one fp32 sum: of compiled targets only.
    Inputs: the operands given, then group_sizes `[E]`, group_start `[E + 1]`, slot_of_row `[capacity]`, [schedule],
    [tile_counters]. y: `[capacity, N]` (scatter `row`) or `[T * K, N]` (`slot`). Raises InvalidInput, Unsupported.
    """
    sizes = _validate(operands, layout, spec, joined)
    if joined and not target.compiled:
        raise Unsupported(f"joined products are planned for compiled targets, got {target}; plan two products")
    _validate_outputs(outputs, operands, layout, spec, stage)
    out_dtype = spec.out_dtype or operands.x.dtype
    builder = PlanBuilder("matmul_ogs", target)
    present = {name: builder.input(name, array) for name, array in named_arrays(operands)}
    if layout is not None:
        experts = layout.num_experts
        shapes = ((experts,), (experts + 1,), (layout.capacity,))
        for name, shape in zip(LAYOUT_INPUTS, shapes, strict=True):
            builder.input(name, ArraySpec(shape, "int32"))
    activation = spec.activation
    found = {"y": ArraySpec((sizes.out_rows, sizes.n), out_dtype)}
    if activation is not None:
        found["pre"] = ArraySpec((sizes.out_rows, activation.input_width(sizes.n)), operands.x.dtype)
    problem = matmul_problem(operands.x, sizes.n, layout, spec, joined)
    choice = choose_tile(problem, target, spec.tuning)
    if config is not None:
        choice = TileChoice(require_legal(config, problem, target), "given by the caller")
    config = choice.config
    if not target.compiled:
        inputs = present | ({name: name for name in LAYOUT_INPUTS} if layout is not None else {})
        for name in outputs:
            builder.output(name, found[name])
        if outputs == ("y",):
            builder.reference("matmul:matmul_ogs", inputs, {"layout": layout, "spec": spec}, outputs)
        else:
            constants = {"layout": layout, "spec": spec, "outputs": outputs}
            builder.reference("matmul:matmul_ogs_keeping", inputs, constants, outputs)
        by_row = ", one row at a time" if spec.tuning is not None and spec.tuning.batch_invariant else ""
        builder.sums(f"reference: float32 BLAS over the whole reduction axis{by_row}")
        return builder.build()

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
        if config.family == "hopper":
            if stage is not None:
                builder.input("tile_counters", ArraySpec((2,), "int32"))
            else:
                zero_counters(builder)
    for name in outputs:
        builder.output(name, found[name])
    if stage is None and layout is not None:
        _fill_absent(builder, layout, spec, sizes)
    if config.family == "hopper" and layout is not None:
        launch_hopper(builder, operands, layout, spec, config, trusted=stage is not None, counter=stage or 0)
    else:
        tiles = -(-sizes.n // config.block_n)
        arguments = _arguments(operands, layout, spec, sizes, config, num_blocks, outputs)
        builder.launch("matmul_ogs:matmul_ogs", (num_blocks * tiles,), arguments, config.num_warps, config.num_stages)
        builder.sums(f"k in blocks of {config.block_k}, in order, fp32 accumulator, one dot per block; no split")
    builder.note(
        f"{config} for {problem.rows} rows, {problem.groups} experts, {problem.d} x {problem.n}; {choice.source}"
    )
    return builder.build()


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
    sizes: _Sizes,
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
