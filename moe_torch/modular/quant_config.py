"""`FusedMoEQuantConfig` with attributes that ported classes read."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch

from moe_core.modular import quant_config as core

#: A string where torch has no dtype.
_ELEMENTS = {"fp8_w8a8": torch.float8_e4m3fn, "int8_w8a8": torch.int8, "mxfp4_w4a4": "mxfp4"}


@dataclass(frozen=True, eq=False)
class FusedMoEQuantConfig(core.FusedMoEQuantConfig):
    __doc__ = core.FusedMoEQuantConfig.__doc__

    @classmethod
    def of(cls, config: core.FusedMoEQuantConfig) -> FusedMoEQuantConfig:
        if isinstance(config, cls):
            return config
        fields = [field.name for field in dataclasses.fields(config) if field.init]
        return cls(**{name: getattr(config, name) for name in fields})

    @property
    def quant_dtype(self) -> torch.dtype | str | None:
        """The dtype of quantised activations, or None."""
        return _ELEMENTS.get(self.scheme or "")

    @property
    def is_quantized(self) -> bool:
        return self.quant_dtype is not None

    @property
    def is_block_quantized(self) -> bool:
        return self.block_shape is not None

    @property
    def is_per_act_token(self) -> bool:
        return self.per_act_token_quant

    @property
    def per_out_ch_quant(self) -> bool:
        return self.per_act_token_quant

    @property
    def use_mxfp4_w4a16(self) -> bool:
        return self.scheme == "mxfp4_w4a16"

    use_nvfp4_w4a4 = is_scale_swizzled = is_scale_transposed = False
    mx_alignment = 0
    ocp_mx_scheme = a1_gscale = a2_gscale = gemm1_alpha = gemm1_beta = gemm1_clamp_limit = None

    def scale_shape(self, max_tokens: int, hidden_dim: int) -> tuple[int, int] | None:
        """Shape of the scales of activations `[max_tokens, hidden_dim]`, None without quantisation."""
        if not self.is_quantized:
            return None
        if self.block_shape is not None:
            return max_tokens, -(-hidden_dim // self.block_shape[1])
        return (max_tokens, 1) if self.per_act_token_quant else (1, 1)

    def batched_scale_shape(self, num_experts: int, max_tokens: int, hidden_dim: int) -> tuple[int, int, int] | None:
        shape = self.scale_shape(max_tokens, hidden_dim)
        return None if shape is None else (num_experts, *shape)


FUSED_MOE_UNQUANTIZED_CONFIG = FusedMoEQuantConfig()
