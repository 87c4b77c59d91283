"""Bitmatrices: bit e % 32 of word e // 32 of a token's row says that expert e was chosen."""

import triton
import triton.language as tl


@triton.jit
def set_bits(experts, WORDS: tl.constexpr):
    here = tl.arange(0, WORDS)[None, :] == (experts >> 5)[:, None]
    # Expert -1 belongs to word -1 (arithmetic shift), which no row has.
    return tl.where(here, 1 << (experts & 31)[:, None], 0)


@triton.jit
def pack(
    ids, bitmatrix, duplicates, invalid_ids, num_tokens,
    NUM_EXPERTS: tl.constexpr, TOP_K: tl.constexpr, BLOCK_T: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """Write rows of the bitmatrix of ids `[T, K]`. Count ids per program that repeat (bit set before) or are outside
    [-1, E).

    Example, E = 4, ids [2, 0, 2, 9, -1]: word 0b0101, one duplicate, one invalid.
    """
    tokens = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    inside = tokens < num_tokens
    words = tl.zeros((BLOCK_T, WORDS), dtype=tl.int32)
    repeated = tl.zeros((BLOCK_T,), dtype=tl.int32)
    invalid = tl.zeros((BLOCK_T,), dtype=tl.int32)
    for k in range(TOP_K):
        expert = tl.load(ids + tokens * TOP_K + k, mask=inside, other=-1)
        known = (expert >= 0) & (expert < NUM_EXPERTS)
        invalid += tl.where(known | (expert == -1), 0, 1)
        bits = set_bits(tl.where(known, expert, -1), WORDS)
        repeated += tl.sum(((words & bits) != 0).to(tl.int32), axis=1)
        words |= bits
    NUM_WORDS: tl.constexpr = (NUM_EXPERTS + 31) // 32
    number = tl.arange(0, WORDS)[None, :]
    target = bitmatrix + tokens[:, None] * NUM_WORDS + number
    tl.store(target, words.to(tl.uint32, bitcast=True), mask=inside[:, None] & (number < NUM_WORDS))
    tl.store(duplicates + tl.program_id(0), tl.sum(repeated, axis=0))
    tl.store(invalid_ids + tl.program_id(0), tl.sum(invalid, axis=0))


@triton.jit
def sum_counts(first_parts, second_parts, first, second, num_parts, BLOCK: tl.constexpr):
    total_first = tl.zeros((BLOCK,), dtype=tl.int32)
    total_second = tl.zeros((BLOCK,), dtype=tl.int32)
    for start in range(0, num_parts, BLOCK):
        parts = start + tl.arange(0, BLOCK)
        total_first += tl.load(first_parts + parts, mask=parts < num_parts, other=0)
        total_second += tl.load(second_parts + parts, mask=parts < num_parts, other=0)
    tl.store(first, tl.sum(total_first, axis=0))
    tl.store(second, tl.sum(total_second, axis=0))


@triton.jit
def unpack(
    bitmatrix, ids, num_tokens,
    NUM_EXPERTS: tl.constexpr, TOP_K: tl.constexpr, BLOCK_T: tl.constexpr, EXPERTS: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """Write the ids `[T, K]` of set bits, ascending, else -1. E = 4, word 0b0101: K = 3 [0, 2, -1], K = 1 [0]."""
    tokens = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    inside = (tokens < num_tokens)[:, None]
    experts = tl.arange(0, EXPERTS)[None, :]
    NUM_WORDS: tl.constexpr = (NUM_EXPERTS + 31) // 32
    source = bitmatrix + tokens[:, None] * NUM_WORDS + experts // 32
    words = tl.load(source, mask=inside & (experts < NUM_EXPERTS), other=0)
    bits = (words.to(tl.int32, bitcast=True) >> (experts & 31)) & 1
    place = tl.cumsum(bits, axis=1) - 1
    target = ids + tokens[:, None] * TOP_K
    chosen = experts + tl.zeros_like(bits)
    tl.store(target + place, chosen, mask=inside & (bits != 0) & (place < TOP_K))
    slots = tl.arange(0, SLOTS)[None, :]
    empty = (slots >= tl.sum(bits, axis=1)[:, None]) & (slots < TOP_K)
    tl.store(target + slots, tl.full((BLOCK_T, SLOTS), -1, tl.int32), mask=inside & empty)
