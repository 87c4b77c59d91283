"""gpt-oss with transformers' mxfp4 experts."""

from __future__ import annotations

from typing import Any

import torch

from moe_core.formats import MXFP4, QuantizedSpec, QuantizedTensor
from moe_core.specs import Activation, MoESpec
from moe_core.specs.operands import ExpertWeights
from moe_torch import ops
from moe_torch.layers.casts import autocast_device
from moe_torch.transformers.experts import given_routing

_GROUP = 32


class Mxfp4Experts(torch.nn.Module):
    """The experts of one gpt-oss layer, replacing transformers' `Mxfp4GptOssExperts`.

    Parameters are frozen, with the names, shapes and bytes of the published checkpoint: `<matrix>_blocks` uint8 `[E, N,
    D / 32, 16]`, `<matrix>_scales` uint8 `[E, N, D / 32]`, `<matrix>_bias` `[E, N]` for gate_up_proj and down_proj.
    Gradients reach hidden states and router.
    """

    #: transformers' block then passes ids and weights.
    _is_hooked = True

    def __init__(self, experts: Any) -> None:
        super().__init__()
        self.alpha, self.limit = experts.alpha, experts.limit
        for name in ("gate_up_proj", "down_proj"):
            weight, scales = getattr(experts, name), getattr(experts, f"{name}_precision_config").weight_scale
            blocks, scales = _rows(weight), _rows(scales)
            self._hold(f"{name}_blocks", blocks.reshape(*scales.shape, _GROUP // 2))
            self._hold(f"{name}_scales", scales)
            self._hold(f"{name}_bias", getattr(experts, f"{name}_bias").detach())

    def _hold(self, name: str, tensor: torch.Tensor) -> None:
        self.register_parameter(name, torch.nn.Parameter(tensor, requires_grad=False))

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Output `[T, D]` in the dtype of hidden_states `[T, D]`. Ids outside [0, E) are no expert."""
        options: Any = self.moebius_options
        device = autocast_device(hidden_states)
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden_states.dtype
        activation = Activation("swiglu_oai", gate_layout="interleaved", alpha=self.alpha, limit=self.limit)
        spec = MoESpec(activation, weight_layout="out_in", tuning=options.tuning, allow_tf32=options.allow_tf32)
        weights = ExpertWeights(
            self._matrix("gate_up_proj"),
            self._matrix("down_proj"),
            gate_up_bias=self.gate_up_proj_bias.to(dtype),
            down_bias=self.down_proj_bias.to(dtype),
        )
        routing = given_routing(top_k_index, top_k_weights)
        return ops.moe(hidden_states.to(dtype).contiguous(), weights, routing, spec).output

    def _matrix(self, name: str) -> QuantizedTensor:
        blocks, scales = getattr(self, f"{name}_blocks"), getattr(self, f"{name}_scales")
        return QuantizedTensor(QuantizedSpec(MXFP4, "out_in"), blocks.flatten(-2), scales)


def _rows(tensor: Any) -> torch.Tensor:
    """The bytes of a triton_kernels tensor as in the checkpoint. Padded layouts trim while they unswizzle."""
    storage = tensor.storage
    return storage.layout.unswizzle_data(storage.data).transpose(-1, -2).contiguous()
