"""Plans the quantisation of activations, row by row or as a whole."""

from __future__ import annotations

from moe_core.base import ArraySpec, Target, dtypes, keep_plans, padded, require_kind, require_spec, row_stride
from moe_core.errors import InvalidInput, Unsupported
from moe_core.formats import Format, QuantizedSpec, quantized_shapes
from moe_core.ops.quantize.kernels import rows as kernels
from moe_core.ops.routing.layout import BLOCK_ELEMENTS
from moe_core.plan import Argument, Held, LaunchPlan, PlanBuilder, Role, declare_kernel, passed

QUANTIZE_GROUPS = declare_kernel(kernels.quantize_groups, pdl="start")
PARTIAL_MAXIMA = declare_kernel(kernels.partial_maxima, pdl="start")
QUANTIZE_WHOLE_ROWS = declare_kernel(kernels.quantize_whole_rows, pdl="start")

_ELEMENTS = ("e4m3", "e2m1", "int8")
#: A power of two, since the next launch reads all.
_MAXIMA = 512
#: 16 per thread of 4 warps.
_TILE = 2048
#: Rows from which several whole rows are quantised at a time, and their tile: elements, most columns, warps. From 16384
#: rows on it takes up to half the time, up to 256 rows up to twice the time (docs/notebook/quantised.md).
_MANY_ROWS = 4096
_MANY, _MANY_COLUMNS, _MANY_WARPS = 4096, 1024, 8
_WIDEST_GROUP = 16384


@keep_plans
def plan_quantize_rows(
    x: ArraySpec,
    format: Format,
    target: Target,
    *,
    scales: ArraySpec | None = None,
    used_by: ArraySpec | None = None,
    maxima: ArraySpec | None = None,
    zeros: int = 0,
) -> LaunchPlan:
    """values and scales of x `[R, D]` in a format, laid out as a `QuantizedTensor` `[R, D]` of layout `out_in`.

    Args:
        x: bf16, fp16 or fp32; rows may be strided.
        format: of e4m3, e2m1 or int8, with scales of a row, of groups of its columns, or of all.
        scales: fp32 `[1]`, a static scale, for formats with one scale per tensor.
        used_by: int32 `[R * n]`: a row with n negative entries is not read and becomes zeros (row_of_slot of a layout
            for tokens, slot_of_row for its rows). None: every row counts.
        maxima: in composed plans on compiled targets, of whole rows: int32 `[n]`, n a power of two, the bits of the
            largest magnitudes of rows that count, found by the writer of x (`MatmulProblem.finds_maxima`).
        zeros: number of int32 zeros to write too, a power of two.

    Inputs: x, [static_scale], [used_by], [maxima]. Outputs: values, scales, [zeros]. Bits: of the reference. Raises
    Unsupported for other formats and, on compiled targets, groups of more than 16384 columns.
    """
    require_kind("format", format, Format)
    require_spec("x", x, ("num_rows", "d"), dtypes.MATMUL_DTYPES, contiguous=False)
    stride = row_stride("x", x)
    if format.element not in _ELEMENTS or format.group_rows not in (None, 1):
        raise Unsupported(
            f"format must be of {', '.join(_ELEMENTS)} with scales of one row or of all, got {format.name}; its "
            "quantiser is moe_core.ops.quantize.reference.quantize, in NumPy"
        )
    if format.group_rows is None and format.group_columns is not None:
        raise Unsupported(
            f"format must not share scales over all rows but not over all columns, got {format.name}"
            "; use a format with scales for both or neither"
        )
    if x.shape[1] < 1:
        raise InvalidInput(f"x must have at least one column, got {x.shape}; pass a wider array")
    shapes = quantized_shapes(QuantizedSpec(format), x.shape)
    if scales is not None:
        require_spec("scales", scales, (1,), "float32")
        if format.group_rows is not None or format.has_e8m0_scales:
            raise InvalidInput(
                f"scales must be None for {format.name}, whose scales are found row by row; a static one goes with "
                "one fp32 scale per tensor"
            )
    if used_by is not None:
        require_spec("used_by", used_by, ("entries",), "int32")
        rows, entries = x.shape[0], used_by.shape[0]
        if entries % max(rows, 1) or (rows > 0 and entries < rows):
            raise InvalidInput(
                f"used_by must have as many entries for every one of the {rows} rows of x, got {entries}; pass "
                "row_of_slot of a layout for its tokens, slot_of_row for its rows"
            )
    builder = PlanBuilder("quantize_rows", target)
    inputs = builder.inputs({"x": x, "static_scale": scales, "used_by": used_by, "maxima": maxima})
    values = builder.output("values", ArraySpec(shapes.values, format.own_element.dtype), Held(Role.ROWS, "values"))
    scale_buffer = builder.output("scales", ArraySpec(shapes.scales, format.scale_dtypes[0]), Held(Role.ROWS, "scales"))
    composed = maxima is not None or zeros > 0
    assert not composed or (target.compiled and format.group_columns is None), "of whole rows, by kernels"
    if zeros:
        builder.output("zeros", ArraySpec((zeros,), "int32"), Role.MAXIMA)
    if not target.compiled:
        from moe_core.ops.quantize import reference as twins

        return builder.reference(twins.quantize_rows, inputs, {"format": format}, (values, scale_buffer))
    add = _add_whole_rows if format.group_columns is None else _add_groups
    add(builder, format, stride)
    return builder.build()


