"""Adapters of a layer's experts: slots of factors that are trained, loaded, replaced and evicted."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from moe_core.checkpoint import ExpertAdapter
from moe_core.errors import InvalidInput, Unsupported
from moe_core.layers import LoRA
from moe_core.specs.operands import BEYOND_EXPERTS, LoRAFactors, RouterWeights, named_fields
from moe_torch.bridge.arrays import require_same_device
from moe_torch.bridge.operator import Operator, call
from moe_torch.bridge.options import TORCH_DTYPES, decode, encode, require_instance
from moe_torch.layers.shards import moved_bytes
from moe_torch.layers.weights import from_numpy
from moe_torch.operators.table import LORA

_OPERATOR = LORA[RouterWeights]
_FACTORS = ("a1", "b1", "a2", "b2", *BEYOND_EXPERTS)


class LoRAParameters(torch.nn.Module):
    """The slots of a layer's adapters: parameters named as the factors of `LoRAFactors`, buffers `scale`, `ranks`.

    All methods write in place, in the order of the stream, so captured graphs see the change. With experts on several
    ranks, all of them call it with the same arguments, `reset` with equal seeds, and each keeps its experts' factors.
    """

    scale: torch.Tensor
    ranks: torch.Tensor

    def __init__(self, options: LoRA, spec: Any, like: torch.Tensor, gate_layout: str) -> None:
        super().__init__()
        self.options, self.gate_layout = options, gate_layout
        #: This rank's part of an array of all experts `[E, ...]`, by the factor's name. None: all are here.
        self.part_of: Callable[[str, Any], Any] | None = None
        #: The operator's options by the layer's, without and with dropout.
        self.options_of: dict[tuple[str, bool], str] = {}
        shapes, dtype = options.shapes(spec), TORCH_DTYPES[options.dtype] if options.dtype else like.dtype
        for name in _FACTORS:
            made = None
            if name in shapes:
                made = torch.empty(shapes[name], dtype=dtype, device=like.device)
            self.register_parameter(name, None if made is None else torch.nn.Parameter(made))
        by_expert = options.slots, spec.num_experts
        self.register_buffer("scale", torch.empty(by_expert, dtype=torch.float32, device=like.device))
        self.register_buffer("ranks", torch.empty(by_expert, dtype=torch.int32, device=like.device))

    def _apply(self, fn: Any, recurse: bool = True) -> LoRAParameters:
        before = dict(self._buffers)
        super()._apply(fn, recurse)
        for name, buffer in before.items():
            self._buffers[name] = moved_bytes(buffer, fn)
        return self

    def present(self) -> dict[str, Any]:
        return {name: one for name in _FACTORS if (one := getattr(self, name)) is not None}

    def share_out(self, exchange: Any, gate_layout: str | None) -> None:
        """Keep the factors of this rank's experts. scale and ranks, and factors shared by all, stay whole."""
        from moe_torch.layers import parallel
        from moe_torch.layers.shards import Own

        split, exchange.calls.shares_factors = exchange.parallel.split, self.options.shared
        for name, wrong in (("dropout", self.options.dropout > 0), ("shared", self.options.shared)):
            if wrong and split.size > 1:
                raise Unsupported(f"lora.{name} cannot be had with experts split over a tensor axis; leave it out")
        if self.options.shared:
            return
        held = exchange.held()
        for name, array in self.present().items():
            if name in BEYOND_EXPERTS:
                continue
            shared = parallel.share_out(exchange, ("in_out", gate_layout), name, array, 1)
            setattr(self, name, parallel.as_parameter(shared, array.requires_grad))
        self.part_of = lambda name, array: Own(array, None, parallel.cut_of(name, "in_out", gate_layout), split).taken(
            array[held]
        )

    def _local(self) -> dict[str, Any]:
        """The factors of this rank."""
        return {n: one.to_local() if hasattr(one, "to_local") else one for n, one in self.present().items()}

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Empty all slots, and start a new adapter where there is one slot alone."""
        for array in (*self._local().values(), self.ranks):
            array.zero_()
        self.scale.fill_(1)
        if self.options.slots == 1:
            self.reset()

    @torch.no_grad()
    def reset(self, slot: int = 0, *, rank: int | None = None) -> None:
        """Start a new adapter: A uniform as PEFT's (Kaiming, a = sqrt(5)), B zero, so that it adds nothing yet.

        rank: None: that of the options.
        """
        rank = self.options.require_rank(self.options.rank if rank is None else rank)
        slot, whole = self.options.require_slot(slot), self.present()
        for name, array in self._local().items():
            array[slot].zero_()
            if name[0] == "a":
                bound, drawn = whole[name].shape[2] ** -0.5, array[slot, :, :, :rank]
                part_of = None if name in BEYOND_EXPERTS else self.part_of
                if part_of is not None:
                    # The numbers of one process with this seed.
                    drawn = drawn.new_empty(*whole[name].shape[1:3], rank)
                drawn.uniform_(-bound, bound)
                if part_of is not None:
                    array[slot, :, :, :rank] = part_of(name, drawn)
        self.scale[slot] = self.options.scale(rank)
        self.ranks[slot] = rank

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
        slot, present = self.options.require_slot(slot), self.present()
        rank = self.options.rank_of(factors, {n: tuple(one.shape) for n, one in present.items()}, self.ranks.shape[1])
        arrays = [(name, one) for name, one in named_fields(factors) if name != "seed"]
        given = {name: one if isinstance(one, torch.Tensor) else from_numpy(np.asarray(one)) for name, one in arrays}
        local = self._local()
        for array in local.values():
            array[slot].zero_()
        for name in local.keys() & given.keys():
            part_of = None if name in BEYOND_EXPERTS else self.part_of
            own = given[name] if part_of is None else part_of(name, given[name])
            one, to = own.to(local[name]), local[name][slot]
            (to[..., : one.shape[2]] if name[0] == "a" else to[:, : one.shape[1]]).copy_(one)
        self.scale[slot] = given["scale"].to(self.scale) if "scale" in given else self.options.scale(rank)
        self.ranks[slot] = given["ranks"].to(self.ranks) if "ranks" in given else rank

    @torch.no_grad()
    def evict(self, slot: int) -> None:
        """Empty a slot. Tokens with its id are without an adapter, and count in invalid_ids."""
        self.ranks[self.options.require_slot(slot)] = 0

    @torch.no_grad()
    def export(self, slot: int = 0) -> LoRAFactors:
        """Copies of an adapter's factors, as `load` takes them. Waits for the device, which holds the rank.

        A collective for experts on several ranks.
        """
        rank = int(self.ranks[self.options.require_slot(slot)].max())
        if not rank:
            raise InvalidInput(f"slot must hold an adapter, got the empty slot {slot}; load one first")
        whole = {n: one.full_tensor() if hasattr(one, "full_tensor") else one for n, one in self.present().items()}
        cut = {n: one[slot, :, :, :rank] if n[0] == "a" else one[slot, :, :rank] for n, one in whole.items()}
        return LoRAFactors(
            **{name: one.clone() for name, one in cut.items()},
            scale=self.scale[slot].clone(),
            ranks=self.ranks[slot].clone(),
        )

    def factors(self) -> LoRAFactors:
        """The op's factors without dropout."""
        factors = {name: getattr(self, name) for name in _FACTORS}
        wide = any(one.dtype == torch.float64 for one in factors.values() if one is not None)
        scale = self.scale.double() if wide else self.scale  # float64 never mixes with other floats
        return LoRAFactors(**factors, scale=scale, ranks=self.ranks)

    def bundle(self) -> LoRAFactors:
        """The op's factors. In training with dropout each call draws a seed from torch's generator."""
        if not (self.training and self.options.dropout):
            return self.factors()
        seed = torch.randint(-(2**31), 2**31 - 1, (1,), dtype=torch.int32, device=self.ranks.device)
        return dataclasses.replace(self.factors(), seed=seed)

    def encode(self, layer_options: str, dropped: bool) -> str:
        """The operator's options for a layer's, kept because programs are traced without encoding any."""
        spec, *formats = decode(layer_options)
        spec = dataclasses.replace(spec, lora_dropout=self.options.dropout if dropped else 0.0)
        made = encode(spec, *(formats or [(None, None, None)]))
        self.options_of[layer_options, dropped] = made
        return made

    def extra_repr(self) -> str:
        return str(self.options)


