"""Plans the activation op."""

from __future__ import annotations

from moe_core.base import ArraySpec, Target, dtypes, keep_plans, require_choice, require_spec, row_stride
from moe_core.base.sizes import elementwise_tile
from moe_core.errors import InvalidInput
from moe_core.ops.activation.kernels import forward as kernels
from moe_core.plan import Argument, LaunchPlan, PlanBuilder, declare_kernel, passed
from moe_core.specs import Activation

ACTIVATION = declare_kernel(kernels.activation)


def check_input(x: ArraySpec, up: ArraySpec | None, activation: Activation) -> int:
    """Check x `[R, 2F]` or `[R, F]` and up `[R, F]` against the gate layout. Returns F."""
    require_spec("x", x, ("num_rows", "width"), dtypes.MATMUL_DTYPES, contiguous=False)
    row_stride("x", x)
    rows, width = x.shape
    if activation.gate_layout in ("halves", "interleaved"):
        if width % 2:
            raise InvalidInput(f"x must have an even width (gate and up), got {width}; pass both halves")
        width //= 2
    if activation.gate_layout == "separate":
        row_stride("up", require_spec("up", up, (rows, width), x.dtype, contiguous=False))
    elif up is not None:
        raise InvalidInput(f"up must be None for gate_layout={activation.gate_layout!r}, got {up}; leave it out")
    return width


def input_constants(x: ArraySpec, up: ArraySpec | None, activation: Activation) -> dict[str, Argument]:
    strides = passed(X_STRIDE=row_stride("x", x), UP_STRIDE=0 if up is None else row_stride("up", up))
    return strides | passed(GATE_LAYOUT=activation.gate_layout) | function_constants(activation)


def function_constants(activation: Activation) -> dict[str, Argument]:
    return passed(NAME=activation.name, ALPHA=activation.alpha, LIMIT=activation.limit)


@keep_plans
def plan_activation(
    x: ArraySpec, activation: Activation, target: Target, *, up: ArraySpec | None = None, out_dtype: str | None = None
) -> LaunchPlan:
    """y `[R, F]` = activation of x in fp32, one cast.

    x: `[R, 2F]` (gated, one buffer) or `[R, F]` (ungated, or the gate of `up` `[R, F]`), bf16, fp16 or fp32; rows may
    be strided. out_dtype: None for the dtype of x. Output: y.
    """
    width = check_input(x, up, activation)
    rows = x.shape[0]
    out_dtype = dtypes.canonical(out_dtype or x.dtype)
    require_choice("out_dtype", out_dtype, dtypes.MATMUL_DTYPES)

    builder = PlanBuilder("activation", target)
    inputs = builder.inputs({"x": x, "up": up})
    builder.output("y", ArraySpec((rows, width), out_dtype))
    if not target.compiled:
        constants = {"activation": activation, "out_dtype": out_dtype}
        from moe_core.ops.activation import reference as twins

        return builder.reference(twins.activation, inputs, constants, ("y",))
    block_m, block_n = elementwise_tile(width, target)
    arguments = builder.pointers("x", "up", "y") | passed(num_rows=rows, WIDTH=width)
    arguments |= input_constants(x, up, activation) | passed(BLOCK_M=block_m, BLOCK_N=block_n)
    builder.launch(ACTIVATION, (-(-rows // block_m), -(-width // block_n)), arguments)
    return builder.build()
