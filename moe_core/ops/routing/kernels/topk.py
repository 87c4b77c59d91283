import triton
import triton.language as tl

from moe_core.ops.activation.kernels.formulas import softcap
from moe_core.ops.common.kernels.aggregates import aggregate_of
from moe_core.ops.common.kernels.pdl import join
from moe_core.ops.routing.kernels.bitmatrix import set_bits
from moe_core.ops.routing.kernels.layout import count_experts, to_local

# Keys below every number (the smallest, of -inf, is -0x7F800001): NaN, experts that may not be chosen, chosen experts.
NAN_KEY = tl.constexpr(-0x7FFFFFFE)
MASKED_KEY = tl.constexpr(-0x7FFFFFFF)
TAKEN_KEY = tl.constexpr(-0x80000000)
# Expert id of padding columns: above every real one.
NO_EXPERT = tl.constexpr(0x7FFFFFFF)


Router = aggregate_of(
    "Router",
    """logits correction_bias token_mask given NUM_EXPERTS TOP_K SCORING SOFTMAX_LAST RENORMALIZE SCALE NUM_GROUPS
    TOPK_GROUP BY_EXPERT BY_PAIR BIAS_ON_LOGITS BIAS_STRIDE EPSILON LOGIT_SCALE SOFTCAP GROUPS MEMBERS SLOTS SPAN
    WIDTH""",
)


@triton.jit
def topk_keys(scores):
    """Return int32 keys in the order of fp32 scores. -0.0 ties with 0.0, NaN is below every number. Bits of negative
    floats descend as int32, so all but the sign are flipped."""
    scores = tl.where(scores == 0.0, 0.0, scores)
    bits = scores.to(tl.int32, bitcast=True)
    return tl.where(scores == scores, bits ^ ((bits >> 31) & 0x7FFFFFFF), NAN_KEY)


