"""From tiled integer codes to the left operand of Hopper's tensor cores: (q - z) s, rounded to fp32, then to bfloat16.

A thread has 16 bytes of a weight row (`moe_core.formats.tiling`), with scale s and zero point z for each of the four
words. A code goes into the low mantissa bits of a number with a last bit worth 1, which is subtracted with the zero
point, exactly. Four bits: a pair is 128 + q in bfloat16, scaled by the dtype of scales:

    bfloat16: one product of pairs. (q - z) s is exact in fp32, so it rounds once
    float16: s = a + b, of 8 and 3 bits. (q - z) b is exact in bfloat16, and added to (q - z) a with one rounding
    float32: a product in fp32 for each code, and one rounding of two to a pair

Eight bits: 2^23 + q in fp32, then as four bits with scales of float32. Other scales are widened.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from moe_core.ops.matmul.sm90.kernels.pipeline import seen_as
from moe_core.ops.matmul.sm90_packed.kernels.decode_e2m1 import HEIGHT, LINES, left_half

#: Pairs of 128 and of code masks, and 2^23. A code's bits go into their last bits.
_PAIR, _PAIR_MASK, _WORD = 0x43004300, 0x000F000F, 0x4B000000
_ZERO = {"uint4": 8, "uint8": 128}


def _half(operand: int, word: int, name: str) -> str:
    """Put a word's number from 16-bit operands, two in a register, into both halves of a pair."""
    which = ("lower", "upper")[word % 2]
    return f"mov.b32 {{lower, upper}}, ${operand + word // 2}; mov.b32 {name}, {{{which}, {which}}};"


def _uint4_half(scale_dtype: str, half: int) -> str:
    """Turn two of the words $16 .. $19, and of $20 .. $23 of another row, into 16 pairs. Zero points plus 128 and
    scales follow."""
    lines = [f"{{ .reg .b32 t, l, h, s, r, z, m; .reg .b16 lower, upper; mov.b32 m, {_PAIR:#x};"]
    for word in (2 * half, 2 * half + 1, 4 + 2 * half, 5 + 2 * half):
        row, q = divmod(word, 4)
        lines.append(_half(24, word, "z"))
        if scale_dtype != "float32":
            lines.append(_half(28, word, "s"))
        if scale_dtype == "float16":
            lines.append(_half(32, word, "r"))
        for pair in range(4):
            shift, codes = (f"shr.u32 t, ${16 + word}, {4 * pair}; ", "t") if pair else ("", f"${16 + word}")
            # (codes & mask) | m
            lines.append(f"{shift}lop3.b32 t, {codes}, {_PAIR_MASK:#x}, m, 0xea; sub.rn.bf16x2 t, t, z;")
            out = f"${4 * pair + 2 * row + q % 2}"
            if scale_dtype == "bfloat16":
                lines.append(f"mul.rn.bf16x2 {out}, t, s;")
            elif scale_dtype == "float16":
                lines.append(f"mul.rn.bf16x2 l, t, r; fma.rn.bf16x2 {out}, t, s, l;")
            else:
                lines.append("shl.b32 l, t, 16; and.b32 h, t, 0xffff0000;")
                lines.append(f"mul.rn.f32 l, l, ${28 + word}; mul.rn.f32 h, h, ${28 + word};")
                lines.append(f"cvt.rn.bf16x2.f32 {out}, h, l;")
    return "\n".join([*lines, "}"])


def _uint8_rows() -> str:
    """Turn the words $16 .. $23, four of each of two rows, into 16 pairs. Zero points plus 2^23 and scales follow."""
    lines = ["{ .reg .f32 l, h; .reg .b32 t, c;", f"mov.b32 c, {_WORD:#x};"]
    for word in range(8):
        row, q = divmod(word, 4)
        for p in range(2):
            for name, byte in (("l", 2 * p), ("h", 2 * p + 1)):
                lines.append(f"prmt.b32 t, ${16 + word}, c, {0x7650 + byte:#x}; mov.b32 {name}, t;")
                lines.append(f"sub.rn.f32 {name}, {name}, ${24 + word}; mul.rn.f32 {name}, {name}, ${32 + word};")
            lines.append(f"cvt.rn.bf16x2.f32 ${4 * (2 * (q % 2) + p) + 2 * row + q // 2}, h, l;")
    return "\n".join([*lines, "}"])


def _registers(results: int, *operands: int) -> str:
    return ",".join(["=&r"] * results + ["r"] * sum(operands))


_BFLOAT16_LOW, _BFLOAT16_HIGH = (gl.constexpr(_uint4_half("bfloat16", half)) for half in range(2))
_FLOAT16_LOW, _FLOAT16_HIGH = (gl.constexpr(_uint4_half("float16", half)) for half in range(2))
_FLOAT32_LOW, _FLOAT32_HIGH = (gl.constexpr(_uint4_half("float32", half)) for half in range(2))
_BFLOAT16_REGISTERS = gl.constexpr(_registers(16, 8, 4, 4))
_FLOAT16_REGISTERS = gl.constexpr(_registers(16, 8, 4, 4, 4))
_FLOAT32_REGISTERS = gl.constexpr(_registers(16, 8, 4, 8))
_UINT8, _UINT8_REGISTERS = gl.constexpr(_uint8_rows()), gl.constexpr(_registers(16, 8, 8, 8))
_UINT4_ZERO, _UINT8_ZERO = gl.constexpr(_ZERO["uint4"]), gl.constexpr(_ZERO["uint8"])
_PAIR_BITS, _WORD_BITS = gl.constexpr(_PAIR & 0xFFFF), gl.constexpr(_WORD)


