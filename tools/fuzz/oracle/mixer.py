"""SparseMixer's router, defined in docs/user/layers.md: weights and gradients of two experts, one after the other."""

from __future__ import annotations

import math

import torch

from tools.fuzz.oracle.real import Real, Tensor
from tools.fuzz.oracle.routing import Choice, scores


def _rounds(logits: Real, ids: Tensor, epsilon: float) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Of each of both choices: (the expert [T, 1], logits that take part [T, E], tokens for which that is unclear)."""
    every, value = torch.arange(logits.value.shape[1], device=ids.device), logits.value
    left, found = torch.ones_like(value, dtype=torch.bool), []
    for k in range(2):
        largest = torch.where(left, value, -math.inf).amax(1, True)
        distance = (largest - value) / torch.maximum(value.abs(), largest)
        # float32 rounds the difference and the quotient, and 2 * epsilon as well.
        unclear = (left & ((distance - 2 * epsilon).abs() <= 8 * logits.unit * (distance.abs() + epsilon))).any(1)
        chosen = ids[:, k : k + 1].long().clamp(min=0)
        found.append((chosen, left & ~(distance > 2 * epsilon), unclear))
        left = left & (every != chosen)
    return found


def _shares(logits: Real, takes_part: Tensor) -> Real:
    """The softmax over the logits that take part, 0 elsewhere."""
    return scores(logits.where(takes_part, -math.inf), Choice(1)).where(takes_part)


def mixed_weights(logits: Real, ids: Tensor, epsilon: float) -> Real:
    """[T, 2], 0 for masked tokens."""
    parts = []
    for chosen, takes_part, unclear in _rounds(logits, ids, epsilon):
        picked = _shares(logits, takes_part).map(lambda part, at=chosen: torch.gather(part, 1, at))
        parts.append(picked.unknown(_unknown(logits, unclear)).where(ids[:, :1] >= 0))
    value, error = (torch.cat([getattr(one, name) for one in parts], 1) for name in ("value", "error"))
    return Real(value, error, logits.unit)


def mixed_gradient(logits: Real, ids: Tensor, epsilon: float, d_weights: Real) -> Real:
    """d_logits [T, E]: w_k (e_k - p) d_k of both softmaxes p, which are differentiated apart."""
    total, present = logits.where(torch.zeros_like(logits.value, dtype=torch.bool)), ids[:, :1] >= 0
    for k, (chosen, takes_part, unclear) in enumerate(_rounds(logits, ids, epsilon)):
        shares = _shares(logits, takes_part)
        picked = shares.map(lambda part, at=chosen: torch.gather(part, 1, at))
        flow = (picked * d_weights.map(lambda part, k=k: part[:, k : k + 1])).map(
            lambda part: part.expand_as(logits.value)
        )
        one_hot = torch.zeros_like(logits.value).scatter(1, chosen, 1.0)
        part = flow * (Real.exact(one_hot, logits.unit) - shares)
        part = part.unknown(_unknown(logits, unclear).expand_as(logits.value))
        total = total + part.where(present.expand_as(logits.value))
    return total.where(present.expand_as(logits.value))


def _unknown(logits: Real, unclear: Tensor) -> Tensor:
    """[T, 1]: tokens whose logits lie on the bound, or are not finite."""
    return (unclear | ~torch.isfinite(logits.value).all(1)).unsqueeze(1)
