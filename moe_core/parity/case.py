"""A case: one MoE layer with its input."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from moe_core.base import dtypes
from moe_core.errors import InvalidInput
from moe_core.formats import QuantizedTensor, Scheme, known_scheme
from moe_core.specs import ExpertWeights, LogitsSpec, MoESpec, RouterSpec, RouterWeights, SharedExpert


@dataclass(frozen=True)
class Case:
    """One layer and its input, in NumPy. x `[T, D]`; experts, routing, shared: arguments of the op `moe`; spec: with
    its router. token_mask bool `[T]` or None: False = padding, which visits no expert. description: the structure's
    origin.
    """

    name: str
    description: str
    x: Any
    experts: ExpertWeights
    routing: RouterWeights
    spec: MoESpec
    shared: SharedExpert | None = None
    token_mask: Any = None

    @property
    def dtype(self) -> str:
        return dtypes.canonical(self.x.dtype)

    @property
    def scheme(self) -> Scheme | None:
        if not isinstance(self.experts.gate_up, QuantizedTensor):
            return None
        weights, activations = self.experts.gate_up.format, self.spec.activations
        name = weights.name if activations is None else f"{weights.name}_{activations.name}"
        return known_scheme(weights, activations) or Scheme(name, weights, activations)

    @property
    def num_experts(self) -> int:
        axis = 0 if self.spec.router_weight_layout == "out_in" else 1
        return int(self.routing.weight.shape[axis])

    @property
    def router(self) -> RouterSpec:
        """A case always routes from x."""
        assert self.spec.router is not None
        return self.spec.router

    @property
    def top_k(self) -> int:
        return self.router.require_top_k()

    @property
    def logits_spec(self) -> LogitsSpec:
        return self.spec.logits_spec()

    @property
    def d_model(self) -> int:
        return int(self.x.shape[1])

    @property
    def d_ff(self) -> int:
        return int(self.experts.down.shape[-1 if self.spec.weight_layout == "out_in" else -2])

    @property
    def sizes(self) -> dict[str, int]:
        return {"T": int(self.x.shape[0]), "E": self.num_experts, "K": self.top_k, "D": self.d_model, "F": self.d_ff}

    def __str__(self) -> str:
        sizes = " ".join(f"{letter}={size}" for letter, size in self.sizes.items())
        scheme = "" if self.scheme is None else f" {self.scheme}"
        return f"{self.name} {self.dtype}{scheme} {sizes}"


def token_count(given: int | None, default: int) -> int:
    """The number of tokens of a case. Raises InvalidInput for fewer than one."""
    if given is not None and given < 1:
        raise InvalidInput(f"tokens must be at least 1, got {given}; pass such a number")
    return default if given is None else given
