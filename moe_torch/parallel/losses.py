"""Losses that balance the experts of several ranks."""

from __future__ import annotations

import torch

from moe_core.layers import MoEAux
from moe_core.specs.routing import RouterSpec
from moe_torch.bridge.options import require_instance
from moe_torch.layers.losses import router_losses
from moe_torch.parallel.forward import ExpertParallel
from moe_torch.parallel.tensor import total_of


def group_losses(
    aux: MoEAux, router: RouterSpec, parallel: ExpertParallel, *, token_mask: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(load-balancing loss, z-loss) of the tokens of all ranks, where `MoEAux` has those of this rank's.

    The mean over ranks of what is returned is the loss of one device with all tokens, and so are the gradients'. The
    message, of counts, is exact in any order; gradients need none. A collective.

    Args:
        aux: what a layer returned with return_aux.
        router: the layer's, `layer.spec.router`.
        parallel: the ranks.
        token_mask: bool `[T]`, the one that the layer got.

    Returns:
        fp32 scalars, differentiable by aux.logits.
    """
    require_instance("parallel", parallel, ExpertParallel)
    logits, counts = aux.logits, aux.tokens_per_expert
    tokens = torch.full((1,), len(logits), dtype=torch.int32, device=logits.device)
    if token_mask is not None:
        tokens = token_mask.sum().to(torch.int32).view(1)
    ranks, tensor = parallel.ranks("losses"), parallel.tensor_ranks("losses")
    total = total_of(ranks, tensor, torch.cat([counts, tokens]), "counts")
    # Both losses are means over tokens, linear in this rank's part of them: its share of the tokens, times the ranks.
    share = parallel.token_ranks * tokens.float() / total[-1:].clamp(min=1).float()
    own = tokens.float().clamp(min=1)
    balance, z = router_losses(logits, (total[:-1].float() * own / total[-1:].clamp(min=1).float()), token_mask, router)
    return (balance * share).squeeze(0), (z * share).squeeze(0)
