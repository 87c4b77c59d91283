"""Slots of adapters of a layer's experts, as functions of their arrays: factors by name, `scale` and `ranks`.

Both Flax layers hold the arrays. See `moe_core.layers.LoRA` and docs/user/lora.md.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from moe_core.checkpoint import ExpertAdapter
from moe_core.errors import InvalidInput, Unsupported
from moe_core.layers import MAXTEXT, LoRA, MoELayerSpec
from moe_core.specs.operands import LoRAFactors, MoEOperands
from moe_jax.bridge.calls import require_type

Slots = dict[str, Any]
#: Arrays without a gradient.
LORA_STATE = ("scale", "ranks")


def require_lora(lora: Any, spec: MoELayerSpec, num_layers: int | None) -> None:
    """Raise InvalidInput or Unsupported unless a layer can have these adapters."""
    require_type("lora", lora, LoRA)
    lora.require_layer(spec)
    if num_layers is not None:
        raise Unsupported(f"lora must be None for a stack of {num_layers} layers; make the layers one by one")


def refuse_cost(lora: Any) -> None:
    if lora is not None:
        raise Unsupported("cost counts no adapters, got a layer with some; ask a layer without, or explain")


def initial_adapters(lora: LoRA, spec: MoELayerSpec, key: jax.Array, dtype: Any) -> Slots:
    """Empty slots. The only one starts as a new adapter."""
    arrays: Slots = {name: jnp.zeros(shape, lora.dtype or dtype) for name, shape in lora.shapes(spec).items()}
    by_expert = lora.slots, spec.num_experts
    arrays |= {"scale": jnp.ones(by_expert, jnp.float32), "ranks": jnp.zeros(by_expert, jnp.int32)}
    return new_adapter(arrays, lora, 0, key) if lora.slots == 1 else arrays


def new_adapter(arrays: Slots, lora: LoRA, slot: int, key: jax.Array, rank: int | None = None) -> Slots:
    """The arrays with a new adapter, which adds nothing yet: A uniform as PEFT's (Kaiming, a = sqrt(5)), B zero."""
    slot, rank = lora.require_slot(slot), lora.require_rank(lora.rank if rank is None else rank)
    changed = dict(arrays)
    for name, one in arrays.items():
        if name in LORA_STATE:
            continue
        changed[name] = one.at[slot].set(0)
        if name[0] == "a":
            key, drawn = jax.random.split(key)
            shape, bound = (*one.shape[1:3], rank), one.shape[2] ** -0.5
            values = jax.random.uniform(drawn, shape, jnp.float32, -bound, bound)
            changed[name] = changed[name].at[slot, :, :, :rank].set(values.astype(one.dtype))
    return changed | _state(arrays, slot, lora.scale(rank), rank)


def load_adapter(
    arrays: Slots, lora: LoRA, spec: MoELayerSpec, slot: int, factors: LoRAFactors | ExpertAdapter
) -> Slots:
    """The arrays with an adapter in a slot. factors: see `moe_jax.nnx.AdapterSlots.load`."""
    if isinstance(factors, ExpertAdapter):
        layout = "interleaved" if spec.storage(MAXTEXT).gate_layout == "interleaved" else "halves"
        factors = LoRAFactors(**factors.with_gate_layout(layout).operands())
    require_type("factors", factors, LoRAFactors)
    slot, changed = lora.require_slot(slot), dict(arrays)
    names = [name for name in arrays if name not in LORA_STATE]
    rank = lora.rank_of(factors, {name: arrays[name].shape for name in names}, spec.num_experts)
    for name in names:
        one = getattr(factors, name)
        one = jnp.zeros((0, 0, 0)) if one is None else jnp.asarray(one)
        padded = [(0, size - given) for size, given in zip(arrays[name].shape[1:], one.shape, strict=True)]
        changed[name] = arrays[name].at[slot].set(jnp.pad(one.astype(arrays[name].dtype), padded))
    scale, ranks = factors.scale, factors.ranks
    return changed | _state(
        arrays, slot, lora.scale(rank) if scale is None else scale, rank if ranks is None else ranks
    )


