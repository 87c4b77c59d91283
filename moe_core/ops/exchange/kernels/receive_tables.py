"""Tables of a rank that has experts."""

import triton
import triton.language as tl

from moe_core.ops.routing.kernels.schedule import fill


@triton.jit
def _local(
    came, source, row, inside, rank, columns, HEADER, LENGTH,
    WIDTH: tl.constexpr, ROW: tl.constexpr, PER_RANK: tl.constexpr,
):  # fmt: skip
    """Return local ids (-1: not here) and weights (0 there)."""
    pointers = came + source.to(tl.int64) * LENGTH + HEADER + row.to(tl.int64) * ROW + columns
    place = tl.load(pointers, mask=inside, other=-1)
    ids = place - rank * PER_RANK
    here = (place >= 0) & (ids >= 0) & (ids < PER_RANK)
    weights = tl.load(pointers + WIDTH, mask=inside, other=0).to(tl.float32, bitcast=True)
    return tl.where(here, ids, -1), tl.where(here, weights, 0.0)


@triton.jit
def _write_spoilt(
    came, header, lost, spoilt, num_sources, length, num_tokens, program, num_programs,
    HEADER: tl.constexpr, SOURCES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Mark this rank's lost tokens, or all of its tokens if a header differs from its own."""
    numbers = tl.arange(0, HEADER)[None, :]
    sources = tl.arange(0, SOURCES)[:, None]
    expected = tl.load(header + numbers)
    received = tl.load(came + sources.to(tl.int64) * length + numbers, mask=sources < num_sources, other=0)
    other = tl.max(tl.max(((sources < num_sources) & (received != expected)).to(tl.int32), axis=1), axis=0) > 0
    for first in range(program * BLOCK, num_tokens, num_programs * BLOCK):
        tokens = first + tl.arange(0, BLOCK)
        gone = tl.zeros((BLOCK,), tl.int32)
        if lost is not None:
            gone = tl.load(lost + tokens, mask=tokens < num_tokens, other=0).to(tl.int32)
        tl.store(spoilt + tokens, (gone > 0) | other, mask=tokens < num_tokens)


@triton.jit
def receive_slots(
    came, header, lost, ids, weights, spoilt, num_sources, each, num_tokens, rank,
    PER_RANK: tl.constexpr, HEADER: tl.constexpr, SOURCES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (b, source) writes ids and weights of BLOCK of `each` rows of slots. came `[sources, HEADER + 2 each]`: a
    header, places, weights."""
    source = tl.program_id(1)
    length = HEADER + 2 * each.to(tl.int64)
    rows = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = rows < each
    local, weight = _local(came, source, rows, inside, rank, 0, HEADER, length, 1, 2, PER_RANK)
    tl.store(ids + source.to(tl.int64) * each + rows, local, mask=inside)
    tl.store(weights + source.to(tl.int64) * each + rows, weight, mask=inside)
    program = tl.program_id(0).to(tl.int64) * num_sources + source
    programs = tl.num_programs(0).to(tl.int64) * num_sources
    _write_spoilt(
        came, header, lost, spoilt, num_sources, length, num_tokens, program, programs, HEADER, SOURCES, BLOCK
    )


@triton.jit
def _filled(counts, each, num_ranks, COUNT: tl.constexpr, RANKS: tl.constexpr):
    """Return the rows that arrived, of memory for `each`. counts int32 `[W, COUNT + 2]`: at COUNT, those of a rank."""
    filled = each.to(tl.int64)
    if counts is not None:
        ranks = tl.arange(0, RANKS)
        told = tl.load(counts + ranks * (COUNT + 2) + COUNT, mask=ranks < num_ranks, other=0)
        filled = tl.minimum(filled, tl.sum(told.to(tl.int64), axis=0))
    return filled


@triton.jit
def count_received(
    came, counts, block_counts, each, block_rows, num_blocks, rank, num_ranks,
    TOP_K: tl.constexpr, ROW: tl.constexpr, PER_RANK: tl.constexpr, HEADER: tl.constexpr, COUNT: tl.constexpr,
    RANKS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """block_counts[source, b] = slots for experts here among block_rows rows of tokens."""
    block, source = tl.program_id(0), tl.program_id(1)
    length = HEADER + each.to(tl.int64) * (2 * TOP_K)
    columns = tl.arange(0, COLUMNS)[None, :]
    last = tl.minimum((block.to(tl.int64) + 1) * block_rows, _filled(counts, each, num_ranks, COUNT, RANKS))
    count = tl.zeros((BLOCK_R, COLUMNS), tl.int32)
    for first in range(block.to(tl.int64) * block_rows, last, BLOCK_R):
        rows = first + tl.arange(0, BLOCK_R)[:, None]
        inside = (rows < last) & (columns < TOP_K)
        local, _ = _local(came, source, rows, inside, rank, columns, HEADER, length, TOP_K, ROW, PER_RANK)
        count += (local >= 0).to(tl.int32)
    tl.store(block_counts + source * num_blocks + block, tl.sum(tl.sum(count, axis=1), axis=0))


@triton.jit
def _own_last(number, counts, rank, num_ranks, COUNT: tl.constexpr, RANKS: tl.constexpr):
    """Number slots anew, this rank's behind all others'. counts: as in `_filled`.

    Example, rank 0 of two with 2 and 3 slots: 0..4 become 3, 4, 0, 1, 2.
    """
    ranks = tl.arange(0, RANKS)
    slots = tl.load(counts + ranks * (COUNT + 2) + COUNT + 1, mask=ranks < num_ranks, other=0)
    first, own = tl.sum(tl.where(ranks < rank, slots, 0), axis=0), tl.sum(tl.where(ranks == rank, slots, 0), axis=0)
    is_own = (number >= first) & (number < first + own)
    return number + tl.where(is_own, tl.sum(slots, axis=0) - first - own, tl.where(number < first, 0, -own))


@triton.jit
def place_received(
    came, header, lost, counts, results, block_counts, ids, weights, slot_of_row, results_at, spoilt, num_sources, each,
    block_rows, num_blocks, num_tokens, rank, num_ranks, most, stride, row_bytes,
    TOP_K: tl.constexpr, ROW: tl.constexpr, PER_RANK: tl.constexpr, HEADER: tl.constexpr, COUNT: tl.constexpr,
    RANKS: tl.constexpr, SOURCES: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_B: tl.constexpr,
    BLOCK_FILL: tl.constexpr,
):  # fmt: skip
    """Place slots for experts here in order, at most `most` per source, from source * stride on. came: as in
    `receive_slots`, with TOP_K places and then TOP_K weights for each row.

    Example, PER_RANK 2, rank 0, places [[2, 0], [1, 0], [3, 3]] of a source, stride 4: ids [0, 1, 0, -1], slot_of_row
    [1, 2, 3, -1]. block_counts None: this is the only program. With results, the memory of slots' results in the order
    of `_own_last`, ids and weights stay where they came, and results_at has each slot's address there, 0: none.
    """
    block, source = tl.program_id(0), tl.program_id(1)
    length = HEADER + each.to(tl.int64) * (2 * TOP_K)
    before = tl.zeros((BLOCK_B,), tl.int32)
    total = tl.zeros((BLOCK_B,), tl.int32)
    if block_counts is not None:
        for first in range(0, num_blocks, BLOCK_B):
            blocks = first + tl.arange(0, BLOCK_B)
            slots = tl.load(block_counts + source * num_blocks + blocks, mask=blocks < num_blocks, other=0)
            total += slots
            before += tl.where(blocks < block, slots, 0)
    ahead = tl.sum(before, axis=0)
    begin = source.to(tl.int64) * stride
    columns = tl.arange(0, COLUMNS)[None, :]
    filled = _filled(counts, each, num_ranks, COUNT, RANKS)
    last = tl.minimum((block.to(tl.int64) + 1) * block_rows, filled if results is None else each.to(tl.int64))
    for first in range(block.to(tl.int64) * block_rows, last, BLOCK_R):
        rows = first + tl.arange(0, BLOCK_R)[:, None]
        listed = (rows < last) & (columns < TOP_K)
        inside = listed & (rows < filled)
        local, weight = _local(came, source, rows, inside, rank, columns, HEADER, length, TOP_K, ROW, PER_RANK)
        here = tl.reshape((local >= 0).to(tl.int32), (BLOCK_R * COLUMNS,))
        number = tl.reshape(ahead + tl.cumsum(here, axis=0) - here, (BLOCK_R, COLUMNS))
        placed = (local >= 0) & (number < most)
        slot = (source.to(tl.int64) * each + rows) * TOP_K + columns
        if results is None:
            tl.store(ids + begin + number, local, mask=placed)
            tl.store(weights + begin + number, weight, mask=placed)
        else:
            number = _own_last(number, counts, rank, num_ranks, COUNT, RANKS)
            address = results.to(tl.int64) + number.to(tl.int64) * row_bytes
            tl.store(results_at + slot, tl.where(placed, address, 0), mask=listed)
            tl.store(ids + slot, local, mask=listed)
            tl.store(weights + slot, weight, mask=listed)
        tl.store(slot_of_row + begin + number, slot.to(tl.int32), mask=placed)
        ahead += tl.sum(here, axis=0)
    used = ahead
    if block_counts is not None:
        used = tl.sum(total, axis=0)
    used = tl.minimum(used, most)
    step = tl.num_programs(0).to(tl.int64) * BLOCK_FILL
    offset = used + block.to(tl.int64) * BLOCK_FILL
    fill(slot_of_row + begin, offset, stride, step, BLOCK_FILL)
    if results is None:
        fill(ids + begin, offset, stride, step, BLOCK_FILL)
        for first in range(offset, stride, step):
            rest = first + tl.arange(0, BLOCK_FILL)
            tl.store(weights + begin + rest, tl.zeros((BLOCK_FILL,), tl.float32), mask=rest < stride)
    if header is not None:
        program = block.to(tl.int64) * num_sources + source
        programs = tl.num_programs(0).to(tl.int64) * num_sources
        _write_spoilt(
            came, header, lost, spoilt, num_sources, length, num_tokens, program, programs, HEADER, SOURCES, BLOCK_FILL
        )
