"""Backward of `topk.route`: gradients of logits from gradients of weights and losses."""

import triton
import triton.language as tl

from moe_core.ops.activation.kernels.formulas import softcap_slope
from moe_core.ops.routing.kernels.topk import bounded, exp_negative, expert_scores, log1p_unit


@triton.jit
def log_score_derivative(x, SCORING: tl.constexpr):
    """d log(score) / d x. sigmoid: s(-x). sqrt_softplus: s(x) / (2 softplus(x)), which is 1/2 in fp32 below -17."""
    if SCORING == "sigmoid":
        return expert_scores(-x, "sigmoid")
    else:
        tl.static_assert(SCORING == "sqrt_softplus", "unknown scoring")
        softplus = tl.where(x > 0.0, x, 0.0) + log1p_unit(exp_negative(-tl.abs(x)))
        return tl.where(x < -17.0, 0.5, tl.div_rn(expert_scores(x, "sigmoid"), 2.0 * softplus))


@triton.jit
def shares(values, EPSILON: tl.constexpr):
    """values / (sum along the last axis + EPSILON). A zero divisor gives zeros."""
    total = tl.sum(values, axis=1)[:, None]
    if EPSILON != 0.0:
        total += EPSILON
    return tl.where(total == 0.0, 0.0, tl.div_rn(values, total))


@triton.jit
def centred(share, gradient):
    """share * (gradient - <gradient, share>): derivative of a normalised score by the log of the score."""
    return share * (gradient - tl.sum(share * gradient, axis=1)[:, None])


@triton.jit
def through_weights(
    picked, chosen, gradient, largest, total, probability, columns, TOP_K: tl.constexpr, SCORING: tl.constexpr,
    SOFTMAX_LAST: tl.constexpr, RENORMALIZE: tl.constexpr, EPSILON: tl.constexpr,
):  # fmt: skip
    """Return d_logits `[tokens, columns]` of the gradient `[tokens, slots]` of the weights before scaling. picked:
    logits of the chosen, -inf without a slot, where gradient is 0. largest, total: of the whole row, with softmax
    probability."""
    DENSE: tl.constexpr = SCORING == "softmax" and not SOFTMAX_LAST and not RENORMALIZE
    slots = tl.arange(0, picked.shape[1])[None, :]
    used = slots < TOP_K
    if SOFTMAX_LAST:
        exponentials = tl.where(used, exp_negative(picked - tl.max(picked, axis=1)[:, None]), 0.0)
        values = tl.div_rn(exponentials, tl.sum(exponentials, axis=1)[:, None])
    elif SCORING == "softmax":
        values = tl.where(used, tl.div_rn(exp_negative(picked - largest), total), 0.0)
    else:
        values = tl.where(used, expert_scores(picked, SCORING), 0.0)
    if DENSE:
        placed = gradient
    else:
        if RENORMALIZE:
            placed = centred(shares(values, EPSILON), gradient)
        elif SOFTMAX_LAST:
            placed = centred(values, gradient)
        else:
            placed = values * gradient
        if SCORING != "softmax":
            placed = tl.where(used, placed * log_score_derivative(picked, SCORING), 0.0)
    result = tl.zeros(probability.shape, dtype=tl.float32)
    for k in range(TOP_K):
        expert = tl.sum(tl.where(slots == k, chosen, 0), axis=1)[:, None]
        value = tl.sum(tl.where(slots == k, placed, 0.0), axis=1)[:, None]
        result = tl.where(columns == expert, value, result)
    if DENSE:
        result = probability * (result - tl.sum(values * gradient, axis=1)[:, None])
    return result


