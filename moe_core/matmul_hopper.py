"""Planning of the grouped matmul's warp-specialised kernel for Hopper (`kernels.hopper`)."""

from __future__ import annotations

from moe_core.activation import row_stride
from moe_core.arrays import ArraySpec
from moe_core.errors import InvalidInput, Unsupported
from moe_core.operands import MatmulOperands
from moe_core.plan import Argument, Constant, PlanBuilder, Pointer, Scalar, TensorMap
from moe_core.specs import INT32_LIMIT, LayoutSpec, MatmulSpec
from moe_core.tuning import HOPPER_BLOCK_K, HOPPER_BLOCK_M, HOPPER_TALL_BLOCK_M, HOPPER_WIDTH, TileConfig

#: Elements of 16 bits in the 16 bytes that TMA and cp.async take at a time.
_VECTOR = 8
_CONSUMER_ROWS, _PIECE, _PANEL = 64, 128, 64


def why_not_hopper(x: ArraySpec, n: int, layout: LayoutSpec | None, spec: MatmulSpec) -> str:
    """The reason the kernel cannot run a product, empty if it can. x: `[rows, d]`; n: output columns."""
    activation = spec.activation
    if layout is None:
        return "it is dense, and only ragged layouts have the kernel's schedule"
    if x.dtype not in ("bfloat16", "float16"):
        return f"it multiplies bfloat16 and float16, got {x.dtype}"
    if (spec.out_dtype or x.dtype) != x.dtype:
        return f"it writes what it reads, {x.dtype}, got out_dtype {spec.out_dtype}"
    if x.shape[1] % HOPPER_BLOCK_K:
        return f"its steps take {HOPPER_BLOCK_K} of the reduction, which must divide d, got {x.shape[1]}"
    if n % _VECTOR:
        return f"rows of weights and y must be multiples of 16 bytes, got {n} columns"
    if row_stride("x", x) % _VECTOR:
        return f"rows of x must start at multiples of 16 bytes, got {row_stride('x', x)} elements between them"
    if activation is not None and activation.name == "gelu":
        return "gelu's erf does not fit into its registers"
    return ""


