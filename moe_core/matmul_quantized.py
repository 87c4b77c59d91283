"""Planning of the grouped matmul with quantised weights, and rows where asked (`kernels.matmul_quantized`)."""

from __future__ import annotations

from moe_core.activation import row_stride
from moe_core.arrays import ArraySpec
from moe_core.formats import Format, QuantizedTensor
from moe_core.matmul_operands import fused_constants
from moe_core.operands import MatmulOperands
from moe_core.plan import Argument, Constant, PlanBuilder, Pointer, Scalar
from moe_core.quantized_tiles import ProductMethod, ProductSizes, product_method, product_sizes
from moe_core.specs import LayoutSpec, MatmulSpec
from moe_core.tuning import TileConfig

#: Columns of which a thread reads its share of decoded weights at once, by elements per byte; see `weight_tile`.
_ORDERS = {2: ("words", 128), 1: ("bytes", 64)}
#: Tokens of a tile from which the columns of x are put in order by a launch of their own, into a buffer of this name.
_ORDERED_ROWS, _ORDERED = 64, "ordered_x"
_ORDER_ROWS = 32
#: A row of packed weights is read by 16 bytes.
_WORD_COLUMNS = 32
#: Tokens of a tile from which they fill the tensor cores' left side, where weights are not decoded into registers.
_TOKENS_FIRST_ROWS = 64


def _order(config: TileConfig, operands: MatmulOperands, method: ProductMethod, d: int) -> str | None:
    """In which order the columns of decoded weights are multiplied, see `kernels.dequantize.weight_tile`."""
    weights: Format = operands.weight.format
    if method.dot in ("e4m3", "int8") or operands.weight.layout != "out_in":
        return None
    name, unit = _ORDERS[weights.own_element.per_byte]
    if config.block_k % unit:
        return None
    if name == "words":
        group = weights.group_columns or config.block_k
        one_scale_a_word = group % config.block_k == 0 or (group % 8 == 0 and config.block_k % group == 0)
        if d % _WORD_COLUMNS or not one_scale_a_word:
            return None
    return name


def _is_uniform(
    weights: Format, spec: MatmulSpec, sizes: ProductSizes, config: TileConfig, method: ProductMethod
) -> bool:
    """Whether the weight rows of any tile, of the gate and of up apart, share their scales."""
    if method.scaling == "into_weight":
        return False
    if weights.group_rows is None:
        return True
    layout = spec.activation.gate_layout if sizes.buffers == 2 and spec.activation is not None else None
    if layout == "halves" and sizes.n % weights.group_rows:
        return False
    return weights.group_rows % (2 * config.block_n if layout == "interleaved" else config.block_n) == 0


def _x_arguments(x: ArraySpec | QuantizedTensor) -> dict[str, Argument]:
    """What kernels are told of x as it is given."""
    if not isinstance(x, QuantizedTensor):
        return {
            "x": Pointer("x"),
            "x_scales": Constant(None),
            "ELEMENT": Constant(None),
            "STRIDE": Constant(row_stride("x", x)),
            "SCALE_STRIDE": Constant(0),
            "GROUP": Constant(0),
        }
    return {
        "x": Pointer("x.values"),
        "x_scales": Pointer("x.scales"),
        "ELEMENT": Constant(x.format.element),
        "STRIDE": Constant(row_stride("x", x.values)),
        "SCALE_STRIDE": Constant(x.scales.shape[1] if x.format.group_rows else 0),
        "GROUP": Constant(x.format.group_columns or 0),
    }


