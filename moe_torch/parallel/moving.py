"""A placement that changes while a model serves."""

from __future__ import annotations

import torch

from moe_core.errors import InvalidInput, Unsupported
from moe_core.parallel.header import Header
from moe_core.parallel.placement import HOLE, Placement

#: Version and digest are a header's last two numbers.
_OF_PLACEMENT = Header._fields.index("version")


class MovingPlacement:
    """A placement that can change between calls of `moe_torch.parallel.moe`, as int32 arrays on a device.

    Captured CUDA graphs read the arrays and stay valid when experts move.

    Args:
        placement: the first one, without empty places (InvalidInput).
        load: int32 `[E]` on the device. Every forward adds the rows of this rank's tokens for each expert. None: new
            zeros.

    Attributes:
        places, start: see `moe_core.parallel.PlacementTables`.
        why_broken: why the experts must not be used any more. None: they may be.
    """

    def __init__(self, placement: Placement, device: torch.device | str, *, load: torch.Tensor | None = None) -> None:
        require_full(placement)
        self.current, self.why_broken = placement, None
        with torch.inference_mode(False):
            self.places = torch.empty(placement.num_places, dtype=torch.int32, device=device)
            self.start = torch.empty(placement.num_experts + 1, dtype=torch.int32, device=device)
            self._named = torch.empty(2, dtype=torch.int32, device=device)
            self.load = torch.zeros_like(self.start[1:]) if load is None else load
        self.change(placement)

    why_broken: str | None

    @torch.no_grad()
    def change(self, placement: Placement) -> None:
        """Use another placement of equal sizes (else raises InvalidInput) from the next call on. Moves no weights."""
        sizes = [(one.num_experts, one.num_ranks, one.per_rank) for one in (self.current, placement)]
        if sizes[0] != sizes[1]:
            raise InvalidInput(f"placement must have {sizes[0]} experts, ranks and places, got {sizes[1]}; keep them")
        require_full(placement)
        _, places, start = placement.tables
        self.places.copy_(torch.tensor(places))
        self.start.copy_(torch.tensor(start))
        self._named.copy_(torch.tensor([placement.version, placement.digest], dtype=torch.int32))
        self.current = placement

    def header(self, header: torch.Tensor) -> torch.Tensor:
        """A header int32 `[8]` on the device, with the placement when it is read."""
        return torch.cat([header[:_OF_PLACEMENT], self._named])

    def require_usable(self, needs_gradient: bool) -> None:
        """Raise Unsupported if a gradient is needed, and RuntimeError if weights were lost."""
        if needs_gradient:
            raise Unsupported(
                "a layer with a Rebalancer must be called under torch.no_grad(): gradients and an optimizer's state "
                "do not move with its experts; train it before"
            )
        if self.why_broken is not None:
            raise RuntimeError(self.why_broken)


def require_full(placement: Placement) -> None:
    if any(expert == HOLE for rank in placement.owners for expert in rank):
        raise InvalidInput(f"placement must have an expert at every place, got {placement}; fill up with replicas")