def launch_hopper(
    builder: PlanBuilder,
    operands: MatmulOperands,
    layout: LayoutSpec,
    spec: MatmulSpec,
    config: TileConfig,
    *,
    trusted: bool,
    counter: int,
) -> None:
    """Add the launch. Buffers by the names of `plan_matmul_ogs`, and `tile_counters`, whose `counter` must be 0 then.

    It writes y and pre, whichever the plan has. trusted: the layout is one of ours, without padding inside a group, so
    that whole tiles may be stored; pre needs it.
    """
    x, weight = builder.spec("x"), builder.spec("weight")
    in_out, activation = spec.weight_layout == "in_out", spec.activation
    d, weight_n = x.shape[1], weight.shape[-1 if in_out else -2]
    one_buffer = activation is not None and activation.gate_layout in ("halves", "interleaved")
    n = weight_n // 2 if one_buffer else weight_n
    assert trusted or not builder.has("pre"), "pre is stored by whole tiles"
    tall = config.block_m == HOPPER_TALL_BLOCK_M
    if tall and builder.has("pre"):
        raise InvalidInput(
            f"config must have block_m {HOPPER_BLOCK_M} where the pre-activation is stored, as training does, got "
            f"{config}, whose kernel stores only the result; give one of {HOPPER_BLOCK_M}, or None"
        )
    matrices = weight.size // (d * weight_n)
    if matrices * max(d, weight_n) >= INT32_LIMIT:
        raise Unsupported(
            f"weight must have fewer than 2**31 rows over all layers and experts for the hopper family, got "
            f"{matrices} matrices of {d} x {weight_n}; give a portable configuration"
        )
    num_blocks = layout.max_blocks(config.block_m)
    tiles = num_blocks * -(-n // config.block_n)
    two_tiles = activation is not None and activation.gate_layout in ("halves", "separate")
    columns = (_PANEL if tall else _PIECE) if two_tiles else HOPPER_WIDTH
    box = _PANEL if tall and activation is not None and activation.gated else _PIECE

    def weight_map(name: str) -> TensorMap:
        if in_out:
            return TensorMap(name, (matrices * d, weight_n), weight_n, (HOPPER_BLOCK_K, columns))
        return TensorMap(name, (matrices * weight_n, d), d, (columns, HOPPER_BLOCK_K))

    def optional(name: str, given: object) -> Pointer | Constant:
        return Pointer(name) if given is not None else Constant(None)

    def output(name: str) -> Pointer | Constant:
        return Pointer(name) if builder.has(name) else Constant(None)

    def output_map(name: str, columns: int | None = None) -> TensorMap | Constant:
        # Of the first `columns` columns, where not of all.
        if not builder.has(name):
            return Constant(None)
        rows, width = builder.spec(name).shape
        return TensorMap(name, (rows, columns or width), width, (_CONSUMER_ROWS, box))

    pre: dict[str, Argument] = {
        "pre": output("pre"),
        "pre_map": output_map("pre"),
        "gate_map": output_map("pre", n) if two_tiles else Constant(None),
    }
    stride = row_stride("x", x)
    x_map = TensorMap("x", (x.shape[0], d), stride, (_CONSUMER_ROWS, HOPPER_BLOCK_K))
    arguments: dict[str, Argument] = {
        "x": Pointer("x"),
        "x_map": x_map if spec.gather == "row" else Constant(None),
        "weight_map": weight_map("weight"),
        "up_map": weight_map("up") if operands.up is not None else Constant(None),
        "bias": optional("bias", operands.bias),
        "up_bias": optional("up_bias", operands.up_bias),
        "row_weight": optional("row_weight", operands.row_weight),
        "layer": optional("layer", operands.layer),
        **{name: Pointer(name) for name in ("group_sizes", "group_start", "slot_of_row", "schedule")},
        "counters": Pointer("tile_counters"),
        "y": output("y"),
        "y_map": output_map("y"),
        **({} if tall else pre),
        "num_blocks": Scalar(num_blocks),
        "num_rows": Scalar(layout.capacity),
        "num_slots": Scalar(layout.num_slots),
        "D": Constant(d),
        "N": Constant(n),
        "WEIGHT_N": Constant(weight_n),
        "NUM_EXPERTS": Constant(layout.num_experts),
        "NUM_LAYERS": Constant(weight.shape[0] if operands.layer is not None else 1),
        "X_STRIDE": Constant(stride),
        "BIAS_LAYER_STRIDE": Constant(_layer_stride(operands.bias, operands)),
        "UP_BIAS_LAYER_STRIDE": Constant(_layer_stride(operands.up_bias, operands)),
        "TOP_K": Constant(layout.top_k),
        "GATHER": Constant(spec.gather),
        "SCATTER": Constant(spec.scatter),
        "GATE_LAYOUT": Constant(activation.gate_layout if activation is not None else None),
        "ACTIVATION": Constant(activation.name if activation is not None else None),
        "ALPHA": Constant(activation.alpha if activation is not None else None),
        "LIMIT": Constant(activation.limit if activation is not None else None),
        "IN_OUT": Constant(in_out),
        "TRUSTED": Constant(trusted),
        "COUNTER": Constant(counter),
        "STAGES": Constant(config.num_stages),
        "GROUP_M": Constant(config.group_m),
        "OVERLAP": Constant(None),
    }
    grid = min(tiles, builder.target.num_sms)
    kernel = "hopper_tall:matmul_ogs" if tall else "hopper:matmul_ogs"
    builder.launch(kernel, (grid,), arguments, config.num_warps, 1)
    products = "wgmma 64 x 256 x 16" + (" and 64 x 128 x 16" if tall else "")
    builder.sums(f"k in blocks of {config.block_k}, in order, fp32 accumulator, {products}; no split")


def zero_counters(builder: PlanBuilder, name: str = "tile_counters") -> str:
    """Add a buffer of tile counters (int32 `[2]`, one per product) and the launch that clears it; its name."""
    builder.scratch(name, ArraySpec((2,), "int32"))
    builder.launch("schedule:zero", (1,), {"counters": Pointer(name), "COUNT": Constant(2)}, 1, 1)
    return name


def _layer_stride(bias: ArraySpec | None, operands: MatmulOperands) -> int:
    return bias.stride[0] if bias is not None and operands.layer is not None else 0
