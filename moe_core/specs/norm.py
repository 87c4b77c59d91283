"""Options of a normalisation of rows."""

from __future__ import annotations

from dataclasses import dataclass

from moe_core.base.checks import finite_float
from moe_core.base.codec import plan_type
from moe_core.errors import InvalidInput


@plan_type
@dataclass(frozen=True)
class NormSpec:
    """RMS normalisation: y = x * (mean(x ** 2) + epsilon) ** -0.5 * weight * scale, in fp32, one cast.

    The mean is over the columns of a row; nothing is subtracted. weight: of each column, a parameter.
    """

    epsilon: float = 1e-6
    scale: float = 1.0

    def __post_init__(self) -> None:
        for name in ("epsilon", "scale"):
            object.__setattr__(self, name, finite_float(name, getattr(self, name)))
        if self.epsilon <= 0:
            raise InvalidInput(f"epsilon must be above 0, got {self.epsilon}; rows of zeros would be divided by 0")
