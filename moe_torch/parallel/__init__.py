"""Expert parallelism on torch.distributed: ranks that share the experts of a layer, with the bits of one device."""

from moe_core.parallel import ExchangeSpec, ParallelOutput, PeerFailed, Placement
from moe_torch.parallel.forward import ExpertParallel, moe
from moe_torch.parallel.layer import parallelize, total_over_ranks
from moe_torch.parallel.losses import group_losses
from moe_torch.parallel.placed import PlacedTensor

__all__ = [
    "ExchangeSpec", "ExpertParallel", "ParallelOutput", "PeerFailed", "PlacedTensor", "Placement", "group_losses",
    "moe", "parallelize", "total_over_ranks",
]  # fmt: skip
