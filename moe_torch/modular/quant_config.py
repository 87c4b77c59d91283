"""`FusedMoEQuantConfig` with attributes that ported classes read."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch

from moe_core.errors import InvalidInput
from moe_core.modular import quant_config as core

#: A string where torch has no dtype.
_ELEMENTS = {
    "fp8_w8a8": torch.float8_e4m3fn,
    "int8_w8a8": torch.int8,
    "mxfp4_w4a4": "mxfp4",
    "mxfp8": "mxfp8",
    "mxfp4_mxfp8": "mxfp8",
    "mxfp4_w4a8": "fp8",
}


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
    def weight_quant_dtype(self) -> torch.dtype | str | None:
        """The dtype of quantised weights, or None."""
        element = (self.scheme or "").partition("_")[0]
        return {"fp8": torch.float8_e4m3fn, "int8": torch.int8, "": None}.get(element, element)

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

    use_nvfp4_w4a4 = is_scale_swizzled = is_scale_transposed = False
    mx_alignment = 0
    g1_alphas = g2_alphas = None
    ocp_mx_scheme = a1_gscale = a2_gscale = None

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


#: Fields of vLLM's moe_config for each constant.
_FROM_MOE_CONFIG = {
    "gemm1_alpha": ("activation_situ_beta", "swiglu_alpha"),
    "gemm1_beta": ("activation_situ_linear_beta", "swiglu_beta"),
    "gemm1_clamp_limit": ("swiglu_limit",),
}


def with_constants(config: FusedMoEQuantConfig, moe_config: Any) -> FusedMoEQuantConfig:
    """The configuration with the constants of moe_config's activation. Raises InvalidInput for two values of one."""
    found: dict[str, Any] = {}
    for name, fields in _FROM_MOE_CONFIG.items():
        values = {getattr(moe_config, field, None) for field in fields} | {getattr(config, name)}
        values.discard(None)
        if len(values) > 1:
            raise InvalidInput(f"{name} must be one number, got {values} in moe_config and quant_config; keep one")
        if values:
            found[name] = values.pop()
    changed = any(getattr(config, name) is None for name in found)
    return dataclasses.replace(config, **found) if changed else config


FUSED_MOE_UNQUANTIZED_CONFIG = FusedMoEQuantConfig()
#: Of older generations' constructors. The first one's names last.
FLAGS = (
    *(f"use_{scheme}" for scheme in core.FLAGGED_SCHEMES),
    *("per_act_token_quant", "block_shape", "per_channel_quant", "block_m"),
)


def config_of_flags(
    *, block_m: int | None = None, per_channel_quant: bool = False, **flags: Any
) -> FusedMoEQuantConfig:
    """`FusedMoEQuantConfig.make` with the first generation's flags too."""
    if block_m is not None:
        raise InvalidInput(f"block_m must be None, as tiles are chosen by plans, got {block_m}; pass a Tuning")
    if per_channel_quant:
        flags["per_act_token_quant"] = True
    return FusedMoEQuantConfig.of(FusedMoEQuantConfig.make(**flags))