def chooses_one_scale(format: Format, static: bool) -> bool:
    """Return True if all rows share a scale that is found from them."""
    return format.group_rows is None and not static


def _users(builder: PlanBuilder) -> int:
    return builder.spec("used_by").shape[0] // max(builder.spec("x").shape[0], 1) if builder.has("used_by") else 0


def rule_of(format: Format, target: Target) -> dict[str, Argument]:
    element = format.own_element
    converts = target.has_fp8 and element.name == "e4m3" and not format.has_e8m0_scales
    rule = passed(ELEMENT=element.name, CONVERTS=converts, RULE=format.scale_rule, LARGEST=element.largest)
    return rule | passed(TOP_EXPONENT=element.top_exponent or 0)


def _rows_of_tile(columns: int, rows: int, target: Target, elements: int = _TILE) -> int:
    if target.interpreted:
        return min(padded(rows), max(1, BLOCK_ELEMENTS["interpreter"] // columns))
    return max(1, elements // columns)


def _add_groups(builder: PlanBuilder, format: Format, stride: int) -> None:
    (rows, width), group = builder.spec("x").shape, format.group_columns
    assert group is not None
    groups = builder.spec("scales").shape[1]
    block_k = padded(group)
    if block_k > _WIDEST_GROUP:
        raise Unsupported(
            f"format must have groups of at most {_WIDEST_GROUP} columns on {builder.target}, got {format.name} with "
            f"{group}; share scales over whole rows, or in smaller groups"
        )
    block_m = _rows_of_tile(block_k, rows, builder.target)
    num_warps = min(16, max(4, block_k // 512))
    arguments = {
        **builder.pointers("x", "used_by", "values", "scales"),
        **passed(num_rows=rows, WIDTH=width, STRIDE=stride, USERS=_users(builder), GROUP=group, GROUPS=groups),
        **rule_of(format, builder.target),
        **passed(BLOCK_M=block_m, BLOCK_K=block_k, PDL=None),
    }
    builder.launch(QUANTIZE_GROUPS, (-(-rows // block_m), groups), arguments, num_warps, 1)


def _add_whole_rows(builder: PlanBuilder, format: Format, stride: int) -> None:
    rows, width = builder.spec("x").shape
    whole = format.group_rows is None
    many = rows >= _MANY_ROWS and not builder.target.interpreted
    elements, columns, num_warps = (_MANY, _MANY_COLUMNS, _MANY_WARPS) if many else (_TILE, _TILE, 4)
    block_k = min(padded(width), columns)
    block_m, block_k, num_warps = _rows_of_tile(block_k, rows, builder.target, elements), block_k, num_warps
    partials, operand = 1 if builder.target.interpreted else _MAXIMA, "partials"
    shape = passed(num_rows=rows, WIDTH=width, STRIDE=stride, USERS=_users(builder))
    tile = passed(BLOCK_M=block_m, BLOCK_K=block_k, PDL=None)
    if builder.has("maxima"):
        (partials,), operand = builder.spec("maxima").shape, "maxima"
    elif chooses_one_scale(format, builder.has("static_scale")):
        builder.scratch("partials", ArraySpec((partials,), "int32"))
        arguments = builder.pointers("x", "used_by", "partials") | shape | tile
        builder.launch(PARTIAL_MAXIMA, (partials,), arguments, num_warps, 1)
    zeros = builder.spec("zeros").size if builder.has("zeros") else 0
    arguments = builder.pointers("x", "used_by") | {"partials": builder.optional(operand)}
    arguments |= {"given": builder.optional("static_scale")} | builder.pointers("values", "scales", "zeros")
    arguments |= shape | passed(PARTIALS=partials, ZEROS=zeros)
    # One scale of all rows is written even without rows.
    programs = max(-(-rows // block_m), 1 if whole else 0)
    arguments |= rule_of(format, builder.target) | tile
    builder.launch(QUANTIZE_WHOLE_ROWS, (programs,), arguments, num_warps, 1)
