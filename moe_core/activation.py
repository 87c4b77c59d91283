"""Planning of the activation as an op of its own."""

from __future__ import annotations

import functools

from moe_core import dtypes
from moe_core.arrays import ArraySpec, require_spec
from moe_core.checks import require_choice
from moe_core.errors import InvalidInput
from moe_core.plan import Constant, LaunchPlan, PlanBuilder, Pointer, Scalar
from moe_core.specs import Activation
from moe_core.target import Target


def elementwise_tile(width: int, target: Target) -> tuple[int, int]:
    """(rows, columns) of a tile for a row-wise elementwise kernel over rows of `width` elements."""
    columns = min(1024, 1 << (max(width, 16) - 1).bit_length())
    elements = 2048 if target.kind == "cuda" else 16384
    return max(1, elements // columns), columns


def row_stride(name: str, spec: ArraySpec) -> int:
    """The row stride of a rank-2 array whose rows are dense; other strides raise InvalidInput."""
    if spec.shape[1] > 1 and spec.stride[1] != 1:
        raise InvalidInput(
            f"{name} must have dense rows (last stride 1), got strides {spec.strides}; make it contiguous"
        )
    if spec.shape[0] > 1 and spec.stride[0] < spec.shape[1]:
        raise InvalidInput(
            f"{name} must not have overlapping rows, got strides {spec.strides} for shape {spec.shape}; "
            "make it contiguous"
        )
    return spec.stride[0]


@functools.lru_cache(maxsize=4096)
def plan_activation(
    x: ArraySpec,
    activation: Activation,
    target: Target,
    *,
    up: ArraySpec | None = None,
    out_dtype: str | None = None,
) -> LaunchPlan:
    """y `[R, F]` = activation of x in fp32, one cast.

    x: `[R, 2F]` (gated, one buffer), `[R, F]` (ungated, or the gate beside `up` `[R, F]`), bf16, fp16 or fp32, rows may
    be strided. out_dtype: None = the dtype of x. Inputs: x, [up]; output: y. Raises InvalidInput for anything else.
    """
    require_spec("x", x, ("num_rows", "width"), dtypes.MATMUL_DTYPES, contiguous=False)
    row_stride("x", x)
    rows, columns = x.shape
    one_buffer = activation.gate_layout in ("halves", "interleaved")
    if one_buffer and columns % 2:
        raise InvalidInput(f"x must have an even width (gate and up), got {columns}; pass both halves")
    width = columns // 2 if one_buffer else columns
    separate = activation.gate_layout == "separate"
    if separate:
        row_stride("up", require_spec("up", up, (rows, width), x.dtype, contiguous=False))
    elif up is not None:
        raise InvalidInput(f"up must be None for gate_layout={activation.gate_layout!r}, got {up}; leave it out")
    out_dtype = dtypes.canonical(out_dtype or x.dtype)
    require_choice("out_dtype", out_dtype, dtypes.MATMUL_DTYPES)

    builder = PlanBuilder("activation", target)
    builder.input("x", x)
    if up is not None:
        builder.input("up", up)
    builder.output("y", ArraySpec((rows, width), out_dtype))
    if not target.compiled:
        inputs = {"x": "x"} | ({"up": "up"} if separate else {})
        builder.reference("activation:activation", inputs, {"activation": activation, "out_dtype": out_dtype}, ("y",))
        return builder.build()
    block_m, block_n = elementwise_tile(width, target)
    builder.launch(
        "activation:activation",
        (-(-rows // block_m), -(-width // block_n)),
        {
            "x": Pointer("x"),
            "up": Pointer("up") if separate else Constant(None),
            "y": Pointer("y"),
            "num_rows": Scalar(rows),
            "WIDTH": Constant(width),
            "X_STRIDE": Constant(row_stride("x", x)),
            "UP_STRIDE": Constant(row_stride("up", up) if up is not None else 0),
            "GATE_LAYOUT": Constant(activation.gate_layout),
            "NAME": Constant(activation.name),
            "ALPHA": Constant(activation.alpha),
            "LIMIT": Constant(activation.limit),
            "BLOCK_M": Constant(block_m),
            "BLOCK_N": Constant(block_n),
        },
    )
    return builder.build()
