"""Store rows of tokens at the ranks of their experts, and results at home."""

import triton
import triton.language as tl

from moe_core.ops.exchange.kernels.addresses import peer_rows, place_of
from moe_core.ops.quantize.kernels.rows import choose_scale, codes_of, magnitude_bits


@triton.jit
def push_rows(
    x, owners, rows, rows_at, num_tokens, num_ranks, num_rows,
    TOP_K: tl.constexpr, AT_ONCE: tl.constexpr, WIDTH: tl.constexpr, X_STRIDE: tl.constexpr, DTYPE: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """rows_at[owners[t, k]][rows[t, k]] = x[t]: read once, stored up to K times. AT_ONCE: slots of a token that are
    looked up together."""
    blocks: tl.constexpr = (WIDTH + BLOCK_N - 1) // BLOCK_N
    for tile in range(tl.program_id(0), tl.cdiv(num_tokens, BLOCK_T) * blocks, tl.num_programs(0)):
        tokens = (tile // blocks) * BLOCK_T + tl.arange(0, BLOCK_T).to(tl.int64)
        columns = (tile % blocks) * BLOCK_N + tl.arange(0, BLOCK_N)
        inside, exists = tokens < num_tokens, (columns < WIDTH)[None, :]
        value = tl.load(x + tokens[:, None] * X_STRIDE + columns[None, :], mask=inside[:, None] & exists, other=0.0)
        for first in range(0, TOP_K, AT_ONCE):
            there, presence = (), ()
            for k in tl.static_range(AT_ONCE):
                some = inside & (first + k < TOP_K)
                owner, row, present = place_of(owners, rows, tokens * TOP_K + first + k, some, num_ranks, num_rows)
                there += (peer_rows(rows_at, owner, row, present, WIDTH, DTYPE),)
                presence += (present,)
            for k in tl.static_range(AT_ONCE):
                tl.store(there[k][:, None] + columns[None, :], value, mask=presence[k][:, None] & exists)


@triton.jit
def push_quantized_rows(
    x, owners, rows, rows_at, scales_at, num_tokens, num_ranks, num_rows,
    TOP_K: tl.constexpr, AT_ONCE: tl.constexpr, WIDTH: tl.constexpr, X_STRIDE: tl.constexpr, GROUP: tl.constexpr,
    GROUPS: tl.constexpr, ELEMENT: tl.constexpr, CONVERTS: tl.constexpr, RULE: tl.constexpr, LARGEST: tl.constexpr,
    TOP_EXPONENT: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_G: tl.constexpr,
):  # fmt: skip
    """`push_rows` of codes, with a scale for each of GROUPS groups of GROUP columns. rows_at: codes `[num_rows,
    WIDTH]`. scales_at: fp32 `[num_rows, GROUPS]`."""
    blocks: tl.constexpr = (GROUPS + BLOCK_G - 1) // BLOCK_G
    for tile in range(tl.program_id(0), tl.cdiv(num_tokens, BLOCK_T) * blocks, tl.num_programs(0)):
        tokens = (tile // blocks) * BLOCK_T + tl.arange(0, BLOCK_T).to(tl.int64)
        groups = (tile % blocks) * BLOCK_G + tl.arange(0, BLOCK_G)
        columns = groups[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        inside, exists = tokens < num_tokens, (columns < WIDTH)[None, :, :]
        pointers = x + tokens[:, None, None] * X_STRIDE + columns[None, :, :]
        value = tl.load(pointers, mask=inside[:, None, None] & exists, other=0.0).to(tl.float32)
        bits = tl.max(magnitude_bits(value), axis=2)
        scale = choose_scale(bits, RULE, LARGEST, TOP_EXPONENT)
        usable = (bits < 0x7F800000)[:, :, None]
        codes = codes_of(value, scale[:, :, None], usable, ELEMENT, CONVERTS).to(tl.uint8)
        for first in range(0, TOP_K, AT_ONCE):
            there, scale_rows, presence = (), (), ()
            for k in tl.static_range(AT_ONCE):
                some = inside & (first + k < TOP_K)
                owner, row, present = place_of(owners, rows, tokens * TOP_K + first + k, some, num_ranks, num_rows)
                there += (peer_rows(rows_at, owner, row, present, WIDTH, "uint8"),)
                scale_rows += (peer_rows(scales_at, owner, row, present, GROUPS, "float32"),)
                presence += (present,)
            for k in tl.static_range(AT_ONCE):
                mask = presence[k][:, None, None] & exists
                tl.store(there[k][:, None, None] + columns[None, :, :], codes, mask=mask)
                mask = presence[k][:, None] & (groups < GROUPS)[None, :]
                tl.store(scale_rows[k][:, None] + groups[None, :], scale, mask=mask)


@triton.jit
def push_slots(
    weights, owners, rows, weights_at, sources_at, num_slots, num_ranks, num_rows, rank, BLOCK: tl.constexpr
):
    """Store the weight of each slot with its row, and the (rank, slot) of its result."""
    slots = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = slots < num_slots
    owner, row, present = place_of(owners, rows, slots, inside, num_ranks, num_rows)
    if weights_at is not None:
        weight = tl.load(weights + slots, mask=present, other=0.0)
        tl.store(peer_rows(weights_at, owner, row, present, 1, "float32"), weight, mask=present)
    if sources_at is not None:
        # Two int32 in one store, the rank in the low half.
        tl.store(peer_rows(sources_at, owner, row, present, 1, "int64"), (slots << 32) | rank, mask=present)


@triton.jit
def push_counts(counts, counts_at, size, rank, BLOCK: tl.constexpr):
    """Program (peer, block): row `rank` of its array `[W, size]` = counts."""
    elements = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = elements < size
    # No hint: a row begins at any address.
    there = tl.load(counts_at + tl.program_id(0)).to(tl.pointer_type(tl.int32)) + rank * size
    tl.store(there + elements, tl.load(counts + elements, mask=inside, other=0), mask=inside)


@triton.jit
def push_results(
    y, sources, group_start, slots_at, num_ranks, num_rows, num_slots,
    NUM_EXPERTS: tl.constexpr, WIDTH: tl.constexpr, DTYPE: tl.constexpr, SECTIONS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """slots_at[home][slot] = y[row] for (home, slot) = sources[row]. Rows are in order of (expert, home, slot), so that
    owners would all store at one home at a time: blocks of rows come in turn from SECTIONS parts."""
    blocks: tl.constexpr = (WIDTH + BLOCK_N - 1) // BLOCK_N
    # Sources behind the last group are old.
    filled = tl.minimum(tl.load(group_start + NUM_EXPERTS), num_rows)
    section = tl.cdiv(filled, BLOCK_M * SECTIONS)
    for tile in range(tl.program_id(0), section * SECTIONS * blocks, tl.num_programs(0)):
        turn = tile // blocks
        row = (turn % SECTIONS * section + turn // SECTIONS) * BLOCK_M + tl.arange(0, BLOCK_M).to(tl.int64)
        columns = (tile % blocks) * BLOCK_N + tl.arange(0, BLOCK_N)
        inside, exists = row < filled, (columns < WIDTH)[None, :]
        value = tl.load(y + row[:, None] * WIDTH + columns[None, :], mask=inside[:, None] & exists, other=0.0)
        home = tl.load(sources + 2 * row, mask=inside, other=-1)
        slot = tl.load(sources + 2 * row + 1, mask=inside, other=-1).to(tl.int64)
        present = inside & (home >= 0) & (home < num_ranks) & (slot >= 0) & (slot < num_slots)
        pointers = peer_rows(slots_at, home, slot, present, WIDTH, DTYPE)[:, None] + columns[None, :]
        tl.store(pointers, value, mask=present[:, None] & exists)
