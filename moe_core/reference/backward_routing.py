"""NumPy twins of the router's backward: from weights and losses to logits, from logits to x and the router matrix.

Selection is not differentiated: ids are constants, and so is the correction bias, which moves nothing else (its
gradient is zero; the rule that updates it is not a gradient). Everything is fp32 from the fp32 logits; nothing the
forward computed from them is kept, it is computed again by the same formulas.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from moe_core.reference.activation import sigmoid
from moe_core.reference.rounding import round_to, to_float32
from moe_core.reference.routing import scores_of
from moe_core.specs import LogitsSpec, RouterSpec

#: exp(-17) is less than half a unit in the last place of 1.
_TINY = np.float32(17)


def log_score_derivative(logits: np.ndarray, scoring: str) -> np.ndarray:
    """d log(score) / d logit of the scores that each expert gives by itself, fp32.

    sigmoid: s(-x). sqrt_softplus: s(x) / (2 softplus(x)), which is 1/2 in fp32 below -17. With these,
    d score = score * derivative keeps its relative accuracy, however small the score or the derivative.
    """
    with np.errstate(all="ignore"):
        if scoring == "sigmoid":
            return sigmoid(-logits)
        assert scoring == "sqrt_softplus"
        shrunk = np.exp(-np.abs(logits))
        softplus = np.maximum(logits, np.float32(0)) + np.log1p(shrunk)
        return np.where(logits < -_TINY, np.float32(0.5), sigmoid(logits) / (2 * softplus))


def _shares(values: np.ndarray) -> np.ndarray:
    """values / their sum along the last axis, fp32; a zero sum gives zeros, as in the forward."""
    total = values.sum(axis=-1, keepdims=True, dtype=np.float32)
    return np.where(total == 0, np.float32(0), values / total)


def _centred(shares: np.ndarray, gradient: np.ndarray) -> np.ndarray:
    """shares * (gradient - <gradient, shares>): the derivative of a normalised score by the log of the score."""
    return shares * (gradient - (shares * gradient).sum(axis=-1, keepdims=True, dtype=np.float32))


def route_backward(d_weights: np.ndarray, logits: np.ndarray, ids: np.ndarray, *, spec: RouterSpec) -> np.ndarray:
    """d_logits fp32 `[T, E]` from d_weights fp32 `[T, K]`, the logits fp32 `[T, E]` and the ids int32 `[T, K]` chosen.

    c = the chosen scores (before renormalising), q = c / sum(c) (zeros where the sum is zero), l = d log(score) / d
    logit, d = scale * d_weights:

    - softmax, renormalised or over the chosen alone: d_logit[id_k] = q_k (d_k - <d, q>), all others exactly 0;
    - softmax over all, not renormalised: with p the softmax, d_logits = p (g - <d, c>), g = d at the chosen, else 0;
    - sigmoid, sqrt_softplus: d_logit[id_k] = l_k q_k (d_k - <d, q>) renormalised, else l_k c_k d_k.

    A token with id -1 is masked: its weights are constants, its d_weights and logits are not read, its row is exact
    zeros. ids of a token are distinct, as routing makes them. A NaN stays in its token's row.
    """
    d_logits = np.zeros(logits.shape, np.float32)
    tokens = np.flatnonzero((ids >= 0).all(axis=-1))
    logits, chosen = logits[tokens], ids[tokens].astype(np.int64)
    with np.errstate(all="ignore"):
        gradient = to_float32(d_weights[tokens]) * np.float32(spec.scale)
        if spec.scoring == "softmax":
            last = spec.order == "topk_then_softmax"
            picked = np.take_along_axis(logits, chosen, axis=-1)
            scores = scores_of(picked if last else logits, "softmax")
            values = scores if last else np.take_along_axis(scores, chosen, axis=-1)
            if last or spec.renormalize:
                d_chosen = _centred(_shares(values) if spec.renormalize else values, gradient)
                d_logits[tokens[:, None], chosen] = d_chosen
            else:
                dense = np.zeros_like(logits)
                np.put_along_axis(dense, chosen, gradient, axis=-1)
                mean = (values * gradient).sum(axis=-1, keepdims=True, dtype=np.float32)
                d_logits[tokens] = scores * (dense - mean)
            return d_logits
        picked = np.take_along_axis(logits, chosen, axis=-1)
        values = scores_of(picked, spec.scoring)
        d_log = _centred(_shares(values), gradient) if spec.renormalize else values * gradient
        d_logits[tokens[:, None], chosen] = d_log * log_score_derivative(picked, spec.scoring)
    return d_logits


def router_losses_backward(
    d_load_balance: np.ndarray | float | None,
    d_z: np.ndarray | float | None,
    logits: np.ndarray,
    tokens_per_expert: np.ndarray | None,
    token_mask: np.ndarray | None = None,
    *,
    spec: RouterSpec,
) -> np.ndarray:
    """d_logits fp32 `[T, E]` of the losses of `reference.auxiliary.router_losses`; d_load_balance and d_z: scalars;
    None = nothing of that loss (tokens_per_expert is read for load balance only).

    P = the scores of a token over their sum, N = unmasked tokens, f_i = tokens_per_expert[i] / (N K), which is a
    constant, v_i = d_load_balance E f_i / N:

        load balance: d_logits = l P (v - <v, P>), l = d log(score) / d logit (softmax: 1; a zero sum of scores: zeros)
        z-loss:       d_logits = d_z 2 logsumexp(logits) / N softmax(logits)

    Masked tokens (token_mask bool `[T]`, False) are not read and get exact zeros.
    """
    d_logits = np.zeros(logits.shape, np.float32)
    tokens = np.arange(len(logits)) if token_mask is None else np.flatnonzero(token_mask)
    if not tokens.size:
        return d_logits
    logits = logits[tokens]
    count, num_experts = np.float32(len(tokens)), np.float32(logits.shape[1])
    with np.errstate(all="ignore"):
        if d_load_balance is not None:
            assert tokens_per_expert is not None
            slot_share = tokens_per_expert.astype(np.float32) / (count * np.float32(spec.require_top_k()))
            coefficient = np.float32(d_load_balance) * num_experts / count * slot_share
            d_balance = _centred(_shares(scores_of(logits, spec.scoring)), coefficient)
            if spec.scoring != "softmax":
                d_balance = d_balance * log_score_derivative(logits, spec.scoring)
            d_logits[tokens] = d_balance
        if d_z is not None:
            highest = logits.max(axis=-1, keepdims=True)
            exponentials = np.exp(logits - highest)
            total = exponentials.sum(axis=-1, keepdims=True, dtype=np.float32)
            slope = np.float32(d_z) * 2 / count * (highest + np.log(total))
            d_logits[tokens] += slope * (exponentials / total)
    return d_logits


def routing_backward(
    logits: np.ndarray,
    ids: np.ndarray,
    d_weights: np.ndarray | None = None,
    d_logits: np.ndarray | None = None,
    d_load_balance: np.ndarray | None = None,
    d_z: np.ndarray | None = None,
    tokens_per_expert: np.ndarray | None = None,
    token_mask: np.ndarray | None = None,
    *,
    spec: RouterSpec,
) -> np.ndarray:
    """All that flows into the logits, fp32 `[T, E]`: through the weights (`route_backward`), + from the losses
    (`router_losses_backward`), + d_logits as given; the arrays of `moe_core.operands.RoutingGradients`.

    Masked tokens (token_mask bool `[T]`, False) get exact zeros whatever is given for them.
    """
    total = np.zeros(logits.shape, np.float32)
    kept = slice(None) if token_mask is None else token_mask
    with np.errstate(all="ignore"):
        if d_weights is not None:
            total += route_backward(d_weights, logits, ids, spec=spec)
        if d_load_balance is not None or d_z is not None:
            total += router_losses_backward(d_load_balance, d_z, logits, tokens_per_expert, token_mask, spec=spec)
        if d_logits is not None:
            total[kept] += d_logits[kept]
    return total


class RouterGradients(NamedTuple):
    """x fp32 `[T, D]` (not yet rounded: other gradients of x are added first), weight and bias in their dtypes."""

    x: np.ndarray
    weight: np.ndarray
    bias: np.ndarray | None


def router_backward(
    d_logits: np.ndarray,
    x: np.ndarray,
    weight: np.ndarray,
    bias: np.ndarray | None = None,
    token_mask: np.ndarray | None = None,
    into: np.ndarray | None = None,
    *,
    spec: LogitsSpec,
) -> RouterGradients:
    """Gradients of the router product from d_logits fp32 `[T, E]`.

    d_x = d_logits . weight^T, d_weight = x^T . d_logits, d_bias = column sums: IEEE fp32 products and sums of fp32
    d_logits and widened x and weight, one cast. spec.logits_dtype rounds the forward's logits; the gradient passes
    through unrounded. token_mask bool `[T]`: rows of x and d_logits of masked tokens are not read, and their d_x is
    exactly 0. into: an fp32 array to which d_weight is added; it is fp32 then. The bits are the same for either storage
    of the weight.
    """
    tokens = np.arange(len(x)) if token_mask is None else np.flatnonzero(token_mask)
    d_logits, matrix, source = d_logits[tokens], to_float32(weight), to_float32(x[tokens])
    d_x = np.zeros(x.shape, np.float32)
    with np.errstate(all="ignore"):
        # One call of BLAS for both storages: what it adds first depends on which matrices are transposed.
        rows = np.ascontiguousarray(matrix.T if spec.weight_layout == "in_out" else matrix)
        d_x[tokens], d_weight = d_logits @ rows, source.T @ d_logits
        d_weight = d_weight if spec.weight_layout == "in_out" else np.ascontiguousarray(d_weight.T)
        d_bias = None if bias is None else round_to(d_logits.sum(axis=0, dtype=np.float32), bias.dtype)
        d_weight = round_to(d_weight, weight.dtype) if into is None else into + d_weight
    return RouterGradients(d_x, d_weight, d_bias)
