"""From tiled codes to the left operand of Hopper's tensor cores: PTX that keeps every step in registers.

A thread has 16 bytes of a weight row for 128 columns (`moe_core.formats.tiling`): word q is its share of columns 32 q
.. 32 q + 31. The lower half holds columns 32 q + 8 i + 2 t, i = 0 .. 3, t being the thread's index among four, and the
upper half the columns after them: a pair for the tensor cores is 16 bits apart.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from moe_core.ops.matmul.sm90.kernels.pipeline import DEPTH, seen_as

#: A block of tiled codes: its weight rows (accumulator rows of one product), half of them, and its lines of 128 bytes.
HEIGHT = gl.constexpr(64)
UNIT = gl.constexpr(32)
LINES = gl.constexpr(32)


#: An e2m1 code's sign and three other bits where bfloat16 has sign, lowest exponent bits and first mantissa bit.
_IN_PLACE = 0x81C081C0
#: For the last code of a half, in the bits that the others leave: after a shift, and three shifts at once.
_REST, _REST_SHIFT, _REST_FACTOR = 0x00D800D8, 7, 1 + (1 << 5) + (1 << 11)


def _numbers(words: int, scale: str) -> list[str]:
    """Multiply two words ($words and the next), four pairs each, with their halves of `scale`: x0 .. x7."""
    lines = [f"mov.b32 {{lower, upper}}, {scale}; mov.b32 c0, {{lower, lower}}; mov.b32 c1, {{upper, upper}};\n"]
    for q in range(2):
        word = f"${words + q}"
        for pair in range(4):
            if pair < 3:
                lines += [f"shl.b32 t, {word}, {3 * pair};"]
            else:
                lines += [
                    f"shr.u32 t, {word}, {_REST_SHIFT}; and.b32 t, t, {_REST:#x}; mul.lo.u32 t, t, {_REST_FACTOR};"
                ]
            lines += [f"and.b32 t, t, {_IN_PLACE:#x}; mul.rn.bf16x2 x{4 * q + pair}, t, c{q};\n"]
    return lines


def _two_words(words: int, scales: str, first: int, outs: list[str]) -> str:
    """Scale two words with the scales `first` and the next, of four. outs: results, the pairs of both."""
    # 2^(byte - 1), of two bytes: the exponent field is byte + 126.
    lines = [f"prmt.b32 c, {scales}, 0, 0x4{first + 1}4{first}; mad.lo.u32 c, c, 128, 0x3f003f00;\n"]
    lines += [*_numbers(words, "c"), *(f"mov.b32 {out}, x{i};" for i, out in enumerate(outs))]
    return "".join(lines)


def _two_great(words: int, scales: str, first: int, outs: list[str]) -> str:
    lines = ["mov.b32 c, 0x7e807e80;\n", *_numbers(words, "c")]
    for q in range(2):
        # 2^(byte - 127): byte 0 is the denormal 2^-127, byte 255 is NaN.
        byte = first + q
        lines += [f"prmt.b32 t, {scales}, 0, 0x4{byte}4{byte}; shl.b32 c, t, 7; setp.eq.u32 odd, t, 0;\n"]
        lines += ["@odd mov.b32 c, 0x00400040; setp.eq.u32 odd, t, 0x00ff00ff; @odd mov.b32 c, 0x7fc07fc0;\n"]
        lines += [f"mul.rn.bf16x2 {outs[4 * q + j]}, x{4 * q + j}, c;\n" for j in range(4)]
    return "".join(lines)


def _e2m1(places: list[tuple[int, str, int, list[str]]], great: str) -> str:
    """`_two_words` of every place, or `_two_great` if the instructions `great` leave a bit of t set."""
    lines = ["{ .reg .b32 t, c, c0, c1, x<8>; .reg .b16 lower, upper; .reg .pred great, odd;\n"]
    lines += [_two_words(*place) for place in places]
    lines += [f"{great} setp.ne.u32 great, t, 0; @!great bra DONE;\n"]
    lines += [_two_great(*place) for place in places]
    return "".join([*lines, "DONE: }"])


def _e2m1_half(first: int) -> str:
    """Outputs 0 .. 7 from the words $8, $9 of a row and bytes first, first + 1 of their scale word $10."""
    outs = [f"${out}" for out in range(8)]
    return _e2m1([(8, "$10", first, outs)], f"and.b32 t, $10, {0x8080 << 8 * first:#x};")


def _e2m1_rows() -> str:
    """Outputs 0 .. 31 from the words $32 .. $35, $36 .. $39 of two rows and their scale words $40 and $44."""
    # Columns 0 .. 63, then the others: of each the pairs of two words, of each pair both rows, of each row both words.
    places = [
        (32 + 4 * row + 2 * half, f"${40 + 4 * row}", 2 * half,
         [f"${16 * half + 4 * pair + 2 * row + q}" for q in range(2) for pair in range(4)])
        for row in range(2) for half in range(2)
    ]  # fmt: skip
    return _e2m1(places, "or.b32 t, $40, $44; and.b32 t, t, 0x80808080;")


_E2M1_LOW, _E2M1_HIGH = gl.constexpr(_e2m1_half(0)), gl.constexpr(_e2m1_half(2))
_E2M1_REGISTERS = gl.constexpr(",".join(["=&r"] * 8 + ["r"] * 4))
_E2M1_ROWS = gl.constexpr(_e2m1_rows())
_E2M1_ROWS_REGISTERS = gl.constexpr(",".join(["=&r"] * 32 + ["r"] * 16))


@gluon.jit
def decode_e2m1(words, scales, HALF: gl.constexpr):
    """Multiply words of eight e2m1 codes, two of a row in a thread, with two (half HALF) of the row's four e8m0 scale
    bytes. Return eight bfloat16 tensors, one for each of every 8 columns. The missing factor 2^126 and the scale are
    one exact product if both scales are at most 1, else two."""
    text: gl.constexpr = _E2M1_LOW if HALF == 0 else _E2M1_HIGH
    return gl.inline_asm_elementwise(text, _E2M1_REGISTERS, [words, scales], (gl.bfloat16,) * 8, True, 2)


@gluon.jit
def decode_rows(words, scales):
    """`decode_e2m1` of a thread's part of a block, four words of two rows each: four tensors of the first 64 columns,
    four of the last."""
    return gl.inline_asm_elementwise(_E2M1_ROWS, _E2M1_ROWS_REGISTERS, [words, scales], (gl.bfloat16,) * 8, True, 8)


@gluon.jit
def load_lines(codes):
    lines: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [gl.num_warps(), 1], [1, 0])
    packed: gl.constexpr = gl.NVMMASharedLayout(128, 32, 2)
    return seen_as(codes, gl.int32, [LINES, 32], packed).load(lines)


@gluon.jit
def load_words(codes, scales):
    """Load a block's codes, words of the first 64 columns and of the last, [32, 16], and scales."""
    parts: gl.constexpr = gl.BlockedLayout([1, 1, 2], [4, 2, 4], [gl.num_warps(), 1, 1], [2, 1, 0])
    table: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    words = load_lines(codes)
    low, high = gl.split(gl.permute(gl.reshape(words, [LINES, 8, 2, 2]), [0, 1, 3, 2]))
    low, high = gl.reshape(low, [LINES, 16]), gl.reshape(high, [LINES, 16])
    return low, high, of_words(seen_as(scales, gl.int32, [LINES, 2], table).load(gl.SliceLayout(2, parts)), low)


