"""The mesh axis that splits a layer's experts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import jax

from moe_core.base.checks import require_kind
from moe_core.errors import InvalidInput
from moe_core.parallel import ExchangeSpec, Placement
from moe_jax.parallel.forward import Group


@dataclass(frozen=True)
class ExpertAxis:
    """The `expert_axis` of layers.

    tokens: mesh axes that split the batch, major first. Losses and capacities cover all their tokens. None: every axis
    of the mesh, or only `name` inside the caller's `jax.shard_map`.
    """

    name: str = "ep"
    exchange: ExchangeSpec = field(default_factory=ExchangeSpec)
    tokens: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        require_kind("exchange", self.exchange, ExchangeSpec)
        names = (self.name,) if self.tokens is None else self.tokens
        if self.name not in names or not all(isinstance(name, str) for name in names):
            raise InvalidInput(
                f"tokens must be names of mesh axes with {self.name!r} among them, got {self.tokens!r}; the ranks of "
                "that axis have tokens of their own"
            )

    @staticmethod
    def of(value: Any) -> ExpertAxis | None:
        if value is None or isinstance(value, ExpertAxis):
            return value
        if not isinstance(value, str):
            raise InvalidInput(
                f"expert_axis must be the name of a mesh axis or an ExpertAxis, got {value!r}; pass 'ep', for example"
            )
        return ExpertAxis(value)

    @property
    def is_manual(self) -> bool:
        try:
            jax.lax.axis_size(self.name)
        except NameError:
            return False
        return True

    @property
    def over(self) -> tuple[str, ...]:
        """The mesh axes of the batch, inside a shard_map."""
        return (self.name,) if self.tokens is None else self.tokens

    def group(self, num_experts: int) -> Group:
        """The ranks, with consecutive experts, the last ranks with fewer if need be."""
        placement = Placement.linear(num_experts, jax.lax.axis_size(self.name))
        return Group(self.name, placement, self.exchange)
