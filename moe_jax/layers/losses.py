"""Losses that balance a router's experts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from moe_core.layers.losses import check_balance
from moe_core.specs.routing import RouterSpec
from moe_jax.ops import Array


def router_losses(
    logits: Array,
    tokens_per_expert: Array,
    token_mask: Array | None = None,
    *,
    spec: RouterSpec,
    over: tuple[str, ...] = (),
) -> tuple[jax.Array, jax.Array]:
    """(load-balancing loss, z-loss), fp32, as the reference. over: axes; the mean over ranks is all tokens'."""
    num_experts = logits.shape[1]
    kept = jnp.ones(logits.shape[0], bool) if token_mask is None else jnp.asarray(token_mask)
    # Masked logits, which may be NaN, must not reach sums or derivatives.
    logits = jnp.where(kept[:, None], logits, 0)
    if spec.logit_scale != 1:
        logits = logits * spec.logit_scale
    if spec.softcap is not None:
        logits = spec.softcap * jnp.tanh(logits / spec.softcap)
    num_tokens = kept.sum(dtype=jnp.int32)
    if over:  # a rank's share, so that the mean covers all tokens
        tokens_per_expert, num_tokens = jax.lax.psum((jnp.asarray(tokens_per_expert), num_tokens), over)
        ranks = jax.lax.axis_size(over)
        tokens_per_expert, num_tokens = tokens_per_expert / ranks, jnp.maximum(num_tokens, 1) / ranks
    else:
        num_tokens = jnp.maximum(num_tokens, 1)
    num_tokens = jnp.asarray(num_tokens, logits.dtype)
    slot_share = jnp.asarray(tokens_per_expert, logits.dtype) / (num_tokens * spec.require_top_k())
    mean_share = _shares(logits, spec.scoring, kept).sum(axis=0) / num_tokens
    squares = jnp.where(kept, jnp.square(jax.nn.logsumexp(logits, axis=-1)), 0)
    return num_experts * (slot_share * mean_share).sum(), squares.sum() / num_tokens


def load_balance_loss(
    logits: Any, ids: Any, *, scoring: str = "softmax", scale: float = 1.0, token_mask: Any = None
) -> jax.Array:
    """A load-balancing loss, fp32, of logits `[..., S, E]` and ids `[..., S, K]`, as `moe_torch.load_balance_loss`."""
    logits, ids = jnp.asarray(logits), jnp.asarray(ids)
    kept = jnp.ones(ids.shape[:-1], bool) if token_mask is None else jnp.asarray(token_mask)
    check_balance(logits, ids, kept, scoring, scale)
    num_experts, top_k = logits.shape[-1], ids.shape[-1]
    logits = jnp.where(kept[..., None], logits, 0)
    counts = (jax.nn.one_hot(ids, num_experts, dtype=logits.dtype) * kept[..., None, None]).sum(axis=(-3, -2))
    tokens = jnp.maximum(kept.sum(axis=-1), 1).astype(logits.dtype)[..., None]
    means = _shares(logits, scoring, kept).sum(axis=-2) / tokens
    losses = num_experts * (counts / (tokens * top_k) * means).sum(axis=-1)
    return scale * losses.sum() / jnp.maximum(kept.any(axis=-1).sum(), 1)


def _shares(logits: jax.Array, scoring: str, kept: jax.Array) -> jax.Array:
    """Scores over their sum. Zeros for masked tokens and all -inf logits."""
    log_scores = _LOG_SCORES[scoring](logits)
    empty = jnp.isneginf(log_scores).all(axis=-1, keepdims=True)
    return jnp.where(kept[..., None] & ~empty, jax.nn.softmax(jnp.where(empty, 0, log_scores), axis=-1), 0)


def _log_sqrt_softplus(logits: jax.Array) -> jax.Array:
    # softplus(x) is exp(x) below the edge.
    edge = -37 if logits.dtype == jnp.float64 else -17
    return 0.5 * jnp.where(logits < edge, logits, jnp.log(jax.nn.softplus(jnp.maximum(logits, edge))))


#: Logarithms of scores, up to a constant of the token. Underflowing scores have no gradient otherwise.
_LOG_SCORES: dict[str, Callable[[jax.Array], jax.Array]] = {
    "softmax": lambda logits: logits,
    "sigmoid": jax.nn.log_sigmoid,
    "sqrt_softplus": _log_sqrt_softplus,
}
