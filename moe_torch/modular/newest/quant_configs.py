"""The newest generation's functions that make configurations, with this library's `FusedMoEQuantConfig`."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from moe_core.base.checks import shown
from moe_core.errors import Unsupported
from moe_torch.modular.quant_config import FusedMoEQuantConfig

_SCALES, _BIASES, _ZERO_POINTS = ("w1_scale", "w2_scale"), ("w1_bias", "w2_bias"), ("w1_zp", "w2_zp")
_INPUT_SCALES, _FACTORS = ("a1_scale", "a2_scale"), ("a1_gscale", "a2_gscale")
_ALPHAS = ("g1_alphas", "g2_alphas")
_CONSTANTS = ("gemm1_alpha", "gemm1_beta", "gemm1_clamp_limit")
_FALSE = ("per_act_token_quant", "per_out_ch_quant", "is_scale_transposed")
_READ = (*_SCALES, *_BIASES, *_ZERO_POINTS, *_INPUT_SCALES, *_CONSTANTS, "per_act_token_quant", "block_shape")
_DEFAULTS = {"mx_alignment": 0, "is_scale_swizzled": True} | dict.fromkeys(_FALSE, False)


def _making(scheme: str | None, required: int, *names: str) -> Callable[..., FusedMoEQuantConfig]:
    kind, read = inspect.Parameter.POSITIONAL_OR_KEYWORD, (*_READ, *_ALPHAS) if scheme == "nvfp4_w4a16" else _READ
    parameters = [inspect.Parameter(name, kind) for name in names[:required]]
    parameters += [inspect.Parameter(name, kind, default=_DEFAULTS.get(name)) for name in names[required:]]
    signature = inspect.Signature(parameters)

    def make(*arguments: Any, **named: Any) -> FusedMoEQuantConfig:
        given = signature.bind(*arguments, **named).arguments
        per_channel = given.pop("per_out_ch_quant", None)
        if per_channel is not None and per_channel != given.get("per_act_token_quant", False):
            raise Unsupported(
                "per_out_ch_quant must be per_act_token_quant, as weights per channel go with activations per token, "
                f"got {per_channel} alone; pass both or none"
            )
        for name, value in given.items():
            if name not in read and value is not signature.parameters[name].default:
                raise Unsupported(f"{name} must not be set, as no scheme here has it, got {shown(value)}; leave it out")
        return FusedMoEQuantConfig(scheme, **{name: value for name, value in given.items() if name in read})

    make.__signature__ = signature  # type: ignore[attr-defined]
    return make


def _refusing(elements: str) -> Callable[..., FusedMoEQuantConfig]:
    def make(*arguments: Any, **named: Any) -> FusedMoEQuantConfig:
        raise Unsupported(f"no experts here run {elements}; quantise to a scheme of FusedMoEQuantConfig")

    return make


_INTEGERS = (*_SCALES, *_ZERO_POINTS, *_BIASES, "block_shape", *_FACTORS, "gemm1_clamp_limit", *_CONSTANTS[:2])
biased_moe_quant_config = _making(None, 2, *_BIASES, *_CONSTANTS)
fp8_w8a8_moe_quant_config = _making(
    "fp8_w8a8", 2, *_SCALES, *_INPUT_SCALES, *_BIASES, *_FALSE[:2], "block_shape", *_FACTORS, *_ALPHAS,
    _FALSE[2], *_CONSTANTS,
)  # fmt: skip
int8_w8a8_moe_quant_config = _making("int8_w8a8", 4, *_SCALES, *_INPUT_SCALES, *_BIASES, _FALSE[0])
int8_w8a16_moe_quant_config = _making("int8_w8a16", 2, *_INTEGERS)
int4_w4a16_moe_quant_config = _making("int4_w4a16", 2, *_INTEGERS)
mxfp4_w4a16_moe_quant_config = _making("mxfp4_w4a16", 2, *_SCALES, *_BIASES, *_CONSTANTS)
mxfp4_moe_quant_config = _making("mxfp4_w4a4", 2, *_SCALES)
fp8_w8a16_moe_quant_config = _making("fp8_w8a16", 2, *_SCALES, *_BIASES, "block_shape", *_CONSTANTS)
mxfp4_mxfp8_moe_quant_config = _making(
    "mxfp4_mxfp8",
    2,
    *_SCALES,
    *_INPUT_SCALES,
    *_BIASES,
    "block_shape",
    *_CONSTANTS,
    "mx_alignment",
    "is_scale_swizzled",
)
mxfp4_w4a8_moe_quant_config = _making(
    "mxfp4_w4a8", 2, *_SCALES, *_INPUT_SCALES, *_BIASES, "block_shape", "gemm1_clamp_limit"
)
nvfp4_w4a16_moe_quant_config = _making("nvfp4_w4a16", 4, *_ALPHAS, *_SCALES, *_CONSTANTS)
nvfp4_moe_quant_config = _refusing("nvfp4 activations")
int4_w4afp8_moe_quant_config = _refusing("int4 weights with e4m3 activations")
ocp_mx_moe_quant_config = _refusing("other OCP MX schemes than mxfp4_moe_quant_config makes")
