"""Products of tiles with factors of different widths, summed in fp32."""

import triton
import triton.language as tl


@triton.jit
def multiply(a, b, accumulator, PRODUCT: tl.constexpr, DRAINED: tl.constexpr):
    """Return accumulator + a . b in fp32. DRAINED: see `drained`.

    PRODUCT: an input precision of `tl.dot`. Prefix `widen_`: both factors become fp32 first. `split_a`, `split_b`: that
    fp32 factor, the other being bf16, is split into three bf16 numbers, exactly, for tensor cores. Small parts are
    added first.
    """
    if PRODUCT == "widen_ieee":
        return tl.dot(a.to(tl.float32), b.to(tl.float32), accumulator, input_precision="ieee")
    elif PRODUCT == "widen_tf32":
        accumulator = tl.dot(a.to(tl.float32), b.to(tl.float32), accumulator, input_precision="tf32")
    elif PRODUCT == "split_a":
        high, middle, low = split(a)
        accumulator = tl.dot(low, b, accumulator)
        accumulator = tl.dot(high, b, tl.dot(middle, b, accumulator))
    elif PRODUCT == "split_b":
        high, middle, low = split(b)
        accumulator = tl.dot(a, low, accumulator)
        return tl.dot(a, high, tl.dot(a, middle, accumulator))
    else:
        return tl.dot(a, b, accumulator, input_precision=PRODUCT)
    if DRAINED:
        accumulator = drained(accumulator)
    return accumulator


@triton.jit
def drained(accumulator):
    """Return the same sums. wgmma reads a computed left operand from registers, some time later, and Triton 3.6 lets up
    to seven products wait while the next step writes them. Using the sums makes a step wait for its products."""
    return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=f,f", [accumulator], tl.float32, False, 1)


@triton.jit
def split(values):
    """Split fp32 into three bf16 numbers, largest first."""
    high = values.to(tl.bfloat16)
    rest = values - high.to(tl.float32)
    middle = rest.to(tl.bfloat16)
    return high, middle, (rest - middle.to(tl.float32)).to(tl.bfloat16)
