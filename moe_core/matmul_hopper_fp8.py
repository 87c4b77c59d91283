"""Planning of the grouped matmul of fp8 with fp8 by the warp-specialised kernel for Hopper (`kernels.hopper_fp8`)."""

from __future__ import annotations

from moe_core.activation import row_stride
from moe_core.arrays import ArraySpec
from moe_core.formats import Format, QuantizedTensor
from moe_core.operands import MatmulOperands
from moe_core.plan import Argument, Constant, PlanBuilder, Pointer, Scalar, TensorMap
from moe_core.specs import INT32_LIMIT, LayoutSpec, MatmulSpec
from moe_core.target import Target
from moe_core.tuning import HOPPER_BLOCK_M, HOPPER_STAGES, HOPPER_WIDTH, TileConfig

#: Columns of the reduction in a stage.
_BLOCK_K = 128
#: Codes in the 16 bytes that TMA and cp.async take at a time, and numbers of a result.
_CODES, _RESULTS = 16, 8
_CONSUMER_ROWS, _PIECE = 64, 128
#: Columns, or weight rows, that may share a scale, besides one and all.
_GROUP = 128
#: Registers per thread of a consumer, which holds 192 sums, and of the producer: 65536 for 384 threads.
_REGISTERS = {"CONSUMER_REGISTERS": Constant(216), "PRODUCER_REGISTERS": Constant(72)}