@triton.jit
def routing_backward(
    logits, ids, d_weights, given_logits, d_load_balance, d_z, tokens_per_expert, token_mask, token_count, d_logits,
    num_tokens,
    NUM_EXPERTS: tl.constexpr, TOP_K: tl.constexpr, SCORING: tl.constexpr, SOFTMAX_LAST: tl.constexpr,
    RENORMALIZE: tl.constexpr, SCALE: tl.constexpr, EPSILON: tl.constexpr, LOGIT_SCALE: tl.constexpr,
    SOFTCAP: tl.constexpr, BLOCK_T: tl.constexpr, COLUMNS: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """d_logits `[T, E]`, BLOCK_T tokens at a time: through the weights, + the losses', + given_logits. Masked tokens
    get exact zeros, and only their ids and mask are read. COLUMNS >= E and SLOTS >= K are powers of two. token_count:
    unmasked tokens (None: all). Formulas: `moe_core.ops.routing.reference`."""
    columns, slots = tl.arange(0, COLUMNS)[None, :], tl.arange(0, SLOTS)[None, :]
    real = columns < NUM_EXPERTS
    if token_count is not None:
        count = tl.load(token_count).to(tl.float32)
    else:
        count = num_tokens.to(tl.float32)
    if d_load_balance is not None:
        routed = tl.load(tokens_per_expert + columns, mask=real, other=0).to(tl.float32)
        slope = tl.div_rn(tl.load(d_load_balance) * NUM_EXPERTS, count)
        coefficient = slope * tl.div_rn(routed, count * TOP_K)
    for first in range(tl.program_id(0).to(tl.int64) * BLOCK_T, num_tokens, tl.num_programs(0).to(tl.int64) * BLOCK_T):
        tokens = tl.cast(first, tl.int64) + tl.arange(0, BLOCK_T)
        inside = tokens < num_tokens
        kept = inside
        if token_mask is not None:
            kept = inside & (tl.load(token_mask + tokens, mask=inside, other=0) != 0)
        here = tokens[:, None] * NUM_EXPERTS + columns
        x = tl.load(logits + here, mask=kept[:, None] & real, other=float("-inf"))
        # Rows that are not kept hold zeros, so that no stray NaN meets a mask.
        raw = tl.where(kept[:, None], x, 0.0)
        x = bounded(raw, LOGIT_SCALE, SOFTCAP)
        largest = tl.max(x, axis=1)[:, None]
        exponentials = tl.where(real, exp_negative(x - largest), 0.0)
        total = tl.sum(exponentials, axis=1)[:, None]
        probability = tl.div_rn(exponentials, total)
        result = tl.zeros((BLOCK_T, COLUMNS), dtype=tl.float32)
        if d_weights is not None:
            here_slots = tokens[:, None] * TOP_K + slots
            chosen = tl.load(ids + here_slots, mask=kept[:, None] & (slots < TOP_K), other=0)
            # Ids are not trusted: none may lead outside of the logits.
            routed_token = kept & (tl.min(chosen, axis=1) >= 0) & (tl.max(chosen, axis=1) < NUM_EXPERTS)
            stored = routed_token[:, None] & (slots < TOP_K)
            gradient = tl.load(d_weights + here_slots, mask=stored, other=0.0) * SCALE
            picked = tl.load(logits + tokens[:, None] * NUM_EXPERTS + chosen, mask=stored, other=float("-inf"))
            picked = bounded(tl.where(routed_token[:, None], picked, 0.0), LOGIT_SCALE, SOFTCAP)
            through = through_weights(
                picked, chosen, gradient, largest, total, probability, columns, TOP_K, SCORING, SOFTMAX_LAST,
                RENORMALIZE, EPSILON,
            )  # fmt: skip
            result = tl.where(routed_token[:, None], through, 0.0)
        if d_load_balance is not None:
            if SCORING == "softmax":
                result += centred(tl.where(largest == float("-inf"), 0.0, probability), coefficient)
            else:
                scores = tl.where(real, expert_scores(x, SCORING), 0.0)
                result += centred(shares(scores, 0.0), coefficient) * log_score_derivative(x, SCORING)
        if d_z is not None:
            result += tl.div_rn(tl.load(d_z) * 2.0, count) * (largest + tl.log(total)) * probability
        if SOFTCAP is not None:
            # A token without gradient may hold any logits.
            result = tl.where(result == 0.0, 0.0, result * softcap_slope(raw * LOGIT_SCALE, SOFTCAP))
        if LOGIT_SCALE != 1.0:
            result *= LOGIT_SCALE
        if given_logits is not None:
            result += tl.load(given_logits + here, mask=kept[:, None] & real, other=0.0)
        tl.store(d_logits + here, tl.where(kept[:, None], result, 0.0), mask=inside[:, None] & real)


@triton.jit
def count_tokens(token_mask, token_count, num_tokens, BLOCK: tl.constexpr):
    counts = tl.zeros((BLOCK,), dtype=tl.int32)
    for first in range(0, num_tokens, BLOCK):
        tokens = first + tl.arange(0, BLOCK)
        counts += (tl.load(token_mask + tokens, mask=tokens < num_tokens, other=0) != 0).to(tl.int32)
    tl.store(token_count, tl.sum(counts, axis=0))