@gluon.constexpr_function
def _factor_layout(groups, num_warps):
    """Return the layout of scales [32 lines, 2, groups] that keeps the scales of a thread's words in that thread."""
    words = gl.BlockedLayout([1, 1, 1, groups, 4 // groups], [4, 2, 4, 1, 1], [num_warps, 1, 1, 1, 1], [4, 3, 2, 1, 0])
    return gl.SliceLayout(2, gl.SliceLayout(4, words))


@gluon.jit
def load_factors(scales, zero_points, step, STEPS: gl.constexpr, GROUPS: gl.constexpr, REPEAT: gl.constexpr):
    """Load scales of a step's rows, [32 lines, 2, GROUPS], and stored zero points, of a block of rows. Zeros behind the
    last step. REPEAT: steps that share them."""
    layout: gl.constexpr = _factor_layout(GROUPS, gl.num_warps())
    line = gl.arange(0, LINES, gl.SliceLayout(1, gl.SliceLayout(2, layout)))[:, None, None]
    row = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(2, layout)))[None, :, None]
    group = gl.arange(0, GROUPS, gl.SliceLayout(0, gl.SliceLayout(1, layout)))[None, None, :]
    start, places = step // REPEAT * (HEIGHT * GROUPS), (2 * line + row) * GROUPS + group
    inside = gl.full([LINES, 2, GROUPS], step, gl.int32, layout) < STEPS
    # Named, as codes are: weights, which no launch ahead writes.
    factors = (gl.load(scales + start + places, mask=inside, other=0, cache_modifier=".ca"),)
    if zero_points is not None:
        factors += (gl.load(zero_points + start + places, mask=inside, other=0, cache_modifier=".ca"),)
    return factors


@gluon.jit
def read_factors(scales, zero_points, GROUPS: gl.constexpr):
    layout: gl.constexpr = _factor_layout(GROUPS, gl.num_warps())
    table: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    factors = (seen_as(scales, scales.dtype, [LINES, 2, GROUPS], table).load(layout),)
    if zero_points is not None:
        factors += (seen_as(zero_points, gl.uint8, [LINES, 2, GROUPS], table).load(layout),)
    return factors


@gluon.jit
def of_groups(values, words):
    GROUPS: gl.constexpr = values.shape[2]
    values = gl.expand_dims(gl.expand_dims(values, 2), 4).broadcast_to([LINES, 2, 4, GROUPS, 4 // GROUPS])
    return gl.convert_layout(gl.reshape(values, [LINES, 32]), words.type.layout, assert_trivial=True)


@gluon.jit
def decode_uint4(words, factors, HALF: gl.constexpr):
    """Decode half of a thread's part of a block, four words of two rows each, to four bfloat16 tensors of 64 columns.
    factors: of `load_factors`."""
    scales = factors[0]
    if len(factors) == 2:
        zero = of_groups((factors[1].to(gl.int16) | _PAIR_BITS).to(gl.bfloat16, bitcast=True), words)
    else:
        zero = gl.full([LINES, 32], 128 + _UINT4_ZERO, gl.bfloat16, words.type.layout)
    if scales.dtype == gl.bfloat16:
        text: gl.constexpr = _BFLOAT16_LOW if HALF == 0 else _BFLOAT16_HIGH
        return gl.inline_asm_elementwise(
            text, _BFLOAT16_REGISTERS, [words, zero, of_groups(scales, words)], (gl.bfloat16,) * 4, True, 8
        )
    elif scales.dtype == gl.float16:
        text: gl.constexpr = _FLOAT16_LOW if HALF == 0 else _FLOAT16_HIGH
        wide = scales.to(gl.float32)
        upper = wide.to(gl.bfloat16)
        rest = wide - upper.to(gl.float32)
        # An infinity has no rest.
        rest = gl.where(rest == rest, rest, 0.0).to(gl.bfloat16)
        return gl.inline_asm_elementwise(
            text, _FLOAT16_REGISTERS, [words, zero, of_groups(upper, words), of_groups(rest, words)],
            (gl.bfloat16,) * 4, True, 8,
        )  # fmt: skip
    else:
        text: gl.constexpr = _FLOAT32_LOW if HALF == 0 else _FLOAT32_HIGH
        return gl.inline_asm_elementwise(
            text, _FLOAT32_REGISTERS, [words, zero, of_groups(scales, words)], (gl.bfloat16,) * 4, True, 8
        )


@gluon.jit
def decode_uint8(words, factors):
    if len(factors) == 2:
        zero = of_groups(factors[1].to(gl.int32) | _WORD_BITS, words)
    else:
        zero = gl.full([LINES, 32], _WORD_BITS + _UINT8_ZERO, gl.int32, words.type.layout)
    scales = of_groups(factors[0].to(gl.float32), words)
    return gl.inline_asm_elementwise(_UINT8, _UINT8_REGISTERS, [words, zero, scales], (gl.bfloat16,) * 4, True, 8)


@gluon.jit
def integer_operand(words, factors, HALF: gl.constexpr, ELEMENT: gl.constexpr, PRODUCT: gl.constexpr):
    """Return numbers [64, 64] of a block as the tensor cores take them: one half of four-bit columns, all of
    eight bits."""
    if ELEMENT == "uint4":
        numbers = decode_uint4(words, factors, HALF)
    else:
        gl.static_assert(ELEMENT == "uint8", "unknown element")
        numbers = decode_uint8(words, factors)
    return left_half(numbers, 0, PRODUCT)
