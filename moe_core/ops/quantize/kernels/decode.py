"""Decode e2m1, e4m3, unsigned integers with zero points, and e8m0 scales by bit operations, exactly."""

import triton
import triton.language as tl


@triton.jit
def bfloat16_of_bits(bits):
    return bits.to(tl.uint16).to(tl.bfloat16, bitcast=True)


@triton.jit
def e8m0_to_bfloat16(scales):
    """2^(b - 127) of uint8 b: byte 0 is the denormal 2^-127, byte 255 is NaN."""
    wide = scales.to(tl.uint16)
    # The two special bytes need one bit more: 0x0040 is 2^-127, and 0x7F80, infinity, becomes NaN.
    return bfloat16_of_bits((wide << 7) | tl.where((wide == 0) | (wide == 255), 0x40, 0).to(tl.uint16))


@triton.jit
def e2m1_to_bfloat16(codes):
    """0 .5 1 1.5 2 3 4 6 of codes 0..7, and their negatives of 8..15."""
    wide = codes.to(tl.uint16)
    # The exponent counts from 2^-126 in bfloat16 and from 2^0 in e2m1.
    return bfloat16_of_bits(((wide & 8) << 12) | ((wide & 7) << 6)) * 8.507059173023462e37


@triton.jit
def e4m3_to_bfloat16(codes):
    wide = codes.to(tl.uint16)
    bits = ((wide & 0x80) << 8) | ((wide & 0x7F) << 4)
    # The exponent counts from 2^-126 in bfloat16 and from 2^-6 in e4m3.
    numbers = bfloat16_of_bits(bits) * 1.329227995784916e36
    return tl.where((wide & 0x7F) == 0x7F, float("nan"), numbers)


@triton.jit
def unsigned_to_bfloat16(codes):
    return codes.to(tl.float32).to(tl.bfloat16)


@triton.jit
def codes_to_bfloat16(codes, ELEMENT: tl.constexpr):
    if ELEMENT == "e2m1":
        return e2m1_to_bfloat16(codes)
    elif ELEMENT == "e4m3":
        return e4m3_to_bfloat16(codes)
    elif ELEMENT == "int8":
        # Convert by way of 0..255: as signed numbers, half of the weight rows of a tile of eight warps were wrong
        # (Triton 3.6, an H200).
        return unsigned_to_bfloat16(codes ^ 128) - 128.0
    else:
        tl.static_assert((ELEMENT == "uint8") or (ELEMENT == "uint4"), "unknown element")
        return unsigned_to_bfloat16(codes)


@triton.jit
def unpack_nibbles(packed):
    """Return [R, C] bytes as [R, 2 C] codes, the low nibble first."""
    both = tl.join(packed & 15, packed >> 4)
    return tl.reshape(both, (packed.shape[0], 2 * packed.shape[1]))


@triton.jit
def word_pair(words, SHIFT: tl.constexpr, ELEMENT: tl.constexpr):
    """Return nibbles SHIFT / 4 and SHIFT / 4 + 4 (SHIFT: 0, 4, 8 or 12) of uint32 words, [R, W], as numbers [R, W, 2].
    They are 16 bits apart, so the same instructions move both."""
    if ELEMENT == "e2m1":
        # A product with two powers of two is two shifts: one places the sign, one the other three bits.
        if SHIFT >= 8:
            pair = words >> 8
        else:
            pair = words
        if SHIFT % 8 == 0:
            pair = (pair & 0x000F000F) * 4160
        else:
            pair = (pair & 0x00F000F0) * 260
        pair = pair & 0x81C081C0
        offset: tl.constexpr = 8.507059173023462e37
        numbers = tl.join(bfloat16_of_bits(pair & 0xFFFF), bfloat16_of_bits(pair >> 16)) * offset
    else:
        # 128 + code: the last of eight bits is worth 1.
        pair = ((words >> SHIFT) & 0x000F000F) | 0x43004300
        numbers = tl.join(bfloat16_of_bits(pair & 0xFFFF), bfloat16_of_bits(pair >> 16)) - 128.0
    return numbers


@triton.jit
def unpack_words(words, ELEMENT: tl.constexpr):
    """Return nibbles of uint32 words, [R, W], as bfloat16 [R, W, 2, 2, 2], nibble 4 b + 2 i + j at [b, i, j]."""
    even = tl.join(word_pair(words, 0, ELEMENT), word_pair(words, 8, ELEMENT))
    odd = tl.join(word_pair(words, 4, ELEMENT), word_pair(words, 12, ELEMENT))
    return tl.join(even, odd)


