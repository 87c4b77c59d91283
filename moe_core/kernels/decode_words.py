"""From tiled codes to the left operand of Hopper's tensor cores: PTX that keeps every step in registers.

A thread of a consumer has 16 bytes of a weight row for 128 columns (`moe_core.formats.tiling`): word q is its share of
columns 32 q .. 32 q + 31, nibbles j and j + 4 are columns 32 q + 16 (j / 2) + 8 (j % 2) + 2 t and the next one, t being
the thread's place among four.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from moe_core.kernels.hopper_ring import DEPTH

#: A block of tiled codes: its weight rows, which are the accumulator rows of one product, half of them, its columns,
#: and its lines of 128 bytes.
HEIGHT = gl.constexpr(64)
UNIT = gl.constexpr(32)
COLUMNS = gl.constexpr(128)
LINES = gl.constexpr(32)


def _pair(word: str, nibble: int, out: str, scale: str) -> str:
    """Codes `nibble` and `nibble` + 4 of a word, 16 bits apart, as two bfloat16 times scale.

    A product with two powers of two is two shifts: one puts the signs into place, one the other three bits.
    """
    mask, factor = (0x000F000F, 4160) if nibble % 2 == 0 else (0x00F000F0, 260)
    return (
        f"and.b32 t, {word}, {mask:#x}; mul.lo.u32 t, t, {factor}; and.b32 t, t, 0x81c081c0; "
        f"mul.rn.bf16x2 {out}, t, {scale};\n"
    )


def _numbers(scale: str) -> list[str]:
    """The pairs of two words, each word times its half of `scale`."""
    lines = [f"mov.b32 {{lower, upper}}, {scale}; mov.b32 c0, {{lower, lower}}; mov.b32 c1, {{upper, upper}};\n"]
    for q in range(2):
        word = f"${8 + q}"
        lines += [_pair(word, 0, f"${4 * q}", f"c{q}"), _pair(word, 1, f"${4 * q + 1}", f"c{q}")]
        lines += [f"shr.u32 high, {word}, 8;\n"]
        lines += [_pair("high", 0, f"${4 * q + 2}", f"c{q}"), _pair("high", 1, f"${4 * q + 3}", f"c{q}")]
    return lines


def _e2m1(first: int) -> str:
    """Of two words with the scales `first` and the next; $0 .. $7: pairs of both, $8, $9: words, $10: scales."""
    both = f"prmt.b32 c, $10, 0, 0x4{first + 1}4{first};\n"
    lines = ["{ .reg .b32 t, high, c, c0, c1; .reg .b16 lower, upper; .reg .pred great, odd;\n"]
    # 2^(byte - 1), of two bytes: its exponent field is byte + 126.
    lines += [both, "mad.lo.u32 c, c, 128, 0x3f003f00;\n", *_numbers("c")]
    lines += [f"and.b32 t, $10, {0x8080 << 8 * first:#x}; setp.ne.u32 great, t, 0; @!great bra DONE;\n"]
    lines += ["mov.b32 c, 0x7e807e80;\n", *_numbers("c")]
    for q in range(2):
        # 2^(byte - 127): byte 0 is the denormal 2^-127, byte 255 is NaN.
        lines += [f"prmt.b32 t, $10, 0, 0x4{first + q}4{first + q}; shl.b32 c, t, 7; setp.eq.u32 odd, t, 0;\n"]
        lines += ["@odd mov.b32 c, 0x00400040; setp.eq.u32 odd, t, 0x00ff00ff; @odd mov.b32 c, 0x7fc07fc0;\n"]
        lines += [f"mul.rn.bf16x2 ${4 * q + j}, ${4 * q + j}, c;\n" for j in range(4)]
    return "".join([*lines, "DONE: }"])


_E2M1_LOW, _E2M1_HIGH = gl.constexpr(_e2m1(0)), gl.constexpr(_e2m1(2))
_E2M1_REGISTERS = gl.constexpr(",".join(["=&r"] * 8 + ["r"] * 4))


@gluon.jit
def decode_e2m1(words, scales, HALF: gl.constexpr):
    """Words with eight e2m1 codes, two of a row in a thread, and the e8m0 bytes of its four: numbers times scales.

    HALF: which two of the four. Returns eight tensors of bfloat16: of every 8 columns one. What is missing in the
    exponent of a number, 2^126, and the scale are one exact product where both scales are at most 1, else two.
    """
    text: gl.constexpr = _E2M1_LOW if HALF == 0 else _E2M1_HIGH
    return gl.inline_asm_elementwise(text, _E2M1_REGISTERS, [words, scales], (gl.bfloat16,) * 8, True, 2)


# Triton 3.9 renamed it.
if hasattr(gl.shared_memory_descriptor, "reinterpret"):

    @gluon.jit
    def words_of(memory, SHAPE: gl.constexpr, LAYOUT: gl.constexpr):
        """Shared memory as 32-bit words."""
        return memory.reinterpret(gl.int32, SHAPE, LAYOUT)

else:

    @gluon.jit
    def words_of(memory, SHAPE: gl.constexpr, LAYOUT: gl.constexpr):
        """Shared memory as 32-bit words."""
        return memory._reinterpret(gl.int32, SHAPE, LAYOUT)


@gluon.jit
def load_words(codes, scales):
    """Codes of a block: words of the first 64 columns and of the last, [32, 16], and the words' scales."""
    lines: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [gl.num_warps(), 1], [1, 0])
    parts: gl.constexpr = gl.BlockedLayout([1, 1, 2], [4, 2, 4], [gl.num_warps(), 1, 1], [2, 1, 0])
    packed: gl.constexpr = gl.NVMMASharedLayout(128, 32, 2)
    table: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    words = words_of(codes, [LINES, 32], packed).load(lines)
    low, high = gl.split(gl.permute(gl.reshape(words, [LINES, 8, 2, 2]), [0, 1, 3, 2]))
    low, high = gl.reshape(low, [LINES, 16]), gl.reshape(high, [LINES, 16])
    scale = words_of(scales, [LINES, 2], table).load(gl.SliceLayout(2, parts))
    scale = gl.reshape(gl.expand_dims(scale, 2).broadcast_to([LINES, 2, 8]), [LINES, 16])
    return low, high, gl.convert_layout(scale, low.type.layout, assert_trivial=True)


@gluon.jit
def left_operand(words, scale, HALF: gl.constexpr, PRODUCT: gl.constexpr):
    """Numbers [64, 64] of half of a pair of units, as the tensor cores take them: no value leaves its thread."""
    k0, k1, k2, k3, k4, k5, k6, k7 = decode_e2m1(words, scale, HALF)
    low = gl.join(gl.join(k0, k1), gl.join(k2, k3))
    high = gl.join(gl.join(k4, k5), gl.join(k6, k7))
    # Lines: side, warp, half of a row's number; words: its other half, lane of four, half of a pair; then bits of the
    # column among 64.
    both = gl.reshape(gl.join(low, high), [2, gl.num_warps(), 4, 2, 4, 2, 2, 2, 2])
    both = gl.permute(both, [1, 0, 2, 3, 8, 7, 6, 4, 5])
    operand: gl.constexpr = gl.DotOperandLayout(0, PRODUCT, 2)
    return gl.convert_layout(gl.reshape(both, [HEIGHT, DEPTH]), operand, assert_trivial=True)
