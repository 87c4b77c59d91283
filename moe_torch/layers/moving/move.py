"""Move experts between ranks while a model trains."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from moe_core.errors import InvalidInput
from moe_core.parallel.placement import HOLE, Placement
from moe_torch.bridge.options import require_instance
from moe_torch.layers.moving.shares import Share, rows_of, shares_of
from moe_torch.layers.placed import held_experts
from moe_torch.parallel.group import Way


@torch.no_grad()
def move_experts(
    layer: Any, placement: Placement, optimizers: Sequence[torch.optim.Optimizer] | torch.optim.Optimizer = ()
) -> None:
    """Move a layer's experts to another placement between two steps, with their optimizer states. A collective.

    Losses and parameters keep their bits. Gradients are dropped. Parameters that were DTensors become `PlacedTensor`s,
    and the optimizers hold the new ones.

    Args:
        layer: a `moe_torch.MoE` that `parallelize` has shared out.
        placement: of the same experts and ranks. Training needs every expert on one rank:
            `Placement.balanced(load, W, places, max_replicas=1)`.
        optimizers: all that update the experts.

    Raises:
        InvalidInput: a placement of other sizes, a layer that is not shared out, or that has a Rebalancer.
        Unsupported: experts in `fully_shard`, or a tensor axis.
        RuntimeError: a message failed. The experts are as before.
    """
    require_instance("placement", placement, Placement)
    optimizers = [optimizers] if isinstance(optimizers, torch.optim.Optimizer) else list(optimizers)
    (share,) = shares_of(layer, optimizers)
    old = share.placement
    if (placement.num_experts, placement.num_ranks) != (old.num_experts, old.num_ranks):
        raise InvalidInput(
            f"placement must be of the layer's {old.num_experts} experts and {old.num_ranks} ranks, got {placement}; "
            "make it for them"
        )
    if share.exchange.moving is not None:
        raise InvalidInput("layer must have no Rebalancer to be moved, got one that has; call its rebalance")
    owners = tuple(tuple(sorted(rank, key=lambda expert: expert == HOLE)) for rank in placement.owners)
    placement = Placement(placement.num_experts, owners, old.version + 1)
    share.replace(_moved(share, placement), placement, share.exchange.parallel)


def _moved(share: Share, new: Placement) -> list[torch.Tensor]:
    ranks, old = share.exchange.parallel.ranks("moving experts"), share.placement
    here, after = held_experts(old, ranks.rank), held_experts(new, ranks.rank)

    def coming(target: int, source: int) -> list[int]:
        wanted = set(held_experts(new, target)) - set(held_experts(old, target))
        return sorted(expert for expert in wanted if old.places_of(expert)[0] // old.per_rank == source)

    out = [coming(target, ranks.rank) for target in range(ranks.size)]
    into = [coming(ranks.rank, source) for source in range(ranks.size)]
    way = Way([len(one) for one in out], [len(one) for one in into])
    sent = [here.index(expert) for one in out for expert in one]
    # Rows of the experts that stay, then of those that come.
    known = {expert: row for row, expert in enumerate(here)}
    known |= {expert: len(here) + row for row, expert in enumerate(expert for one in into for expert in one)}
    order = [known[expert] for expert in after]
    parts = []
    for (name, _), rows in zip(share.arrays(), rows_of(share), strict=True):
        came = ranks.all_to_all(rows[sent], f"experts.{name}", way)
        parts.append(torch.cat([rows, came])[order])
    return parts
