"""Parts around a layer's experts: a latent width, and operations on their results."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from moe_core.base import plan_type
from moe_core.base.checks import finite_float, require_at_least, require_choice, require_flag, require_kind
from moe_core.errors import InvalidInput
from moe_core.specs import NormSpec

NORM_OF = ("sum", "experts")


@plan_type
@dataclass(frozen=True)
class OutputSpec:
    """Operations on the experts' results.

    norm: RMS normalisation with a factor for each column. of: `sum`, the rows of y, routed and shared experts together;
    `experts`, each expert's result before the router's weight. scale: a constant that multiplies the rows of y after
    the norm. bias: add a parameter `[D]` at the end.
    """

    norm: NormSpec | None = None
    of: str = "sum"
    scale: float = 1.0
    bias: bool = False

    def __post_init__(self) -> None:
        require_kind("output.norm", self.norm, NormSpec, optional=True)
        require_choice("output.of", self.of, NORM_OF)
        object.__setattr__(self, "scale", finite_float("output.scale", self.scale))
        require_flag("output.bias", self.bias)
        if self.norm is None and self.of != "sum":
            raise InvalidInput(f"output.of must be 'sum' without a norm, got {self.of!r}; leave it out")
        if self.norm is None and self.scale == 1 and not self.bias:
            raise InvalidInput(f"output must have a norm, a scale or a bias, got {self}; leave it out")

    @property
    def of_experts(self) -> bool:
        """True if each expert's result is normalised."""
        return self.of == "experts"


@plan_type
@dataclass(frozen=True)
class LatentSpec:
    """Routed experts take and give rows of another width, with projections before and after them.

    norm: RMS normalisation of the rows that the experts take. Router and shared experts take x.
    """

    width: int
    norm: NormSpec | None = None

    def __post_init__(self) -> None:
        require_at_least("latent.width", self.width, 1)
        require_kind("latent.norm", self.norm, NormSpec, optional=True)


@dataclass(frozen=True)
class LayerPart:
    """weight: a projection. norm, bias: of its columns. spec: the OutputSpec or LatentSpec, None behind the experts."""

    weight: Any = None
    norm: Any = None
    bias: Any = None
    spec: Any = None
