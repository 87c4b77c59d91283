"""The formats of a configuration's weights and activations, and the keys that ask for them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from moe_core import formats
from moe_core.base.arrays import ArraySpec
from moe_core.errors import InvalidInput
from moe_core.formats import Format
from moe_core.modular.quant_config import SCHEMES, FusedMoEQuantConfig

_INT8_TENSOR = Format("int8_tensor", "int8", None, None)
#: e2m1 in groups of 16. Its fp32 scales are the stored e4m3 ones times an expert's global scale.
NVFP4 = Format("nvfp4", "e2m1", 1, 16)


def _grouped(element: str, name: str, rows: int, columns: int, known: Format) -> Format:
    if (known.group_rows, known.group_columns) == (rows, columns):
        return known
    return Format(f"{name}_{rows}x{columns}", element, rows, columns)


def weight_quantization(config: FusedMoEQuantConfig) -> Format | None:
    """The format of w1 and w2, or None.

    fp8_w8a8, int8_w8a8: per block of block_shape, per output channel with per_act_token_quant, else per tensor.
    fp8_w8a16: the same, per output channel if w1_scale has a scale for each. int8_w8a16, int4_w4a16: unsigned codes in
    groups of block_shape[1] along the input axis (None: one group), perhaps with zero points. mxfp4, mxfp8: groups of
    32. nvfp4: groups of 16.
    """
    block, scheme = config.block_shape, config.scheme
    if scheme in ("fp8_w8a8", "fp8_w8a16"):
        if block is not None:
            return _grouped("e4m3", "fp8_block", *block, known=formats.FP8_BLOCK)
        has_channels = math.prod(getattr(config.w1_scale, "shape", ())[1:]) > 1
        by_channel = config.per_act_token_quant or (scheme == "fp8_w8a16" and has_channels)
        return formats.FP8_CHANNEL if by_channel else formats.FP8_TENSOR
    if scheme == "int8_w8a8":
        if block is not None:
            return Format(f"int8_block_{block[0]}x{block[1]}", "int8", *block)
        return formats.INT8_CHANNEL if config.per_act_token_quant else _INT8_TENSOR
    if scheme in ("int8_w8a16", "int4_w4a16"):
        columns, zero_points = None if block is None else block[1], config.w1_zp is not None
        grouped = formats.int8_grouped if scheme == "int8_w8a16" else formats.int4_grouped
        return grouped(columns, zero_points)
    if scheme == "nvfp4_w4a16":
        return NVFP4
    if scheme == "mxfp8":
        return formats.MXFP8
    return None if scheme is None else formats.MXFP4


def activation_quantization(config: FusedMoEQuantConfig) -> Format | None:
    if not config.quantizes_activations:
        return None
    # vLLM's quantiser of mxfp8 keeps the largest of a group in range.
    known = {"mxfp4_w4a4": formats.MXFP4, "mxfp4_mxfp8": formats.MXFP8_CEIL, "mxfp8": formats.MXFP8_CEIL}
    if config.scheme in known:
        return known[config.scheme]
    element, tensor, token = ("e4m3", formats.FP8_TENSOR, formats.FP8_TOKEN)
    if config.scheme == "int8_w8a8":
        element, tensor, token = ("int8", _INT8_TENSOR, formats.INT8_TOKEN)
    if config.block_shape is not None:
        columns = config.block_shape[1]
        if element == "e4m3":
            return _grouped(element, "fp8_group", 1, columns, formats.FP8_GROUP)
        return Format(f"int8_group_1x{columns}", element, 1, columns)
    return token if config.per_act_token_quant else tensor


@dataclass(frozen=True)
class ScaleDesc:
    """static: known before the call. group: (rows, columns) that share a scale, -1 for the whole axis."""

    dtype: Any
    static: bool
    group_shape: tuple[int, int]


@dataclass(frozen=True)
class QuantKey:
    """One side of a scheme: dtype of the elements (`e4m3`, `int8`, `uint8`, `uint4`, `e2m1`) and their scales. scale2:
    of the scales. symmetric: no zero points. dtypes by name, or a framework's."""

    dtype: Any
    scale: ScaleDesc
    scale2: ScaleDesc | None = None
    symmetric: bool = True


