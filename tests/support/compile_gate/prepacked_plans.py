"""Plans of products with prepacked weights for the compile gate: every tile, format, epilogue, gather and scatter."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from benchmarks.shapes import SHAPES
from moe_core.base.arrays import ArraySpec
from moe_core.base.target import Target
from moe_core.formats import MXFP4, Format, QuantizedSpec, QuantizedTensor, format_named, quantized_specs
from moe_core.formats.tiling import Tiling, block_of
from moe_core.ops.matmul.forward import plan_matmul_ogs
from moe_core.ops.matmul.sm90_packed.plan import MIXED_INPUT_NAME, block_width, why_illegal_mixed_input
from moe_core.plan.steps import LaunchPlan
from moe_core.specs import Activation, LayoutSpec, MatmulSpec, MatmulTuning, TileConfig
from moe_core.specs.operands import MatmulOperands

#: One on each side of every change of tiles.
ROWS_PER_EXPERT = (1, 8, 16, 40, 512)
#: (activation, gather, scatter, row weights, bias, stacked layers)
EPILOGUES = (
    (Activation("silu", gate_layout="halves"), "token", "row", False, False, False),
    (Activation("swiglu_oai", gate_layout="interleaved"), "slot", "slot", True, True, True),
    (Activation("gelu_tanh", gate_layout="halves"), "row", "slot", True, True, True),
    (Activation("relu2", gated=False), "token", "slot", True, True, True),
    (None, "row", "slot", True, True, False),
)
#: Integer formats and the dtypes of their scales: every way of decoding, with groups shorter than blocks, as long as
#: they, and longer, and zero points.
INTEGERS = (
    ("int4_g128", "bfloat16"), ("int4_g32_zp", "float16"), ("int4_g64", "float32"), ("int4_row_zp", "bfloat16"),
    ("int8_g128", "float32"), ("int8_g32_zp", "bfloat16"), ("int8_row", "float16"), ("int8_channel", "float32"),
)  # fmt: skip


def tiled_weight(
    shape: tuple[int, ...], activation: Activation | None, format: Format = MXFP4, scale_dtype: str | None = None
) -> QuantizedTensor:
    """A prepared weight of logical `[..., N, D]` for products with that activation."""
    gate_layout = activation.gate_layout if activation is not None and activation.gated else None
    order = gate_layout or "rows"
    return quantized_specs(QuantizedSpec(format, "out_in", Tiling(shape[-2], shape[-1], order)), shape, scale_dtype)


def tall_config(weight: QuantizedTensor, spec: MatmulSpec) -> TileConfig:
    """A tile of 256 rows of x, with as many stages as there is room for."""
    target = Target("cuda", 90, 132)
    config = TileConfig(256, 2 * block_width(spec), block_of(weight.format).columns, 4, 2, 8, MIXED_INPUT_NAME)
    more = dataclasses.replace(config, num_stages=3)
    while why_illegal_mixed_input(more, weight, spec, target) is None:
        config, more = more, dataclasses.replace(more, num_stages=more.num_stages + 1)
    return config


def _product(
    rows: int, sizes: tuple[int, int, int], epilogue: tuple, target: Target, format: Format = MXFP4,
    scale_dtype: str | None = None, tall: bool = False,
) -> LaunchPlan:  # fmt: skip
    """sizes: experts, D and N."""
    experts, d, n = sizes
    activation, gather, scatter, weighted, biased, stacked = epilogue
    layout = LayoutSpec(max(1, rows * experts // 2), 2, experts)
    width = 2 * n if activation is not None and activation.gated else n
    count = {"row": layout.capacity, "token": layout.num_tokens, "slot": layout.num_slots}[gather]
    lead = (3, experts) if stacked else (experts,)
    operands = MatmulOperands(
        ArraySpec((count, d), "bfloat16"),
        tiled_weight((*lead, width, d), activation, format, scale_dtype),
        bias=ArraySpec((*lead, width), "float32") if biased else None,
        row_weight=ArraySpec((layout.num_slots,), "float32") if weighted else None,
        layer_index=ArraySpec((1,), "int32") if stacked else None,
    )
    spec = MatmulSpec("out_in", gather, scatter, activation)
    if tall:
        spec = dataclasses.replace(spec, tuning=MatmulTuning(tall_config(operands.weight, spec)))
    return plan_matmul_ogs(operands, layout, spec, target)


def prepared(target: Target) -> Iterator[LaunchPlan]:
    """Released models' layers, and every epilogue with sizes that end inside of blocks."""
    if target.arch != 90:
        return
    for rows in ROWS_PER_EXPERT:
        yield from _layers(rows, ("gptoss120b", "qwen3"), target)
        for epilogue in EPILOGUES:
            yield _product(rows, (8, 416, 352), epilogue, target)


def prepared_integers(target: Target) -> Iterator[LaunchPlan]:
    """Layers in two formats, and every format with each of the tiles and some of the epilogues."""
    if target.arch != 90:
        return
    for rows in ROWS_PER_EXPERT:
        for name, scale_dtype in (("int4_g128", "bfloat16"), ("int8_channel", "float32")):
            yield from _layers(rows, ("qwen3",), target, format_named(name), scale_dtype)
        for place, (name, scale_dtype) in enumerate(INTEGERS):
            epilogue = EPILOGUES[(place + rows) % len(EPILOGUES)]
            yield _product(rows, (8, 384, 352), epilogue, target, format_named(name), scale_dtype)


def prepared_tall(target: Target) -> Iterator[LaunchPlan]:
    """Tiles of 256 rows: a layer, every epilogue, and every format with one of them."""
    if target.arch != 90:
        return
    yield from _layers(512, ("gptoss120b",), target, tall=True)
    for epilogue in EPILOGUES:
        yield _product(512, (8, 416, 352), epilogue, target, tall=True)
    for place, (name, scale_dtype) in enumerate(INTEGERS):
        epilogue = EPILOGUES[place % len(EPILOGUES)]
        yield _product(512, (8, 384, 352), epilogue, target, format_named(name), scale_dtype, tall=True)


def _layers(
    rows: int, models: tuple[str, ...], target: Target, format: Format = MXFP4, scale_dtype: str | None = None,
    tall: bool = False,
) -> Iterator[LaunchPlan]:  # fmt: skip
    """Both products of released models' layers."""
    for model in models:
        shape = SHAPES[model]
        experts, d, n = shape.num_experts, shape.d_model, shape.d_ff
        first = (shape.activation, "token", "row", False, shape.biased, False)
        yield _product(rows, (experts, d, n), first, target, format, scale_dtype, tall)
        second = (None, "row", "slot", True, shape.biased, False)
        yield _product(rows, (experts, n, d), second, target, format, scale_dtype, tall)


#: Groups of the compile gate.
GROUPS = {"prepared": prepared, "prepared_integers": prepared_integers, "prepared_tall": prepared_tall}
