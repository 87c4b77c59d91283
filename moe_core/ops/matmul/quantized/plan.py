"""Planning of the grouped matmul with quantised weights, and rows where asked (`kernel.matmul_quantized`)."""

from __future__ import annotations

from moe_core.base.arrays import ArraySpec, row_stride
from moe_core.formats import Format, QuantizedTensor
from moe_core.ops.matmul import arguments as common
from moe_core.ops.matmul.problem import MatmulProblem
from moe_core.ops.matmul.quantized.tiles import ProductMethod, QuantizedTiles, product_method
from moe_core.plan.builder import PlanBuilder
from moe_core.plan.steps import Argument, Kernel, Pointer, passed
from moe_core.specs.operands import MatmulOperands
from moe_core.specs.tile import TileConfig

ORDER_COLUMNS = Kernel("matmul.quantized.kernel:order_columns")
MATMUL_QUANTIZED = Kernel("matmul.quantized.kernel:matmul_quantized", pdl="layout")

#: Columns of which a thread reads its share of decoded weights at once, by elements per byte; see `weight_tile`.
_ORDERS = {2: ("words", 128), 1: ("bytes", 64)}
#: Tokens of a tile from which the columns of x are put in order by a launch of their own, into a buffer of this name.
_ORDERED_ROWS, _ORDERED = 64, "ordered_x"
_ORDER_ROWS = 32
#: A row of packed weights is read by 16 bytes.
_WORD_COLUMNS = 32
#: Tokens of a tile from which they fill the tensor cores' left side, where weights are not decoded into registers.
_TOKENS_FIRST_ROWS = 64


class _Quantized(QuantizedTiles):
    """The tiles, and their launch."""

    def launch(self, builder: PlanBuilder, problem: MatmulProblem, config: TileConfig, stage: int | None) -> None:
        method = product_method(problem.operands, builder.target)
        order = _order(config, problem.operands, method, problem.d)
        x_side = _x_arguments(problem.operands.x)
        if order is not None and config.block_m >= _ORDERED_ROWS:
            x_side = _order_columns(builder, x_side, method, order, config, problem.d)
        arguments = _arguments(builder, problem, config, x_side, order)
        builder.launch(MATMUL_QUANTIZED, (problem.tiles(config),), arguments, config.num_warps, config.num_stages)
        within = f", a block in the order {order}" if order is not None else ""
        builder.sums(
            f"k in blocks of {config.block_k}, of {method.dot} products, scales {method.scaling}{within}; no split"
        )


QUANTIZED = _Quantized()


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


def _is_uniform(problem: MatmulProblem, config: TileConfig, method: ProductMethod) -> bool:
    """Whether the weight rows of any tile, of the gate and of up apart, share their scales."""
    group_rows, gate_layout = problem.operands.weight.format.group_rows, problem.gate_layout
    if method.scaling == "into_weight":
        return False
    if group_rows is None:
        return True
    if gate_layout == "halves" and problem.n % group_rows:
        return False
    return group_rows % (2 * config.block_n if gate_layout == "interleaved" else config.block_n) == 0


def _x_arguments(x: ArraySpec | QuantizedTensor) -> dict[str, Argument]:
    """What kernels are told of x as it is given."""
    if not isinstance(x, QuantizedTensor):
        return passed(x="x", x_scales=None, ELEMENT=None, STRIDE=row_stride("x", x), SCALE_STRIDE=0, GROUP=0)
    scale_stride, group = x.scales.shape[1] if x.format.group_rows else 0, x.format.group_columns or 0
    arrays = passed(x="x.values", x_scales="x.scales", ELEMENT=x.format.element, STRIDE=row_stride("x", x.values))
    return arrays | passed(SCALE_STRIDE=scale_stride, GROUP=group)


def _order_columns(
    builder: PlanBuilder, x_side: dict[str, Argument], method: ProductMethod, order: str, config: TileConfig, d: int
) -> dict[str, Argument]:
    """Add the launch that decodes x and puts its columns in order; what the product is then told of x."""
    x = x_side["x"]
    assert isinstance(x, Pointer)
    rows, width = builder.spec(x.buffer).shape[0], -(-d // config.block_k) * config.block_k
    into_weight = method.scaling == "into_weight"
    builder.scratch(_ORDERED, ArraySpec((rows, width), method.dot))
    arguments = {
        **passed(x=x, x_scales=x_side["x_scales"] if into_weight else None, ordered_x=_ORDERED, num_rows=rows, D=d),
        **{name: x_side[name] for name in ("ELEMENT", "STRIDE", "SCALE_STRIDE", "GROUP")},
        **passed(SCALING=method.scaling, ORDER=order, WIDTH=width, BLOCK_M=_ORDER_ROWS, BLOCK_K=config.block_k),
    }
    grid = (-(-rows // _ORDER_ROWS), width // config.block_k)
    builder.launch(ORDER_COLUMNS, grid, arguments, 4, 1)
    scales_go = passed(x_scales=None) if into_weight else {}
    return x_side | passed(x=_ORDERED, ELEMENT=None, STRIDE=width) | scales_go


def _arguments(
    builder: PlanBuilder, problem: MatmulProblem, config: TileConfig, x_side: dict[str, Argument], order: str | None
) -> dict[str, Argument]:
    """Every kernel parameter in order. x_side: what it is told of x; order: of the columns of decoded weights."""
    weight: QuantizedTensor = problem.operands.weight
    spec, method = problem.spec, product_method(problem.operands, builder.target)
    ordered = x_side["x"] == Pointer(_ORDERED)
    columns = builder.spec(_ORDERED).shape[1] if ordered else problem.d
    tokens_first = method.dot in ("e4m3", "int8") and config.block_m >= _TOKENS_FIRST_ROWS
    return {
        **(passed(x=x_side["x"], x_scales=x_side["x_scales"]) | common.quantized_pointers(builder)),
        **builder.pointers("bias", "up_bias", "row_weight", "layer_index", *common.SCHEDULED_INPUTS, "y", "pre"),
        **(common.row_counts(problem, config) | common.size_constants(problem)),
        **passed(X_ELEMENT=x_side["ELEMENT"], X_COLUMNS=columns, X_STRIDE=x_side["STRIDE"]),
        **passed(X_SCALE_STRIDE=x_side["SCALE_STRIDE"], X_GROUP=x_side["GROUP"], X_ORDER=None if ordered else order),
        **(common.format_constants(weight) | common.quantized_strides(weight)),
        **(common.bias_strides(problem.operands) | common.fused_constants(problem)),
        **passed(DOT=method.dot, SCALING=method.scaling, UNIFORM=_is_uniform(problem, config, method)),
        **passed(ORDER=order, INPUT_PRECISION="tf32" if spec.allow_tf32 and method.dot == "float32" else "ieee"),
        **passed(FAST_ACCUMULATE=spec.fast_accumulate, TOKENS_FIRST=tokens_first),
        **(common.block_constants(config) | passed(PDL=None)),
    }