@triton.jit
def group_of_row(n, GROUP_ROWS: tl.constexpr):
    if GROUP_ROWS == 0:
        return n * 0
    else:
        return n // GROUP_ROWS


@triton.jit
def per_group(pointers, start, D: tl.constexpr, GROUP: tl.constexpr, STRIDE: tl.constexpr, BLOCK_K: tl.constexpr):
    """Load values of groups of GROUP columns (0: all) for BLOCK_K columns, 0 behind D: [rows, groups], or [rows,
    BLOCK_K] if groups and blocks do not fit. pointers: to the first group of rows."""
    if GROUP == 0:
        return tl.load(pointers)[:, None]
    elif GROUP % BLOCK_K == 0:
        return tl.load(pointers + tl.minimum(start, D - 1) // GROUP * STRIDE)[:, None]
    else:
        if BLOCK_K % GROUP == 0:
            groups = start // GROUP + tl.arange(0, BLOCK_K // GROUP)
        else:
            groups = (start + tl.arange(0, BLOCK_K)) // GROUP
        inside = (groups < (D + GROUP - 1) // GROUP)[None, :]
        return tl.load(pointers[:, None] + groups[None, :] * STRIDE, mask=inside, other=0)


@triton.jit
def number_of(scale):
    if scale.dtype == tl.uint8:
        return e8m0_to_bfloat16(scale)
    else:
        return scale.to(tl.float32)


@triton.jit
def spread(values, WIDTH: tl.constexpr):
    if (values.shape[1] == 1) or (values.shape[1] == WIDTH):
        return values
    else:
        wide = tl.broadcast_to(values[:, :, None], (values.shape[0], values.shape[1], WIDTH // values.shape[1]))
        return tl.reshape(wide, (values.shape[0], WIDTH))


@triton.jit
def load_codes(
    pointers, start, exists, D: tl.constexpr, STRIDE: tl.constexpr, PER_BYTE: tl.constexpr, BLOCK_K: tl.constexpr
):
    """Load codes [rows, BLOCK_K], zero behind D and in missing rows (None: all exist)."""
    columns = start // PER_BYTE + tl.arange(0, BLOCK_K // PER_BYTE)
    places = pointers[:, None] + columns[None, :] * STRIDE
    if D % BLOCK_K == 0:
        if exists is None:
            codes = tl.load(places)
        else:
            codes = tl.load(places, mask=exists[:, None], other=0)
    else:
        inside = (columns < D // PER_BYTE)[None, :]
        if exists is None:
            codes = tl.load(places, mask=inside, other=0)
        else:
            codes = tl.load(places, mask=exists[:, None] & inside, other=0)
    if PER_BYTE == 2:
        codes = unpack_nibbles(codes)
    return codes


@triton.jit
def ordered(tile, ORDER: tl.constexpr):
    rows: tl.constexpr = tile.shape[0]
    columns: tl.constexpr = tile.shape[1]
    if ORDER == "words":
        parts = tl.reshape(tile, (rows, columns // 128, 4, 4, 2, 4))
        return tl.reshape(tl.permute(parts, (0, 1, 3, 5, 2, 4)), (rows, columns))
    elif ORDER == "bytes":
        parts = tl.reshape(tile, (rows, columns // 64, 4, 8, 2))
        return tl.reshape(tl.permute(parts, (0, 1, 3, 2, 4)), (rows, columns))
    else:
        return tile


@triton.jit
def cast_to(numbers, DTYPE: tl.constexpr):
    if DTYPE == "bfloat16":
        return numbers.to(tl.bfloat16)
    elif DTYPE == "float16":
        return numbers.to(tl.float16)
    else:
        return numbers.to(tl.float32)


@triton.jit
def scaled(numbers, scale, zero, DTYPE: tl.constexpr, ELEMENT: tl.constexpr, SCALING: tl.constexpr):
    """(number - zero) * scale, cast once. SCALING `into_weight` applies scales that are fp32 or powers of two."""
    if (ELEMENT == "uint8") or (ELEMENT == "uint4"):
        numbers = numbers - zero.to(tl.bfloat16)
    if SCALING != "into_weight":
        return cast_to(numbers, DTYPE)
    elif scale.dtype == tl.bfloat16:
        return cast_to(numbers * scale, DTYPE)
    else:
        return cast_to(numbers.to(tl.float32) * scale, DTYPE)


@triton.jit
def weight_tile(
    pointers, scale, zero, start, DTYPE: tl.constexpr, ELEMENT: tl.constexpr, SCALING: tl.constexpr,
    ORDER: tl.constexpr, D: tl.constexpr, STRIDE: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Load weights [rows, BLOCK_K] as the tensor cores take them. scale, zero: of groups, see `per_group`.

    Columns may be summed in any order. The cores take columns 2 t and 2 t + 1 of each 8 from lane t of every four.
    Order `words`: 32 neighbouring 4-bit codes of every 128 per lane, one vector load with one scale. Column 32 t + 8 q
    + 4 b + j goes to 8 (4 q + j) + 2 t + b. Order `bytes`: 16 neighbouring bytes of every 64. Column 16 t + 2 c + b
    goes to 8 c + 2 t + b. `ordered` does the same with x.
    """
    rows: tl.constexpr = pointers.shape[0]
    scale = number_of(scale)
    if ORDER == "words":
        word_pointers = pointers.to(tl.pointer_type(tl.uint32), bitcast=True)
        columns = start // 8 + tl.arange(0, BLOCK_K // 8)
        places = word_pointers[:, None] + columns[None, :]
        if D % BLOCK_K == 0:
            words = tl.load(places)
        else:
            words = tl.load(places, mask=(columns < D // 8)[None, :], other=0)
        numbers = unpack_words(words, ELEMENT)
        if SCALING == "into_weight":
            scale = spread(scale, BLOCK_K // 8)[:, :, None, None, None]
        zero = spread(zero, BLOCK_K // 8)[:, :, None, None, None]
        numbers = scaled(numbers, scale, zero, DTYPE, ELEMENT, SCALING)
        numbers = tl.reshape(numbers, (rows, BLOCK_K // 128, 4, 4, 2, 2, 2))
        return tl.reshape(tl.permute(numbers, (0, 1, 3, 5, 6, 2, 4)), (rows, BLOCK_K))
    else:
        per_byte: tl.constexpr = 2 if (ELEMENT == "uint4") or (ELEMENT == "e2m1") else 1
        codes = load_codes(pointers, start, None, D, STRIDE, per_byte, BLOCK_K)
        numbers = codes_to_bfloat16(codes, ELEMENT)
        if SCALING == "into_weight":
            scale = spread(scale, BLOCK_K)
        return ordered(scaled(numbers, scale, spread(zero, BLOCK_K), DTYPE, ELEMENT, SCALING), ORDER)


@triton.jit
def plain_tile(pointers, start, exists, D: tl.constexpr, STRIDE: tl.constexpr, BLOCK_K: tl.constexpr):
    columns = start + tl.arange(0, BLOCK_K)
    places = pointers[:, None] + columns[None, :] * STRIDE
    if exists is None:
        if D % BLOCK_K == 0:
            return tl.load(places)
        else:
            return tl.load(places, mask=(columns < D)[None, :], other=0.0)
    elif D % BLOCK_K == 0:
        return tl.load(places, mask=exists[:, None], other=0.0)
    else:
        return tl.load(places, mask=exists[:, None] & (columns < D)[None, :], other=0.0)


@triton.jit
def activation_tile(
    rows, scale_rows, exists, start, ELEMENT: tl.constexpr, SCALING: tl.constexpr, D: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    if ELEMENT is None:
        return plain_tile(rows, start, exists, D, 1, BLOCK_K)
    else:
        codes = load_codes(rows, start, exists, D, 1, 2 if ELEMENT == "e2m1" else 1, BLOCK_K)
        numbers = codes_to_bfloat16(codes, ELEMENT)
        if SCALING == "into_weight":
            numbers = numbers * spread(number_of(per_group(scale_rows, start, D, GROUP, 1, BLOCK_K)), BLOCK_K)
        return numbers


@triton.jit
def zero_point(stored, n, ELEMENT: tl.constexpr):
    """Return zero points [rows, groups] of weight rows n. Points of 4 bits share bytes, even rows in the low nibble. A
    format that stores none has one for all, [1, 1]."""
    if (ELEMENT == "uint4") and (stored.shape[0] > 1):
        return (stored >> ((n & 1) * 4).to(tl.uint8)[:, None]) & 15
    else:
        return stored