def hopper_fp8_config(spec: MatmulSpec, num_stages: int = HOPPER_STAGES, group_m: int = 8) -> TileConfig:
    """The hopper family's configuration of a product of fp8 with fp8."""
    buffers = 2 if spec.activation is not None and spec.activation.gated else 1
    return TileConfig(HOPPER_BLOCK_M, HOPPER_WIDTH // buffers, _BLOCK_K, 4, num_stages, group_m, "hopper")


def why_illegal_hopper_fp8(config: TileConfig, spec: MatmulSpec) -> str | None:
    """The reason a configuration of the hopper family cannot run a product that the kernel can run, or None."""
    only = hopper_fp8_config(spec, config.num_stages, config.group_m)
    if config != only:
        return f"the hopper family's tiles of fp8 are {only}, got {config}"
    if not 2 <= config.num_stages <= HOPPER_STAGES:
        return f"num_stages must be 2 to {HOPPER_STAGES} (shared memory), got {config.num_stages}"
    if config.group_m < 1:
        return f"group_m must be at least 1, got {config.group_m}"
    return None


def why_not_hopper_fp8(
    operands: MatmulOperands, n: int, layout: LayoutSpec | None, spec: MatmulSpec, target: Target
) -> str:
    """The reason the kernel cannot run a product of (valid) operands, empty if it can. n: output columns."""
    x, weight, activation = operands.x, operands.weight, spec.activation
    if target.kind != "cuda" or target.arch != 90:
        return f"it needs sm_90, its wgmma and TMA instructions, got {target}"
    if layout is None:
        return "it is dense, and only ragged layouts have the kernel's schedule"
    for name, tensor in (("x", x), ("weight", weight)):
        if not isinstance(tensor, QuantizedTensor):
            return f"it multiplies codes with codes, and {name} is not quantised"
        if tensor.format.element != "e4m3" or tensor.format.has_e8m0_scales:
            return f"it multiplies e4m3 codes whose scales are numbers, got {name} as {tensor.format}"
    if weight.layout != "out_in":
        return f"fp8 tensor cores read weights along the reduction, which is out_in, got {weight.layout}"
    reason = _why_not_scales(x.format, weight.format)
    if reason:
        return reason
    out_dtype, d = spec.out_dtype, x.shape[1]
    if out_dtype not in ("bfloat16", "float16"):
        return f"it writes bfloat16 and float16, got out_dtype {out_dtype}"
    if d % _CODES:
        return f"rows of codes must be multiples of {_CODES} bytes, got d {d}"
    if row_stride("x", x.values) % _CODES:
        return f"rows of x must start at multiples of 16 bytes, got {row_stride('x', x.values)} codes between them"
    if n % _RESULTS:
        return f"rows of y must be multiples of 16 bytes, got {n} columns"
    if weight.format.group_rows == 1 and n % _GROUP:
        return f"scales of single weight rows are read {_GROUP} at a time, which must divide n, got {n}"
    split = activation is not None and activation.gate_layout == "halves"
    if split and weight.format.group_rows == _GROUP and n % _GROUP:
        return f"columns of up must begin with a scale of their own, {_GROUP} must divide n, got {n}"
    if activation is not None and activation.name == "gelu":
        return "gelu's erf does not fit into its registers"
    if weight.values.size // d >= INT32_LIMIT or x.scales.size >= INT32_LIMIT:
        return "rows of all weights, and scales of x, must be fewer than 2**31"
    return ""


def why_not_codes(format: Format, n: int, spec: MatmulSpec, *, static: bool = False) -> str:
    """The reason a product that the kernel runs cannot store its result in a format of rows, empty if it can.

    static: the format's scale is given."""
    if spec.activation is None or not spec.activation.gated or spec.scatter != "row":
        return f"its tiles have one group of {_GROUP} columns of a gated activation, by row"
    groups = (None, None) if static else (1, _GROUP)
    if format.element != "e4m3" or format.has_e8m0_scales or (format.group_rows, format.group_columns) != groups:
        wanted = f"a scale for {_GROUP} columns of a row, or one that is given for all"
        return f"it quantises to e4m3 with {wanted}, got {format}{' and a scale' if static else ''}"
    if n % _CODES:
        return f"rows of codes must be multiples of {_CODES} bytes, got {n} columns"
    return ""


def _why_not_scales(x: Format, weights: Format) -> str:
    """The reason the kernel cannot apply the scales of both formats, empty if it can."""
    if x.group_rows not in (None, 1) or x.group_columns not in (None, _GROUP):
        return f"scales of x must be of one row or all, and of {_GROUP} columns or all, got {x}"
    if weights.group_rows not in (None, 1, _GROUP) or weights.group_columns not in (None, _GROUP):
        return f"weight scales must be of 1, {_GROUP} or all rows, and of {_GROUP} columns or all, got {weights}"
    if weights.group_rows == 1 and weights.group_columns is not None:
        return f"scales of single weight rows must be of all columns, got {weights}"
    if x.group_columns is not None and weights.group_columns is None:
        return f"groups of x must be those of the weights, got {x} and {weights}"
    return ""


def _rule(codes: Format | None, static: bool) -> str | None:
    """How scales of a result's codes are found."""
    if codes is None:
        return None
    return "given" if static else codes.scale_rule


def launch_hopper_fp8(
    builder: PlanBuilder,
    operands: MatmulOperands,
    layout: LayoutSpec,
    spec: MatmulSpec,
    config: TileConfig,
    *,
    trusted: bool,
    counter: int,
    codes: Format | None = None,
) -> None:
    """Add the launch. Buffers by the names of `matmul_quantized.launch_quantized`, and `tile_counters`, whose `counter`
    must be 0 then.

    trusted: the layout is one of ours, without padding inside a group, so that whole tiles may be stored; codes need
    it. codes: y is quantised to that format, in `y.values` and `y.scales`, with the scale of the buffer `static_scale`
    if there is one; see `why_not_codes`.
    """
    x: QuantizedTensor = operands.x
    weight: QuantizedTensor = operands.weight
    activation, (weight_n, d) = spec.activation, weight.shape[-2:]
    gate_layout = activation.gate_layout if activation is not None and activation.gated else None
    two_tiles = gate_layout in ("halves", "separate")
    n = weight_n // 2 if gate_layout in ("halves", "interleaved") else weight_n
    assert trusted or codes is None, "codes are stored by whole tiles"
    y = "y" if codes is None else "y.values"
    num_blocks = layout.max_blocks(config.block_m)
    tiles = num_blocks * -(-n // config.block_n)

    def weight_map(name: str) -> TensorMap:
        columns = HOPPER_WIDTH // 2 if two_tiles else HOPPER_WIDTH
        return TensorMap(name, (builder.spec(name).size // d, d), d, (columns, config.block_k))

    def optional(name: str) -> Pointer | Constant:
        return Pointer(name) if builder.has(name) else Constant(None)

    def layer_stride(bias: ArraySpec | None) -> Constant:
        return Constant(bias.stride[0] if bias is not None and operands.layer is not None else 0)

    stride = row_stride("x", x.values)
    x_map = TensorMap("x.values", (x.shape[0], d), stride, (_CONSUMER_ROWS, config.block_k))
    arguments: dict[str, Argument] = {
        "x": Pointer("x.values"),
        "x_map": x_map if spec.gather == "row" else Constant(None),
        "x_scales": Pointer("x.scales"),
        "weight_map": weight_map("weight.values"),
        "up_map": weight_map("up.values") if operands.up is not None else Constant(None),
        "scales": Pointer("weight.scales"),
        "up_scales": optional("up.scales"),
        **{name: optional(name) for name in ("bias", "up_bias", "row_weight", "layer")},
        **{name: Pointer(name) for name in ("group_sizes", "group_start", "slot_of_row", "schedule")},
        "counters": Pointer("tile_counters"),
        "y": Pointer(y),
        "y_scales": optional("y.scales"),
        "y_map": TensorMap(y, (builder.spec(y).shape[0], n), n, (_CONSUMER_ROWS, _PIECE)),
        "given": optional("static_scale"),
        "num_blocks": Scalar(num_blocks),
        "num_rows": Scalar(layout.capacity),
        "num_slots": Scalar(layout.num_slots),
        "D": Constant(d),
        "N": Constant(n),
        "WEIGHT_N": Constant(weight_n),
        "NUM_EXPERTS": Constant(layout.num_experts),
        "NUM_LAYERS": Constant(weight.shape[0] if operands.layer is not None else 1),
        "X_STRIDE": Constant(stride),
        "X_SCALE_STRIDE": Constant(x.scales.shape[1] if x.format.group_rows else 0),
        "X_GROUP": Constant(x.format.group_columns or 0),
        "SCALE_ROWS": Constant(weight.scales.shape[-2]),
        "SCALE_COLUMNS": Constant(weight.scales.shape[-1]),
        "GROUP_ROWS": Constant(weight.format.group_rows or 0),
        "GROUP": Constant(weight.format.group_columns or 0),
        "BIAS_LAYER_STRIDE": layer_stride(operands.bias),
        "UP_BIAS_LAYER_STRIDE": layer_stride(operands.up_bias),
        "TOP_K": Constant(layout.top_k),
        "GATHER": Constant(spec.gather),
        "SCATTER": Constant(spec.scatter),
        "GATE_LAYOUT": Constant(gate_layout),
        "ACTIVATION": Constant(activation.name if activation is not None else None),
        "ALPHA": Constant(activation.alpha if activation is not None else None),
        "LIMIT": Constant(activation.limit if activation is not None else None),
        "FAST": Constant(spec.fast_accumulate and weight.format.group_columns is None),
        "TRUSTED": Constant(trusted),
        "COUNTER": Constant(counter),
        "STAGES": Constant(config.num_stages),
        "GROUP_M": Constant(config.group_m),
        "HIDDEN": Constant(spec.out_dtype),
        "RULE": Constant(_rule(codes, builder.has("static_scale"))),
        **_REGISTERS,
    }
    grid = min(tiles, builder.target.num_sms)
    builder.launch("hopper_fp8:matmul_fp8", (grid,), arguments, config.num_warps, 1)
    fast = arguments["FAST"] == Constant(True)
    blocks = "in the tensor cores" if fast else f"in blocks of {config.block_k}, added in order in fp32"
    when = "at_end" if weight.format.group_columns is None else "per_block"
    width = HOPPER_WIDTH if fast else _PIECE
    builder.sums(f"k {blocks}, of e4m3 products, wgmma 64 x {width} x 32, scales {when}; no split")
