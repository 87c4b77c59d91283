"""Read a quantization_config."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moe_core.checkpoint.packing import Packing, mxfp4_packing, plain_packing, words_packing
from moe_core.errors import InvalidInput, Unsupported
from moe_core.formats import MXFP4, MXFP8, Format, Scheme
from moe_core.formats.fp8 import FP8_BLOCK, FP8_CHANNEL, FP8_GROUP, FP8_TENSOR, FP8_TOKEN
from moe_core.formats.integer import INT8_CHANNEL, INT8_TOKEN, int4_grouped, int8_grouped

METHODS = ("mxfp4", "fp8", "compressed-tensors")
_BLOCK = [128, 128]
#: (type, num_bits, strategy) of activations.
_ACTIVATIONS: dict[tuple[Any, Any, Any], Format] = {
    ("int", 8, "token"): INT8_TOKEN,
    ("float", 8, "token"): FP8_TOKEN,
    ("float", 8, "tensor"): FP8_TENSOR,
    ("float", 8, "group"): FP8_GROUP,
}


def read_quantization(settings: Any, family: str) -> Packing | None:
    """The packing that a quantization_config describes, or None.

    family: the model_type. Raises InvalidInput for malformed settings, Unsupported for unreadable ones.
    """
    if not settings:
        return None
    if not isinstance(settings, Mapping):
        raise InvalidInput(
            f"quantization_config in config.json must be an object, got {settings!r}; restore the original config.json"
        )
    method = settings.get("quant_method")
    if method == "mxfp4":
        if family != "gpt_oss":
            raise _unsupported(f"quant_method mxfp4 for {family}", "only gpt_oss is published in it")
        return mxfp4_packing(Scheme("mxfp4_w4a16", MXFP4), settings)
    if method == "fp8":
        if settings.get("weight_block_size") != _BLOCK:
            raise _unsupported(f"weight_block_size {settings.get('weight_block_size')!r}", f"it must be {_BLOCK}")
        for key, wanted in (("fmt", "e4m3"), ("activation_scheme", "dynamic"), ("expert_dtype", "fp8")):
            if settings.get(key, wanted) != wanted:
                raise _unsupported(f"{key} {settings[key]!r}", f"it must be {wanted!r}")
        return plain_packing(Scheme("fp8_block", FP8_BLOCK, FP8_GROUP), settings, ".weight_scale_inv")
    if method == "compressed-tensors":
        return _compressed_tensors(settings)
    raise _unsupported(f"quant_method {method!r}", f"the methods that can be read are {', '.join(METHODS)}")


def _unsupported(what: str, why: str) -> Unsupported:
    return Unsupported(f"quantization_config in config.json has {what}; {why}: dequantise to bfloat16 first")


def _compressed_tensors(settings: Mapping[str, Any]) -> Packing:
    groups = settings.get("config_groups")
    if not isinstance(groups, Mapping) or not all(isinstance(group, Mapping) for group in groups.values()):
        raise InvalidInput(
            f"config_groups in config.json must map names to objects, got {groups!r}; restore the original config.json"
        )
    names, default = ("weights", "input_activations"), settings.get("format")
    kinds = [(group.get("format") or default, *map(group.get, names)) for group in groups.values()]
    if not kinds or any(group != kinds[0] for group in kinds):
        raise _unsupported(f"{len(kinds)} groups of different kinds", "every matrix must be quantised alike")
    kind, weights, activations = kinds[0]
    # Only text names a format, and a list is no key.
    kind = str(kind)
    if not isinstance(weights, Mapping):
        raise _unsupported("a group without weights", "the weights must be quantised")
    if weights.get("actorder") in ("group", "dynamic", True):
        raise _unsupported("actorder by group", "permuted columns (weight_g_idx) cannot be read")
    format = _format(weights)
    scheme = Scheme(f"{format.name}_compressed", format, _activations(activations, format))
    stored = {"pack-quantized": ("uint4", "uint8"), "int-quantized": ("int8",), "float-quantized": ("e4m3",)}
    stored |= {"naive-quantized": ("e4m3",), "mxfp4-pack-quantized": ("e2m1",), "mxfp8-quantized": ("e4m3",)}
    element = "int8" if kind == "int-quantized" and format.element == "uint8" else format.element
    if kind not in stored or element not in stored[kind]:
        raise _unsupported(f"format {kind!r} of {format.name}", f"the formats that can be read are {', '.join(stored)}")
    if (kind == "mxfp8-quantized") != (format == MXFP8):
        raise _unsupported(f"format {kind!r} of {format.name}", "mxfp8 and e8m0 scales go together")
    if kind == "pack-quantized":
        return words_packing(scheme, settings)
    if element == "int8":
        if format.group_columns is not None or format.zero_points:
            raise _unsupported(f"format {kind!r} of {format.name}", "int8 values must have one scale per channel")
        return plain_packing(Scheme("int8_w8a8", INT8_CHANNEL, scheme.activations), settings)
    return plain_packing(scheme, settings)


def _format(weights: Mapping[str, Any]) -> Format:
    kind, bits = weights.get("type", "int"), weights.get("num_bits", 8)
    strategy, group_size = weights.get("strategy"), weights.get("group_size")
    zero_points = weights.get("symmetric", True) is False
    if strategy == "channel" or group_size == -1:
        strategy, group_size = "channel", None
    elif strategy is None and group_size is not None:
        strategy = "group"
    if kind == "int" and bits in (4, 8) and strategy in ("group", "channel"):
        return (int4_grouped if bits == 4 else int8_grouped)(group_size, zero_points)
    if kind == "float" and not zero_points:
        if strategy == "group" and group_size == MXFP4.group_columns and bits in (4, 8):
            return MXFP4 if bits == 4 else MXFP8
        if bits == 8 and strategy in ("channel", "tensor"):
            return FP8_CHANNEL if strategy == "channel" else FP8_TENSOR
        if bits == 8 and strategy == "block" and weights.get("block_structure") == _BLOCK:
            return FP8_BLOCK
    raise _unsupported(
        f"weights of {bits} bits {kind}, strategy {strategy!r}, group_size {group_size!r}, symmetric {not zero_points}",
        "there is no such format",
    )


def _activations(arguments: Any, weights: Format) -> Format | None:
    if arguments is None:
        return None
    if not isinstance(arguments, Mapping):
        raise InvalidInput(
            f"input_activations in config.json must be an object, got {arguments!r}; restore the original config.json"
        )
    kind, bits, strategy = (arguments.get(key) for key in ("type", "num_bits", "strategy"))
    if arguments.get("dynamic") is not True:
        raise _unsupported("input_activations with static scales", "only dynamic ones can be read")
    if strategy == "group" and arguments.get("group_size") == MXFP4.group_columns:
        format = (MXFP4 if bits == 4 else MXFP8) if kind == "float" and bits in (4, 8) else None
    else:
        format = next((known for key, known in _ACTIVATIONS.items() if key == (kind, bits, strategy)), None)
    if format is None or format.group_columns not in (None, weights.group_columns):
        raise _unsupported(
            f"input_activations of {bits} bits {kind}, strategy {strategy!r}, beside weights of {weights.name}",
            "there is no such scheme",
        )
    return format
