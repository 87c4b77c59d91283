"""Adapters of a layer's experts: slots of factors that are trained, loaded, replaced and evicted."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from moe_core.base.checks import require_at_least, require_flags
from moe_core.checkpoint import ExpertAdapter
from moe_core.errors import InvalidInput, Unsupported
from moe_core.specs.operands import LoRAFactors, RouterWeights, named_fields
from moe_torch.bridge.operator import call
from moe_torch.bridge.options import decode, encode, require_instance
from moe_torch.layers.parameters import moved_bytes
from moe_torch.layers.weights import from_numpy
from moe_torch.operators.table import LORA

_OPERATOR = LORA[RouterWeights]
_TARGETS = {"gate_up": ("a1", "b1"), "down": ("a2", "b2")}
_FACTORS = ("a1", "b1", "a2", "b2")


@dataclass(frozen=True)
class LoRA:
    """Low-rank adapters of experts, for `MoE.add_lora`.

    Args:
        rank: of adapters that `reset` makes.
        alpha: their scale is alpha / rank. None: rank, so that it is 1.
        targets: `gate_up`, `down` or both.
        slots: adapters held at once.
        max_rank: the largest rank of a slot. None: rank.
        rslora: the scale is alpha / sqrt(rank).
        dropout: probability of a zero in the input of the factors A, in training mode.
        shared: one pair of factors for all experts.
        dtype: of the factors. None: the dtype of x.
    """

    rank: int
    alpha: float | None = None
    targets: tuple[str, ...] = ("gate_up", "down")
    slots: int = 1
    max_rank: int | None = None
    rslora: bool = False
    dropout: float = 0.0
    shared: bool = False
    dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        require_at_least("rank", self.rank, 1)
        require_at_least("slots", self.slots, 1)
        require_at_least("max_rank", self.largest, self.rank)
        require_flags(self, "rslora", "shared")
        if not self.targets or not set(self.targets) <= set(_TARGETS) or len(set(self.targets)) < len(self.targets):
            names = "gate_up and down"
            if "router" in self.targets or "shared_experts" in self.targets:
                raise Unsupported(
                    f"targets must be among {names}, got {self.targets}: others have no adapters; drop them"
                )
            raise InvalidInput(f"targets must be among {names}, each once, got {self.targets}; name at least one")
        if not 0 <= self.dropout < 1:
            raise InvalidInput(f"dropout must be in [0, 1), got {self.dropout}; pass a probability")

    @property
    def largest(self) -> int:
        return self.rank if self.max_rank is None else self.max_rank

    def scale(self, rank: int) -> float:
        return (self.rank if self.alpha is None else self.alpha) / (math.sqrt(rank) if self.rslora else rank)


class LoRAParameters(torch.nn.Module):
    """The slots of a layer's adapters: parameters `a1`, `b1`, `a2`, `b2` of `LoRAFactors`, buffers `scale`, `ranks`.

    All methods write in place, in the order of the stream, so captured graphs see the change.
    """

    scale: torch.Tensor
    ranks: torch.Tensor

    def __init__(self, options: LoRA, spec: Any, like: torch.Tensor, gate_layout: str) -> None:
        super().__init__()
        self.options, self.gate_layout = options, gate_layout
        #: The operator's options by the layer's, without and with dropout.
        self.options_of: dict[tuple[str, bool], str] = {}
        experts, width = (1 if options.shared else spec.num_experts), spec.experts.activation.input_width(spec.d_ff)
        padded = -(-options.largest // 16) * 16
        sides = {"gate_up": (spec.d_model, width), "down": (spec.d_ff, spec.d_model)}
        for target, (a, b) in _TARGETS.items():
            inside, outside = sides[target]
            present = target in options.targets
            for name, shape in ((a, (inside, padded)), (b, (padded, outside))):
                array = torch.zeros(
                    options.slots, experts, *shape, dtype=options.dtype or like.dtype, device=like.device
                )
                self.register_parameter(name, torch.nn.Parameter(array) if present else None)
        by_expert = options.slots, spec.num_experts
        self.register_buffer("scale", torch.ones(by_expert, dtype=torch.float32, device=like.device))
        self.register_buffer("ranks", torch.zeros(by_expert, dtype=torch.int32, device=like.device))

    def _apply(self, fn: Any, recurse: bool = True) -> LoRAParameters:
        before = dict(self._buffers)
        super()._apply(fn, recurse)
        for name, buffer in before.items():
            self._buffers[name] = moved_bytes(buffer, fn)
        return self

    def _slot(self, slot: int) -> int:
        if not isinstance(slot, int) or isinstance(slot, bool) or not 0 <= slot < self.options.slots:
            raise InvalidInput(f"slot must be an integer in [0, {self.options.slots}), got {slot!r}; name one of these")
        return slot

    def present(self) -> dict[str, torch.Tensor]:
        return {name: one for name in _FACTORS if (one := getattr(self, name)) is not None}

    @torch.no_grad()
    def reset(self, slot: int = 0, *, rank: int | None = None) -> None:
        """Start a new adapter: A uniform as PEFT's (Kaiming, a = sqrt(5)), B zero, so that it adds nothing yet.

        rank: None: that of the options.
        """
        rank = self._rank(self.options.rank if rank is None else rank)
        for name, array in self.present().items():
            array[self._slot(slot)].zero_()
            if name[0] == "a":
                bound = array.shape[2] ** -0.5
                array[slot, :, :, :rank].uniform_(-bound, bound)
        self.scale[slot] = self.options.scale(rank)
        self.ranks[slot] = rank

    def _rank(self, rank: int) -> int:
        if not 1 <= rank <= self.options.largest:
            raise InvalidInput(
                f"rank must be in [1, {self.options.largest}], got {rank}; make the slots with a larger max_rank"
            )
        return rank

    @torch.no_grad()
    def load(self, slot: int, factors: LoRAFactors | ExpertAdapter) -> None:
        """Copy an adapter into a slot, in place of what it holds.

        factors: a layer's adapter of `moe_core.checkpoint.read_adapter`, or arrays without the axis of slots: a1 `[E or
        1, D, r]`, b1 `[E or 1, r, N]`, a2, b2 likewise; scale fp32 `[E]`, None: by the options and r; ranks int32
        `[E]`, None: r. A pair that is None adds nothing.
        """
        if isinstance(factors, ExpertAdapter):
            factors = LoRAFactors(**factors.with_gate_layout(self.gate_layout).operands())
        require_instance("factors", factors, LoRAFactors)
        slot, present = self._slot(slot), self.present()
        arrays = [(name, one) for name, one in named_fields(factors) if name != "seed"]
        given = {name: from_numpy(one) if isinstance(one, np.ndarray) else one for name, one in arrays}
        names = [name for name in given if name in _FACTORS]
        if not names or not set(names) <= set(present):
            wanted, got = ", ".join(present), ", ".join(sorted(names)) or "none"
            raise InvalidInput(f"factors must be of {wanted} as the layer's targets are, got {got}; pass these")
        for name in names:
            other = given.get(f"a{name[1]}")
            shape, axis = list(present[name].shape[1:]), 2 if name[0] == "a" else 1
            shape[axis] = min(shape[axis], 0 if other is None else other.shape[-1])
            if list(given[name].shape) != shape:
                raise InvalidInput(
                    f"factors.{name} must be {shape} at most, got {list(given[name].shape)}; pass an adapter of this "
                    "layer, or slots with a larger max_rank"
                )
        rank = max(given[name].shape[-1] for name in names if name[0] == "a")
        for array in present.values():
            array[slot].zero_()
        for name in names:
            one, to = given[name].to(present[name]), present[name][slot]
            (to[..., : one.shape[2]] if name[0] == "a" else to[:, : one.shape[1]]).copy_(one)
        self.scale[slot] = given["scale"].to(self.scale) if "scale" in given else self.options.scale(rank)
        self.ranks[slot] = given["ranks"].to(self.ranks) if "ranks" in given else rank

    @torch.no_grad()
    def evict(self, slot: int) -> None:
        """Empty a slot. Tokens with its id are without an adapter, and count in invalid_ids."""
        self.ranks[self._slot(slot)] = 0

    @torch.no_grad()
    def export(self, slot: int = 0) -> LoRAFactors:
        """Copies of an adapter's factors, as `load` takes them. Waits for the device, which holds the rank."""
        rank = int(self.ranks[self._slot(slot)].max())
        if not rank:
            raise InvalidInput(f"slot must hold an adapter, got the empty slot {slot}; load one first")
        cut = {n: one[slot, :, :, :rank] if n[0] == "a" else one[slot, :, :rank] for n, one in self.present().items()}
        return LoRAFactors(
            **{name: one.clone() for name, one in cut.items()},
            scale=self.scale[slot].clone(),
            ranks=self.ranks[slot].clone(),
        )

    def bundle(self) -> LoRAFactors:
        """The op's factors. In training with dropout each call draws a seed from torch's generator."""
        seed = None
        if self.training and self.options.dropout:
            seed = torch.randint(-(2**31), 2**31 - 1, (1,), dtype=torch.int32, device=self.ranks.device)
        return LoRAFactors(
            **{name: getattr(self, name) for name in _FACTORS}, scale=self.scale, ranks=self.ranks, seed=seed
        )

    def encode(self, layer_options: str, dropped: bool) -> str:
        """The operator's options for a layer's, kept because programs are traced without encoding any."""
        spec, *formats = decode(layer_options)
        spec = dataclasses.replace(spec, lora_dropout=self.options.dropout if dropped else 0.0)
        made = encode(spec, *(formats or [(None, None, None)]))
        self.options_of[layer_options, dropped] = made
        return made

    def extra_repr(self) -> str:
        return str(self.options)


def why_no_lora(layer: Any) -> str | None:
    """The reason why a layer's experts take no adapters, or None."""
    spec, scheme = layer.spec, layer.spec.experts.scheme
    if spec.in_stages or spec.token_rounding is not None:
        return "a layer that runs in stages, or rounds tokens"
    if layer._modules["experts"].__dict__.get("exchange") is not None:
        return "a layer with experts on several ranks"
    if scheme is not None and scheme.activations is not None:
        return f"experts with quantised activations ({scheme})"
    return None


def run_with_adapters(layer: Any, arrays: list[Any], x: torch.Tensor, adapter_ids: Any, staged: bool) -> Any:
    """The results of the operator for a layer with adapters. arrays: of the layer's operator, rows first."""
    lora: LoRAParameters | None = layer._modules["lora"]
    if lora is None:
        raise InvalidInput("adapter_ids must be None for a layer without adapters, got ids; call add_lora first")
    if staged:
        raise Unsupported(
            "a layer with adapters runs as one operator: gate_inputs, expert_ids, input_ids, hooks and wrappers of its "
            "parts have no adapters; remove them"
        )
    tokens = arrays[0].shape[0]
    if adapter_ids is None:
        if lora.options.slots > 1:
            raise InvalidInput("adapter_ids must be given to a layer with several slots, got None; pass int32 ids")
        adapter_ids = torch.zeros(tokens, dtype=torch.int32, device=arrays[0].device)
    require_instance("adapter_ids", adapter_ids, torch.Tensor)
    if adapter_ids.shape != x.shape[:-1]:
        shape, got = list(x.shape[:-1]), list(adapter_ids.shape)
        raise InvalidInput(f"adapter_ids must be int32 {shape} like the tokens of x, got {got}; pass one id per token")
    factors = lora.bundle()
    dropped = factors.seed is not None
    options = lora.options_of.get((layer._options, dropped)) or lora.encode(layer._options, dropped)
    known = dict(zip(layer._operator.names, arrays, strict=True))
    known |= {f"lora.{name}": one for name, one in named_fields(factors)} | {"adapter_ids": adapter_ids.reshape(-1)}
    return call(_OPERATOR, (*[known.get(name) for name in _OPERATOR.names], options))
