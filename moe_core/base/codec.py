"""Canonical JSON of frozen dataclasses, for plan keys, exported plans and torch op schemas."""

from __future__ import annotations

import dataclasses
import json
from typing import Any, TypeVar

from moe_core.errors import InvalidInput

_TYPES: dict[str, type] = {}
T = TypeVar("T", bound=type)


def plan_type(cls: T) -> T:
    """Register a frozen dataclass (apply above `@dataclass(frozen=True)`) for use in plans."""
    assert cls.__name__ not in _TYPES, f"{cls.__name__} is registered twice"
    _TYPES[cls.__name__] = cls
    return cls


def _data(cls: type) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(cls) if field.compare)


def _encode(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        name = type(value).__name__
        assert name in _TYPES, f"{name} is not a plan_type"
        return {"type": name} | {field: _encode(getattr(value, field)) for field in _data(type(value))}
    if isinstance(value, (tuple, list)):
        return [_encode(item) for item in value]
    if isinstance(value, float):
        return {"float": value.hex()}
    assert value is None or isinstance(value, (bool, int, str)), f"{value!r} cannot be part of a plan"
    return value


def decode(value: Any) -> Any:
    """The value of parsed JSON of `dumps`. Lists become tuples. Raises InvalidInput for an unknown type or field."""
    if isinstance(value, dict):
        return float.fromhex(value["float"]) if "float" in value else _decode_dataclass(value)
    if isinstance(value, list):
        return tuple(decode(item) for item in value)
    return value


def _decode_dataclass(value: dict[str, Any]) -> Any:
    fields = dict(value)
    name = fields.pop("type", None)
    if name not in _TYPES:
        raise InvalidInput(f"plan data must use known types, got {name!r}; load it with the version that wrote it")
    # The default of a missing field may not be what its writer meant.
    known = set(_data(_TYPES[name]))
    if fields.keys() != known:
        raise InvalidInput(
            f"plan data must give {name} the fields {', '.join(sorted(known))}, got {', '.join(sorted(fields))}; "
            "load it with the version that wrote it"
        )
    return _TYPES[name](**{key: decode(item) for key, item in fields.items()})


def dumps(value: Any) -> str:
    """Canonical JSON of registered dataclasses, tuples, numbers (floats bit-exact), strings, booleans and None."""
    return json.dumps(_encode(value), sort_keys=True, separators=(",", ":"))


def loads(text: str) -> Any:
    return decode(json.loads(text))
