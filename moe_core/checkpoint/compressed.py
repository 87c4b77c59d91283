"""Read the settings of compressed-tensors."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

from moe_core.checkpoint import layouts
from moe_core.checkpoint.packing import Packing, plain_packing, words_packing
from moe_core.checkpoint.rules import (
    CLASS,
    Quantization,
    Rule,
    Settings,
    dropped,
    list_of_names,
    require,
    require_known,
    static,
    unsupported,
)
from moe_core.errors import InvalidInput
from moe_core.formats import (
    FP8_BLOCK,
    FP8_CHANNEL,
    FP8_GROUP,
    FP8_TENSOR,
    FP8_TOKEN,
    INT8_CHANNEL,
    INT8_TOKEN,
    MXFP4,
    MXFP8,
    Format,
    Scheme,
    int4_grouped,
    int8_grouped,
)
from moe_core.ops.matmul.operands import why_not_together

_BLOCK, _NVFP4_GROUP = [128, 128], 16
#: (type, num_bits, strategy) of activations.
_ACTIVATIONS: dict[tuple[Any, Any, Any], Format] = {
    ("int", 8, "token"): INT8_TOKEN,
    ("float", 8, "token"): FP8_TOKEN,
    ("float", 8, "tensor"): FP8_TENSOR,
    ("float", 8, "group"): FP8_GROUP,
}
_GROUP = "targets weights input_activations output_activations format"
_ARGUMENTS = """num_bits type symmetric group_size strategy block_structure dynamic actorder scale_dtype zp_dtype
    observer observer_kwargs"""


def read_compressed_tensors(settings: Settings) -> Quantization:
    groups = settings.get("config_groups")
    if not isinstance(groups, Mapping) or not all(isinstance(group, Mapping) for group in groups.values()):
        raise InvalidInput(
            f"config_groups in config.json must map names to objects, got {groups!r}; restore the original config.json"
        )
    require(settings, sparsity_config=({},), transform_config=({},), moe_sparsity_config=({},))
    if not groups:
        raise unsupported("no config_groups", "one must say how weights are quantised")
    rules = []
    for group in groups.values():
        require_known(group, _GROUP, "config_groups")
        targets = list_of_names(group.get("targets") or [CLASS], "targets")
        kind = group.get("format") or settings.get("format")
        rules.append(Rule(targets, functools.cache(lambda group=group, kind=kind: (_group(group, kind, settings),))))
    return Quantization(settings, tuple(rules), list_of_names(settings.get("ignore"), "ignore"))


def _group(group: Settings, kind: Any, settings: Settings) -> Packing:
    weights, activations = group.get("weights"), group.get("input_activations")
    # Only text names a format, and a list is no key.
    kind = str(kind)
    if not isinstance(weights, Mapping):
        raise unsupported("a group without weights", "the weights must be quantised")
    if group.get("output_activations") is not None:
        raise unsupported("output_activations", "results of products cannot be quantised")
    require_known(weights, _ARGUMENTS, "weights")
    if kind == "nvfp4-pack-quantized":
        require(weights, num_bits=(4,), type=("float",), group_size=(_NVFP4_GROUP,), strategy=("tensor_group", "group"))
        packing = layouts.nvfp4(settings, modelopt=False)
        return packing if activations is None else dataclasses.replace(packing, notes=(dropped("nvfp4", "nvfp4"),))
    if weights.get("actorder") in ("dynamic", True):
        raise unsupported(f"actorder {weights['actorder']!r}", "it must be 'group', 'weight' or null")
    format = _format(weights)
    scheme, notes, is_static = _scheme(format, activations)
    stored = {"pack-quantized": ("uint4", "uint8"), "int-quantized": ("int8",), "float-quantized": ("e4m3",)}
    stored |= {"naive-quantized": ("e4m3", "int8"), "mxfp4-pack-quantized": ("e2m1",), "mxfp8-quantized": ("e4m3",)}
    is_int8 = kind in ("int-quantized", "naive-quantized") and format.element == "uint8"
    element = "int8" if is_int8 else format.element
    if kind not in stored:
        raise unsupported(f"format {kind!r}", f"the formats that can be read are {', '.join(stored)}")
    if element not in stored[kind]:
        others = ", ".join(name for name, elements in stored.items() if format.element in elements) or "none"
        raise unsupported(
            f"format {kind!r} with weights of {format.name}", f"it stores {' or '.join(stored[kind])}, and {others} "
            f"store {format.element}",
        )  # fmt: skip
    if (kind == "mxfp8-quantized") != (format == MXFP8):
        raise unsupported(f"format {kind!r} of {format.name}", "mxfp8 and e8m0 scales go together")
    if kind == "pack-quantized":
        packing = layouts.permuted(words_packing(scheme, settings), ".weight_g_idx")
    elif element == "int8":
        if format.group_columns is not None or format.zero_points:
            raise unsupported(f"format {kind!r} of {format.name}", "int8 values must have one scale per channel")
        scheme, notes, is_static = _scheme(INT8_CHANNEL, activations)
        packing = plain_packing(scheme, settings)
    else:
        packing = plain_packing(scheme, settings)
    packing = dataclasses.replace(packing, notes=notes)
    return static(packing) if is_static else packing


def _format(weights: Settings) -> Format:
    kind, bits = weights.get("type", "int"), weights.get("num_bits", 8)
    strategy, group_size = weights.get("strategy"), weights.get("group_size")
    symmetric = weights.get("symmetric", True)
    if not isinstance(symmetric, bool):
        raise InvalidInput(
            f"symmetric in config.json must be true or false, got {symmetric!r}; compressed-tensors refuses others: "
            "write the one that the files have (zero points: false)"
        )
    zero_points = not symmetric
    if strategy == "channel" or group_size == -1:
        strategy, group_size = "channel", None
    elif strategy is None:
        strategy = "tensor" if group_size is None else "group"
    if kind == "int" and bits in (4, 8) and strategy in ("group", "channel"):
        if group_size is not None and (not isinstance(group_size, int) or not 0 < group_size < 2**31):
            raise InvalidInput(
                f"group_size in config.json must be a positive integer or null, got {group_size!r}"
                "; restore the original file"
            )
        return (int4_grouped if bits == 4 else int8_grouped)(group_size, zero_points)
    if kind == "float" and not zero_points:
        if strategy == "group" and group_size == MXFP4.group_columns and bits in (4, 8):
            return MXFP4 if bits == 4 else MXFP8
        if bits == 8 and strategy in ("channel", "tensor"):
            return FP8_CHANNEL if strategy == "channel" else FP8_TENSOR
        if bits == 8 and strategy == "block" and weights.get("block_structure") == _BLOCK:
            return FP8_BLOCK
    raise unsupported(
        f"weights of {bits} bits {kind}, strategy {strategy!r}, group_size {group_size!r}, symmetric {not zero_points}",
        "there is no such format",
    )


def _scheme(weights: Format, arguments: Any) -> tuple[Scheme, tuple[str, ...], bool]:
    """(scheme, notes, True for static activations)."""

    def scheme(activations: Format | None) -> Scheme:
        return Scheme(f"{weights.name}_compressed", weights, activations)

    if arguments is None:
        return scheme(None), (), False
    if not isinstance(arguments, Mapping):
        raise InvalidInput(
            f"input_activations in config.json must be an object, got {arguments!r}; restore the original config.json"
        )
    require_known(arguments, _ARGUMENTS, "input_activations")
    kind, bits = arguments.get("type", "int"), arguments.get("num_bits", 8)
    is_static = arguments.get("dynamic", False) is not True
    strategy = arguments.get("strategy") or ("tensor" if arguments.get("group_size") is None else "group")
    if strategy == "group" and arguments.get("group_size") == MXFP4.group_columns:
        format = (MXFP4 if bits == 4 else MXFP8) if kind == "float" and bits in (4, 8) else None
    else:
        format = next((known for key, known in _ACTIVATIONS.items() if key == (kind, bits, strategy)), None)
    if is_static and format is not FP8_TENSOR:
        raise unsupported(
            f"input_activations with static scales of {bits} bits {kind}, strategy {strategy!r}",
            "static scales must be of 8 bits float, strategy 'tensor'",
        )
    if format is None:
        raise unsupported(
            f"input_activations of {bits} bits {kind}, strategy {strategy!r}, beside weights of {weights.name}",
            "there is no such scheme",
        )
    if why_not_together(format, weights) is not None:
        return scheme(None), (dropped(format, weights),), False
    return scheme(format), (), is_static
