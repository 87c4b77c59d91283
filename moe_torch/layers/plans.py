"""Plans and costs of a layer, without running it."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from moe_core.base.arrays import ArraySpec
from moe_core.base.dtypes import canonical
from moe_core.errors import InvalidInput
from moe_core.layers import HUGGING_FACE, LayerCost, layer_cost
from moe_core.layers.costs import count_tokens
from moe_core.layers.plans import explain_layer, layer_plans
from moe_core.plan import Explanation
from moe_core.runtime.warmup import WarmupReport, token_counts, warmup
from moe_core.specs.operands import MoEOperands, map_arrays
from moe_torch.bridge.arrays import array_spec, target_of_device
from moe_torch.bridge.operator import Operator
from moe_torch.bridge.options import require_instance
from moe_torch.layers.lora.slots import LoRA, LoRAParameters
from moe_torch.layers.parameters import PrepackedExperts, own_part
from moe_torch.operators.requests import operands_of


class PlannedLayer(PrepackedExperts):
    _operator: Operator
    _options: str
    _like_place: int
    _arrays: Callable[[Mapping[str, Any]], list[Any]]

    def explain(self, tokens: int | Sequence[int], *, training: bool = False) -> Explanation:
        """Explain a forward of so many tokens, or of an x of that shape: buffers, kernels, decisions, order of sums.

        training: a training step with gradients of x and every parameter. Adapters are explained without dropout. Runs
        nothing. `save` of the result writes the plans for `moebius-view`.
        """
        tokens = count_tokens(tokens, self.spec.d_model)
        target = target_of_device(self._parts()["router"].weight.device)
        return explain_layer(self._operands_for(tokens), self.spec, HUGGING_FACE, target, training)

    def cost(self, tokens: int | Sequence[int], *, training: bool = False) -> LayerCost:
        """Floating-point operations and bytes of a forward, see `explain` and `moe_core.layers.layer_cost`."""
        dtype = canonical(self._arrays(self._parts())[self._like_place].dtype)
        return layer_cost(self.spec, HUGGING_FACE, tokens, dtype, training=training)

    def warmup(self, tokens: Sequence[int], *, training: bool = False) -> WarmupReport:
        """Compile and load the kernels of forwards of so many tokens, ahead of the first call. Runs nothing.

        tokens: the numbers to come, or a few from small to large. training: also steps that train every parameter.
        Returns the kernels with the seconds each took; none on a CPU.
        """
        device = self._parts()["router"].weight.device
        arguments = (self.spec, HUGGING_FACE, target_of_device(device), training)
        kinds = [layer_plans(self._operands_for(count), *arguments) for count in token_counts(tokens)]
        return warmup([plan for plans in kinds for plan in itertools.chain(*plans)], (device.index or 0,))

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "lora":
            targets = () if value is None else value.options.targets
            for part in ("router", "shared_experts"):
                if (one := self._modules.get(part)) is not None:
                    own_part(one, part).adapted = any(target.startswith(part.split("_")[0]) for target in targets)

    def __delattr__(self, name: str) -> None:
        setattr(self, name, None) if name == "lora" else super().__delattr__(name)

    def add_lora(self, lora: LoRA) -> LoRAParameters:
        """Give the layer adapters, as `layer.lora`, and freeze the layer's other parameters, as PEFT does.

        With one slot its adapter starts as new. Several are empty until `layer.lora.load` or `reset`. Returns
        `layer.lora`. Raises InvalidInput for a layer with adapters, and Unsupported for one that takes none.
        """
        require_instance("lora", lora, LoRA)
        if self.lora is not None:
            raise InvalidInput("the layer must have no adapters yet, got some; load into their slots")
        lora.require_layer(self.spec)
        self.requires_grad_(False)
        gate_layout = "interleaved" if self.storage.gate_layout == "interleaved" else "halves"
        like = self._arrays(self._parts())[self._like_place]
        self.lora = made = LoRAParameters(lora, self.spec, like, gate_layout).train(self.training)
        self._in_stages = self._in_stages or lora.beyond_experts
        exchange = self._parts()["experts"].exchange
        if exchange is not None:
            made.share_out(exchange, self.storage.gate_layout if self.spec.experts.activation.gated else None)
        for dropped in (False, True):
            made.encode(self._options, dropped)
        made.reset_parameters()
        return made

    def extra_repr(self) -> str:
        spec = self.spec
        parts = [f"d_model={spec.d_model}, d_ff={spec.d_ff}, num_experts={spec.num_experts}, top_k={spec.top_k}"]
        parts.append(f"scoring={spec.router.scoring}, activation={spec.experts.activation.name}")
        parts.append(f"storage={self.storage.weight_layout}/{self.storage.gate_layout}")
        if spec.shared_experts is not None:
            parts.append(f"shared_d_ff={spec.shared_experts.d_ff}")
        if spec.experts.scheme is not None:
            parts.append(f"scheme={spec.experts.scheme}{', prepacked' if self.is_prepacked else ''}")
        if spec.capacity_factor is not None:
            parts.append(f"capacity_factor={spec.capacity_factor:g}")
        if spec.token_rounding is not None:
            parts.append(f"token_rounding={spec.token_rounding.mode} {spec.token_rounding.tile}")
        return ", ".join(parts)

    def _operands_for(self, num_tokens: int) -> MoEOperands:
        arrays = self._arrays(self._parts())
        dtype = arrays[self._like_place].dtype
        arrays[0] = torch.empty(num_tokens, self.spec.d_model, dtype=dtype, device="meta")
        lora: Any = self.lora
        operands = operands_of(self._operator, (*arrays, self._options))
        if lora is None:
            return operands
        factors = map_arrays(lora.factors(), lambda one: array_spec("lora", one))
        return dataclasses.replace(operands, lora=factors, adapter_ids=ArraySpec((num_tokens,), "int32"))