def evict_adapter(arrays: Slots, lora: LoRA, slot: int) -> Slots:
    """The arrays with an empty slot. Tokens with its id have no adapter, and count in invalid_ids."""
    return arrays | {"ranks": arrays["ranks"].at[lora.require_slot(slot)].set(0)}


def export_adapter(arrays: Slots, lora: LoRA, slot: int) -> LoRAFactors:
    """An adapter's factors, as `load_adapter` takes them. Waits for the device, which holds the rank."""
    slot = lora.require_slot(slot)
    rank = int(np.asarray(arrays["ranks"][slot]).max())
    if not rank:
        raise InvalidInput(f"slot must hold an adapter, got the empty slot {slot}; load one first")
    cut = {name: one[slot] for name, one in arrays.items()}
    cut = {n: one if n in LORA_STATE else one[..., :rank] if n[0] == "a" else one[:, :rank] for n, one in cut.items()}
    return LoRAFactors(**cut)


def _state(arrays: Slots, slot: int, scale: Any, ranks: Any) -> Slots:
    values = {"scale": scale, "ranks": ranks}
    return {name: arrays[name].at[slot].set(jnp.asarray(one, arrays[name].dtype)) for name, one in values.items()}


@functools.partial(jax.tree_util.register_dataclass, data_fields=["factors", "ids"], meta_fields=["dropout"])
@dataclasses.dataclass(frozen=True)
class Adapters:
    """Adapters of the tokens of one call of a layer.

    Args:
        factors: with a seed where dropout is above 0.
        ids: int32 `[...]`, the slot of each token of x, -1 = none. None: slot 0 of one.
        dropout: probability of a zero in the input of the factors A.
    """

    factors: LoRAFactors
    ids: Any = None
    dropout: float = 0.0

    def of(self, x: Any, layer_index: Any) -> Adapters:
        """With ids for x `[..., D]`."""
        ids, shape = self.ids, x.shape[:-1]
        if layer_index is not None:
            raise Unsupported("lora must be None for a stack, got adapters and a layer_index; pass one layer's arrays")
        if ids is None:
            if self.factors.scale.shape[0] > 1:
                raise InvalidInput("adapter_ids must be given to a layer with several slots, got None; pass int32 ids")
            return dataclasses.replace(self, ids=jnp.zeros(shape, jnp.int32))
        got = f"{getattr(ids, 'dtype', type(ids).__name__)}{list(getattr(ids, 'shape', ()))}"
        if got != f"int32{list(shape)}":
            raise InvalidInput(
                f"adapter_ids must be int32{list(shape)} like the tokens of x, got {got}; pass one id per token"
            )
        return dataclasses.replace(self, ids=jnp.asarray(ids))

    def added_to(self, operands: MoEOperands) -> MoEOperands:
        factors = self.factors
        if operands.x.dtype == jnp.float64:  # which never mixes with other floats
            wide = [one.astype(jnp.float64) if one.dtype.kind != "i" else one for one in jax.tree.leaves(factors)]
            factors = jax.tree.unflatten(jax.tree.structure(factors), wide)
        return dataclasses.replace(operands, lora=factors, adapter_ids=self.ids.reshape(-1))


def adapters_of(arrays: Slots | None, lora: LoRA | None, ids: Any, key: jax.Array | None) -> Adapters | None:
    """Of a layer's slots, None without any. key: of the dropout, None in evaluation."""
    if arrays is None or lora is None:
        if ids is not None:
            raise InvalidInput("adapter_ids must be None for a layer without adapters, got ids; make it with lora")
        return None
    seed = None if key is None else jax.lax.bitcast_convert_type(jax.random.bits(key, (1,), jnp.uint32), jnp.int32)
    return Adapters(LoRAFactors(**arrays, seed=seed), ids, 0.0 if key is None else lora.dropout)
