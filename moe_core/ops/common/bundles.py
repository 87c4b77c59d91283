"""Bundles from named arrays, the inverse of `moe_core.specs.operands.named_arrays`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, TypeVar

from moe_core.formats import QuantizedSpec, QuantizedTensor

Bundle = TypeVar("Bundle")


def bundle_of(kind: type[Bundle], arrays: Mapping[str, Any], prefix: str = "") -> Bundle:
    names = {field.name: prefix + field.name for field in dataclasses.fields(kind)}  # pyright: ignore[reportArgumentType]
    return kind(**{field: arrays[name] for field, name in names.items() if name in arrays})


def quantized_from(arrays: Mapping[str, Any], tensors: tuple[tuple[str, QuantizedSpec], ...]) -> dict[str, Any]:
    """Join arrays of quantised tensors (`weight.values`, ...) among a plan's inputs."""
    parts, rest = ("values", "scales", "zero_points"), dict(arrays)
    built = {
        name: QuantizedTensor(meaning, *(rest.pop(f"{name}.{part}", None) for part in parts))
        for name, meaning in tensors
    }
    return rest | built
