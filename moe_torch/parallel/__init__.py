"""Expert parallelism on torch.distributed: ranks that share the experts of a layer, with the bits of one device."""

from moe_core.parallel import ExchangeSpec, ParallelOutput, PeerFailed, Placement
from moe_torch.parallel.forward import ExpertParallel, moe
from moe_torch.parallel.layer import group_losses, parallelize, total_over_ranks
from moe_torch.parallel.moving import MovingPlacement
from moe_torch.parallel.placed import PlacedTensor
from moe_torch.parallel.rebalance import LayerMoves, Rebalancer

__all__ = [
    "ExchangeSpec", "ExpertParallel", "LayerMoves", "MovingPlacement", "ParallelOutput", "PeerFailed", "PlacedTensor",
    "Placement", "Rebalancer", "group_losses", "moe", "parallelize", "total_over_ranks",
]  # fmt: skip
