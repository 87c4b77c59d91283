"""Expert parallelism on torch.distributed: ranks that share the experts of a layer, with the bits of one device."""

import importlib
from typing import TYPE_CHECKING, Any

from moe_core.parallel import ExchangeSpec, ParallelOutput, PeerFailed, Placement
from moe_torch.parallel.forward import ExpertParallel, moe
from moe_torch.parallel.moving import MovingPlacement
from moe_torch.parallel.stages import Arrived, Combining, Dispatching, combine, dispatch

if TYPE_CHECKING:
    from moe_torch.layers.listed import clip_grad_norm_
    from moe_torch.layers.moving.mirror import Mirror
    from moe_torch.layers.moving.move import move_experts
    from moe_torch.layers.moving.reform import reform
    from moe_torch.layers.parallel import group_losses, ignore_experts, parallelize, total_over_ranks
    from moe_torch.layers.placed import PlacedTensor
    from moe_torch.layers.rebalance import LayerMoves, Rebalancer

__all__ = [
    "Arrived", "Combining", "Dispatching", "ExchangeSpec", "ExpertParallel", "LayerMoves", "Mirror",
    "MovingPlacement", "ParallelOutput", "PeerFailed", "PlacedTensor", "Placement", "Rebalancer", "clip_grad_norm_",
    "combine", "dispatch", "group_losses", "ignore_experts", "moe", "move_experts", "parallelize", "reform",
    "total_over_ranks",
]  # fmt: skip

#: Names of layers, which stand on this package: imported on first use.
_OF_LAYERS = {
    **dict.fromkeys(("group_losses", "ignore_experts", "parallelize", "total_over_ranks"), "moe_torch.layers.parallel"),
    "clip_grad_norm_": "moe_torch.layers.listed",
    "Mirror": "moe_torch.layers.moving.mirror",
    "PlacedTensor": "moe_torch.layers.placed",
    "move_experts": "moe_torch.layers.moving.move",
    "reform": "moe_torch.layers.moving.reform",
    **dict.fromkeys(("LayerMoves", "Rebalancer"), "moe_torch.layers.rebalance"),
}


def __getattr__(name: str) -> Any:
    if name not in _OF_LAYERS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_OF_LAYERS[name]), name)
