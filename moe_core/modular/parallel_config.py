"""Over how many ranks a layer is spread."""

from __future__ import annotations

from dataclasses import dataclass

from moe_core.checks import require_at_least, require_flag
from moe_core.errors import InvalidInput


@dataclass(frozen=True)
class FusedMoEParallelConfig:
    """Sizes and ranks of tensor, data and expert parallelism; use_ep: whole experts are split over ranks.

    Raises InvalidInput where a rank is not below its size.
    """

    tp_size: int = 1
    dp_size: int = 1
    ep_size: int = 1
    tp_rank: int = 0
    dp_rank: int = 0
    ep_rank: int = 0
    use_ep: bool = False

    def __post_init__(self) -> None:
        for kind in ("tp", "dp", "ep"):
            size, rank = getattr(self, f"{kind}_size"), getattr(self, f"{kind}_rank")
            require_at_least(f"{kind}_size", size, 1)
            require_at_least(f"{kind}_rank", rank, 0)
            if rank >= size:
                raise InvalidInput(f"{kind}_rank must be below {kind}_size = {size}, got {rank}; number ranks from 0")
        require_flag("use_ep", self.use_ep)
        if self.ep_size > 1 and not self.use_ep:
            raise InvalidInput(f"ep_size must be 1 without use_ep, got {self.ep_size}; pass use_ep=True")
