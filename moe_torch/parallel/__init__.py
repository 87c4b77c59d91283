"""Expert parallelism on torch.distributed: ranks that share the experts of a layer, with the bits of one device."""

from moe_core.parallel import ExchangeSpec, ParallelOutput, PeerFailed, Placement
from moe_torch.parallel.forward import ExpertParallel, moe

__all__ = ["ExchangeSpec", "ExpertParallel", "ParallelOutput", "PeerFailed", "Placement", "moe"]
