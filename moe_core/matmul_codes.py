"""Planning of a product and the quantisation of its result in one launch: the hidden rows of a forward."""

from __future__ import annotations

import functools

from moe_core.arrays import ArraySpec
from moe_core.formats import Format, QuantizedSpec, QuantizedTensor, quantized_specs
from moe_core.matmul_hopper_fp8 import launch_hopper_fp8, why_not_codes
from moe_core.matmul_ogs import LAYOUT_INPUTS, product_tile
from moe_core.matmul_operands import check_operands
from moe_core.operands import MatmulOperands, named_arrays
from moe_core.plan import LaunchPlan, PlanBuilder
from moe_core.specs import LayoutSpec, MatmulSpec
from moe_core.target import Target
from moe_core.tuning import TileConfig


def why_two_launches(
    operands: MatmulOperands,
    n: int,
    spec: MatmulSpec,
    config: TileConfig | None,
    format: Format,
    *,
    static: bool = False,
) -> str:
    """The reason a product with that configuration does not quantise its result itself, empty if it does.

    n: output columns; format: of the result's rows; static: its scale is given.
    """
    if config is None or config.family != "hopper" or not isinstance(operands.weight, QuantizedTensor):
        return "only the hopper family's fp8 kernel quantises what it stores"
    return why_not_codes(format, n, spec, static=static)


@functools.lru_cache(maxsize=4096)
def plan_matmul_codes(
    operands: MatmulOperands,
    layout: LayoutSpec,
    spec: MatmulSpec,
    format: Format,
    target: Target,
    *,
    scale: ArraySpec | None = None,
) -> LaunchPlan:
    """`matmul_ogs.plan_matmul_ogs` as the first product of a composed plan, then `plan_quantize_rows`: to their bits.

    The result is rounded to spec.out_dtype before it is quantised. scale: fp32 `[1]`, a static scale of all of it.
    Inputs as of `plan_matmul_ogs` with stage 0, [static_scale]; outputs: y.values e4m3 `[capacity, N]`, y.scales fp32
    `[capacity, ceil(N / 128)]`, or `[1]` of a static scale, rows of no expert unwritten. For products of which
    `why_two_launches` gives no reason.
    """
    sizes = check_operands(operands, layout, spec, False)
    choice = product_tile(operands, sizes.n, layout, spec, target)
    config = None if choice is None else choice.config
    reason = why_two_launches(operands, sizes.n, spec, config, format, static=scale is not None)
    assert choice is not None and not reason, reason
    builder = PlanBuilder("matmul_codes", target)
    for name, array in named_arrays(operands):
        builder.input(name, array)
    experts = layout.num_experts
    shapes = ((experts,), (experts + 1,), (layout.capacity,))
    for name, shape in zip(LAYOUT_INPUTS, shapes, strict=True):
        builder.input(name, ArraySpec(shape, "int32"))
    builder.input("schedule", ArraySpec((layout.max_blocks(choice.config.block_m), 2), "int32"))
    builder.input("tile_counters", ArraySpec((2,), "int32"))
    if scale is not None:
        builder.input("static_scale", scale)
    codes = quantized_specs(QuantizedSpec(format), (sizes.out_rows, sizes.n))
    for part, array in named_arrays(codes, "y."):
        builder.output(part, array)
    launch_hopper_fp8(builder, operands, layout, spec, choice.config, trusted=True, counter=0, codes=format)
    builder.note(f"{choice.config} for {layout.num_slots} rows, {experts} experts; {choice.source}")
    builder.note(f"rounded to {spec.out_dtype} and quantised to {format} before it is stored")
    return builder.build()
