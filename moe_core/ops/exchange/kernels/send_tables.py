"""Tables of a rank that has tokens: a counting sort without atomics. Blocks of tokens are counted, then place
their slots."""

import triton
import triton.language as tl

from moe_core.ops.routing.kernels.layout import count_experts
from moe_core.ops.routing.kernels.schedule import fill


@triton.jit
def count_sends(
    ids, token_mask, places_of_experts, start, tokens, places, groups, block_counts, block_invalid, num_tokens,
    block_tokens, rank, num_ranks,
    MODE: tl.constexpr, BY_SLOT: tl.constexpr, PER_RANK: tl.constexpr, NUM_EXPERTS: tl.constexpr, TOP_K: tl.constexpr,
    SENT: tl.constexpr, RANKS: tl.constexpr, SENDS: tl.constexpr, EXPERTS: tl.constexpr, BLOCK_T: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """Program b finds places and groups of the slots of block_tokens tokens and counts them.

        block_counts[b] = [rows sent by group (SENT of them), slots by owner, slots by expert]
        place = the place of the slot's expert, -1: none, owner = place // PER_RANK
        group = place (BY_SLOT), else the owner, -1 where an earlier slot of the token has it

    Example, PER_RANK 2, places [[2, 3], [0, 2]]: groups of tokens [[1, -1], [0, 1]], rows sent [1, 2], by owner [1, 3].
    tokens int32 `[W]`: of all ranks. A slot of an expert with n places (None: 1) takes number (token + k) mod n.
    """
    block = tl.program_id(0).to(tl.int64)
    last = tl.minimum((block + 1) * block_tokens, num_tokens)
    first_token = tl.zeros((), tl.int64)
    ranks = tl.arange(0, RANKS)
    if tokens is not None:
        first_token = tl.sum(tl.load(tokens + ranks, mask=(ranks < rank) & (ranks < num_ranks), other=0).to(tl.int64))
    columns = tl.arange(0, COLUMNS)[None, :]
    sends = tl.zeros((SENDS,), dtype=tl.int32)
    by_owner = tl.zeros((RANKS,), dtype=tl.int32)
    by_expert = tl.zeros((EXPERTS,), dtype=tl.int32)
    wrong = tl.zeros((BLOCK_T * COLUMNS,), dtype=tl.int32)
    for begin in range(block * block_tokens, last, BLOCK_T):
        rows = begin + tl.arange(0, BLOCK_T)[:, None]
        inside = (rows < last) & (columns < TOP_K)
        slots = rows * TOP_K + columns
        chosen = tl.load(ids + slots, mask=inside, other=-1)
        if token_mask is not None:
            kept = tl.load(token_mask + rows, mask=rows < last, other=0)
            chosen = tl.where(kept != 0, chosen, -1)
        valid = (chosen >= 0) & (chosen < NUM_EXPERTS)
        first = tl.load(start + chosen, mask=valid, other=0)
        if tokens is not None:
            replicas = tl.load(start + chosen + 1, mask=valid, other=1) - first
            first += ((first_token + rows + columns) % tl.maximum(replicas, 1)).to(tl.int32)
        place = tl.load(places_of_experts + first, mask=valid, other=-1)
        owner = tl.where(place < 0, -1, place // PER_RANK)
        tl.store(places + slots, place, mask=inside)
        wrong += tl.reshape(((chosen < -1) | (chosen >= NUM_EXPERTS)).to(tl.int32), (BLOCK_T * COLUMNS,))
        by_owner += count_experts(tl.reshape(owner, (BLOCK_T * COLUMNS,)), RANKS)
        by_expert += count_experts(tl.reshape(tl.where(valid, chosen, -1), (BLOCK_T * COLUMNS,)), EXPERTS)
        if BY_SLOT:
            sends += count_experts(tl.reshape(place, (BLOCK_T * COLUMNS,)), SENDS)
        elif MODE != "all_gather":
            group = owner
            for k in range(TOP_K - 1):
                one = tl.sum(tl.where(columns == k, owner, 0), axis=1)[:, None]
                group = tl.where((columns > k) & (owner == one), -1, group)
            tl.store(groups + slots, group, mask=inside)
            sends += count_experts(tl.reshape(group, (BLOCK_T * COLUMNS,)), SENDS)
    row = block_counts + block * (SENT + num_ranks + NUM_EXPERTS)
    if MODE != "all_gather":
        groups_sent = tl.arange(0, SENDS)
        tl.store(row + groups_sent, sends, mask=groups_sent < SENT)
    tl.store(row + SENT + ranks, by_owner, mask=ranks < num_ranks)
    experts = tl.arange(0, EXPERTS)
    tl.store(row + SENT + num_ranks + experts, by_expert, mask=experts < NUM_EXPERTS)
    tl.store(block_invalid + block, tl.sum(wrong, axis=0))


@triton.jit
def _sum_blocks(counts, block, num_blocks, count, stride, SIZE: tl.constexpr, BLOCK_B: tl.constexpr):
    """Return counts added up over all blocks, and over the blocks ahead, int32 `[SIZE]` each."""
    columns = tl.arange(0, SIZE)[None, :]
    total = tl.zeros((SIZE,), dtype=tl.int32)
    before = tl.zeros((SIZE,), dtype=tl.int32)
    for first in range(0, num_blocks, BLOCK_B):
        blocks = first + tl.arange(0, BLOCK_B)[:, None]
        mask = (blocks < num_blocks) & (columns < count)
        one = tl.load(counts + blocks.to(tl.int64) * stride + columns, mask=mask, other=0)
        total += tl.sum(one, axis=0)
        before += tl.sum(tl.where(blocks < block, one, 0), axis=0)
    return total, before


@triton.jit
def _ranks_among(wanted, held, before):
    """Return (before + number of earlier equals in held for each of wanted, before with held added).

    Example, wanted [4, 2, 4, 4], held [4, 2, -1 (none), 4], before 0 but for before[4] = 5: [5, 0, 6, 6].
    """
    position = tl.arange(0, wanted.shape[0])
    earlier = position[:, None] < position[None, :]
    ranks = tl.sum((earlier & (held[:, None] == wanted[None, :])).to(tl.int32), axis=0)
    ranks += tl.gather(before, tl.where(wanted >= 0, wanted, 0), 0)
    return ranks, before + count_experts(held, before.shape[0])


@triton.jit
def place_sends(
    weights, header, limits, places, groups, block_counts, block_invalid, invalid_ids, tokens_per_expert, row_of_slot,
    lost, counted, message, slot_of_row, table, num_tokens, block_tokens, rank, num_ranks, num_blocks, num_rows, block,
    back, block_rows, back_rows,
    OWN_FIRST: tl.constexpr, MODE: tl.constexpr, BY_SLOT: tl.constexpr, PER_RANK: tl.constexpr,
    NUM_EXPERTS: tl.constexpr, TOP_K: tl.constexpr,
    SENT: tl.constexpr, HEADER: tl.constexpr, RANKS: tl.constexpr, SENDS: tl.constexpr, EXPERTS: tl.constexpr,
    BLOCK_T: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_FILL: tl.constexpr,
):  # fmt: skip
    """Program b places the slots of block b. All share the rows that no slot fills, and program 0 writes the counts.

        number = the row of the slot, or of its token, among rows to its owner, by (group, slot)
        result = the slot's result among those that come back: by slot, or as they went (BY_SLOT)
        row sent = start of the owner's rows + number, row_of_slot = start of its results + result

    limits int32 `[2, W]`: rows that each owner takes, and (rows of tokens) where its results begin at home. With blocks
    owners take `block` rows, at multiples of block_rows, and return `back`, at multiples of back_rows. A slot without
    room has no row, and its token is lost. counted int32 `[W]`: rows and results without room. For `all_to_all`: slots
    that arrive, the first of an owner's, so the first row that does not arrive has their number among the results.
    """
    program = tl.program_id(0)
    WIDTH: tl.constexpr = (1 if MODE == "all_to_all" else 2) if BY_SLOT else 2 * TOP_K
    SLOTS: tl.constexpr = BLOCK_T * COLUMNS
    stride = SENT + num_ranks + NUM_EXPERTS
    ranks = tl.arange(0, RANKS)
    is_rank = ranks < num_ranks
    by_owner, owners_before = _sum_blocks(block_counts + SENT, program, num_blocks, num_ranks, stride, RANKS, BLOCK_B)
    sends, sends_before = by_owner, owners_before
    if MODE != "all_gather":
        sends, sends_before = _sum_blocks(block_counts, program, num_blocks, SENT, stride, SENDS, BLOCK_B)
    # By owner: rows to send, rows that it takes, rows sent, their first row, and the first result.
    rows = by_owner
    if not BY_SLOT and MODE != "all_gather":
        rows = sends
    kept = tl.full((RANKS,), 2147483647, tl.int32)
    if limits is not None:
        kept = tl.load(limits + ranks, mask=is_rank, other=0)
    elif MODE == "padded":
        kept = tl.full((RANKS,), 0, tl.int32) + block
    went = tl.minimum(rows, kept)
    if MODE == "padded":
        row_start = ranks * block_rows
    else:
        row_start = tl.cumsum(went, axis=0) - went
    if MODE != "all_to_all":
        result_start = ranks * back_rows
    elif BY_SLOT:
        result_start = row_start
    elif limits is not None:
        result_start = tl.load(limits + num_ranks + ranks, mask=is_rank, other=0)
    else:
        result_start = tl.cumsum(by_owner, axis=0) - by_owner
        if OWN_FIRST:
            own = tl.sum(tl.where(ranks == rank, by_owner, 0), axis=0)
            result_start = tl.where(ranks == rank, 0, result_start + tl.where(ranks < rank, own, 0))
    group_start = tl.cumsum(sends, axis=0) - sends
    if BY_SLOT:
        owner_start = tl.cumsum(by_owner, axis=0) - by_owner
        of_group = tl.minimum(tl.arange(0, SENDS) // PER_RANK, RANKS - 1)
        group_start -= tl.gather(owner_start, of_group, 0)
    if program == 0:
        of_experts = block_counts + SENT + num_ranks
        by_expert, _ = _sum_blocks(of_experts, 0, num_blocks, NUM_EXPERTS, stride, EXPERTS, BLOCK_B)
        experts = tl.arange(0, EXPERTS)
        tl.store(tokens_per_expert + experts, by_expert, mask=experts < NUM_EXPERTS)
        wrong = tl.zeros((BLOCK_B,), dtype=tl.int32)
        for first in range(0, num_blocks, BLOCK_B):
            blocks = first + tl.arange(0, BLOCK_B)
            wrong += tl.load(block_invalid + blocks, mask=blocks < num_blocks, other=0)
        tl.store(invalid_ids, tl.sum(wrong, axis=0))
        of_owners = sends, by_owner, num_ranks
        _write_heads(header, message, *of_owners, block_rows, MODE, BY_SLOT, PER_RANK, SENT, HEADER, WIDTH)
        if BY_SLOT:
            tl.store(counted + ranks, _counted(went, rows - went, back, MODE), mask=is_rank)
        else:
            tl.store(counted + ranks, _counted(by_owner, 0, back, MODE), mask=is_rank & (rows <= kept))
    if MODE == "padded":
        _fill_blocks(slot_of_row, message, went, num_ranks, block_rows, HEADER, WIDTH, BLOCK_FILL)
    elif MODE == "all_to_all":
        step = tl.num_programs(0).to(tl.int64) * BLOCK_FILL
        fill(slot_of_row, tl.sum(went, axis=0) + program.to(tl.int64) * BLOCK_FILL, num_rows, step, BLOCK_FILL)
    last = tl.minimum((program.to(tl.int64) + 1) * block_tokens, num_tokens)
    lane = tl.arange(0, SLOTS)
    for begin in range(program.to(tl.int64) * block_tokens, last, BLOCK_T):
        token, k = begin + lane // COLUMNS, lane % COLUMNS
        inside = (token < last) & (k < TOP_K)
        slot = token * TOP_K + k
        place = tl.load(places + slot, mask=inside, other=-1)
        owner = tl.where(place < 0, -1, place // PER_RANK)
        target = tl.where(owner < 0, 0, owner)
        travels = place >= 0
        arrives = travels
        if BY_SLOT:
            number, sends_before = _ranks_among(place, place, sends_before)
            number += tl.gather(group_start, tl.where(place < 0, 0, place), 0)
            result = number
            arrives = travels & (number < tl.gather(kept, target, 0))
        else:
            result, owners_before = _ranks_among(owner, owner, owners_before)
            number = result
            if MODE != "all_gather":
                group = tl.load(groups + slot, mask=inside, other=-1)
                number, sends_before = _ranks_among(owner, group, sends_before)
                travels = group >= 0
                # A later slot of a token shares the row of the first one.
                number = tl.where(travels, number, number - 1)
                limit = tl.gather(kept, target, 0)
                arrives = arrives & (number < limit)
                over = tl.gather(rows, target, 0) - limit
                counts = _counted(result, over, back, MODE)
                tl.store(counted + target, counts, mask=travels & (number == limit))
        fits = arrives
        if MODE != "all_to_all":
            fits = arrives & (result < back)
        home = tl.where(fits, tl.gather(result_start, target, 0) + result, -1)
        tl.store(row_of_slot + slot, home, mask=inside)
        gone = tl.reshape(((place >= 0) & ~fits).to(tl.int32), (BLOCK_T, COLUMNS))
        of_token = begin + tl.arange(0, BLOCK_T)
        tl.store(lost + of_token, tl.max(gone, axis=1) > 0, mask=of_token < last)
        if MODE == "all_gather":
            bits = tl.load(weights + slot, mask=inside, other=0).to(tl.int32, bitcast=True)
            words = message + HEADER + token * WIDTH + k
            tl.store(words, place, mask=inside)
            tl.store(words + TOP_K, bits, mask=inside)
        else:
            goes = travels & arrives
            row = tl.gather(row_start, target, 0).to(tl.int64) + number
            tl.store(slot_of_row + row, slot.to(tl.int32), mask=goes)
            if MODE == "padded":
                length = HEADER + block_rows.to(tl.int64) * WIDTH
                words = message + owner * length + HEADER + number.to(tl.int64) * WIDTH
            else:
                words = table + row * WIDTH
            if BY_SLOT:
                bits = tl.load(weights + slot, mask=goes, other=0).to(tl.int32, bitcast=True)
                if MODE == "padded":
                    tl.store(words, place, mask=goes)
                tl.store(words + (WIDTH - 1), bits, mask=goes)
            else:
                for other in range(TOP_K):
                    read = token * TOP_K + other
                    bits = tl.load(weights + read, mask=goes, other=0).to(tl.int32, bitcast=True)
                    tl.store(words + other, tl.load(places + read, mask=goes, other=-1), mask=goes)
                    tl.store(words + TOP_K + other, bits, mask=goes)


@triton.jit
def _counted(arrived, over, back, MODE: tl.constexpr):
    if MODE == "all_to_all":
        return arrived
    return tl.maximum(arrived - back, 0) + over


@triton.jit
def _write_heads(
    header, message, sends, by_owner, num_ranks, block_rows, MODE: tl.constexpr, BY_SLOT: tl.constexpr,
    PER_RANK: tl.constexpr, SENT: tl.constexpr, HEADER: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    numbers = tl.arange(0, HEADER)
    head = tl.load(header + numbers)
    if MODE == "padded":
        for owner in range(num_ranks):
            length = HEADER + block_rows.to(tl.int64) * WIDTH
            tl.store(message + owner * length + numbers, head)
    elif MODE == "all_gather":
        tl.store(message + numbers, head)
    else:
        EACH: tl.constexpr = PER_RANK if BY_SLOT else 1
        LENGTH: tl.constexpr = HEADER + (PER_RANK if BY_SLOT else 2)
        for owner in range(num_ranks):
            tl.store(message + owner * LENGTH + numbers, head)
        groups = tl.arange(0, sends.shape[0])
        words = message + groups // EACH * LENGTH + HEADER + groups % EACH
        tl.store(words, sends, mask=groups < SENT)
        if not BY_SLOT:
            owners = tl.arange(0, by_owner.shape[0])
            tl.store(message + owners * LENGTH + HEADER + 1, by_owner, mask=owners < num_ranks)


@triton.jit
def _fill_blocks(
    slot_of_row, message, went, num_ranks, block_rows, HEADER: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):
    ranks = tl.arange(0, went.shape[0])
    length = HEADER + block_rows.to(tl.int64) * WIDTH
    first = tl.program_id(0).to(tl.int64) * BLOCK
    step = tl.num_programs(0).to(tl.int64) * BLOCK
    for owner in range(num_ranks):
        used = tl.sum(tl.where(ranks == owner, went, 0), axis=0)
        rows = slot_of_row + owner * block_rows.to(tl.int64)
        fill(rows, used + first, block_rows, step, BLOCK)
        words = message + owner * length + HEADER
        fill(words, used.to(tl.int64) * WIDTH + first, block_rows.to(tl.int64) * WIDTH, step, BLOCK)
