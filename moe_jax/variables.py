"""Variables of the NNX layer, and its slots of adapters."""

from __future__ import annotations

from typing import Any

from flax import nnx

from moe_core.checkpoint import ExpertAdapter
from moe_core.errors import InvalidInput
from moe_core.layers import LoRA, MoELayerSpec
from moe_core.specs.operands import LoRAFactors
from moe_jax.layers import lora as slots
from moe_jax.layers import qwix


class CorrectionBias(nnx.Variable):
    """The router's fp32 bias `[E]`, without a gradient. `update_correction_bias` gives its value after a step."""


class TokenTable(nnx.Variable):
    """A router's table int32 `[V, K]`, token id -> experts, state without a gradient."""


class QuantizedArray(nnx.Variable):
    """One array of a quantised matrix, without a gradient."""


class LoRAState(nnx.Variable):
    """`scale` or `ranks` of slots of adapters, without a gradient."""


class ParameterGroup(nnx.Module):
    """Parameters below one name, such as `gate` or the quantised `wi_0`."""

    kernel: nnx.Param
    bias: nnx.Param
    correction_bias: CorrectionBias
    norm: nnx.Param
    table: TokenTable
    expert_scale: nnx.Param
    values: QuantizedArray
    scales: QuantizedArray
    zero_points: QuantizedArray
    tiled_values: QuantizedArray
    tiled_scales: QuantizedArray
    tiled_zero_points: QuantizedArray
    gate: ParameterGroup
    wi: ParameterGroup
    wi_0: ParameterGroup
    wi_1: ParameterGroup
    wo: ParameterGroup


class AdapterSlots(nnx.Module):
    """The slots of a layer's adapters: `nnx.LoRAParam`s a1, b1, a2, b2, and LoRAState scale and ranks, as in
    `LoRAFactors`. The shapes never change, so a jitted call that takes the layer is not traced again."""

    a1: nnx.LoRAParam
    b1: nnx.LoRAParam
    a2: nnx.LoRAParam
    b2: nnx.LoRAParam
    scale: LoRAState
    ranks: LoRAState

    def __init__(self, options: LoRA, spec: MoELayerSpec, dtype: Any, *, rngs: nnx.Rngs) -> None:
        self.options, self.spec = options, spec
        arrays = slots.initial_adapters(options, spec, rngs.params(), dtype)
        self.names = tuple(arrays)
        for name, one in arrays.items():
            setattr(self, name, (LoRAState if name in slots.LORA_STATE else nnx.LoRAParam)(one))
        self.rngs = rngs.dropout.fork() if options.dropout else None

    def arrays(self) -> dict[str, Any]:
        return {name: getattr(self, name).get_value() for name in self.names}

    def _hold(self, arrays: dict[str, Any]) -> None:
        for name, one in arrays.items():
            getattr(self, name).set_value(one)

    def reset(self, slot: int = 0, *, rngs: nnx.Rngs, rank: int | None = None) -> None:
        """Start a new adapter, which adds nothing yet: A as PEFT's, B zero. rank: None: that of the options."""
        self._hold(slots.new_adapter(self.arrays(), self.options, slot, rngs.params(), rank))

    def load(self, slot: int, factors: LoRAFactors | ExpertAdapter) -> None:
        """Copy an adapter into a slot, in place of what it holds.

        factors: a layer's adapter of `moe_core.checkpoint.read_adapter`, or arrays without the axis of slots: a1 `[E or
        1, D, r]`, b1 `[E or 1, r, N]`, a2, b2 likewise; scale fp32 `[E]`, None: by the options and r; ranks int32
        `[E]`, None: r. A pair that is None adds nothing.
        """
        self._hold(slots.load_adapter(self.arrays(), self.options, self.spec, slot, factors))

    def evict(self, slot: int) -> None:
        """Empty a slot. Tokens with its id have no adapter, and count in invalid_ids."""
        self._hold(slots.evict_adapter(self.arrays(), self.options, slot))

    def export(self, slot: int = 0) -> LoRAFactors:
        """An adapter's factors, as `load` takes them. Waits for the device, which holds the rank."""
        return slots.export_adapter(self.arrays(), self.options, slot)


class AdaptedLayer(nnx.Module):
    """A layer that may have adapters."""

    spec: MoELayerSpec
    deterministic: bool
    num_layers: int | None
    param_dtype: Any
    lora: AdapterSlots | None = None

    def add_lora(self, lora: LoRA, *, rngs: nnx.Rngs) -> AdapterSlots:
        """Give the experts adapters, as `layer.lora`. Train these alone with `nnx.DiffState(0, nnx.LoRAParam)`.

        With one slot its adapter starts as new. Several are empty until `layer.lora.load` or `reset`. Returns
        `layer.lora`. Raises InvalidInput for a layer with adapters, and Unsupported for one that takes none.
        """
        if self.lora is not None:
            raise InvalidInput("the layer must have no adapters yet, got some; load into their slots")
        slots.require_lora(lora, self.spec, self.num_layers)
        self.lora = AdapterSlots(lora, self.spec, self.param_dtype, rngs=rngs)
        return self.lora

    def _follow(self, rule: Any) -> None:
        """Take the adapters of a `qwix.LoraRule`, in the first call, that of `qwix.apply_lora_to_model`."""
        lora = qwix.lora_of_rule(rule)
        if lora is None:
            return
        if self.lora is not None:
            qwix.require_same_lora(self.lora.options, rule)
            return
        rngs = getattr(self, "qwix_rngs", None)
        if not isinstance(rngs, nnx.Rngs):
            raise InvalidInput(
                f"rngs must draw the new adapter of a layer, got {rngs}; call qwix.apply_lora_to_model(..., "
                "rngs=nnx.Rngs(0)), without skip_nnx_init"
            )
        factors = qwix.factors_of_rule(rule, self.spec, rngs.params, self.param_dtype)
        self.add_lora(lora, rngs=rngs).load(0, factors)

    def _adapters(self, ids: Any) -> slots.Adapters | None:
        lora = self.lora
        if lora is None:
            return slots.adapters_of(None, None, ids, None)
        key = None if lora.rngs is None or self.deterministic else lora.rngs()
        return slots.adapters_of(lora.arrays(), lora.options, ids, key)
