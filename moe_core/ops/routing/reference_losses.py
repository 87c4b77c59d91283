"""NumPy twin of the router losses of the layers."""

from __future__ import annotations

import numpy as np

from moe_core.ops.routing.reference import scores_of, shares_of
from moe_core.specs.routing import RouterSpec


def router_losses(
    logits: np.ndarray, tokens_per_expert: np.ndarray, token_mask: np.ndarray | None = None, *, spec: RouterSpec
) -> tuple[np.float32, np.float32]:
    """(load-balancing loss, z-loss) of fp32 logits `[T, E]`, in fp32.

    load balance: E * sum_i f_i * P_i; f_i = tokens_per_expert[i] / (tokens * K), the share of the routed slots; P_i =
    the mean over tokens of expert i's score, normalised to sum 1 over experts (zeros where all are zero; softmax
    whichever way the order goes; not moved by a correction bias). This is Switch Transformers' loss (Fedus et al. 2021,
    eq. 4-6) for any K and scoring; a uniform router has loss 1. z: mean over tokens of logsumexp(logits)^2 (ST-MoE,
    Zoph et al. 2022, eq. 5). token_mask bool `[T]`: tokens that are False are left out of every mean; without any token
    both losses are 0. tokens_per_expert: int `[E]`, counted over the unmasked tokens.
    """
    if token_mask is not None:
        logits = logits[token_mask]
    num_tokens, num_experts = logits.shape
    if num_tokens == 0:
        return np.float32(0), np.float32(0)
    with np.errstate(all="ignore"):
        mean_share = shares_of(scores_of(logits, spec.scoring)).mean(axis=0, dtype=np.float32)
        slot_share = tokens_per_expert.astype(np.float32) / np.float32(num_tokens * spec.require_top_k())
        highest = logits.max(axis=-1, keepdims=True)
        log_sum = highest[:, 0] + np.log(np.exp(logits - highest).sum(axis=-1, dtype=np.float32))
        balance = np.float32(num_experts) * (slot_share * mean_share).sum(dtype=np.float32)
        return np.float32(balance), np.float32(np.square(log_sum).mean(dtype=np.float32))