def _order_columns(
    builder: PlanBuilder, x_side: dict[str, Argument], method: ProductMethod, order: str, config: TileConfig, d: int
) -> dict[str, Argument]:
    """Add the launch that decodes x and puts its columns in order; what the product is then told of x."""
    x = x_side["x"]
    assert isinstance(x, Pointer)
    rows, width = builder.spec(x.buffer).shape[0], -(-d // config.block_k) * config.block_k
    into_weight = method.scaling == "into_weight"
    builder.scratch(_ORDERED, ArraySpec((rows, width), method.dot))
    arguments: dict[str, Argument] = {
        "x": x,
        "x_scales": x_side["x_scales"] if into_weight else Constant(None),
        "ordered_x": Pointer(_ORDERED),
        "num_rows": Scalar(rows),
        "D": Constant(d),
        **{name: x_side[name] for name in ("ELEMENT", "STRIDE", "SCALE_STRIDE", "GROUP")},
        "SCALING": Constant(method.scaling),
        "ORDER": Constant(order),
        "WIDTH": Constant(width),
        "BLOCK_M": Constant(_ORDER_ROWS),
        "BLOCK_K": Constant(config.block_k),
    }
    grid = (-(-rows // _ORDER_ROWS), width // config.block_k)
    builder.launch("matmul_quantized:order_columns", grid, arguments, 4, 1)
    scales_stay = {} if not into_weight else {"x_scales": Constant(None)}
    return x_side | {"x": Pointer(_ORDERED), "ELEMENT": Constant(None), "STRIDE": Constant(width)} | scales_stay


def launch_quantized(
    builder: PlanBuilder, operands: MatmulOperands, layout: LayoutSpec | None, spec: MatmulSpec, config: TileConfig
) -> None:
    """Add the launch that computes y and pre, whichever the plan has.

    Buffers by the names of `plan_matmul_ogs`: operands (`weight.values`, ...) and, with a layout, group_sizes,
    group_start, slot_of_row and the schedule of config.block_m.
    """
    weight: QuantizedTensor = operands.weight
    assert weight.spec.tiling is None, "quantized_tiles chooses no tile for these"
    x, weights = operands.x, weight.format
    sizes, method = product_sizes(operands, layout, spec), product_method(operands, builder.target)
    ragged, stacked = layout is not None, operands.layer is not None
    num_rows = layout.capacity if layout is not None else sizes.rows
    num_blocks = layout.max_blocks(config.block_m) if layout is not None else -(-num_rows // config.block_m)
    order = _order(config, operands, method, sizes.d)

    def optional(name: str) -> Pointer | Constant:
        return Pointer(name) if builder.has(name) else Constant(None)

    def layout_array(name: str) -> Pointer | Constant:
        return Pointer(name) if ragged else Constant(None)

    def strides(prefix: str, name: str) -> dict[str, Argument]:
        array = getattr(weight, name)
        if array is None:
            return {f"{prefix}_{part}": Constant(0) for part in ("MATRIX", "N", "K")}
        n_axis, k_axis = (-2, -1) if weight.layout == "out_in" else (-1, -2)
        sides = {"MATRIX": array.shape[-2] * array.shape[-1], "N": array.stride[n_axis], "K": array.stride[k_axis]}
        return {f"{prefix}_{part}": Constant(value) for part, value in sides.items()}

    def layer_stride(name: str) -> Constant:
        return Constant(builder.spec(name).stride[0] if builder.has(name) and stacked else 0)

    x_side = _x_arguments(x)
    if order is not None and config.block_m >= _ORDERED_ROWS:
        x_side = _order_columns(builder, x_side, method, order, config, sizes.d)
    arguments: dict[str, Argument] = {
        "x": x_side["x"],
        "x_scales": x_side["x_scales"],
        "weight": Pointer("weight.values"),
        "scales": Pointer("weight.scales"),
        "zero_points": optional("weight.zero_points"),
        "up": optional("up.values"),
        "up_scales": optional("up.scales"),
        "up_zero_points": optional("up.zero_points"),
        **{name: optional(name) for name in ("bias", "up_bias", "row_weight", "layer")},
        **{name: layout_array(name) for name in ("group_sizes", "group_start", "slot_of_row", "schedule")},
        "y": optional("y"),
        "pre": optional("pre"),
        "num_blocks": Scalar(num_blocks),
        "num_rows": Scalar(num_rows),
        "num_slots": Scalar(layout.num_slots if layout is not None else num_rows),
        "D": Constant(sizes.d),
        "N": Constant(sizes.n),
        "WEIGHT_N": Constant(weight.shape[-2 if weight.layout == "out_in" else -1]),
        "NUM_EXPERTS": Constant(sizes.groups),
        "NUM_LAYERS": Constant(weight.shape[0] if stacked else 1),
        "X_ELEMENT": x_side["ELEMENT"],
        "X_COLUMNS": Constant(sizes.d if x_side["x"] != Pointer(_ORDERED) else builder.spec(_ORDERED).shape[1]),
        "X_STRIDE": x_side["STRIDE"],
        "X_SCALE_STRIDE": x_side["SCALE_STRIDE"],
        "X_GROUP": x_side["GROUP"],
        "X_ORDER": Constant(order if x_side["x"] != Pointer(_ORDERED) else None),
        "ELEMENT": Constant(weights.element),
        "GROUP_ROWS": Constant(weights.group_rows or 0),
        "GROUP": Constant(weights.group_columns or 0),
        **strides("VALUE", "values"),
        **strides("SCALE", "scales"),
        **strides("POINT", "zero_points"),
        "BIAS_LAYER_STRIDE": layer_stride("bias"),
        "UP_BIAS_LAYER_STRIDE": layer_stride("up_bias"),
        "TOP_K": Constant(layout.top_k if layout is not None else 1),
        **fused_constants(spec),
        "DOT": Constant(method.dot),
        "SCALING": Constant(method.scaling),
        "UNIFORM": Constant(_is_uniform(weights, spec, sizes, config, method)),
        "ORDER": Constant(order),
        "INPUT_PRECISION": Constant("tf32" if spec.allow_tf32 and method.dot == "float32" else "ieee"),
        "FAST_ACCUMULATE": Constant(spec.fast_accumulate),
        "TOKENS_FIRST": Constant(method.dot in ("e4m3", "int8") and config.block_m >= _TOKENS_FIRST_ROWS),
        "BLOCK_M": Constant(config.block_m),
        "BLOCK_N": Constant(config.block_n),
        "BLOCK_K": Constant(config.block_k),
        "GROUP_M": Constant(config.group_m),
        "OVERLAP": Constant(None),
    }
    grid = num_blocks * -(-sizes.n // config.block_n)
    kernel = "matmul_quantized:matmul_quantized"
    builder.launch(kernel, (grid,), arguments, config.num_warps, config.num_stages)
    within = f", a block in the order {order}" if order is not None else ""
    builder.sums(
        f"k in blocks of {config.block_k}, of {method.dot} products, scales {method.scaling}{within}; no split"
    )
