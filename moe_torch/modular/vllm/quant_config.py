"""vLLM's quantisation, read into ours."""

from __future__ import annotations

import math
from typing import Any

import torch

from moe_core.errors import InvalidInput, Unsupported
from moe_core.modular.quant_config import CONSTANTS
from moe_torch.modular.quant_config import FusedMoEQuantConfig

_FP8 = torch.float8_e4m3fn
#: Dtypes of activations and weights -> scheme.
_SCHEMES: dict[tuple[Any, Any], str | None] = {
    (None, None): None,
    (_FP8, _FP8): "fp8_w8a8",
    (torch.int8, torch.int8): "int8_w8a8",
    (None, torch.int8): "int8_w8a16",
    (None, "int4"): "int4_w4a16",
    ("mxfp4", "mxfp4"): "mxfp4_w4a4",
    (None, "mxfp4"): "mxfp4_w4a16",
    (None, _FP8): "fp8_w8a16",
    ("mxfp8", "mxfp4"): "mxfp4_mxfp8",
    ("fp8", "mxfp4"): "mxfp4_w4a8",
    ("mxfp8", "mxfp8"): "mxfp8",
    (None, "nvfp4"): "nvfp4_w4a16",
}
READ = tuple(scheme for scheme in _SCHEMES.values() if scheme)
_W8A8, _GROUPED = ("fp8_w8a8", "int8_w8a8"), ("int8_w8a16", "int4_w4a16")
#: Fields that no scheme above has, and those of nvfp4 alone.
_UNREAD, _ALPHAS = ("a1_gscale", "a2_gscale", "is_scale_transposed", "mx_alignment"), ("g1_alphas", "g2_alphas")
#: vLLM's block_shape of mxfp8.
_MXFP8_BLOCK = (1, 32)


def quant_config_of(quant_config: Any) -> FusedMoEQuantConfig:
    """Read vLLM's `FusedMoEQuantConfig`, biases cast to fp32. Raises Unsupported for other dtypes, for scales of
    weights per channel with activations per tensor and the reverse, and for fields that no scheme here has.
    """
    parts: list[Any] = [getattr(quant_config, f"_{name}", None) for name in ("a1", "a2", "w1", "w2")]
    if None in parts:
        raise InvalidInput(
            f"quant_config must be vLLM's FusedMoEQuantConfig, got {type(quant_config).__name__}; make it with vLLM's "
            "functions"
        )
    a1, a2, w1, w2 = parts
    if (a1.dtype, w1.dtype) not in _SCHEMES or (a2.dtype, w2.dtype) != (a1.dtype, w1.dtype):
        known = ", ".join(f"{pair[0]} and {pair[1]}" for pair in _SCHEMES)
        raise Unsupported(
            f"quant_config must have one of these dtypes of activations and weights for both products: {known}, got "
            f"{a1.dtype} and {w1.dtype}, {a2.dtype} and {w2.dtype}; choose experts of vLLM"
        )
    scheme = _SCHEMES[a1.dtype, w1.dtype]
    for name in (*_UNREAD, *(() if scheme == "nvfp4_w4a16" else _ALPHAS)):
        value = getattr(quant_config, name)
        if isinstance(value, torch.Tensor) or value:
            raise Unsupported(
                f"quant_config.{name} must not be set, as {scheme} here does not have it, got a value; leave it out"
            )
    block, per_token = _block(scheme, w1.shape), scheme in _W8A8 and quant_config.per_act_token_quant
    if scheme in _W8A8 and block is None:
        _require_granularity("w1_scale", w1.scale, per_token)
        _require_granularity("w2_scale", w2.scale, per_token)
    arrays = {"w1_scale": w1.scale, "w2_scale": w2.scale, "w1_zp": w1.zp, "w2_zp": w2.zp}
    if scheme == "nvfp4_w4a16":
        arrays |= {name: getattr(quant_config, name) for name in _ALPHAS}
    for name, scale in (("a1_scale", a1.scale), ("a2_scale", a2.scale)):
        per_tensor = scheme == "mxfp4_w4a8" or (scheme in _W8A8 and block is None and not per_token)
        if scale is not None and not (per_tensor and math.prod(scale.shape) == 1):
            raise Unsupported(
                f"quant_config.{name} must be None, or one number for activations with a scale per tensor, got "
                f"{list(scale.shape)}; leave it out, or pass the largest"
            )
        arrays[name] = scale
    for name, bias in (("w1_bias", w1.bias), ("w2_bias", w2.bias)):
        arrays[name] = None if bias is None else bias.to(torch.float32)
    constants = {name: getattr(quant_config, name) for name in CONSTANTS}
    return FusedMoEQuantConfig(scheme, per_token, block, **arrays, **constants)


def _block(scheme: str | None, shape: Any) -> tuple[int, int] | None:
    """Rows and columns of a group of weights. None: a scale per tensor or per row."""
    if scheme == "mxfp8" and shape is not None and tuple(shape) != _MXFP8_BLOCK:
        raise Unsupported(
            f"quant_config.block_shape must be {list(_MXFP8_BLOCK)} for mxfp8, got {list(shape)}; quantise so"
        )
    if shape is None or shape[1] == -1 or scheme not in (*_W8A8, *_GROUPED, "fp8_w8a16"):
        return None
    if scheme in _GROUPED:
        return 0, int(shape[1])
    return None if shape[0] == -1 else (int(shape[0]), int(shape[1]))


def _require_granularity(name: str, scale: Any, per_token: bool) -> None:
    per_tensor = scale.numel() == scale.shape[0]
    if per_tensor == per_token:
        got = ("tensor", "token") if per_tensor else ("output channel", "tensor")
        raise Unsupported(
            f"quant_config.{name} must be per output channel with activations per token, and per tensor with "
            f"activations per tensor, got one per {got[0]} with activations per {got[1]}; change one of them"
        )
