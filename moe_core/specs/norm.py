"""Options of a normalisation of rows."""

from __future__ import annotations

from dataclasses import dataclass

from moe_core.base import plan_type
from moe_core.base.checks import finite_float, require_flags
from moe_core.errors import InvalidInput


@plan_type
@dataclass(frozen=True)
class NormSpec:
    """RMS normalisation of rows: y = x * (mean(x ** 2) + epsilon) ** -0.5 * factor * scale, in fp32, one cast.

    factor is weight, one parameter per column, or 1 + weight if centred. weight_first: multiply x by factor before the
    normalisation instead of y after it.
    """

    epsilon: float = 1e-6
    scale: float = 1.0
    centred: bool = False
    weight_first: bool = False

    def __post_init__(self) -> None:
        for name in ("epsilon", "scale"):
            object.__setattr__(self, name, finite_float(name, getattr(self, name)))
        require_flags(self, "centred", "weight_first")
        if self.epsilon <= 0:
            raise InvalidInput(f"epsilon must be above 0, got {self.epsilon}; rows of zeros would be divided by 0")
