"""Weights as ported code holds them."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import torch

from moe_core.errors import InvalidInput, Unsupported
from moe_core.modular.quant_config import SCALES_OF_PRECISION
from moe_torch.modular.quant_config import FusedMoEQuantConfig

#: Fields of precision objects that belong to a call.
_OF_CALLS = (
    *("act_scale", "out_scale", "out_dtype"),
    *("a_mx_scale", "c_mx_scale", "a_mx_tensor_scale", "b_mx_tensor_scale"),
)


class Stored(NamedTuple):
    """Plain weights, their configuration and layout."""

    w1: torch.Tensor
    w2: torch.Tensor
    config: FusedMoEQuantConfig
    weight_layout: str


def is_plain(w1: Any, w2: Any, config: FusedMoEQuantConfig) -> bool:
    tensors = isinstance(w1, torch.Tensor) and isinstance(w2, torch.Tensor)
    return tensors and not config.is_wrapped and w1.stride(-1) == 1 == w2.stride(-1)


def as_stored(w1: Any, w2: Any, config: FusedMoEQuantConfig, weight_layout: str) -> Stored:
    """Return w1 and w2 as the ops take them, unchanged if they are plain.

    A `triton_kernels` Tensor becomes its memory, a PrecisionConfig its weight_scale. Weights that are contiguous along
    the last axis but one (`.mT` views, results of `downcast_to_mxfp`) are read in the other layout. Only scales in
    another order than their weights are copied. Raises InvalidInput if only one of w1 and w2 is such a view, and
    Unsupported for swizzled memory.
    """
    w1, w2 = memory_of("w1", w1), memory_of("w2", w2)
    if config.is_wrapped:
        config = _with_plain_scales(config)
    if w1.stride(-1) == w2.stride(-1) == 1:
        return Stored(w1, w2, config, weight_layout)
    transposed = [weight.ndim == 3 and weight.stride(-1) != 1 and weight.stride(-2) == 1 for weight in (w1, w2)]
    if not any(transposed):
        return Stored(w1, w2, config, weight_layout)
    if not all(transposed):
        raise InvalidInput(
            f"w1 and w2 must lie in memory alike, got strides {tuple(w1.stride())} and {tuple(w2.stride())}; call "
            "contiguous() on the transposed one"
        )
    names = ("w1_scale", "w2_scale", "w1_zp", "w2_zp")
    views = {name: getattr(config, name) for name in names}
    views = {name: array.mT.contiguous() for name, array in views.items() if array is not None and array.ndim == 3}
    config = dataclasses.replace(config, **views) if views else config
    return Stored(w1.mT, w2.mT, config, "in_out" if weight_layout == "out_in" else "out_in")


def memory_of(name: str, array: Any) -> torch.Tensor:
    """The tensor inside a wrapper with `storage.data` and `storage.layout`."""
    if isinstance(array, torch.Tensor):
        return array
    storage: Any = getattr(array, "storage", None)
    if not isinstance(getattr(storage, "data", None), torch.Tensor):
        raise InvalidInput(
            f"{name} must be a torch.Tensor or a Tensor around one, got {type(array).__name__}; pass one"
        )
    if getattr(storage.layout, "name", None) is not None:
        raise Unsupported(
            f"{name} must be in plain memory, got {type(storage.layout).__name__}, which no kernel of ours reads; "
            "convert it with convert_layout(..., StridedLayout) or from_upstream"
        )
    return storage.data


def _with_plain_scales(config: FusedMoEQuantConfig) -> FusedMoEQuantConfig:
    plain: dict[str, Any] = {"w1_precision": None, "w2_precision": None}
    for number in (1, 2):
        scale, precision = getattr(config, f"w{number}_scale"), getattr(config, f"w{number}_precision")
        if precision is not None:
            if scale is not None:
                raise InvalidInput(
                    f"w{number}_scale must be None beside w{number}_precision, which has it, got both; keep one"
                )
            scale = _scale_of(f"w{number}_precision", precision)
        if scale is not None:
            scale = memory_of(f"w{number}_scale", scale)
            # e8m0 bytes may also have torch's own dtype.
            plain[f"w{number}_scale"] = scale.view(torch.uint8) if scale.dtype == torch.float8_e8m0fnu else scale
    return dataclasses.replace(config, **plain)


def _scale_of(name: str, precision: Any) -> Any:
    flex = getattr(precision, "flex_ctx", None)
    said = [getattr(getattr(flex, side, None), "scale", None) for side in ("lhs_data", "rhs_data")]
    said += [getattr(precision, field, None) for field in _OF_CALLS]
    if any(value is not None for value in said):
        raise Unsupported(
            f"{name} must have a weight_scale or b_mx_scale alone, got flex scales or one of {', '.join(_OF_CALLS)}; "
            "state the quantisation in the FusedMoEQuantConfig"
        )
    return next(getattr(precision, field) for field in SCALES_OF_PRECISION if hasattr(precision, field))
