"""Products of tiles whose factors differ in width, summed in fp32."""

import triton
import triton.language as tl


@triton.jit
def multiply(a, b, accumulator, PRODUCT: tl.constexpr, DRAINED: tl.constexpr):
    """accumulator + a . b, fp32. PRODUCT: an input precision of `tl.dot`, behind `widen_` where both become fp32 first;
    `split_a` or `split_b`: that factor is fp32, the other bf16. DRAINED: see `drained`.

    A split factor is three bf16 numbers, whose sum has its 24 bits: products on the tensor cores are exact then, which
    products in fp32 are not, and sums are fp32's. Small parts go first.
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
    """The same sums, behind the products that they come from.

    A left operand that is computed, and not loaded, is in registers. wgmma reads them when its turn comes, and Triton
    3.6 lets up to seven products wait while the next step of a loop already writes the same registers. What uses the
    sums makes a step wait for its own products.
    """
    return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=f,f", [accumulator], tl.float32, False, 1)


@triton.jit
def split(values):
    """Three bf16 numbers whose sum is an fp32 number, largest first."""
    high = values.to(tl.bfloat16)
    rest = values - high.to(tl.float32)
    middle = rest.to(tl.bfloat16)
    return high, middle, (rest - middle.to(tl.float32)).to(tl.bfloat16)
