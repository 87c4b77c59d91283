"""NumPy twins of the backward of routing and of the router's losses, in fp32. Ids and biases are constants."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from moe_core.ops.activation.reference import sigmoid
from moe_core.ops.common.bundles import bundle_of
from moe_core.ops.common.rounding import to_float32
from moe_core.ops.routing.reference import bounded, scores_of, shares_of, softmax_and_log_sum, through_bounds
from moe_core.specs import RouterSpec
from moe_core.specs.operands import RoutingGradients

#: exp(-17) and exp(-37) are less than half a unit in the last place of 1.
_TINY = {"float32": 17.0, "float64": 37.0}


def log_score_derivative(logits: np.ndarray, scoring: str) -> np.ndarray:
    """d log(score) / d logit of elementwise scores, fp32, with which d score = score * derivative stays accurate."""
    with np.errstate(all="ignore"):
        if scoring == "sigmoid":
            return sigmoid(-logits)
        assert scoring == "sqrt_softplus"
        shrunk = np.exp(-np.abs(logits))
        softplus = np.maximum(logits, 0) + np.log1p(shrunk)
        return np.where(logits < -_TINY[logits.dtype.name], 0.5, sigmoid(logits) / (2 * softplus))


def _centred(shares: np.ndarray, gradient: np.ndarray) -> np.ndarray:
    return shares * (gradient - (shares * gradient).sum(axis=-1, keepdims=True))


def route_backward(d_weights: np.ndarray, logits: np.ndarray, ids: np.ndarray, *, spec: RouterSpec) -> np.ndarray:
    """d_logits fp32 `[T, E]` from d_weights fp32 `[T, K]`, logits fp32 `[T, E]` and the chosen ids int32 `[T, K]`.

    c = the chosen scores (before renormalising), q = c / sum(c) (zeros if the sum is zero), l = d log(score) / d logit,
    d = scale * d_weights, for `bounded` logits:

    - softmax, renormalised or over the chosen only: d_logit[id_k] = q_k (d_k - <d, q>), all others exactly 0;
    - softmax over all, not renormalised: with p the softmax, d_logits = p (g - <d, c>), g = d at the chosen, else 0;
    - sigmoid, sqrt_softplus, with q = c / (sum(c) + epsilon): d_logit[id_k] = l_k q_k (d_k - <d, q>) renormalised, else
      l_k c_k d_k.

    A token with an id outside [0, E) is masked: not read, its row exactly 0. The ids of a token are distinct.
    """
    d_logits, raw = np.zeros(logits.shape, logits.dtype), logits
    tokens = np.flatnonzero(((ids >= 0) & (ids < logits.shape[1])).all(axis=-1))
    logits, chosen = bounded(logits[tokens], spec), ids[tokens].astype(np.int64)
    with np.errstate(all="ignore"):
        gradient = to_float32(d_weights[tokens]) * spec.scale
        if spec.scoring == "softmax":
            last = spec.order == "topk_then_softmax"
            picked = np.take_along_axis(logits, chosen, axis=-1)
            scores = scores_of(picked if last else logits, "softmax")
            values = scores if last else np.take_along_axis(scores, chosen, axis=-1)
            if last or spec.renormalize:
                d_chosen = _centred(shares_of(values) if spec.renormalize else values, gradient)
                d_logits[tokens[:, None], chosen] = d_chosen
            else:
                dense = np.zeros_like(logits)
                np.put_along_axis(dense, chosen, gradient, axis=-1)
                mean = (values * gradient).sum(axis=-1, keepdims=True)
                d_logits[tokens] = scores * (dense - mean)
            return through_bounds(d_logits, raw, spec)
        picked = np.take_along_axis(logits, chosen, axis=-1)
        values = scores_of(picked, spec.scoring)
        d_log = _centred(shares_of(values, spec.epsilon), gradient) if spec.renormalize else values * gradient
        d_logits[tokens[:, None], chosen] = d_log * log_score_derivative(picked, spec.scoring)
    return through_bounds(d_logits, raw, spec)


def _loss_shares(logits: np.ndarray, scoring: str) -> np.ndarray:
    """P of `router_losses` as the softmax of log scores: no sum underflows. 0 if all logits are -inf."""
    if scoring == "sigmoid":
        logits = np.minimum(logits, 0) - np.log1p(np.exp(-np.abs(logits)))
    elif scoring == "sqrt_softplus":
        softplus = np.maximum(logits, 0) + np.log1p(np.exp(-np.abs(logits)))
        logits = 0.5 * np.where(logits < -_TINY[logits.dtype.name], logits, np.log(softplus))
    return np.where(np.isneginf(logits).all(axis=-1, keepdims=True), 0.0, scores_of(logits, "softmax"))


def router_losses(
    logits: np.ndarray, tokens_per_expert: np.ndarray, token_mask: np.ndarray | None = None, *, spec: RouterSpec
) -> tuple[np.floating, np.floating]:
    """(load-balancing loss, z-loss) of fp32 logits `[T, E]`, in fp32.

    Load balance: E * sum_i f_i * P_i. f_i = tokens_per_expert[i] / (tokens * K) is the share of the routed slots. P_i
    is the mean over tokens of expert i's score, normalised to sum 1 over experts, without the correction bias. This is
    Switch Transformers' loss (Fedus et al. 2021, eq. 4-6) for any K and scoring; a uniform router has loss 1. z: mean
    over tokens of logsumexp(logits)^2 (ST-MoE, Zoph et al. 2022, eq. 5). token_mask bool `[T]`: False excludes a token
    from every mean. Without tokens both losses are 0. tokens_per_expert: int `[E]`, over unmasked tokens.
    """
    logits = bounded(logits if token_mask is None else logits[token_mask], spec)
    (num_tokens, num_experts), kind = logits.shape, logits.dtype.type
    if num_tokens == 0:
        return kind(0), kind(0)
    with np.errstate(all="ignore"):
        mean_share = _loss_shares(logits, spec.scoring).mean(axis=0)
        slot_share = tokens_per_expert.astype(logits.dtype) / kind(num_tokens * spec.require_top_k())
        log_sum = softmax_and_log_sum(logits)[1][:, 0]
        balance = kind(num_experts) * (slot_share * mean_share).sum()
        return balance, np.square(log_sum).mean()


def router_losses_backward(
    d_load_balance: np.ndarray | float | None,
    d_z: np.ndarray | float | None,
    logits: np.ndarray,
    tokens_per_expert: np.ndarray | None,
    token_mask: np.ndarray | None = None,
    *,
    spec: RouterSpec,
) -> np.ndarray:
    """d_logits fp32 `[T, E]` of `router_losses`. d_load_balance and d_z: scalars or None.

    P = a token's scores over their sum, N = unmasked tokens, f_i = tokens_per_expert[i] / (N K), a constant, v_i =
    d_load_balance E f_i / N:

        load balance: d_logits = l P (v - <v, P>), l = d log(score) / d logit (softmax: 1; all logits -inf: zeros)
        z-loss:       d_logits = d_z 2 logsumexp(logits) / N softmax(logits)

    Masked tokens (token_mask bool `[T]`, False) are not read and get exact zeros.
    """
    d_logits = np.zeros(logits.shape, logits.dtype)
    tokens = np.arange(len(logits)) if token_mask is None else np.flatnonzero(token_mask)
    if not tokens.size:
        return d_logits
    raw, logits = logits, bounded(logits[tokens], spec)
    kind = logits.dtype.type
    count, num_experts = kind(len(tokens)), kind(logits.shape[1])
    with np.errstate(all="ignore"):
        if d_load_balance is not None:
            assert tokens_per_expert is not None
            slot_share = tokens_per_expert.astype(logits.dtype) / (count * kind(spec.require_top_k()))
            coefficient = kind(d_load_balance) * num_experts / count * slot_share
            d_balance = _centred(_loss_shares(logits, spec.scoring), coefficient)
            if spec.scoring != "softmax":
                d_balance = d_balance * log_score_derivative(logits, spec.scoring)
            d_logits[tokens] = d_balance
        if d_z is not None:
            softmax, log_sum = softmax_and_log_sum(logits)
            d_logits[tokens] += kind(d_z) * 2 / count * log_sum * softmax
    return through_bounds(d_logits, raw, spec)


def routing_backward(
    gradients: RoutingGradients,
    logits: np.ndarray,
    ids: np.ndarray | None,
    token_mask: np.ndarray | None = None,
    *,
    spec: RouterSpec,
) -> np.ndarray:
    total = np.zeros(logits.shape, logits.dtype)
    kept = slice(None) if token_mask is None else token_mask
    with np.errstate(all="ignore"):
        if gradients.weights is not None:
            assert ids is not None
            total += route_backward(gradients.weights, logits, ids, spec=spec)
        if gradients.load_balance is not None or gradients.z is not None:
            losses = gradients.load_balance, gradients.z
            total += router_losses_backward(*losses, logits, gradients.tokens_per_expert, token_mask, spec=spec)
        if gradients.logits is not None:
            total[kept] += gradients.logits[kept]
    return total


def routing_backward_plan(arrays: Mapping[str, np.ndarray], *, spec: RouterSpec) -> np.ndarray:
    gradients = bundle_of(RoutingGradients, arrays, "gradients.")
    return routing_backward(gradients, arrays["logits"], arrays.get("ids"), arrays.get("token_mask"), spec=spec)
