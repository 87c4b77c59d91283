"""Router losses of a layer, in torch operations: traceable, and differentiable through the logits."""

from __future__ import annotations

import torch

from moe_core.specs.routing import RouterSpec


def router_losses(
    logits: torch.Tensor, tokens_per_expert: torch.Tensor, token_mask: torch.Tensor | None, router: RouterSpec
) -> tuple[torch.Tensor, torch.Tensor]:
    """(load-balancing loss, z-loss), fp32 scalars; formulas: `moe_core.ops.routing.reference.router_losses`.

    logits fp32 `[T, E]`; tokens_per_expert int32 `[E]`; token_mask bool `[T]` or None.
    """
    num_tokens, num_experts = logits.shape
    count = logits.new_full((), num_tokens)
    if token_mask is not None:
        # What a masked token holds, even NaN, must not reach the sums.
        logits = torch.where(token_mask[:, None], logits, 0.0)
        count = token_mask.sum().to(torch.float32)
    scores = _scores(logits, router.scoring)
    total = scores.sum(dim=-1, keepdim=True)
    shares = torch.where(total == 0, 0.0, scores / total)
    squares = torch.logsumexp(logits, dim=-1).square()
    if token_mask is not None:
        shares, squares = torch.where(token_mask[:, None], shares, 0.0), torch.where(token_mask, squares, 0.0)
    count = count.clamp(min=1.0)
    slot_share = tokens_per_expert.to(torch.float32) / (count * router.require_top_k())
    balance = num_experts * (slot_share * (shares.sum(dim=0) / count)).sum()
    return balance, squares.sum() / count


def _scores(logits: torch.Tensor, scoring: str) -> torch.Tensor:
    if scoring == "softmax":
        return torch.softmax(logits, dim=-1)
    if scoring == "sigmoid":
        return torch.sigmoid(logits)
    return torch.sqrt(torch.nn.functional.softplus(logits))
