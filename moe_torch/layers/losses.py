"""Losses that balance a router's experts."""

from __future__ import annotations

import torch

from moe_core.layers.losses import check_balance
from moe_core.specs import RouterSpec
from moe_torch.bridge.options import require_instance


def router_losses(
    logits: torch.Tensor, tokens_per_expert: torch.Tensor, token_mask: torch.Tensor | None, router: RouterSpec
) -> tuple[torch.Tensor, torch.Tensor]:
    """(load-balancing loss, z-loss), fp32 scalars, see `moe_core.ops.routing.reference_backward.router_losses`."""
    num_tokens, num_experts = logits.shape
    count = logits.new_full((), num_tokens)
    if token_mask is not None:
        # Masked tokens, which may be NaN, must not reach the sums.
        logits = torch.where(token_mask[:, None], logits, 0.0)
        count = token_mask.sum().to(logits.dtype)
    if router.logit_scale != 1:
        logits = logits * router.logit_scale
    if router.softcap is not None:
        logits = router.softcap * torch.tanh(logits / router.softcap)
    shares = _shares(logits, router.scoring)
    squares = torch.logsumexp(logits, dim=-1).square()
    if token_mask is not None:
        shares, squares = torch.where(token_mask[:, None], shares, 0.0), torch.where(token_mask, squares, 0.0)
    count = count.clamp(min=1.0)
    slot_share = tokens_per_expert.to(logits.dtype) / (count * router.require_top_k())
    balance = num_experts * (slot_share * (shares.sum(dim=0) / count)).sum()
    return balance, squares.sum() / count


def load_balance_loss(
    logits: torch.Tensor,
    ids: torch.Tensor,
    *,
    scoring: str = "softmax",
    scale: float = 1.0,
    token_mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return a load-balancing loss from `MoEAux.logits` and `MoEAux.ids`.

    The mean over sequences of scale * E * sum_i f_i * P_i: f_i is expert i's share of the S * K slots, and P_i the mean
    score over tokens, normalised to sum 1 over experts. Sequences without a token are left out.

    | loss | call |
    |---|---|
    | `MoEAux.load_balance_loss` | `load_balance_loss(aux.logits, aux.ids, scoring=...)` |
    | MaxText, of `x [B, S, D]` | logits `[B, S, E]`, `scale=K`, `softmax` for every router |
    | Hugging Face (Mixtral, Qwen, ...) | of all layers, concatenated along the tokens, `scale=K` |
    | DeepSeek-V3, sequence-wise | logits `[B, S, E]`, `scoring="sigmoid"`, `scale=alpha` |

    Args:
        logits: fp32 `[..., S, E]`, S tokens of each sequence.
        ids: int32 `[..., S, K]`. Ids outside [0, E) do not count, such as slots dropped by a capacity limit.
        scoring: of P: `softmax`, `sigmoid` or `sqrt_softplus`.
        scale: multiplies the loss.
        token_mask: bool `[..., S]`. False tokens are left out.

    Returns:
        an fp32 scalar, differentiable by logits.

    Raises:
        InvalidInput: arguments of other shapes or dtypes.
    """
    require_instance("logits", logits, torch.Tensor)
    require_instance("ids", ids, torch.Tensor)
    kept = torch.ones(ids.shape[:-1], dtype=torch.bool, device=ids.device) if token_mask is None else token_mask
    require_instance("token_mask", kept, torch.Tensor)
    check_balance(logits, ids, kept, scoring, scale)
    num_experts, top_k = logits.shape[-1], ids.shape[-1]
    shares = torch.where(kept[..., None], _shares(torch.where(kept[..., None], logits, 0.0), scoring), 0.0)
    counted = (kept[..., None] & (ids >= 0) & (ids < num_experts)).to(logits.dtype).flatten(-2)
    counts = shares.new_zeros(*ids.shape[:-2], num_experts)
    # Integers are exact in any order.
    counts = counts.scatter_add(-1, ids.clamp(0, num_experts - 1).to(torch.int64).flatten(-2), counted)
    tokens = kept.sum(dim=-1, keepdim=True).to(logits.dtype).clamp(min=1.0)
    losses = num_experts * (counts / (tokens * top_k) * (shares.sum(dim=-2) / tokens)).sum(dim=-1)
    return scale * losses.sum() / kept.any(dim=-1).sum().clamp(min=1)


def _shares(logits: torch.Tensor, scoring: str) -> torch.Tensor:
    """Scores over their sum. Zeros if all logits are -inf."""
    log_scores = _log_scores(logits, scoring)
    empty = torch.isneginf(log_scores).all(dim=-1, keepdim=True)
    return torch.where(empty, 0.0, torch.softmax(torch.where(empty, 0.0, log_scores), dim=-1))


def _log_scores(logits: torch.Tensor, scoring: str) -> torch.Tensor:
    """Logarithms of scores, up to a constant of the token. Underflowing scores have no gradient otherwise."""
    if scoring == "softmax":
        return logits
    if scoring == "sigmoid":
        return torch.nn.functional.logsigmoid(logits)
    # softplus(x) is exp(x) below the edge, and x above the threshold.
    edge, threshold = (-37.0, 37.0) if logits.dtype == torch.float64 else (-17.0, 20.0)
    softplus = torch.nn.functional.softplus(logits.clamp(min=edge), threshold=threshold)
    return 0.5 * torch.where(logits < edge, logits, softplus.log())