@gluon.jit
def of_words(scales, words):
    EACH: gl.constexpr = words.shape[1] // 2
    scales = gl.reshape(gl.expand_dims(scales, 2).broadcast_to([LINES, 2, EACH]), [LINES, 2 * EACH])
    return gl.convert_layout(scales, words.type.layout, assert_trivial=True)


@gluon.jit
def left_operand(words, scale, HALF: gl.constexpr, PRODUCT: gl.constexpr):
    """Return numbers [64, 64] of half of a block as the tensor cores take them. No value leaves its thread."""
    k0, k1, k2, k3, k4, k5, k6, k7 = decode_e2m1(words, scale, HALF)
    low = gl.join(gl.join(k0, k1), gl.join(k2, k3))
    high = gl.join(gl.join(k4, k5), gl.join(k6, k7))
    # Lines: side, warp, half of a row's number. Words: its other half, lane of four, half of a pair. Then bits of the
    # column.
    both = gl.reshape(gl.join(low, high), [2, gl.num_warps(), 4, 2, 4, 2, 2, 2, 2])
    both = gl.permute(both, [1, 0, 2, 3, 8, 7, 6, 4, 5])
    operand: gl.constexpr = gl.DotOperandLayout(0, PRODUCT, 2)
    return gl.convert_layout(gl.reshape(both, [HEIGHT, DEPTH]), operand, assert_trivial=True)


@gluon.jit
def left_half(numbers, WHICH: gl.constexpr, PRODUCT: gl.constexpr):
    k0, k1, k2, k3 = numbers[4 * WHICH], numbers[4 * WHICH + 1], numbers[4 * WHICH + 2], numbers[4 * WHICH + 3]
    both = gl.join(gl.join(k0, k1), gl.join(k2, k3))
    # Words: half of the row's number, lane of four, unit of 32 columns, half of a pair. Then bits of the column.
    both = gl.permute(gl.reshape(both, [2, gl.num_warps(), 4, 2, 4, 2, 2, 2, 2]), [1, 0, 2, 3, 5, 8, 7, 4, 6])
    operand: gl.constexpr = gl.DotOperandLayout(0, PRODUCT, 2)
    return gl.convert_layout(gl.reshape(both, [HEIGHT, DEPTH]), operand, assert_trivial=True)