def adapters_of(layer: Any, x: torch.Tensor, adapter_ids: Any) -> tuple[LoRAFactors, torch.Tensor]:
    """The factors of a call, and ids int32 `[T]`."""
    lora: LoRAParameters | None = layer._modules.get("lora")
    if lora is None:
        raise InvalidInput("adapter_ids must be None for a layer without adapters, got ids; call add_lora first")
    require_same_device("layer.lora.scale", lora.scale, "x", x)
    if adapter_ids is None:
        if lora.options.slots > 1:
            raise InvalidInput("adapter_ids must be given to a layer with several slots, got None; pass int32 ids")
        adapter_ids = torch.zeros(x.shape[:-1], dtype=torch.int32, device=x.device)
    require_instance("adapter_ids", adapter_ids, torch.Tensor)
    if adapter_ids.shape != x.shape[:-1]:
        shape, got = list(x.shape[:-1]), list(adapter_ids.shape)
        raise InvalidInput(f"adapter_ids must be int32 {shape} like the tokens of x, got {got}; pass one id per token")
    return lora.bundle(), adapter_ids.reshape(-1)


def run_with_adapters(layer: Any, arrays: list[Any], x: torch.Tensor, adapter_ids: Any) -> Any:
    """The results of the operator for a layer with adapters, then the overflow or None. arrays: of the layer's
    operator, rows first."""
    factors, ids = adapters_of(layer, x, adapter_ids)
    if layer._modules["experts"].__dict__.get("exchange") is None:
        return *call(*adapted_call(layer, arrays, factors, ids)), None
    parts, experts = layer._parts(), layer.experts
    router, shared = parts["router"], parts.get("shared_experts")
    routing = RouterWeights(router.weight, router.bias, router.correction_bias)
    spec = dataclasses.replace(layer.moe_spec, lora_dropout=0.0 if factors.seed is None else layer.lora.options.dropout)
    found = experts.moe(
        arrays[0], experts.operands(), routing, spec, token_mask=arrays[layer._mask_place],
        shared=None if shared is None else shared.operands(), lora=factors, adapter_ids=ids,
    )  # fmt: skip
    counts = found.tokens_per_expert, found.invalid_ids
    return found.output, *counts, found.ids, found.weights, found.logits, found.overflow


def adapted_call(
    layer: Any, arrays: list[Any], factors: LoRAFactors, adapter_ids: torch.Tensor
) -> tuple[Operator, tuple[Any, ...]]:
    """The operator for a layer with adapters, and its arguments."""
    lora, dropped = layer._modules["lora"], factors.seed is not None
    options = lora.options_of.get((layer._options, dropped)) or lora.encode(layer._options, dropped)
    known = dict(zip(layer._operator.names, arrays, strict=True))
    known |= {f"lora.{name}": one for name, one in named_fields(factors)} | {"adapter_ids": adapter_ids}
    return _OPERATOR, (*[known.get(name) for name in _OPERATOR.names], options)
