"""From logits to expert ids and weights: scoring, grouped selection, renormalisation."""

import triton
import triton.language as tl

from moe_core.kernels.bitmatrix import set_bits

# Keys below those of every number (the smallest, of -inf, is -0x7F800001): NaN, then experts that may not be chosen,
# then experts chosen already.
NAN_KEY = tl.constexpr(-0x7FFFFFFE)
MASKED_KEY = tl.constexpr(-0x7FFFFFFF)
TAKEN_KEY = tl.constexpr(-0x80000000)
# The expert id of a padding column: above every real one.
NO_EXPERT = tl.constexpr(0x7FFFFFFF)


@triton.jit
def selection_keys(scores):
    """int32 keys in the order of fp32 scores; -0.0 ties with 0.0, NaN is below every number.

    The bits of a float, read as int32, ascend for positive and descend for negative numbers; flipping the other 31 bits
    of the negative ones puts both in one order. Example: -2.0, -1.0, 0.0, 1.0 -> ascending keys.
    """
    scores = tl.where(scores == 0.0, 0.0, scores)
    bits = scores.to(tl.int32, bitcast=True)
    return tl.where(scores == scores, bits ^ ((bits >> 31) & 0x7FFFFFFF), NAN_KEY)


@triton.jit
def key_scores(keys):
    """The fp32 scores of keys (0.0 for both zeros, NaN for NAN_KEY): the flip of `selection_keys`, its own inverse."""
    scores = (keys ^ ((keys >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
    return tl.where(keys == NAN_KEY, float("nan"), scores)


@triton.jit
def take_best(keys, names):
    """(best key, its name, keys without it) along the last axis; ties go to the lowest name."""
    axis: tl.constexpr = len(keys.shape) - 1
    best = tl.max(keys, axis=axis)
    name = tl.min(tl.where(keys == tl.expand_dims(best, axis), names, NO_EXPERT), axis=axis)
    return best, name, tl.where(names == tl.expand_dims(name, axis), TAKEN_KEY, keys)


@triton.jit
def exp_negative(x):
    """exp(x) for x <= 0 (or NaN), to a few ulp whatever x: `tl.exp` rounds x * log2(e), which costs |x| ulp.

    x * log2(e) = product + rest, rest the rounding error;  exp(x) = 2**product * (1 + rest * log(2))
    """
    # exp(-104) is 0 in fp32; clamped so that -inf gives no inf - inf, and by `where`, so that NaN stays.
    x = tl.where(x < -104.0, -104.0, x)
    product = x * 1.4426950408889634
    rest = tl.fma(x, 1.4426950408889634, -product) + x * 1.9259629911e-8
    power = tl.exp2(product)
    return tl.fma(power, rest * 0.6931471805599453, power)


@triton.jit
def log1p_unit(u):
    """log(1 + u) for u in [0, 1], to a few ulp: 2 * atanh(s), s = u / (2 + u) <= 1/3, as its series up to s**15."""
    s = tl.div_rn(u, 2.0 + u)
    square = s * s
    series = tl.full(u.shape, 1.0 / 15.0, tl.float32)
    for term in tl.static_range(7):
        series = series * square + 1.0 / (13 - 2 * term)
    return 2.0 * s * series


@triton.jit
def expert_scores(x, SCORING: tl.constexpr):
    """Scores that each expert gives by itself, without overflow: sigmoid, or sqrt(log(1 + exp(x)))."""
    shrunk = exp_negative(-tl.abs(x))
    if SCORING == "sigmoid":
        return tl.div_rn(tl.where(x >= 0.0, 1.0, shrunk), 1.0 + shrunk)
    else:
        tl.static_assert(SCORING == "sqrt_softplus", "unknown scoring")
        return tl.sqrt_rn(tl.where(x > 0.0, x, 0.0) + log1p_unit(shrunk))


@triton.jit
def keep_groups(keys, TOPK_GROUP: tl.constexpr, GROUPS: tl.constexpr, BY_PAIR: tl.constexpr):
    """`[tokens, GROUPS * members]` keys, masked outside the TOPK_GROUP best groups.

    group score = best of the group (BY_PAIR: sum of the two best); ties go to the lower group.
    """
    tokens: tl.constexpr = keys.shape[0]
    columns: tl.constexpr = keys.shape[1]
    members = tl.reshape(keys, (tokens, GROUPS, columns // GROUPS))
    if BY_PAIR:
        names = tl.arange(0, columns // GROUPS)[None, None, :]
        first, _, others = take_best(members, names)
        group_keys = selection_keys(key_scores(first) + key_scores(tl.max(others, axis=2)))
    else:
        group_keys = tl.max(members, axis=2)
    # Groups that only pad hold masked keys alone and come last: no key is lower, and ties go to the lower group.
    groups = tl.arange(0, GROUPS)[None, :]
    for _ in range(TOPK_GROUP):
        _, _, group_keys = take_best(group_keys, groups)
    kept = tl.expand_dims(group_keys == TAKEN_KEY, 2)
    return tl.reshape(tl.where(kept, members, MASKED_KEY), (tokens, columns))


@triton.jit
def route(
    logits,
    correction_bias,
    token_mask,
    ids,
    weights,
    bitmatrix,
    num_tokens,
    NUM_EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    SCORING: tl.constexpr,
    SOFTMAX_LAST: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    SCALE: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    TOPK_GROUP: tl.constexpr,
    BY_EXPERT: tl.constexpr,
    BLOCK_T: tl.constexpr,
    GROUPS: tl.constexpr,
    MEMBERS: tl.constexpr,
    SLOTS: tl.constexpr,
    WORDS: tl.constexpr,
):
    """ids and weights `[T, K]` (and bitmatrix rows) of logits `[T, E]`, BLOCK_T tokens at a time.

    keys = order of the logits (with a bias: of score + bias); outside the best groups: masked
    for k = 0..K-1: ids[k] = expert of the largest key, lower id first; its key is taken out
    weights = scores of the chosen, / their sum, * scale

    Columns are padded to GROUPS * MEMBERS, powers of two; SLOTS >= K and WORDS >= E / 32 are powers of two. Example,
    K = 2, logits [1, 3, 3, NaN], sigmoid: ids [1, 2] (a tie: lower id first; NaN last), weights [0.95, 0.95].
    """
    columns = tl.arange(0, GROUPS * MEMBERS)
    group, member = columns // MEMBERS, columns % MEMBERS
    real = (group < NUM_GROUPS) & (member < NUM_EXPERTS // NUM_GROUPS)
    # Without groups the plain column number, which the compiler knows to be contiguous.
    offsets = columns if NUM_GROUPS == 1 else group * (NUM_EXPERTS // NUM_GROUPS) + member
    experts = tl.where(real, offsets, NO_EXPERT)[None, :]
    slots = tl.arange(0, SLOTS)[None, :]
    step = tl.num_programs(0).to(tl.int64) * BLOCK_T
    for first in range(tl.program_id(0).to(tl.int64) * BLOCK_T, num_tokens, step):
        tokens = first + tl.arange(0, BLOCK_T)
        inside = tokens < num_tokens
        base = logits + tokens[:, None] * NUM_EXPERTS
        x = tl.load(base + offsets[None, :], mask=inside[:, None] & real[None, :], other=float("-inf"))
        if SCORING == "softmax" and not SOFTMAX_LAST:
            largest = tl.max(x, axis=1)
            total = tl.sum(tl.where(real[None, :], exp_negative(x - largest[:, None]), 0.0), axis=1)
        if correction_bias is None:
            keys = selection_keys(x)
        else:
            if SOFTMAX_LAST:
                scores = x
            elif SCORING == "softmax":
                scores = tl.div_rn(exp_negative(x - largest[:, None]), total[:, None])
            else:
                scores = expert_scores(x, SCORING)
            keys = selection_keys(scores + tl.load(correction_bias + offsets[None, :], mask=real[None, :], other=0.0))
        keys = tl.where(real[None, :], keys, MASKED_KEY)
        if NUM_GROUPS > 1:
            keys = keep_groups(keys, TOPK_GROUP, GROUPS, correction_bias is not None)

        chosen = tl.full((BLOCK_T, SLOTS), -1, tl.int32)
        for k in range(TOP_K):
            _, expert, keys = take_best(keys, experts)
            chosen = tl.where(slots == k, expert[:, None], chosen)

        stored = inside[:, None] & (slots < TOP_K)
        picked = tl.load(base + chosen, mask=stored, other=float("-inf"))
        if SOFTMAX_LAST:
            exponentials = tl.where(slots < TOP_K, exp_negative(picked - tl.max(picked, axis=1)[:, None]), 0.0)
            values = tl.div_rn(exponentials, tl.sum(exponentials, axis=1)[:, None])
        elif SCORING == "softmax":
            values = tl.div_rn(exp_negative(picked - largest[:, None]), total[:, None])
        else:
            values = expert_scores(picked, SCORING)
        if RENORMALIZE:
            divisor = tl.sum(tl.where(slots < TOP_K, values, 0.0), axis=1)[:, None]
            values = tl.where(divisor == 0.0, 0.0, tl.div_rn(values, divisor))
        values *= SCALE

        position = slots
        if BY_EXPERT:
            # A slot's place is the number of chosen experts with a lower id.
            position = tl.zeros((BLOCK_T, SLOTS), dtype=tl.int32)
            for k in range(TOP_K):
                other = tl.sum(tl.where(slots == k, chosen, 0), axis=1)
                position += (other[:, None] < chosen).to(tl.int32)
        if token_mask is not None:
            kept = tl.load(token_mask + tokens, mask=inside, other=0) != 0
            chosen = tl.where(kept[:, None], chosen, -1)
            values = tl.where(kept[:, None], values, 0.0)
        target = tokens[:, None] * TOP_K + position
        tl.store(ids + target, chosen, mask=stored)
        tl.store(weights + target, values, mask=stored)
        if bitmatrix is not None:
            words = tl.zeros((BLOCK_T, WORDS), dtype=tl.int32)
            for k in range(TOP_K):
                expert = tl.sum(tl.where(slots == k, chosen, 0), axis=1)
                words |= set_bits(expert, WORDS)
            number = tl.arange(0, WORDS)[None, :]
            NUM_WORDS: tl.constexpr = (NUM_EXPERTS + 31) // 32
            place = bitmatrix + tokens[:, None] * NUM_WORDS + number
            tl.store(place, words.to(tl.uint32, bitcast=True), mask=inside[:, None] & (number < NUM_WORDS))