@triton.jit
def key_scores(keys):
    """Return the fp32 scores of keys (0.0 for both zeros, NaN for NAN_KEY), by the flip of `topk_keys`."""
    scores = (keys ^ ((keys >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
    return tl.where(keys == NAN_KEY, float("nan"), scores)


@triton.jit
def take_best(keys, names):
    axis: tl.constexpr = len(keys.shape) - 1
    best = tl.max(keys, axis=axis)
    name = tl.min(tl.where(keys == tl.expand_dims(best, axis), names, NO_EXPERT), axis=axis)
    return best, name, tl.where(names == tl.expand_dims(name, axis), TAKEN_KEY, keys)


@triton.jit
def exp_negative(x):
    """exp(x) for x <= 0 (or NaN), to a few ulp for every x: `tl.exp` rounds x * log2(e), which costs |x| ulp. With x *
    log2(e) = product + rest, exp(x) = 2**product * (1 + rest * log(2))."""
    # exp(-104) is 0 in fp32. The clamp avoids inf - inf for -inf, and `where` keeps NaN.
    x = tl.where(x < -104.0, -104.0, x)
    product = x * 1.4426950408889634
    rest = tl.fma(x, 1.4426950408889634, -product) + x * 1.9259629911e-8
    power = tl.exp2(product)
    return tl.fma(power, rest * 0.6931471805599453, power)


@triton.jit
def log1p_unit(u):
    """log(1 + u) for u in [0, 1], to a few ulp: the series up to s**15 of 2 * atanh(s), s = u / (2 + u) <= 1/3."""
    s = tl.div_rn(u, 2.0 + u)
    square = s * s
    series = tl.full(u.shape, 1.0 / 15.0, tl.float32)
    for term in tl.static_range(7):
        series = series * square + 1.0 / (13 - 2 * term)
    return 2.0 * s * series


@triton.jit
def expert_scores(x, SCORING: tl.constexpr):
    shrunk = exp_negative(-tl.abs(x))
    if SCORING == "sigmoid":
        return tl.div_rn(tl.where(x >= 0.0, 1.0, shrunk), 1.0 + shrunk)
    else:
        tl.static_assert(SCORING == "sqrt_softplus", "unknown scoring")
        return tl.sqrt_rn(tl.where(x > 0.0, x, 0.0) + log1p_unit(shrunk))


@triton.jit
def bounded(x, LOGIT_SCALE: tl.constexpr, SOFTCAP: tl.constexpr):
    if LOGIT_SCALE != 1.0:
        x = x * LOGIT_SCALE
    if SOFTCAP is not None:
        x = softcap(x, SOFTCAP)
    return x


@triton.jit
def keep_groups(keys, TOPK_GROUP: tl.constexpr, GROUPS: tl.constexpr, BY_PAIR: tl.constexpr):
    """Mask keys `[tokens, GROUPS * members]` outside the TOPK_GROUP best groups. A group's score is its best score
    (BY_PAIR: the sum of its two best). Ties go to the lower group."""
    tokens: tl.constexpr = keys.shape[0]
    columns: tl.constexpr = keys.shape[1]
    members = tl.reshape(keys, (tokens, GROUPS, columns // GROUPS))
    if BY_PAIR:
        names = tl.arange(0, columns // GROUPS)[None, None, :]
        first, _, others = take_best(members, names)
        group_keys = topk_keys(key_scores(first) + key_scores(tl.max(others, axis=2)))
    else:
        group_keys = tl.max(members, axis=2)
    # Padding groups hold only masked keys and come last: no key is lower, and ties go to the lower group.
    groups = tl.arange(0, GROUPS)[None, :]
    for _ in range(TOPK_GROUP):
        _, _, group_keys = take_best(group_keys, groups)
    kept = tl.expand_dims(group_keys == TAKEN_KEY, 2)
    return tl.reshape(tl.where(kept, members, MASKED_KEY), (tokens, columns))


@triton.jit
def row_sum(x):
    """Sum fp32 `[rows, columns]` along the columns (a power of two), neighbours first: (a + b) + (c + d), in every
    layout, so that every kernel gives the same bits."""
    for _ in tl.static_range(16):
        if x.shape[1] > 1:
            x = tl.sum(tl.reshape(x, (x.shape[0], x.shape[1] // 2, 2)), axis=2)
    return tl.reshape(x, (x.shape[0],))


@triton.jit
def column_experts(router, FIRST: tl.constexpr, WIDTH: tl.constexpr):
    """Return (experts of WIDTH columns from FIRST on, True if real). Groups are padded to MEMBERS columns."""
    NUM_GROUPS: tl.constexpr = router.NUM_GROUPS
    columns = FIRST + tl.arange(0, WIDTH)
    group, member = columns // router.MEMBERS, columns % router.MEMBERS
    real = (group < NUM_GROUPS) & (member < router.NUM_EXPERTS // NUM_GROUPS)
    # Without groups the plain column number, known to be contiguous.
    return columns if NUM_GROUPS == 1 else group * (router.NUM_EXPERTS // NUM_GROUPS) + member, real


@triton.jit
def load_rows(rows, inside, router, FIRST: tl.constexpr, WIDTH: tl.constexpr):
    """Load fp32 `[rows, WIDTH]`, -inf in padding columns and in rows not inside. SPAN columns at a time are joined in
    registers: a wider load would spread over more warps, and maxima over a row would need shared memory."""
    if WIDTH <= router.SPAN:
        offsets, real = column_experts(router, FIRST, WIDTH)
        mask = inside[:, None] & real[None, :]
        return tl.load(rows[:, None] + offsets[None, :], mask=mask, other=float("-inf"))
    else:
        HALF: tl.constexpr = WIDTH // 2
        left = load_rows(rows, inside, router, FIRST, HALF)
        right = load_rows(rows, inside, router, FIRST + HALF, HALF)
        return tl.reshape(tl.permute(tl.join(left, right), (0, 2, 1)), (rows.shape[0], WIDTH))


@triton.jit
def choose_experts(router, tokens, inside):
    """Return (ids, weights) `[tokens, SLOTS]` of some tokens.

        keys = order of the logits (with a bias: of score + bias, or logit + bias), outside the best groups: masked
        for k = 0..WIDTH-1: ids[k] = expert of the largest key, lower id first, and take its key out
        weights = scores of the chosen K, / (their sum + EPSILON), * scale, from K on: score (among all experts) * scale

    given: None, or the ids `[T, K]` to weigh instead, in their order. A token with one outside [0, E) is masked.
    Columns are padded to GROUPS * MEMBERS, powers of two, as is SLOTS >= WIDTH. Ids past WIDTH, of masked tokens and of
    tokens not inside are -1. WIDTH > K: candidates of token rounding, without BY_EXPERT (order of ids) and given.

    Example, K = 2, logits [1, 3, 3, NaN], sigmoid: ids [1, 2], weights [0.95, 0.95].
    """
    TOP_K: tl.constexpr = router.TOP_K
    WIDTH: tl.constexpr = router.WIDTH
    SCORING: tl.constexpr = router.SCORING
    SOFTMAX_LAST: tl.constexpr = router.SOFTMAX_LAST
    COLUMNS: tl.constexpr = router.GROUPS * router.MEMBERS
    tl.static_assert(WIDTH == TOP_K or (router.given is None and not router.BY_EXPERT))
    offsets, real = column_experts(router, 0, COLUMNS)
    experts = tl.where(real, offsets, NO_EXPERT)[None, :]
    slots = tl.arange(0, router.SLOTS)[None, :]
    rows = router.logits + tokens * router.NUM_EXPERTS
    raw = load_rows(rows, inside, router, 0, COLUMNS)
    x = bounded(raw, router.LOGIT_SCALE, router.SOFTCAP)
    if SCORING == "softmax" and (not SOFTMAX_LAST or WIDTH > TOP_K):
        largest = tl.max(x, axis=1)
        total = row_sum(tl.where(real[None, :], exp_negative(x - largest[:, None]), 0.0))
    routed = inside
    if router.given is not None:
        chosen = tl.load(
            router.given + tokens[:, None] * TOP_K + slots, mask=inside[:, None] & (slots < TOP_K), other=0
        )
        valid = (chosen >= 0) & (chosen < router.NUM_EXPERTS)
        routed = inside & (tl.min(valid.to(tl.int32), axis=1) != 0)
        chosen = tl.where(routed[:, None] & (slots < TOP_K), chosen, -1)
    else:
        PAIRS: tl.constexpr = (router.correction_bias is not None) if router.BY_PAIR is None else router.BY_PAIR
        if router.correction_bias is None and not (PAIRS and router.NUM_GROUPS > 1):
            # Keys of logits before the cap, which may make different ones equal.
            keys = topk_keys(raw)
        else:
            if SOFTMAX_LAST or router.BIAS_ON_LOGITS:
                scores = x
            elif SCORING == "softmax":
                scores = tl.div_rn(exp_negative(x - largest[:, None]), total[:, None])
            else:
                scores = expert_scores(x, SCORING)
            if router.correction_bias is not None:
                # Loaded as one row per token, so that threads hold biases as they hold scores.
                biases = router.correction_bias + tokens * router.BIAS_STRIDE
                scores = scores + load_rows(biases, inside, router, 0, COLUMNS)
            keys = topk_keys(scores)
        keys = tl.where(real[None, :], keys, MASKED_KEY)
        if router.NUM_GROUPS > 1:
            keys = keep_groups(keys, router.TOPK_GROUP, router.GROUPS, PAIRS)

        chosen = tl.full((tokens.shape[0], router.SLOTS), -1, tl.int32)
        for k in range(WIDTH):
            _, expert, keys = take_best(keys, experts)
            chosen = tl.where(slots == k, expert[:, None], chosen)

    picked = tl.load(rows[:, None] + chosen, mask=routed[:, None] & (slots < WIDTH), other=float("-inf"))
    picked = bounded(picked, router.LOGIT_SCALE, router.SOFTCAP)
    if SCORING != "softmax":
        values = expert_scores(picked, SCORING)
    elif not SOFTMAX_LAST or WIDTH > TOP_K:
        values = tl.div_rn(exp_negative(picked - largest[:, None]), total[:, None])
    if WIDTH > TOP_K:
        scores_of_others = values
        picked = tl.where(slots < TOP_K, picked, float("-inf"))
    if SOFTMAX_LAST:
        exponentials = tl.where(slots < TOP_K, exp_negative(picked - tl.max(picked, axis=1)[:, None]), 0.0)
        values = tl.div_rn(exponentials, row_sum(exponentials)[:, None])
    if router.RENORMALIZE:
        divisor = row_sum(tl.where(slots < TOP_K, values, 0.0))[:, None]
        if router.EPSILON != 0.0:
            divisor += router.EPSILON
        values = tl.where(divisor == 0.0, 0.0, tl.div_rn(values, divisor))
    if WIDTH > TOP_K:
        values = tl.where(slots < TOP_K, values, scores_of_others)
    values *= router.SCALE

    if router.BY_EXPERT and router.given is None:
        # Weights move as bits: picking one by a sum would turn -0.0 into 0.0.
        bits = values.to(tl.int32, bitcast=True)
        unsorted, sorted_ids, sorted_bits = tl.where(slots < TOP_K, chosen, NO_EXPERT), chosen, bits
        for k in range(TOP_K):
            lowest = tl.min(unsorted, axis=1)[:, None]
            weight = tl.sum(tl.where(chosen == lowest, bits, 0), axis=1)[:, None]
            sorted_ids = tl.where(slots == k, lowest, sorted_ids)
            sorted_bits = tl.where(slots == k, weight, sorted_bits)
            unsorted = tl.where(chosen == lowest, NO_EXPERT, unsorted)
        chosen, values = sorted_ids, sorted_bits.to(tl.float32, bitcast=True)
    kept = routed
    if router.token_mask is not None:
        kept = tl.load(router.token_mask + tokens, mask=routed, other=0) != 0
    if router.token_mask is not None or router.given is not None:
        values = tl.where(kept[:, None], values, 0.0)
    return tl.where(kept[:, None], chosen, -1), values


@triton.jit
def route(
    logits, correction_bias, token_mask, given, expert_map, ids, weights, bitmatrix, block_counts, num_tokens,
    block_tokens,
    NUM_EXPERTS: tl.constexpr, TOP_K: tl.constexpr, SCORING: tl.constexpr, SOFTMAX_LAST: tl.constexpr,
    RENORMALIZE: tl.constexpr, SCALE: tl.constexpr, NUM_GROUPS: tl.constexpr, TOPK_GROUP: tl.constexpr,
    BY_EXPERT: tl.constexpr, BY_PAIR: tl.constexpr, BIAS_ON_LOGITS: tl.constexpr, BIAS_STRIDE: tl.constexpr,
    EPSILON: tl.constexpr,
    LOGIT_SCALE: tl.constexpr, SOFTCAP: tl.constexpr, GROUPS: tl.constexpr, MEMBERS: tl.constexpr, SLOTS: tl.constexpr,
    SPAN: tl.constexpr, BLOCK_T: tl.constexpr, WORDS: tl.constexpr, NUM_LOCAL: tl.constexpr, EXPERTS: tl.constexpr,
    WIDTH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Write ids and weights `[T, WIDTH]` of logits `[T, E]`, block_tokens tokens per program, as `choose_experts`.
    bitmatrix, if not None: of the first K ids, WORDS >= E / 32, a power of two. block_counts `[programs, NUM_LOCAL]`,
    if not None: the program's slots of every local expert."""
    join(PDL)
    block = tl.program_id(0)
    start = block.to(tl.int64) * block_tokens
    last = tl.minimum(start + block_tokens, num_tokens)
    slots = tl.arange(0, SLOTS)[None, :]
    router = Router(
        logits, correction_bias, token_mask, given, NUM_EXPERTS, TOP_K, SCORING, SOFTMAX_LAST, RENORMALIZE, SCALE,
        NUM_GROUPS, TOPK_GROUP, BY_EXPERT, BY_PAIR, BIAS_ON_LOGITS, BIAS_STRIDE, EPSILON, LOGIT_SCALE, SOFTCAP, GROUPS,
        MEMBERS, SLOTS, SPAN, WIDTH,
    )  # fmt: skip
    counts = tl.zeros((EXPERTS,), dtype=tl.int32)
    for first in range(start, last, BLOCK_T):
        # Of 64 bits whatever the loop's number has, which are 32 in the interpreter.
        tokens = tl.cast(first, tl.int64) + tl.arange(0, BLOCK_T)
        inside = tokens < last
        chosen, values = choose_experts(router, tokens, inside)
        target = tokens[:, None] * WIDTH + slots
        stored = inside[:, None] & (slots < WIDTH)
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
        if block_counts is not None:
            local, _ = to_local(tl.reshape(chosen, (BLOCK_T * SLOTS,)), expert_map, NUM_EXPERTS, NUM_LOCAL)
            counts += count_experts(local, EXPERTS)
    if block_counts is not None:
        experts = tl.arange(0, EXPERTS)
        tl.store(block_counts + block.to(tl.int64) * NUM_LOCAL + experts, counts, mask=experts < NUM_LOCAL)
