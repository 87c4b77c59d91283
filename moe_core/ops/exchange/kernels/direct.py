"""Push rows of tokens to places that follow from a token's number, and sum at home."""

import triton
import triton.language as tl

from moe_core.ops.exchange.kernels.addresses import pointer_to
from moe_core.ops.reduction.kernels.reduce import Reduction, reduce_tile
from moe_core.ops.routing.kernels.layout import local_experts
from moe_core.ops.routing.kernels.schedule import fill


@triton.jit
def push_tokens_once(
    x, ids, weights, header, places_of_experts, given, token_mask, rows_at, ids_at, weights_at, headers_at,
    places, tokens_per_expert, invalid_ids, overflow, owners, rows, num_tokens, num_ranks, rank, most,
    PER_RANK: tl.constexpr, NUM_EXPERTS: tl.constexpr, TOP_K: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr,
    X_STRIDE: tl.constexpr, DTYPE: tl.constexpr, HEADER: tl.constexpr, EXPERTS: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_FILL: tl.constexpr,
):  # fmt: skip
    """Store token t as row rank * most + t of every owner of one of its experts, and its weights and ids there.

        ids_at[owner][row, k] = the place among the owner's, -1 for other ranks' experts and behind the last token
        headers_at[owner][turn % 2, rank] = header, num_tokens, 0, 0, 0
        owners[t, owner] = owner, rows[t, owner] = row, -1: no visit

    Turns are counted behind the 2 W headers, because a peer may begin the next turn while they are read. Program 0
    writes header and counts, the others take turns with rows. x None: rows travel separately. places_of_experts None:
    expert e has place e. given: places of slots that do not follow from experts.
    """
    program = tl.program_id(0)
    if program == 0:
        numbers = tl.arange(0, 16)
        told = tl.load(header + numbers, mask=numbers < HEADER, other=0)
        told = tl.where(numbers == HEADER, num_tokens, told)
        turns = pointer_to(tl.load(headers_at + rank), "int32") + 2 * num_ranks * (HEADER + 4)
        turn = tl.load(turns)
        for peer in range(num_ranks):
            there = pointer_to(tl.load(headers_at + peer), "int32") + ((turn & 1) * num_ranks + rank) * (HEADER + 4)
            tl.store(there + numbers, told, mask=numbers < HEADER + 4)
        # Only after every thread has read it.
        tl.debug_barrier()
        tl.store(turns, turn + 1)
        tl.store(overflow, 0)
        _count(ids, token_mask, tokens_per_expert, invalid_ids, num_tokens * TOP_K, NUM_EXPERTS, TOP_K, EXPERTS, CHUNK)
    else:
        blocks: tl.constexpr = (WIDTH + BLOCK_N - 1) // BLOCK_N
        k = tl.arange(0, COLUMNS)[None, :]
        for tile in range(program - 1, tl.cdiv(num_tokens, BLOCK_T) * blocks, tl.num_programs(0) - 1):
            tokens = (tile // blocks) * BLOCK_T + tl.arange(0, BLOCK_T).to(tl.int64)
            columns = (tile % blocks) * BLOCK_N + tl.arange(0, BLOCK_N)
            inside, exists = tokens < num_tokens, (columns < WIDTH)[None, :]
            if x is not None:
                mask = inside[:, None] & exists
                value = tl.load(x + tokens[:, None] * X_STRIDE + columns[None, :], mask=mask, other=0.0)
            slots = tokens[:, None] * TOP_K + k
            known = inside[:, None] & (k < TOP_K)
            place = _places(
                ids, places_of_experts, given, token_mask, tokens[:, None], slots, known, num_ranks * PER_RANK,
                NUM_EXPERTS,
            )  # fmt: skip
            owner = tl.where(place < 0, -1, place // PER_RANK)
            row = rank.to(tl.int64) * most + tokens[:, None]
            first_block = known & (tile % blocks == 0)
            weight = tl.load(weights + slots, mask=first_block, other=0.0)
            tl.store(places + slots, place, mask=first_block)
            for turn in range(num_ranks):
                # Every rank begins with another peer.
                peer = (rank + 1 + turn) % num_ranks
                visits = (tl.max((owner == peer).to(tl.int32), axis=1) > 0)[:, None]
                if x is not None:
                    there = pointer_to(tl.load(rows_at + peer), DTYPE) + row * WIDTH
                    tl.store(there + columns[None, :], value, mask=visits & exists)
                if owners is not None:
                    once = inside[:, None] & (tile % blocks == 0)
                    at_home = tokens[:, None] * num_ranks + peer
                    tl.store(owners + at_home, tl.where(visits, peer, -1), mask=once)
                    tl.store(rows + at_home, tl.where(visits, row, -1).to(tl.int32), mask=once)
                local = tl.where(owner == peer, place - peer * PER_RANK, -1)
                tl.store(pointer_to(tl.load(ids_at + peer), "int32") + row * TOP_K + k, local, mask=first_block)
                tl.store(pointer_to(tl.load(weights_at + peer), "float32") + row * TOP_K + k, weight, mask=first_block)
        first, step = (program - 1).to(tl.int64) * BLOCK_FILL, (tl.num_programs(0) - 1).to(tl.int64) * BLOCK_FILL
        begin, end = num_tokens.to(tl.int64), most.to(tl.int64)
        for peer in range(num_ranks):
            unused = pointer_to(tl.load(ids_at + peer), "int32") + rank * end * TOP_K
            fill(unused, begin * TOP_K + first, end * TOP_K, step, BLOCK_FILL)


@triton.jit
def _places(ids, places_of_experts, given, token_mask, tokens, slots, known, num_places, NUM_EXPERTS: tl.constexpr):
    if given is not None:
        place = tl.load(given + slots, mask=known, other=-1)
    else:
        place = tl.load(ids + slots, mask=known, other=-1)
        if token_mask is not None:
            kept = tl.load(token_mask + tokens, mask=known, other=0)
            place = tl.where(kept != 0, place, -1)
        exists = (place >= 0) & (place < NUM_EXPERTS)
        if places_of_experts is not None:
            place = tl.load(places_of_experts + place, mask=exists, other=-1)
        else:
            place = tl.where(exists, place, -1)
    return tl.where((place >= 0) & (place < num_places), place, -1)


@triton.jit
def _count(
    ids, token_mask, tokens_per_expert, invalid_ids, num_slots,
    NUM_EXPERTS: tl.constexpr, TOP_K: tl.constexpr, EXPERTS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    counts = tl.zeros((EXPERTS,), dtype=tl.int32)
    wrong = tl.zeros((CHUNK,), dtype=tl.int32)
    for first in range(0, num_slots, CHUNK):
        slots = first + tl.arange(0, CHUNK)
        local, invalid = local_experts(ids, None, token_mask, slots, num_slots, NUM_EXPERTS, NUM_EXPERTS, TOP_K)
        wrong += invalid.to(tl.int32)
        counts += tl.histogram(local, EXPERTS, mask=local >= 0)
    experts = tl.arange(0, EXPERTS)
    tl.store(tokens_per_expert + experts, counts, mask=experts < NUM_EXPERTS)
    tl.store(invalid_ids, tl.sum(wrong, axis=0))


@triton.jit
def sum_results(
    y, row_of_slot, headers, agree, wanted, shared, shared_gate, out, num_tokens, num_rows, num_ranks,
    TOP_K: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr, SHARED_STRIDE: tl.constexpr, UNROLL: tl.constexpr,
    HEADER: tl.constexpr, RANKS: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """`reduce` results by slot. NaN where ranks disagree, and in tokens with a wanted slot without a row. headers: see
    `push_tokens_once`, compared for the last turn. agree: nonzero if ranks agreed."""
    if headers is not None:
        ranks, numbers = tl.arange(0, RANKS)[:, None], tl.arange(0, HEADER)[None, :]
        known, other = headers + ranks * (HEADER + 4) + numbers, num_ranks * (HEADER + 4)
        turn = tl.load(headers + 2 * other) - 1
        even = tl.load(known, mask=ranks < num_ranks, other=0)
        odd = tl.load(known + other, mask=ranks < num_ranks, other=0)
        first_even, first_odd = tl.load(headers + numbers), tl.load(headers + other + numbers)
    sums = Reduction(
        y, row_of_slot, out, num_tokens, num_rows, TOP_K, WIDTH, BLOCK_T, BLOCK_N, shared, shared_gate, SHARED_STRIDE,
        False, UNROLL,
    )  # fmt: skip
    reduce_tile(tl.program_id(0), tl.program_id(1), sums)
    tokens = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    spoilt = tl.zeros((BLOCK_T,), dtype=tl.int32)
    if headers is not None:
        differ = tl.where((turn & 1) == 0, even != first_even, odd != first_odd) & (ranks < num_ranks)
        spoilt += tl.max(tl.max(differ.to(tl.int32), axis=1), axis=0)
    if agree is not None:
        spoilt += (tl.load(agree) == 0).to(tl.int32)
    if wanted is not None:
        k = tl.arange(0, COLUMNS)[None, :]
        slots, inside = tokens[:, None] * TOP_K + k, (tokens < num_tokens)[:, None] & (k < TOP_K)
        lost = tl.load(row_of_slot + slots, mask=inside, other=0) < 0
        lost = lost & (tl.load(wanted + slots, mask=inside, other=-1) >= 0)
        spoilt += tl.max(lost.to(tl.int32), axis=1)
    if tl.max(spoilt, axis=0) > 0:
        # After the sums, which other threads may have stored.
        tl.debug_barrier()
        columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
        mask = ((tokens < num_tokens) & (spoilt > 0))[:, None] & (columns < WIDTH)[None, :]
        nothing = tl.full((BLOCK_T, BLOCK_N), float("nan"), out.dtype.element_ty)
        tl.store(out + tokens[:, None] * WIDTH + columns[None, :], nothing, mask=mask)
