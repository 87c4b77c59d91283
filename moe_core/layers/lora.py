"""Adapters of a layer's experts, as both frameworks' layers take them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from moe_core.base.checks import (
    as_integer,
    finite_float,
    require_at_least,
    require_flags,
    set_integer,
    set_matmul_dtype,
)
from moe_core.errors import InvalidInput, Unsupported
from moe_core.layers.spec import MoELayerSpec
from moe_core.specs.operands import LoRAFactors

#: Factors of each target.
TARGETS = {"gate_up": ("a1", "b1"), "down": ("a2", "b2"), "router": ("a_router", "b_router")}
TARGETS |= {"shared_gate_up": ("a1_shared", "b1_shared"), "shared_down": ("a2_shared", "b2_shared")}


@dataclass(frozen=True)
class LoRA:
    """Low-rank adapters of a layer.

    Args:
        rank: of new adapters.
        alpha: their scale is alpha / rank. None: rank, so that it is 1.
        targets: `gate_up` and `down` of the experts, `router`, `shared_gate_up` and `shared_down` of shared experts.
        slots: adapters held at once.
        max_rank: the largest rank of a slot. None: rank.
        rslora: the scale is alpha / sqrt(rank).
        dropout: probability of a zero in the input of the factors A, in training.
        shared: one pair of factors for all experts.
        dtype: of the factors. None: that of the layer's parameters.
    """

    rank: int
    alpha: float | None = None
    targets: tuple[str, ...] = ("gate_up", "down")
    slots: int = 1
    max_rank: int | None = None
    rslora: bool = False
    dropout: float = 0.0
    shared: bool = False
    dtype: Any = None

    def __post_init__(self) -> None:
        set_integer(self, "rank", 1)
        set_integer(self, "slots", 1)
        require_at_least("max_rank", self.largest, self.rank)
        require_flags(self, "rslora", "shared")
        set_matmul_dtype(self, "dtype", optional=True)
        for name in ("dropout",) if self.alpha is None else ("dropout", "alpha"):
            object.__setattr__(self, name, finite_float(name, getattr(self, name)))
        if not self.targets or not set(self.targets) <= set(TARGETS) or len(set(self.targets)) < len(self.targets):
            raise InvalidInput(
                f"targets must be among {', '.join(TARGETS)}, each once, got {self.targets}; name these alone"
            )
        if not 0 <= self.dropout < 1:
            raise InvalidInput(f"dropout must be in [0, 1), got {self.dropout}; pass a probability")

    @property
    def largest(self) -> int:
        return self.rank if self.max_rank is None else self.max_rank

    @property
    def beyond_experts(self) -> bool:
        return not {"gate_up", "down"} >= set(self.targets)

    def scale(self, rank: int) -> float:
        return (self.rank if self.alpha is None else self.alpha) / (math.sqrt(rank) if self.rslora else rank)

    def require_layer(self, spec: MoELayerSpec) -> None:
        """Raise InvalidInput or Unsupported for targets without adapters."""
        scheme, refused = spec.experts.scheme, None
        if spec.shared_experts is None and {"shared_gate_up", "shared_down"} & set(self.targets):
            raise InvalidInput(f"targets must be of a layer with shared experts, got {self.targets}; leave these out")
        if not {"gate_up", "down"} & set(self.targets):
            return
        if spec.norm_of_experts is not None:
            refused = "a layer with a norm of each expert's result"
        elif scheme is not None and scheme.activations is not None:
            refused = f"experts with quantised activations ({scheme}), whose products apply scales after the sums"
        if refused is not None:
            raise Unsupported(
                f"lora must be None for {refused}, as these take no adapters, got {self}; leave it out, or name the "
                "targets router and shared_gate_up, shared_down"
            )

    def shapes(self, spec: MoELayerSpec) -> dict[str, tuple[int, ...]]:
        """`[slots, E or 1, inputs, outputs]` of each factor of the targets, with ranks padded to a multiple of 16."""
        experts, padded = 1 if self.shared else spec.num_experts, -(-self.largest // 16) * 16
        width = spec.experts.activation.input_width(spec.d_ff)
        d_model = spec.d_model if spec.latent is None else spec.latent.width
        sides = {"gate_up": (d_model, width), "down": (spec.d_ff, d_model), "router": (spec.d_model, spec.num_experts)}
        if spec.shared_experts is not None:
            wide = spec.shared_experts.d_ff
            sides["shared_gate_up"] = spec.d_model, spec.experts.activation.input_width(wide)
            sides["shared_down"] = wide, spec.d_model
        made: dict[str, tuple[int, ...]] = {}
        for target, (a, b) in TARGETS.items():
            if target in self.targets:
                (inside, outside), count = sides[target], experts if target in ("gate_up", "down") else 1
                made |= {a: (self.slots, count, inside, padded), b: (self.slots, count, padded, outside)}
        return made

    def require_slot(self, slot: Any) -> int:
        return as_integer("slot", slot, 0, self.slots)

    def require_rank(self, rank: int) -> int:
        return as_integer("rank", rank, 1, self.largest + 1)

    def rank_of(self, factors: LoRAFactors, shapes: Mapping[str, tuple[int, ...]], num_experts: int) -> int:
        """The rank of one adapter, unpadded and without the axis of slots. shapes: of the slots.

        A pair that is None adds nothing. Raises InvalidInput unless the adapter fits.
        """
        every = {name: getattr(factors, name) for pair in TARGETS.values() for name in pair}
        present = [name for name, one in every.items() if one is not None]
        alone = [name for pair in TARGETS.values() for name in pair if (set(pair) & set(present)) == {name}]
        if not present or alone or not set(present) <= set(shapes):
            got = ", ".join(present) or "none"
            raise InvalidInput(
                f"factors must be pairs of {', '.join(shapes)}, the layer's targets, got {got}; pass these"
            )
        state = {name: one for name in ("scale", "ranks") if (one := getattr(factors, name)) is not None}
        one_for_all = not set(present) - {"a_router", "b_router"}  # as files have those of a router alone
        for name, one in state.items():
            if tuple(one.shape) != (num_experts,) and not (one_for_all and tuple(one.shape) == (1,)):
                raise InvalidInput(
                    f"factors.{name} must be [{num_experts}], one for each expert, got {list(one.shape)}; pass such "
                    "an array, or None"
                )
        for name in present:
            shape, axis = list(shapes[name][1:]), 2 if name[0] == "a" else 1
            most = self.largest if "ranks" not in state else shape[axis]  # ranks may be below padded factors
            shape[axis] = min(most, every[f"a{name[1:]}"].shape[-1])
            if list(every[name].shape) != shape:
                raise InvalidInput(
                    f"factors.{name} must be {shape} at most, got {list(every[name].shape)}; pass an adapter of this "
                    "layer, or make slots with a larger max_rank"
                )
        return max(every[name].shape[-1] for name in present if name[0] == "a")