_E8M0, _FP8 = "uint8", "float8_e4m3fn"
_GLOBAL = ScaleDesc("float32", True, (-1, -1))
_ELEMENTS = {
    "float8_e4m3fn": "e4m3",
    "float4_e2m1fn_x2": "e2m1",
    "mxfp4": "e2m1",
    "mxfp8": "e4m3",
    "nvfp4": "e2m1",
    "int4": "uint4",
    "uint4b8": "uint4",
    "uint8b128": "uint8",
}


def quant_key(format: Format, static: bool) -> QuantKey:
    group = tuple(-1 if extent is None else extent for extent in (format.group_rows, format.group_columns))
    if format == NVFP4:
        return QuantKey(format.element, ScaleDesc(_FP8, static, (1, 16)), _GLOBAL)
    scale = ScaleDesc(format.scale_dtypes[0], static, (group[0], group[1]))
    return QuantKey(format.element, scale, symmetric=not format.zero_points)


def _name(dtype: Any) -> str:
    name = dtype if isinstance(dtype, str) else str(getattr(dtype, "name", dtype))
    return name.removeprefix("torch.")


def canonical_key(key: Any) -> QuantKey:
    """A key of this or another library, with names for dtypes."""
    scales = []
    for desc in (key.scale, getattr(key, "scale2", None)):
        if desc is not None:
            rows, columns = desc.group_shape
            # vLLM's name for one scale per output channel.
            group = (1, -1) if (rows, columns) == (-1, 1) else (int(rows), int(columns))
            name = _name(desc.dtype)
            desc = ScaleDesc(_E8M0 if name in ("float8_e8m0fnu", "e8m0") else name, bool(desc.static), group)
        scales.append(desc)
    element, scale = _name(key.dtype), scales[0]
    element = _ELEMENTS.get(element, element)
    if element == "uint8" and scale.dtype in (_E8M0, _FP8):
        element = "e2m1"
    if element in ("uint4", "uint8") and scale.dtype in ("bfloat16", "float16"):
        scale = ScaleDesc("float32", scale.static, scale.group_shape)
    return QuantKey(element, scale, scales[1], key.symmetric)


def has_scheme(weight_key: Any, activation_key: Any, schemes: Sequence[str] = SCHEMES) -> bool:
    """True if some configuration has these keys. None: not quantised."""
    if weight_key is None:
        return activation_key is None
    weights = canonical_key(weight_key)
    return (weights, None if activation_key is None else canonical_key(activation_key)) in _keys_like(weights, schemes)


def _keys_like(weights: QuantKey, schemes: Sequence[str]) -> Iterator[tuple[QuantKey | None, QuantKey | None]]:
    """Keys of every configuration, in blocks like a key of weights."""
    some, group = ArraySpec((2, 2, 1), "float32"), weights.scale.group_shape
    blocks = (None, group) if min(group) > 0 else (None,)
    arrays: tuple[dict[str, Any], ...] = ({}, {"w1_zp": some}, {"w1_scale": some})
    for scheme, block, token, given in itertools.product(schemes, blocks, (False, True), arrays):
        try:
            config = FusedMoEQuantConfig(scheme, token, block, **given)
            yield keys_of(config, static=False)
            yield keys_of(config, static=True)
        except InvalidInput:
            continue
    if "int8_w8a16" in schemes:
        # Signed weights.
        yield quant_key(formats.INT8_CHANNEL, static=True), None


def keys_of(config: FusedMoEQuantConfig, static: bool) -> tuple[QuantKey | None, QuantKey | None]:
    """(weight key, activation key). static: activations have one given scale. Without effect on finer ones."""
    weights, activations = weight_quantization(config), activation_quantization(config)
    per_tensor = activations is not None and activations.group_rows is None
    return (
        None if weights is None else quant_key(weights, static=True),
        None if activations is None else quant_key(activations, static and per_tensor),
    )
