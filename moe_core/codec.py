"""Frozen dataclasses to canonical JSON and back; the ground under plan keys, exported plans and torch op schemas."""

from __future__ import annotations

import dataclasses
import json
from typing import Any, TypeVar

from moe_core.errors import InvalidInput

_TYPES: dict[str, type] = {}
T = TypeVar("T", bound=type)


def plan_type(cls: T) -> T:
    """Register a frozen dataclass (apply above `@dataclass(frozen=True)`) so that plans can carry and export it."""
    assert cls.__name__ not in _TYPES, f"{cls.__name__} is registered twice"
    _TYPES[cls.__name__] = cls
    return cls


def _encode(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        name = type(value).__name__
        assert name in _TYPES, f"{name} is not a plan_type"
        return {"type": name} | {f.name: _encode(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, (tuple, list)):
        return [_encode(item) for item in value]
    if isinstance(value, float):
        return {"float": value.hex()}
    assert value is None or isinstance(value, (bool, int, str)), f"{value!r} cannot be part of a plan"
    return value


def _decode(value: Any) -> Any:
    if isinstance(value, dict):
        if "float" in value:
            return float.fromhex(value["float"])
        name = value["type"]
        if name not in _TYPES:
            raise InvalidInput(f"plan data must use known types, got {name!r}; load it with the version that wrote it")
        return _TYPES[name](**{key: _decode(item) for key, item in value.items() if key != "type"})
    if isinstance(value, list):
        return tuple(_decode(item) for item in value)
    return value


def dumps(value: Any) -> str:
    """Canonical JSON of registered dataclasses, tuples, numbers (floats bit-exact), strings, booleans and None."""
    return json.dumps(_encode(value), sort_keys=True, separators=(",", ":"))


def loads(text: str) -> Any:
    """The inverse of `dumps`; lists come back as tuples."""
    return _decode(json.loads(text))
